"""The backward pass of a step is the engine's: a loss function that calls it itself is refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.runtime.torch_private import replaced


@contextmanager
def no_backward() -> Iterator[None]:
    """Refuse a backward pass over all parameters inside: their gradients would count twice."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def refuse(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("inputs") is None:
            raise UserError(
                "the loss function calls backward, which engine.step does itself",
                "leave it out; for gradients inside of the loss use torch.autograd.grad",
            )
        backward(*args, **kwargs)

    with replaced(torch.autograd, "backward", refuse):
        yield
