"""Context parallelism: each rank of the cp axis has some tokens of every sequence.

The batch is cut, and all else follows: what is computed from it token by token is this rank's part, and attention
gathers keys and values. A rank has one chunk from each end of a sequence, because under a causal mask the last tokens
have the most to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.blocks import find_blocks
from lockstep.follow.trees import map_tensors, tensors_of
from lockstep.follow.values import user_line
from lockstep.parallel.tensor.cut import Along, Following, Parts, along_of, mark, take
from lockstep.parallel.tensor.dry_forward import refuse_reentrant, trying_out
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
        with trying_out(lambda: look(skeleton), "cp"), Following():
            refuse_reentrant(look(skeleton, Axis("cp", 1, 0, observer=trial)), "cp")
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
