"""Small line charts: an SVG that stands alone, and one made of characters for a terminal. No library is needed.

line_chart("all-reduce", "size", "GB/s", [ChartLine("dp", [(1e3, 0.1), (1e6, 1.9)])], log_x=True)    -> "<svg ..."
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.text import svg

WIDTH, HEIGHT = 760, 420
LEFT, TOP, BOTTOM = 74, 52, 58
LABEL_GAP = 16.0
TICKS = 6

# Told apart by people who do not see red or green, and dark (or, on dark paper, light) enough to be read as text.
LIGHT = ("#0067a5", "#b84a00", "#00734f", "#9b3f78", "#7a5c00", "#3d3d3d", "#5b4fc4", "#a01c2c", "#2d7d8a")
DARK = ("#6cb8f0", "#ff9a52", "#41cf9f", "#ee9dcd", "#e3c04a", "#d0d0d0", "#b0a6ff", "#ff8d8d", "#79d3e0")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "", "7 3", "2 3", "9 3 2 3", "")
GLYPHS = "●■▲◆▼✚★○□"
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-3.5 -3.5h7v7h-7z",
    "M0 -5L4.5 3.5H-4.5z",
    "M0 -5L5 0L0 5L-5 0z",
    "M0 5L4.5 -3.5H-4.5z",
    "M-1.5 -5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
    "M-4 -2.5L0 -5L4 -2.5V2.5L0 5L-4 2.5z",
    "M-5 -2h10v4h-10z",
    "M-2 -5h4v10h-4z",
)

Format = Callable[[float], str]


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart: its name, and (x, y) points in the order of x."""

    name: str
    points: list[tuple[float, float]]


