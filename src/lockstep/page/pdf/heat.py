"""Heat maps on paper: a shade for each row and column."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.page.panels import Heat, Layer, Number
from lockstep.page.pdf.charts import is_number, say_instead
from lockstep.page.pdf.paper import INK, PALE, QUIET, Paper, moment_text, value_text

MOST_LAYERS = 6
MOST_COLUMNS = 240
SHADES = 48
LABELS = 7
MOST_LABEL = 38.0
ALIKE = 0.01
"""Values that differ by less than this share of the largest are one number, and no picture."""
CIVIDIS = ((0, 34, 78), (42, 63, 109), (87, 93, 109), (124, 123, 120), (166, 157, 117), (211, 193, 100), (254, 232, 56))
"""Equally spaced colours of the map of that name, which people see alike who do not see red and green."""


def draw_heat(paper: Paper, panel: Heat) -> None:
    """Rows over steps or time; on paper all layers, one below the other."""
    for layer in panel.layers[:MOST_LAYERS]:
        _draw_layer(paper, panel, layer)
    if len(panel.layers) > MOST_LAYERS:
        say_instead(paper, f"{len(panel.layers) - MOST_LAYERS} more layers are on the page")


def heat_height(panel: Heat) -> float:
    """Of one layer, in millimetres."""
    return min(56.0, max(8.0, 3.6 * len(panel.rows)))


def _draw_layer(paper: Paper, panel: Heat, layer: Layer) -> None:
    rows = len(panel.rows)
    numbers = [value for row in layer.values for value in row if is_number(value)]
    if not numbers or not panel.at:
        say_instead(paper, f"{layer.name}: no values yet")
        return
    low, high = min(0.0, *numbers), max(numbers)
    if max(numbers) - min(numbers) <= ALIKE * abs(high):
        say_instead(paper, f"{layer.name}: {value_text(high, layer.unit)} in every row, all the time")
        return
    height = heat_height(panel)
    paper.need(height + 14)
    paper.pen(6.5, QUIET)
    label = min(MOST_LABEL, max(paper.get_string_width(paper.clean(row[:100])) for row in panel.rows)) + 2
    top, left, width = paper.get_y() + 5.0, paper.left + label, paper.wide - label
    paper.pen(7.5, INK, bold=True)
    paper.word(paper.left, top - 1.6, layer.name, most=70)
    _draw_scale(paper, low, high, layer.unit, top)
    paper.filled(left, top, width, height, PALE)
    count = len(panel.at)
    columns = min(count, MOST_COLUMNS)
    for number, row in enumerate(layer.values):
        y, tall = top + height * number / rows, height / rows
        shades = [_shade(row[n * count // columns : (n + 1) * count // columns], low, high) for n in range(columns)]
        begin = 0
        for end in range(1, columns + 1):
            if end < columns and shades[end] == shades[begin]:
                continue
            if shades[begin] is not None:
                # A little taller and wider than it is, else thin white lines show between cells.
                box = (left + width * begin / columns, y, width * (end - begin) / columns + 0.05, tall + 0.05)
                paper.set_fill_color(_cividis(shades[begin] or 0))
                paper.rect(*box, style="F")
            begin = end
    paper.pen(6.5, QUIET)
    every = max(1, math.ceil(rows / (height / 3.2)))
    for number in range(0, rows, every):
        middle = top + height * (number + 0.5) / rows
        paper.word(left - 1.5, middle + 0.8, panel.rows[number], "right", most=MOST_LABEL)
    _name_columns(paper, panel, left, width, top + height)
    paper.set_y(top + height + 7)


def _name_columns(paper: Paper, panel: Heat, left: float, width: float, y: float) -> None:
    """Where some columns end: they are all equally wide, whatever they stand for."""
    paper.pen(6.5, QUIET)
    count = len(panel.at)
    form = "%d %b %H:%M" if panel.at[-1] - panel.at[0] > 86400 else "%H:%M:%S"
    shown = min(count, LABELS)
    for number in sorted({(n * (count - 1)) // max(1, shown - 1) for n in range(shown)}):
        text = moment_text(panel.at[number], form) if panel.x == "time" else f"{panel.at[number]:,.0f}"
        place = left + width * (number + 0.5) / count
        half = paper.get_string_width(text) / 2
        paper.word(min(max(place, left + half), left + width - half), y + 3.4, text, "middle")
    name = moment_text(panel.at[0], "%d %b %Y, local time") if panel.x == "time" else panel.x
    paper.word(left + width, y + 6.2, name, "right")


def _draw_scale(paper: Paper, low: float, high: float, unit: str, top: float) -> None:
    right, wide = paper.left + paper.wide, 28.0
    paper.pen(6.5, QUIET)
    right -= paper.word(right, top - 1.6, value_text(high, unit), "right") + 1.5
    for shade in range(SHADES):
        x = right - wide + wide * shade / SHADES
        paper.set_fill_color(_cividis(shade))
        paper.rect(x, top - 3.8, wide / SHADES + 0.05, 2.4, style="F")
    paper.word(right - wide - 1.5, top - 1.6, value_text(low, unit), "right")


def _shade(cells: Sequence[Number], low: float, high: float) -> int | None:
    """Of the largest of some cells, so that no extreme is lost."""
    numbers = [value for value in cells if value is not None and math.isfinite(value)]
    if not numbers:
        return None
    return round((SHADES - 1) * (max(numbers) - low) / (high - low)) if high > low else 0


def _cividis(shade: int) -> tuple[int, int, int]:
    place = shade / (SHADES - 1) * (len(CIVIDIS) - 1)
    first = min(int(place), len(CIVIDIS) - 2)
    part = place - first
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(CIVIDIS[first], CIVIDIS[first + 1], strict=True))
    return red, green, blue
