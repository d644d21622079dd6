"""Trying out a forward with cut tensors, on a model without data: what nobody could compute so is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import apis as functorch  # private in torch 2.11 and 2.13
from torch.overrides import TorchFunctionMode

from lockstep.errors import UserError
from lockstep.parallel.crossing import line_of, user_line
from lockstep.parallel.cut import CannotCutError, along_of
from lockstep.parallel.rehearsal import without_data
from lockstep.parallel.trees import tensors_of

LOOKED_AT = "and how to cut a model is found out without data"
"""Why a value cannot be read while a forward is tried out."""


@contextmanager
def trying_out(look: Callable[[], Any], axis: str) -> Iterator[None]:
    """For a forward with tensors cut over an axis; `look` runs the same one without."""
    with without_data(LOOKED_AT), no_shortcuts(), no_own_gradients(axis), can_be_followed(look, axis):
        yield


@contextmanager
def can_be_followed(look: Callable[[], Any], axis: str) -> Iterator[None]:
    """Refuse a model in which cut values lead to an error that it does not have without them."""
    try:
        yield
    except (UserError, CannotCutError):
        raise
    except Exception as error:
        look()  # an error of the user's own comes again
        what = f"{type(error).__name__}: {error}"
        raise UserError(
            f"the values of this model cannot be followed for {axis} at {line_of(error)}: {what}",
            f"use a layout without {axis}, or leave the matrices around it whole (tensor.roles)",
        ) from error


GRADIENT_FUNCTIONS = {
    "register_hook": "a hook on a gradient (register_hook)",
    "grad": "a gradient inside the loss (torch.autograd.grad)",
    "backward": "a backward pass inside the loss",
}


@contextmanager
def no_own_gradients(axis: str) -> Iterator[None]:
    """Refuse code of the user's that sees gradients: under tp and cp a rank has a share or a part of them only."""

    def refuse(what: str) -> None:
        raise UserError(
            f"{user_line()} has {what}, and under {axis} a rank has only a share of it",
            "use a dp or fsdp layout for this model",
        )

    functions: Any = functorch
    vmap = functions.vmap_impl

    def checked_vmap(*args: Any, **kwargs: Any) -> Any:
        if any(map(along_of, tensors_of((args, kwargs)))):
            raise UserError(
                f"{user_line()} gives torch.vmap a cut tensor, which looks like a whole one inside",
                f"write the dim out (broadcasting, einsum), or use a layout without {axis}",
            )
        return vmap(*args, **kwargs)

    functions.vmap_impl = checked_vmap
    try:
        with _Refusing(refuse):
            yield
    finally:
        functions.vmap_impl = vmap


def refuse_own_functions(result: Any, axis: str) -> None:
    """Refuse autograd.Functions of the user's in what leads to a loss: their backward would get a share of a gradient.

    They are found in autograd's graph, however they were called.
    """
    waiting = [tensor.grad_fn for tensor in tensors_of(result) if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        function: Any = getattr(node, "_forward_cls", torch.autograd.Function)
        module = function.__module__
        if module == "torch.utils.checkpoint":
            raise UserError(
                f"the model recomputes with a reentrant checkpoint, which does not go with {axis}",
                "give torch.utils.checkpoint use_reentrant=False, or leave it out and give run.setup recompute=True",
            )
        if not module.startswith(("torch.", "lockstep.")):
            raise UserError(
                f"{function.__name__} is an autograd.Function, which is given gradients, and under {axis} a rank has "
                "only a share of them",
                "write it with torch's own operations, or use a dp or fsdp layout for this model",
            )
        further = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(further)
        waiting += further


class _Refusing(TorchFunctionMode):
    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (what := GRADIENT_FUNCTIONS.get(getattr(func, "__name__", ""))) is not None:
            self._refuse(what)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_shortcuts() -> Iterator[None]:
    """torch's own transformer layers skip their modules where no gradients are wanted."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
