"""Times from begin to end, in seconds: put together, cut with each other, and what lies between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times in any of the intervals, in order and without overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def common(ours: Sequence[Interval], theirs: Sequence[Interval]) -> list[Interval]:
    """The times in both; each is in order and without overlap, as `union` gives them."""
    found, i, j = [], 0, 0
    while i < len(ours) and j < len(theirs):
        begin, end = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if begin < end:
            found.append((begin, end))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return found


def outside(intervals: Sequence[Interval], whole: Interval) -> list[Interval]:
    """The times of the whole that are in none of the intervals, which are in order and without overlap."""
    at, found = whole[0], []
    for begin, end in intervals:
        if begin > at:
            found.append((at, min(begin, whole[1])))
        at = max(at, end)
    if at < whole[1]:
        found.append((at, whole[1]))
    return [(begin, end) for begin, end in found if begin < end]


def length(intervals: Iterable[Interval]) -> float:
    """Seconds of intervals without overlap."""
    return sum(end - begin for begin, end in intervals)
