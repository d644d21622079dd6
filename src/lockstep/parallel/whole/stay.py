"""A forward that moves parameters by itself, as a teacher follows its student: found before the first step.

Every micro-batch and every rank would move them once more, and what is written into gathered shards is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.forward import Functions

IN_PLACE_OPERATORS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")

NO_WRITES = ("requires_grad_", "detach_", "share_memory_")
"""Functions that are called like those in place, and leave values alone."""


class ParametersStay(Functions):
    """While it is entered, functions that write into a parameter of the model, or into its `.data`, are refused."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse a call that writes into a parameter."""
        for tensor in _written(func, args):
            if (name := self._name_of(tensor)) is not None:
                raise UserError(
                    f"the forward changes the parameter {name}, and every rank and micro-batch would do that once more",
                    "change it between steps, in the code after engine.step",
                )
        return func(*args, **kwargs)

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        with suppress(RuntimeError, NotImplementedError):  # a tensor without storage of its own
            place = tensor.untyped_storage().data_ptr()
            for name, parameter in self._model.named_parameters():
                if place and parameter.untyped_storage().data_ptr() == place:
                    return name
        return None


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The tensors that a call changes."""
    name = getattr(func, "__name__", "")
    is_setting = func is torch.Tensor.data.__set__  # type: ignore[attr-defined]
    is_in_place = name.endswith("_") and name[-2:] != "__" and name not in NO_WRITES
    if not args or not (is_setting or is_in_place or name in IN_PLACE_OPERATORS):
        return
    first = args[0]
    yield from (one for one in (first if isinstance(first, list | tuple) else [first]) if isinstance(one, torch.Tensor))
