"""Charts with axes on paper: lines with their bands, and stacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import TypeGuard

from lockstep.page.panels import Curve, Lines, Mark, Number, Stack
from lockstep.page.pdf.paper import FILLS, INK, LEVELS, LINE, PARTS, QUIET, STROKES, Paper, moment_text, value_text
from lockstep.text.charts import Axis

HEIGHT = 38.0
LEFT = 17.0
"""Room for what stands beside the y axis."""
MOST_NAMES = 24
COLUMNS = 250
"""So many points a curve has at least before some are left out: the smallest and the largest of each stay."""
DASHES = ((), (1.6, 0.8), (0.5, 0.7))
SECONDS_OF_TICKS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 2 * 86400, 7 * 86400, 28 * 86400, 91 * 86400, 364 * 86400),
)

Place = Callable[[float], float]
Name = tuple[str, str, Sequence[float] | None]
"""What a chart shows by that name: its colour, and how its line is dashed; None for an area."""


@dataclass(frozen=True)
class Frame:
    """Where a chart is on the paper, and what its axes stand for."""

    x: Axis
    y: Axis
    left: float
    top: float
    width: float
    height: float

    def across(self, value: float) -> float:
        """Where an x is."""
        return self.left + self.width * self.x.share(value)

    def up(self, value: float) -> float:
        """Where a y is; never outside of the chart."""
        return self.top + self.height * (1 - min(1.0, max(0.0, self.y.share(value))))

    def can_show(self, value: Number) -> bool:
        """Whether a value has a place on the y axis."""
        return value is not None and math.isfinite(value) and (value > 0 or not self.y.is_log)


def draw_lines(paper: Paper, panel: Lines) -> None:
    """Lines over steps, time, ranks or seconds, each with the band between its extremes."""
    names = [(curve.name, STROKES[n % len(STROKES)], _dash(n, curve)) for n, curve in enumerate(panel.curves)]
    values = [v for c in panel.curves for part in (c.y, c.low or (), c.high or ()) for v in part if is_number(v)]
    is_log = panel.log and any(value > 0 for value in values)
    values = [value for value in values if value > 0] if is_log else values
    if not values:
        say_instead(paper, "no values yet")
        return
    y = _y_axis(values, is_log, panel.unit, panel.most, panel.from_zero)
    frame = _frame(paper, panel.x, [x for curve in panel.curves for x in curve.x], y, panel.unit, names)
    _draw_marks(paper, frame, panel.marks)
    for number, curve in enumerate(panel.curves):
        if curve.low and curve.high:
            _draw_band(paper, frame, curve, STROKES[number % len(STROKES)])
    for number, curve in enumerate(panel.curves):
        _draw_curve(paper, frame, curve, STROKES[number % len(STROKES)], _dash(number, curve))


def draw_stack(paper: Paper, panel: Stack) -> None:
    """Parts that add up, as columns on top of each other: each from the x before to its own."""
    parts = [[max(0.0, v) if v is not None and math.isfinite(v) else 0.0 for v in part.y] for part in panel.parts]
    if not panel.at or not parts:
        say_instead(paper, "no values yet")
        return
    colours = [PARTS.get(part.name, FILLS[n % len(FILLS)]) for n, part in enumerate(panel.parts)]
    names = [(part.name, colour, None) for part, colour in zip(panel.parts, colours, strict=True)]
    whole = [sum(column) for column in zip(*parts, strict=True)]
    wide = panel.at[1] - panel.at[0] if len(panel.at) > 1 else 1.0
    begin = panel.at[0] - wide if panel.begin is None else panel.begin
    ends = [begin, *panel.at]
    frame = _frame(paper, panel.x, ends, _y_axis([0.0, *whole], False, panel.unit, None), panel.unit, names)
    at = [x for pair in pairwise(ends) for x in pair]
    below = [0.0] * len(at)
    for number, part in enumerate(parts):
        above = [low + amount for low, amount in zip(below, (v for v in part for _ in range(2)), strict=True)]
        if any(part):
            edge = _thinned([(frame.across(x), frame.up(value)) for x, value in zip(at, above, strict=True)])
            base = _thinned([(frame.across(x), frame.up(value)) for x, value in zip(at, below, strict=True)])
            paper.set_fill_color(colours[number])
            paper.polygon([*edge, *reversed(base)], style="F")
        below = above
    _draw_marks(paper, frame, panel.marks)


def _y_axis(values: list[float], is_log: bool, unit: str, most: float | None, from_zero: bool = False) -> Axis:
    if is_log:
        return Axis.over(values, True)
    if most is not None and most > 0:
        return Axis(min(0.0, *values), max(most, *values), False)
    low, high = min(values), max(values)
    return Axis.over(values, False, from_zero=from_zero or bool(unit) or low < 0.4 * high)


def x_axis(values: Sequence[float], is_counted: bool = True) -> Axis:
    """An axis from the first to the last of some steps, moments or, not counted, seconds."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if high == low:
        low, high = _bar(low)
    return Axis(low, high, False, is_counted=is_counted)


