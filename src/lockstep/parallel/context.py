"""Context parallelism: each rank of the cp axis has some tokens of every sequence.

The batch is cut, and all else follows: what is computed from it token by token is this rank's part, and attention
gathers keys and values. A rank has one chunk from each end of a sequence, because under a causal mask the last tokens
have the most to do.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.parallel.cut import Along, mark, take
from lockstep.parallel.trees import map_tensors, tensors_of
from lockstep.runtime.axis import Axis


def cut_sequences(data: Any, axis: Axis) -> Any:
    """A micro-batch with its sequences cut: dim 1 of every tensor that is as long there as the tokens are."""
    length = sequence_length(data)
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
    """How long the sequences of a micro-batch are: by its token numbers, or by the first tensor of three dims."""
    tensors = list(tensors_of(data))
    tokens = [t for t in tensors if t.dim() == 2 and not t.is_floating_point()]
    for tensor in (*tokens, *(t for t in tensors if t.dim() == 3)):
        return tensor.shape[1]
    raise UserError(
        "the cp axis cuts sequences, and the batch has none: no whole numbers of shape (samples, tokens), nor a tensor "
        "of three dims",
        "use a dp, fsdp or tp layout for this model",
    )