def plain(value: float) -> str:
    """A number for people: few digits, and no exponent where it can be helped."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2g}"


def line_chart(
    title: str, x_label: str, y_label: str, series: Sequence[ChartLine], log_x: bool = False, x_format: Format = plain
) -> str:
    """An SVG that needs nothing but itself: light and dark, every line with its own dash, marker and name.

    What cannot be drawn (a value that is not finite, or not above 0 on a logarithmic axis) is left out.
    """
    shown = [ChartLine(line.name, _drawable(line.points, log_x)) for line in series]
    x_axis = ChartAxis.over([x for line in shown for x, _ in line.points], log_x)
    y_axis = ChartAxis.over([y for line in shown for _, y in line.points], is_log=False, from_zero=True)

    # A name may be long; letters of system fonts are about 8 wide.
    right = WIDTH - min(WIDTH // 2, 34 + 8 * max((len(line.name) for line in shown), default=4))

    def x_at(value: float) -> float:
        return LEFT + x_axis.share(value) * (right - LEFT)

    def y_at(value: float) -> float:
        return HEIGHT - BOTTOM - y_axis.share(value) * (HEIGHT - TOP - BOTTOM)

    parts = [
        svg.text(LEFT, 26, title, 16, "ink strong"),
        svg.text((LEFT + right) / 2, HEIGHT - 14, x_label, classes="ink mid"),
        svg.text(14, TOP - 12, y_label),
    ]
    for value in y_axis.ticks():
        y = y_at(value)
        parts.append(f'<path class="line-edge" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(svg.text(LEFT - 8, y + 4, plain(value), classes="ink end"))
    for value in x_axis.ticks():
        x = x_at(value)
        parts.append(f'<path class="line-edge" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(svg.text(x, HEIGHT - BOTTOM + 18, x_format(value), classes="ink mid"))
    if not any(line.points for line in shown):
        parts.append(svg.text(LEFT + 20, HEIGHT / 2, "nothing to draw"))
    ends = [y_at(line.points[-1][1]) if line.points else math.inf for line in shown]
    labels = _apart(ends, TOP, HEIGHT - BOTTOM)
    for number, line in enumerate(shown):
        if not line.points:
            continue
        style = number % len(LIGHT)
        places = [(x_at(x), y_at(y)) for x, y in line.points]
        way = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dash = f' stroke-dasharray="{DASHES[style]}"' if DASHES[style] else ""
        colour = f"series{style}"
        parts.append(f'<path class="{colour}-edge" d="M{way}" stroke-width="2" stroke-linejoin="round"{dash}/>')
        for (x, y), (x_value, y_value) in zip(places, line.points, strict=True):
            marker = f'<path class="{colour}" d="{MARKERS[style]}" transform="translate({x:.1f} {y:.1f})"/>'
            parts.append(svg.group([marker], f"{line.name}: {plain(y_value)} at {x_format(x_value)}"))
        end_x, end_y = places[-1]
        label_x, label_y = right + 22, labels[number]
        lead = f"M{end_x + 6:.1f} {end_y:.1f}L{label_x - 4} {label_y:.1f}"
        parts.append(f'<path class="{colour}-edge" d="{lead}" opacity="0.45"/>')
        parts.append(svg.text(label_x, label_y + 4, line.name, classes=f"{colour} strong"))
    colours = {f"series{number}": pair for number, pair in enumerate(zip(LIGHT, DARK, strict=True))}
    return svg.picture(WIDTH, HEIGHT, title, _in_words(x_label, y_label, shown, x_format), parts, colours)


def terminal_chart(
    series: Sequence[ChartLine],
    width: int = 80,
    height: int = 9,
    log_x: bool = False,
    x_format: Format = plain,
    from_zero: bool = True,
) -> str:
    """The same for a terminal: lines of dots, `width` characters at most; with several lines each has a mark."""
    shown = [ChartLine(line.name, _drawable(line.points, log_x)) for line in series]
    x_axis = ChartAxis.over([x for line in shown for x, _ in line.points], log_x)
    y_axis = ChartAxis.over([y for line in shown for _, y in line.points], is_log=False, from_zero=from_zero)
    margin = max(len(plain(value)) for value in (y_axis.low, y_axis.high)) + 1
    columns = max(10, width - margin - 1)
    dots = [[0] * columns for _ in range(height)]
    marks: dict[tuple[int, int], str] = {}

    def place(point: tuple[float, float]) -> tuple[float, float]:
        """In dots: two a column, four a row."""
        return x_axis.share(point[0]) * (2 * columns - 1), (1 - y_axis.share(point[1])) * (4 * height - 1)

    for number, line in enumerate(shown):
        places = [place(point) for point in line.points]
        for (x1, y1), (x2, y2) in pairwise(places):
            steps = max(1, round(2 * max(abs(x2 - x1), abs(y2 - y1))))
            for step in range(steps + 1):
                x, y = (round(a + (b - a) * step / steps) for a, b in ((x1, x2), (y1, y2)))
                dots[y // 4][x // 2] |= _braille_bit(x % 2, y % 4)
        if len(shown) > 1 or len(places) == 1:
            marks |= {(round(y) // 4, round(x) // 2): GLYPHS[number % len(GLYPHS)] for x, y in places}
    rows = []
    for number, row in enumerate(dots):
        text = {0: plain(y_axis.high), height - 1: plain(y_axis.low)}.get(number, "")
        drawn = "".join(marks.get((number, column), chr(0x2800 + bits)) for column, bits in enumerate(row))
        rows.append(f"{text:>{margin - 1}} │{drawn.replace(chr(0x2800), ' ').rstrip()}")
    first, last = x_format(x_axis.low), x_format(x_axis.high)
    rows.append(" " * margin + "└" + "─" * columns)
    rows.append(" " * (margin + 1) + first + last.rjust(columns - len(first)))
    if len(shown) > 1:
        names = [f"{GLYPHS[number % len(GLYPHS)]} {line.name}" for number, line in enumerate(shown)]
        rows.append(" " * (margin + 1) + "  ".join(names))
    return "\n".join(rows)


@dataclass(frozen=True)
class ChartAxis:
    """One axis of a chart, from its lowest value to its highest."""

    low: float
    high: float
    is_log: bool
    is_counted: bool = False
    """Whether its values are whole numbers, between which there is nothing."""

    @staticmethod
    def over(values: list[float], is_log: bool, from_zero: bool = False) -> ChartAxis:
        """An axis with room for all values; one that begins at 0 where that says more."""
        low, high = (min(values), max(values)) if values else (1.0, 10.0)
        if is_log:
            return ChartAxis(low, high, True) if high > low else ChartAxis(low / 2, low * 2, True)
        if from_zero and low >= 0:
            step = _round_up(high / TICKS) if high > 0 else 1.0
            return ChartAxis(0.0, math.ceil(high / step - 1e-9) * step or 1.0, False)
        room = (high - low or abs(high) or 1.0) * 0.05
        return ChartAxis(low - room, high + room, False, is_counted=all(value == int(value) for value in values))

    def share(self, value: float) -> float:
        """Where a value lies between the ends, as 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values to write beside the axis."""
        if not self.is_log:
            step = _round_up(max((self.high - self.low) / TICKS, 1.0 if self.is_counted else 0.0))
            first = math.ceil(self.low / step - 1e-9)
            return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / (TICKS + 2)))
        decades = [10.0**power for power in range(first, last + 1, every)]
        if len(decades) > 2:
            return decades
        fine = [digit * 10.0**power for power in range(first - 1, last + 1) for digit in (1, 2, 5)]
        return [value for value in fine if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)] or [self.low]


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= value * (1 - 1e-9))


def _drawable(points: Sequence[tuple[float, float]], log_x: bool) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)]


def _apart(ends: Sequence[float], top: float, bottom: float) -> list[float]:
    """Heights for the names of lines, near where they end and not over one another."""
    order = sorted((number for number in range(len(ends)) if math.isfinite(ends[number])), key=lambda n: ends[n])
    found = list(ends)
    above = top - LABEL_GAP
    for number in order:
        above = found[number] = max(found[number], above + LABEL_GAP)
    below = bottom + LABEL_GAP
    for number in reversed(order):
        below = found[number] = min(found[number], below - LABEL_GAP)
    return found


def _braille_bit(x: int, y: int) -> int:
    return (0x40, 0x80)[x] if y == 3 else 1 << (y + 3 * x)


def _in_words(x_label: str, y_label: str, series: Sequence[ChartLine], x_format: Format) -> str:
    """All values, for those who hear the chart."""
    lines = [f"{y_label} over {x_label}."]
    for line in series:
        values = ", ".join(f"{plain(y)} at {x_format(x)}" for x, y in line.points)
        lines.append(f"{line.name}: {values or 'no values'}.")
    return " ".join(lines)
