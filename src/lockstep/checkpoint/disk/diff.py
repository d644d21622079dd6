"""Two checkpoints beside each other, tensor by tensor."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from lockstep.checkpoint.disk.files import ShardReader, bytes_of, reading
from lockstep.checkpoint.disk.format import DamageError, StoredTensor, Whole
from lockstep.checkpoint.disk.load import read_whole
from lockstep.errors import UserError


class TensorDifference(NamedTuple):
    """How a tensor of one checkpoint differs from that of another; the numbers where both have it and it differs."""

    name: str
    what: str
    largest: float | None = None
    relative: float | None = None
    """The norm of the difference over the norm of the first; None where that is not finite."""


def compare(a: Whole, b: Whole) -> list[TensorDifference]:
    """All tensors of two checkpoints, one pair of them in memory at a time."""
    ours, theirs = a.index.tensors, b.index.tensors
    found = []
    with reading(a) as one, reading(b) as other:
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in theirs:
                found.append(TensorDifference(name, "only in the first"))
            elif name not in ours:
                found.append(TensorDifference(name, "only in the second"))
            else:
                found.append(_compare(name, one, ours[name], other, theirs[name]))
    return found


def _compare(
    name: str, reader: ShardReader, ours: StoredTensor, other: ShardReader, theirs: StoredTensor
) -> TensorDifference:
    kinds = [f"{one.dtype} {one.shape}" for one in (ours, theirs)]
    if kinds[0] != kinds[1]:
        return TensorDifference(name, f"{kinds[0]} and {kinds[1]}")
    try:
        first, second = read_whole(reader, ours), read_whole(other, theirs)
    except DamageError as error:
        raise UserError(f"{name} cannot be compared", f"{error}; lockstep ckpt verify says more") from None
    if bytes_of(first) == bytes_of(second):
        return TensorDifference(name, "equal")
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    apart, unit = (first.double() - second.double()).abs(), float(first.double().norm())
    largest, relative = float(apart.max()), float(apart.norm()) / unit if unit else math.inf
    return TensorDifference(name, "differs", _finite(largest), _finite(relative))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
