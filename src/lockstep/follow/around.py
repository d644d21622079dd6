"""Wrapping a module's forward."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]
"""A forward as its class has it: the module comes first."""


def replace_forward(module: nn.Module, around: Callable[[Forward], Forward]) -> None:
    """Replace a module's forward by `around(forward)`; its name, its parameters and its hooks stay.

    Bound to the module as a method is, so that a deep copy, for a moving average say, computes with its own weights.
    """
    current = module.forward
    if isinstance(current, MethodType) and current.__self__ is module:
        forward: Forward = current.__func__
    else:  # somebody else's replacement, which does not take the module

        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return current(*args, **kwargs)

    module.forward = MethodType(around(forward), module)
