"""Numbers over steps or time, in as many points as a page can show.

Where points are merged, the mean is drawn, and the lowest and the highest are kept beside it: extremes are never lost.
What is not finite has no place in a mean; it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.page.panels import Curve, Number

Array = npt.NDArray[Any]

MOST_POINTS = 800
"""Of a curve over steps: about what a wide screen has room for."""
DIGITS = 7
"""Of a value. The page writes four: with one or two more, 2.43147 would be rounded twice, and become 2.432."""
MOST_COLUMNS = 240
"""Of a grid."""
MOST_ROWS = 32768
"""Of a grid: more GPUs than any run so far, and what a damaged log may ask for at most."""


def rounded(value: float, digits: int = DIGITS) -> Number:
    """A number with so many digits that count; None where it is not finite."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def numbers(values: Array, digits: int = DIGITS) -> list[Number]:
    """Many of them."""
    return [rounded(value, digits) for value in values.tolist()]


def places(values: Array) -> list[float]:
    """Places on an x axis: steps as they are, times to a tenth of a second."""
    return [int(value) if value == int(value) else round(value, 1) for value in values.tolist()]


class Series:
    """One number over steps, as they come: at most `most` buckets, which merge in pairs when they are full.

    A step that comes again replaces those from there on: the later line counts. Where a bucket has steps of both sides
    it stays as it is, and ends there.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        assert most % 2 == 0, "buckets merge in pairs"
        self._most = most
        self._points_of_each = 1
        # first x, last x, sum, how many of them are finite, low, high, how many
        self._buckets: list[list[float]] = []
        self.not_finite = 0

    def add(self, x: float, y: float) -> None:
        """One more point."""
        buckets = self._buckets
        while buckets and buckets[-1][0] >= x:
            buckets.pop()
        if buckets and buckets[-1][1] >= x:
            buckets[-1][1] = x - 1
        finite = math.isfinite(y)
        self.not_finite += not finite
        if not buckets or buckets[-1][6] >= self._points_of_each:
            if len(buckets) >= self._most:
                self._merge()
            buckets = self._buckets
            buckets.append([x, x, y, 1, y, y, 1] if finite else [x, x, 0.0, 0, math.inf, -math.inf, 1])
            return
        bucket = buckets[-1]
        bucket[1] = x
        bucket[6] += 1
        if finite:
            bucket[2] += y
            bucket[3] += 1
            bucket[4] = min(bucket[4], y)
            bucket[5] = max(bucket[5], y)

    def _merge(self) -> None:
        pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
        self._buckets = [
            [a[0], b[1], a[2] + b[2], a[3] + b[3], min(a[4], b[4]), max(a[5], b[5]), a[6] + b[6]] for a, b in pairs
        ]
        self._points_of_each *= 2

    def spans(self) -> list[tuple[float, float, float]]:
        """Of every bucket that has a finite number: its first x, the lowest and the highest."""
        return [(bucket[0], bucket[4], bucket[5]) for bucket in self._buckets if bucket[3]]

    def curve(self, name: str, style: str = "line") -> Curve:
        """All of it, to be drawn."""
        if not self._buckets:
            return Curve(name, [], [])
        first, last, total, count, low, high, _ = np.array(self._buckets).T
        return _curve(name, first, last, _over(total, count), low, high, style)


def curve_of(name: str, x: Array, y: Array, style: str = "line", most: int = MOST_POINTS) -> Curve:
    """The same for numbers that are all there, in order of x."""
    return ratio_curve(name, x, y, np.ones(len(y)), style, most)


def ratio_curve(name: str, x: Array, part: Array, whole: Array, style: str = "line", most: int = MOST_POINTS) -> Curve:
    """`part / whole` over x, such as items over seconds: of merged points, the sums of both."""
    if not len(x):
        return Curve(name, [], [])
    begins = np.arange(0, len(x), -(-len(x) // most))
    ends = np.append(begins[1:], len(x)) - 1
    with np.errstate(all="ignore"):
        each = part / whole
    finite = np.isfinite(each)
    sums = (np.add.reduceat(np.where(finite, values, 0.0), begins) for values in (part, whole))
    low = np.minimum.reduceat(np.where(finite, each, np.inf), begins)
    high = np.maximum.reduceat(np.where(finite, each, -np.inf), begins)
    return _curve(name, x[begins], x[ends], _over(*sums), low, high, style)


def _over(part: Array, whole: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Array = np.where(whole > 0, part / whole, np.nan)
    return result


def _curve(name: str, first: Array, last: Array, mean: Array, low: Array, high: Array, style: Any) -> Curve:
    middle = np.floor((first + last) / 2)
    x = np.where(first == last, first, middle)
    if np.array_equal(low, high) or not np.isfinite(mean).any():
        return Curve(name, places(x), numbers(mean), style=style)
    return Curve(name, places(x), numbers(mean), numbers(low), numbers(high), style)


class Grid:
    """Many numbers at once over steps or time: rows such as ranks, and at most `MOST_COLUMNS` columns.

    As many looks as needed become one column; of each row it keeps mean, lowest and highest. A row is what is measured,
    and of whom.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], int] = {}
        self._first: list[float] = []
        self._last: list[float] = []
        self._looks: list[int] = []
        self._looks_of_each = 1
        # Column by column: a look is written in one piece.
        self._sum, self._count = np.zeros((MOST_COLUMNS, 0)), np.zeros((MOST_COLUMNS, 0), np.int32)
        self._low, self._high = np.full((MOST_COLUMNS, 0), np.inf), np.full((MOST_COLUMNS, 0), -np.inf)

    def places_of(self, names: Sequence[tuple[str, str]]) -> Array:
        """The rows of these names, new ones where there are none yet; -1 where there is no room for more."""
        rows = self._rows
        for name in names:
            if name not in rows and len(rows) < MOST_ROWS:
                rows[name] = len(rows)
        grown = len(rows) - self._sum.shape[1]
        if grown > 0:
            more = ((0, 0), (0, max(grown, len(rows) // 4)))
            self._sum, self._count = np.pad(self._sum, more), np.pad(self._count, more)
            self._low = np.pad(self._low, more, constant_values=np.inf)
            self._high = np.pad(self._high, more, constant_values=-np.inf)
        return np.array([rows.get(name, -1) for name in names], np.intp)

    def add(self, x: float, at: Array, values: Array) -> None:
        """One look, in order of x: `values` of the rows `at`; what is not finite is passed over."""
        finite = np.isfinite(values) & (at >= 0)
        if not finite.all():
            at, values = at[finite], values[finite]
        if not self._first or self._looks[-1] >= self._looks_of_each:
            if len(self._first) == MOST_COLUMNS:
                self._merge()
            self._first.append(x)
            self._last.append(x)
            self._looks.append(0)
        column = len(self._first) - 1
        self._last[-1] = x
        self._looks[-1] += 1
        low, high = self._low[column], self._high[column]
        self._sum[column][at] += values
        self._count[column][at] += 1
        low[at] = np.minimum(low[at], values)
        high[at] = np.maximum(high[at], values)

    def go_back(self, x: float) -> None:
        """What comes next is at `x`: what was there, or after it, does not count any more."""
        while self._first and self._first[-1] >= x:
            column = len(self._first) - 1
            self._sum[column], self._count[column] = 0.0, 0
            self._low[column], self._high[column] = np.inf, -np.inf
            for kept in (self._first, self._last, self._looks):
                kept.pop()
        if self._last and self._last[-1] >= x:
            self._last[-1] = x - 1

    def _merge(self) -> None:
        half = MOST_COLUMNS // 2
        for values, join, empty in (
            (self._sum, np.add, 0),
            (self._count, np.add, 0),
            (self._low, np.minimum, np.inf),
            (self._high, np.maximum, -np.inf),
        ):
            values[:half] = join(values[::2], values[1::2])
            values[half:] = empty
        self._first, self._last = self._first[::2], self._last[1::2]
        self._looks = [a + b for a, b in zip(self._looks[::2], self._looks[1::2], strict=True)]
        self._looks_of_each *= 2

    @property
    def at(self) -> Array:
        """Where the columns end."""
        return np.array(self._last)

    @property
    def looks_of_each(self) -> int:
        """How many looks a column stands for, but for the last one."""
        return self._looks_of_each

    def of(self, what: str) -> dict[str, int]:
        """Whom this is known of, and their rows."""
        return {who: row for (one, who), row in self._rows.items() if one == what}

    def row(self, what: str, who: str) -> int | None:
        """Where one is."""
        return self._rows.get((what, who))

    def mean(self) -> Array:
        """Of every row and column; NaN where nothing was told."""
        return _over(*self._cut(self._sum, self._count))

    def high(self) -> Array:
        """The highest of every row and column."""
        (high,) = self._cut(self._high)
        return np.where(np.isfinite(high), high, np.nan)

    def low(self) -> Array:
        """The lowest of every row and column."""
        (low,) = self._cut(self._low)
        return np.where(np.isfinite(low), low, np.nan)

    def _cut(self, *whole: Array) -> list[Array]:
        return [values[: len(self._first), : len(self._rows)].T for values in whole]