def _bar(x: float) -> list[float]:
    """One x as wide as a bar."""
    return [x - 0.5, x + 0.5]


def _frame(paper: Paper, x: str, at: Sequence[float], y: Axis, unit: str, names: Sequence[Name]) -> Frame:
    """Draw axes and the names of what is shown, and leave the paper below the chart."""
    paper.need(HEIGHT + 14)
    if len(names) > 1 or (names and not names[0][0].strip()):
        _draw_names(paper, names)
    top = paper.get_y() + 1.5
    frame = Frame(x_axis(at, x != "seconds"), y, paper.left + LEFT, top, paper.wide - LEFT - 2, HEIGHT)
    for value in y.ticks():
        if not -1e-6 <= y.share(value) <= 1 + 1e-6:
            continue
        paper.stroke(LINE, 0.1)
        height = frame.up(value)
        paper.line(frame.left, height, frame.left + frame.width, height)
        paper.pen(6.5, QUIET)
        paper.word(frame.left - 1.5, height + 0.8, value_text(value, unit), "right", most=LEFT)
    draw_x_axis(paper, x, frame.x, frame.across, top + HEIGHT)
    paper.set_y(top + HEIGHT + 7)
    return frame


def draw_x_axis(paper: Paper, x: str, axis: Axis, across: Place, y: float) -> None:
    """An axis of steps, ranks, time or seconds at a height; `across` says where a value is."""
    paper.stroke(QUIET, 0.15)
    paper.line(across(axis.low), y, across(axis.high), y)
    text_of = {"seconds": lambda value: value_text(value, "s")}.get(x, "{:,.0f}".format)
    ticks = _time_ticks(axis) if x == "time" else [(value, text_of(value)) for value in axis.ticks()]
    right = -math.inf
    for value, text in ticks:
        place = across(value)
        paper.line(place, y, place, y + 0.8)
        paper.pen(6.5, QUIET)
        width = paper.get_string_width(text)
        if place - width / 2 > right + 1:
            paper.word(place, y + 3.4, text, "middle")
            right = place + width / 2
    name = moment_text(axis.low, "%d %b %Y, local time") if x == "time" else "time" if x == "seconds" else x
    paper.pen(6.5, QUIET)
    paper.word(across(axis.high), y + 6.2, name, "right")


def _time_ticks(axis: Axis) -> list[tuple[float, str]]:
    """Round moments of local time."""
    try:
        offset = datetime.fromtimestamp(axis.low).astimezone().utcoffset()
    except (ValueError, OverflowError, OSError):
        offset = None
    ahead = offset.total_seconds() if offset else 0.0
    span = axis.high - axis.low
    step = next((one for one in SECONDS_OF_TICKS if span / one <= 8), SECONDS_OF_TICKS[-1])
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%d %b"
    first, last = math.ceil((axis.low + ahead) / step), math.floor((axis.high + ahead) / step)
    moments = [number * step - ahead for number in range(first, min(last, first + 40) + 1)]
    return [(moment, moment_text(moment, form)) for moment in moments]


