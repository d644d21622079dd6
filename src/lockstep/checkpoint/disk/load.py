"""Reading tensors out of a checkpoint, whatever layout wrote it: of every chunk the slices that are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from lockstep.checkpoint.disk.files import DTYPES, ShardReader, reading
from lockstep.checkpoint.disk.format import StoredTensor, Whole
from lockstep.parallel.boxes import Box, overlap, whole_box


class Target(NamedTuple):
    """A tensor to be filled: its name in the checkpoint, this rank's part, and where that stands in the whole."""

    name: str
    tensor: torch.Tensor
    boxes: Sequence[Box]


@torch.no_grad()
def fill(checkpoint: Whole, targets: Iterable[Target]) -> None:
    """Read tensors into their places, with every digest checked."""
    with reading(checkpoint) as reader:
        for target in targets:
            read_tensor(reader, checkpoint.index.tensors[target.name], target.tensor, target.boxes)


def read_whole(reader: ShardReader, stored: StoredTensor) -> torch.Tensor:
    """All of a tensor, in the memory of the host."""
    tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    read_tensor(reader, stored, tensor, whole_box(stored.shape))
    return tensor


def read_tensor(reader: ShardReader, stored: StoredTensor, target: torch.Tensor, boxes: Sequence[Box]) -> None:
    """Fill a part of a tensor from the chunks it is in."""
    for box in boxes:
        for chunk in stored.chunks:
            common = overlap(box, chunk.start, chunk.shape)
            if common is None:
                continue
            local, inside, size = common
            place = target[_slices(local, size)]
            if list(size) == chunk.shape and place.device.type == "cpu" and place.is_contiguous():
                reader.read_into(place, chunk)
            elif not size:
                place.copy_(reader.read_chunk(chunk, place.dtype))
            else:
                columns = _slices(inside[1:], size[1:])
                for first, rows in reader.rows(chunk, place.dtype, inside[0], inside[0] + size[0]):
                    at = first - inside[0]
                    place[at : at + len(rows)].copy_(rows[(slice(None), *columns)])


def _slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(start, shape, strict=True))
