"""From measured times to times of sizes that were not measured.

Two answers, for two uses. `fit_link` gives the two numbers that people and the planner reason with: seconds to begin,
and seconds a byte. Real curves bend, where a library changes its way or a cache ends, and two numbers do not follow
them; `TimeCurve` does, from one measured size to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.links.collective_cost import Link

Point = tuple[float, float]
"""Bytes, and seconds."""

ROUNDS = 30
CLOSE = 1e-3
"""A residual below this counts like this: the weights of the fit stay finite."""


def fit_link(points: Sequence[Point]) -> Link:
    """The alpha and beta, neither below 0, that miss the measured times least, relative to each.

    What counts is the sum of the absolute misses and not of their squares, so that a point that was disturbed, or lies
    beyond a bend, does not carry the rest away.
    """
    assert points
    weights = [1.0] * len(points)
    link = _least_squares(points, weights)
    for _ in range(ROUNDS):
        weights = [1 / max(CLOSE, abs(link.seconds(size) / seconds - 1)) for size, seconds in points]
        link = _least_squares(points, weights)
    return link


def worst_miss(link: Link, points: Sequence[Point]) -> float:
    """How far the two numbers are from the measured time where they are farthest, relative to it."""
    return max(abs(link.seconds(size) / seconds - 1) for size, seconds in points)


@dataclass(frozen=True)
class TimeCurve:
    """The time of any size: between two measured ones by the alpha and beta that both of them have.

    Below the smallest the time stays what it is there, above the largest its bytes per second stay; no time is below
    that of a smaller size.
    """

    points: tuple[Point, ...]

    @staticmethod
    def through(points: Sequence[Point]) -> TimeCurve:
        """Points may come in any order; where a larger size was faster, both get their geometric mean."""
        assert points
        blocks: list[tuple[list[float], float]] = []  # sizes, and the logarithm of their common time
        for size, seconds in sorted(points):
            sizes, level = [float(size)], math.log(seconds)
            while blocks and blocks[-1][1] > level:
                before, higher = blocks.pop()
                level = (higher * len(before) + level * len(sizes)) / (len(before) + len(sizes))
                sizes = before + sizes
            blocks.append((sizes, level))
        return TimeCurve(tuple((size, math.exp(level)) for sizes, level in blocks for size in sizes))

    def seconds(self, size: float) -> float:
        """What a buffer of so many bytes takes."""
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            return last[1] * size / last[0]
        (x1, y1), (x2, y2) = next(pair for pair in pairwise(self.points) if size <= pair[1][0])
        return y1 + (size - x1) / (x2 - x1) * (y2 - y1)


def _least_squares(points: Sequence[Point], weights: Sequence[float]) -> Link:
    """alpha and beta for which the weighted sum of squares of `(alpha + beta x) / t - 1` is least."""
    a11 = sum(w / t**2 for (_, t), w in zip(points, weights, strict=True))
    a12 = sum(w * x / t**2 for (x, t), w in zip(points, weights, strict=True))
    a22 = sum(w * x**2 / t**2 for (x, t), w in zip(points, weights, strict=True))
    b1 = sum(w / t for (_, t), w in zip(points, weights, strict=True))
    b2 = sum(w * x / t for (x, t), w in zip(points, weights, strict=True))
    determinant = a11 * a22 - a12**2
    if determinant <= 1e-12 * a11 * a22:  # one size alone: all of it is the time to begin
        return Link(b1 / a11, 0.0)
    alpha, beta = (b1 * a22 - b2 * a12) / determinant, (b2 * a11 - b1 * a12) / determinant
    if beta < 0:
        return Link(b1 / a11, 0.0)
    return Link(alpha, beta) if alpha >= 0 else Link(0.0, b2 / a22)
