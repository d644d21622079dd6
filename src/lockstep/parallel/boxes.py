"""Which box of a whole tensor a shard is: with it, saving and loading under two layouts is arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

Point = tuple[int, ...]


class Box(NamedTuple):
    """A box that a rank has of a tensor: where it begins in the whole and in the rank's own part."""

    start: Point
    local: Point
    shape: Point

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def here(self) -> tuple[slice, ...]:
        """The box in the rank's own part."""
        return tuple(slice(at, at + length) for at, length in zip(self.local, self.shape, strict=True))


def whole_box(shape: Sequence[int]) -> list[Box]:
    """All of a tensor in one box; none where there is nothing in it."""
    nowhere = (0,) * len(shape)
    return [Box(nowhere, nowhere, tuple(shape))] if prod(shape) else []


def cut_boxes(boxes: Sequence[Box], dim: int, parts: Sequence[int], rank: int, ranks: int) -> list[Box]:
    """What a rank has of boxes that are cut along a dim (once more): each of the dim's parts is shared out evenly."""
    return [
        Box(
            _with(box.start, dim, box.start[dim] + low - box.local[dim]),
            _with(box.local, dim, local + low - first),
            _with(box.shape, dim, high - low),
        )
        for first, local, length in shares(parts, rank, ranks)
        for box in boxes
        for low, high in [(max(box.local[dim], first), min(box.local[dim] + box.shape[dim], first + length))]
        if high > low
    ]


def shares(parts: Sequence[int], rank: int, ranks: int) -> list[tuple[int, int, int]]:
    """What a rank has of a dim that consists of parts, each shared out evenly; one part may be uneven at the end.

    For each part: where the share begins in the dim and in what the rank has, and how long it is.
    """
    found, begin, local = [], 0, 0
    for part in parts:
        most = -(-part // ranks)
        first, end = min(rank * most, part), min((rank + 1) * most, part)
        if end > first:
            found.append((begin + first, local, end - first))
        local += end - first
        begin += part
    return found


def _with(point: Point, dim: int, value: int) -> Point:
    return (*point[:dim], value, *point[dim + 1 :])


def overlap(box: Box, start: Sequence[int], shape: Sequence[int]) -> tuple[Point, Point, Point] | None:
    """What a rank's box and another have in common: where it begins in the rank's part and in the other, its shape."""
    local, inside, size = [], [], []
    for at, mine, length, begin, count in zip(box.start, box.local, box.shape, start, shape, strict=True):
        low, high = max(at, begin), min(at + length, begin + count)
        if high <= low:
            return None
        local.append(mine + low - at)
        inside.append(low - begin)
        size.append(high - low)
    return tuple(local), tuple(inside), tuple(size)


class Replicas:
    """Shares the work of writing out among ranks that hold the same: each tensor to the one that has least so far.

    Every rank computes the same answers, because it is asked the same questions in the same order.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._load = np.zeros(sizes, dtype=np.float64)

    def writer(self, size: int, cut: Sequence[bool]) -> Iterator[int]:
        """The coordinate of the rank that writes a tensor, along the axes that hold copies; -1 where it is cut."""
        axes = tuple(axis for axis, is_cut in enumerate(cut) if is_cut)
        busy = self._load.max(axis=axes, keepdims=True)
        least = np.unravel_index(int(busy.argmin()), busy.shape)
        place = tuple(slice(None) if is_cut else int(at) for at, is_cut in zip(least, cut, strict=True))
        self._load[place] += size / prod(self._load.shape[axis] for axis in axes)
        return (-1 if is_cut else int(at) for at, is_cut in zip(least, cut, strict=True))
