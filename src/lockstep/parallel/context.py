"""Context parallelism: each rank of the cp axis has some tokens of every sequence.

The batch is cut, and all else follows: what is computed from it token by token is this rank's part, and attention
gathers keys and values. A rank has one chunk from each end of a sequence, because under a causal mask the last tokens
have the most to do.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._functorch import apis as functorch  # private in torch 2.11 and 2.13
from torch.overrides import TorchFunctionMode

from lockstep.errors import UserError
from lockstep.modelplan import find_blocks
from lockstep.parallel.crossing import is_library, user_line
from lockstep.parallel.cut import Along, CannotCutError, Following, Parts, along_of, mark, take
from lockstep.parallel.rehearsal import without_data
from lockstep.parallel.trees import map_tensors, tensors_of
from lockstep.runtime.axis import Axis


def cut_sequences(data: Any, axis: Axis) -> Any:
    """A micro-batch with its sequences cut: dim 1 of every tensor that is as long there as the tokens are."""
    length = sequence_length(data)
    if length == 0:
        raise UserError(
            "the cp axis cuts sequences, and the batch has none: no whole numbers of shape (samples, tokens), nor a "
            "tensor of three dims",
            "use a dp, fsdp or tp layout for this model",
        )
    if length % axis.chunks:
        raise UserError(
            f"a sequence of {length} tokens cannot be shared out over cp={axis.size}, two chunks a rank",
            f"use sequences whose length is a multiple of {axis.chunks}, or another layout",
        )

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != length:
            return tensor
        along = Along(axis, 1, (length,))
        return mark(take(tensor, along), [along])

    return map_tensors(cut, data)


def sequence_length(data: Any) -> int:
    """How long the sequences of a micro-batch are: by its token numbers, or by the first tensor of three dims.

    0 where there are none.
    """
    tensors = list(tensors_of(data))
    tokens = [t for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    return next((tensor.shape[1] for tensor in (*tokens, *(t for t in tensors if t.dim() == 3))), 0)


LOOKED_AT = "and how to cut a model is found out without data"
"""Why a value cannot be read while a forward is tried out."""


class ContextTrial:
    """One forward with its sequences cut, to see where they would have to be whole."""

    def __init__(self) -> None:
        self.inside = 0
        self.cut_blocks = 0
        self.gathers: list[str] = []
        """Where, outside of blocks, an operation needs whole sequences."""

    def cannot(self, along: Sequence[Along], reason: str, parts: Parts | None) -> None:  # noqa: ARG002 - as the rules call it
        """An operation needs whole sequences: inside a block nothing would be gained by cutting them."""
        if self.inside:
            raise UserError(
                f"{user_line()} needs whole sequences inside a block of the model: {reason}",
                "use a layout without cp for this model",
            )
        self.gathers.append(f"{user_line()}: {reason}")

    def divides(self, along: Along, size: int, what: str) -> None:
        """Lengths are checked when they are known."""


def plan_context(skeleton: nn.Module, look: Callable[..., Any], cp: int) -> list[str]:
    """Try out whether the sequences of a model can be cut; returns where they are gathered. Else it is refused."""
    trial = ContextTrial()
    blocks = [block for _, block in find_blocks(skeleton)] or [skeleton]

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        trial.inside += 1
        trial.cut_blocks += any(map(along_of, tensors_of((args, kwargs))))

    def leave(*_: Any) -> None:
        trial.inside -= 1

    handles = []
    for block in blocks:
        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(block.register_forward_hook(leave, always_call=True))
    try:
        following = can_be_followed(lambda: look(skeleton), "cp")
        with without_data(LOOKED_AT), no_shortcuts(), no_own_gradients("cp"), following, Following():
            refuse_own_functions(look(skeleton, Axis("cp", 1, 0, observer=trial)), "cp")
    finally:
        for handle in handles:
            handle.remove()
    if not trial.cut_blocks:
        why = f" ({trial.gathers[0]})" if trial.gathers else ""
        raise UserError(
            f"cp={cp} would cut nothing: no block of the model gets sequences that are cut{why}",
            "use a dp, fsdp or tp layout for this model",
        )
    return trial.gathers


@contextmanager
def can_be_followed(look: Callable[[], Any], axis: str) -> Iterator[None]:
    """Refuse a model in which cut values lead to an error that it does not have without them."""
    try:
        yield
    except (UserError, CannotCutError):
        raise
    except Exception as error:
        look()  # an error of the user's own comes again
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        raise UserError(
            f"the values of this model cannot be followed for {axis}{where}: {type(error).__name__}: {error}",
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
