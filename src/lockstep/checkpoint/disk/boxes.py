"""Which box of a whole tensor a shard is: with it, saving and loading under two layouts is arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

Point = tuple[int, ...]


class Piece(NamedTuple):
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


class Segment(NamedTuple):
    """Some indices of one dim: where they begin in the whole and in a part, and how many they are."""

    start: int
    local: int
    length: int


def shares(parts: Sequence[int], rank: int, ranks: int) -> list[Segment]:
    """What a rank has of a dim that consists of parts, each shared out evenly; one part may be uneven at the end."""
    found, begin, local = [], 0, 0
    for part in parts:
        most = -(-part // ranks)
        first, end = min(rank * most, part), min((rank + 1) * most, part)
        if end > first:
            found.append(Segment(begin + first, local, end - first))
        local += end - first
        begin += part
    return found


def narrowed(segments: Sequence[Segment], first: int, end: int) -> list[Segment]:
    """Of a part that is cut once more, what stands between two of its indices."""
    found = []
    for one in segments:
        low, high = max(one.local, first), min(one.local + one.length, end)
        if high > low:
            found.append(Segment(one.start + low - one.local, low - first, high - low))
    return found


def pieces_of(dims: Sequence[Sequence[Segment]]) -> list[Piece]:
    """The boxes of a part, from the segments of each dim; none where there is nothing in it."""
    boxes = [
        Piece(*(tuple(values) for values in zip(*segments, strict=True))) if segments else Piece((), (), ())
        for segments in product(*dims)
    ]
    return [box for box in boxes if box.size]


def whole_piece(shape: Sequence[int]) -> list[Piece]:
    """All of a tensor in one box."""
    return pieces_of([[Segment(0, 0, length)] for length in shape])


def overlap(piece: Piece, start: Sequence[int], shape: Sequence[int]) -> tuple[Point, Point, Point] | None:
    """What a piece and a box have in common: where it begins in the rank's part and in the box, and its shape."""
    local, inside, size = [], [], []
    for at, mine, length, begin, count in zip(piece.start, piece.local, piece.shape, start, shape, strict=True):
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