def _draw_names(paper: Paper, names: Sequence[Name]) -> None:
    """What is what: a sample of each line or area, and its name."""
    x, y = paper.left, paper.get_y() + 2.6
    shown = names if len(names) <= MOST_NAMES else names[: MOST_NAMES - 1]
    for name, colour, dash in shown:
        paper.pen(7, INK)
        text = paper.short(name, 60)
        width = 6 + paper.get_string_width(text) + 4
        if x + width > paper.left + paper.wide and x > paper.left:
            x, y = paper.left, y + 3.8
        if dash is None:
            paper.filled(x, y - 2.2, 4, 2.4, colour)
        else:
            paper.stroke(colour, 0.5, dash)
            paper.line(x, y - 1.0, x + 4.5, y - 1.0)
        paper.word(x + 6, y, text)
        x += width
    paper.set_dash_pattern()
    if len(shown) < len(names):
        paper.pen(7, QUIET)
        paper.word(x, y, f"and {len(names) - len(shown)} more")
    paper.set_y(y + 1.2)


def _dash(number: int, curve: Curve) -> Sequence[float]:
    return DASHES[1] if curve.style == "dashed" else DASHES[number // len(STROKES) % len(DASHES)]


def _draw_band(paper: Paper, frame: Frame, curve: Curve, colour: str) -> None:
    points = [
        (frame.across(x), frame.up(low), frame.up(high))
        for x, low, high in zip(curve.x, curve.low or (), curve.high or (), strict=True)
        if low is not None and high is not None and frame.can_show(low) and frame.can_show(high)
    ]
    if len(points) < 2:
        return
    upper, lower = _thinned([(x, high) for x, _, high in points]), _thinned([(x, low) for x, low, _ in points])
    paper.set_fill_color(colour)
    with paper.local_context(fill_opacity=0.18):
        paper.polygon([*upper, *reversed(lower)], style="F")


def _draw_curve(paper: Paper, frame: Frame, curve: Curve, colour: str, dash: Sequence[float]) -> None:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(curve.x, curve.y, strict=True):
        if y is not None and frame.can_show(y):
            pieces[-1].append((frame.across(x), frame.up(y)))
        elif pieces[-1]:
            pieces.append([])
    pieces = [piece for piece in pieces if piece]
    dots = [point for piece in pieces if curve.style == "points" or len(piece) == 1 for point in piece]
    paper.stroke(colour, 0.3, dash)
    for piece in pieces if curve.style != "points" else []:
        if len(piece) > 1:
            paper.polyline(_thinned(piece))
    paper.set_dash_pattern()
    paper.set_fill_color(colour)
    for x, y in _thinned(dots):
        paper.circle(x, y, 0.7, style="F")


def _draw_marks(paper: Paper, frame: Frame, marks: Sequence[Mark]) -> None:
    right = -math.inf
    for mark in sorted(marks, key=lambda mark: mark.x):
        if not frame.x.low <= mark.x <= frame.x.high:
            continue
        x = frame.across(mark.x)
        paper.stroke(LEVELS[mark.level], 0.25, (0.8, 0.8))
        paper.line(x, frame.top, x, frame.top + frame.height)
        paper.set_dash_pattern()
        paper.pen(6, LEVELS[mark.level])
        room = frame.left + frame.width - x - 1
        if x > right and room > 8:
            right = x + 2 + paper.word(x + 0.7, frame.top + 2.2, mark.text, most=min(room, 45.0))


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of many points those that a printer can show: of each narrow column the first, lowest, highest and last."""
    if len(points) <= 2 * COLUMNS:
        return points
    first, last = points[0][0], points[-1][0]
    wide = (last - first) / COLUMNS or 1.0
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int((point[0] - first) / wide), []).append(point)
    kept = []
    for column in columns.values():
        wanted = {0, len(column) - 1, *(find(range(len(column)), key=lambda n: column[n][1]) for find in (min, max))}
        kept += [column[number] for number in sorted(wanted)]
    return kept


def is_number(value: Number) -> TypeGuard[float]:
    """Whether there is a value that can be drawn."""
    return value is not None and math.isfinite(value)


def say_instead(paper: Paper, text: str) -> None:
    """Where there is nothing to draw."""
    paper.pen(8, QUIET)
    paper.paragraph(text, 4)
    paper.ln(2)
