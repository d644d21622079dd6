"""Trying out a forward with cut tensors, on a model without data: what nobody could compute so is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.follow.forward import following
from lockstep.follow.functions import nodes_of, own_functions_seen
from lockstep.follow.rehearsal import without_data
from lockstep.follow.trees import tensors_of
from lockstep.follow.unread import DatalessForward, read, reads_nothing
from lockstep.follow.values import line_of, user_line
from lockstep.parallel.tensor.cut import CannotCutError, along_of, cuts_in
from lockstep.parallel.tensor.rules.operands import cannot
from lockstep.runtime.torch_private import function_of, vmap_seen
from lockstep.runtime.torch_private.seen import require

LOOKED_AT = "and how to cut a model is found out without data"
"""Why a value cannot be read while a forward is tried out."""


@contextmanager
def trying_out(look: Callable[[], Any], axis: str) -> Iterator[None]:
    """For a forward with tensors cut over an axis; `look` runs the same one without."""
    with (
        without_data(LOOKED_AT) as seen,
        no_shortcuts(),
        no_own_gradients(axis),
        following(function=partial(_read, seen)),
        own_functions_seen(partial(_whole_arguments, axis)),
        can_be_followed(look, axis),
    ):
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

    def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (what := GRADIENT_FUNCTIONS.get(getattr(func, "__name__", ""))) is not None:
            raise UserError(
                f"{user_line()} has {what}, and under {axis} a rank has only a share of it",
                "use a dp layout for this model, or fsdp with shard.level = zero1",
            )
        return func(*args, **kwargs)

    def check_vmap(*args: Any, **kwargs: Any) -> None:
        if any(map(along_of, tensors_of((args, kwargs)))):
            raise UserError(
                f"{user_line()} gives torch.vmap a cut tensor, which looks like a whole one inside",
                f"write the dim out (broadcasting, einsum), or use a layout without {axis}",
            )

    require("tensor parallelism")
    with vmap_seen(check_vmap), following(function=refuse):
        yield


def refuse_reentrant(result: Any, axis: str) -> None:
    """Refuse reentrant checkpoints in what leads to a loss."""
    for node in nodes_of(list(tensors_of(result))):
        if getattr(function_of(node), "__module__", "") == "torch.utils.checkpoint":
            raise UserError(
                f"the model recomputes with a reentrant checkpoint, which does not go with {axis}",
                "give torch.utils.checkpoint use_reentrant=False, or leave it out and give run.setup recompute=True",
            )


def _whole_arguments(axis: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an autograd.Function of the user's is given has to be whole: its code sees what a tensor holds."""
    for value in cuts_in(args):
        cannot(along_of(value), f"{function.__name__} is an autograd.Function")
        raise UserError(
            f"{user_line()} gives {function.__name__}, an autograd.Function, a tensor that {axis} cuts",
            f"write it with torch's own operations, or use a layout without {axis}",
        )
    return args


def _read(look: DatalessForward, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values that are read: at work, every rank has the whole ones, and the same."""
    if reads_nothing(name := getattr(func, "__name__", ""), args):
        return read(name, look, converts=True)
    return func(*args, **kwargs)


@contextmanager
def no_shortcuts() -> Iterator[None]:
    """torch's own transformer layers skip their modules where no gradients are wanted."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
