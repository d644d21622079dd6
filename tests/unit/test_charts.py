"""Charts stand alone, say every value, and leave out what cannot be drawn."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from lockstep.text.charts import ChartLine, line_chart, terminal_chart

SVG = "{http://www.w3.org/2000/svg}"
TWO = [ChartLine("a & b", [(1e3, 0.5), (1e6, 1.5)]), ChartLine("<second>", [(1e3, 0.25), (1e6, 1.25)])]


def test_an_svg_is_well_formed_and_says_its_title_and_every_value() -> None:
    chart = ElementTree.fromstring(line_chart("Speed of <x> & y", "bytes", "GB/s", TWO, log_x=True))
    assert chart.find(f"{SVG}title").text == "Speed of <x> & y"  # type: ignore[union-attr]
    told = chart.find(f"{SVG}desc").text or ""  # type: ignore[union-attr]
    assert "a & b: 0.5 at 1,000, 1.5 at 1,000,000." in told
    assert "<second>: 0.25 at 1,000, 1.25 at 1,000,000." in told
    names = [text.text for text in chart.iter(f"{SVG}text")]
    assert {"a & b", "<second>", "bytes", "GB/s"} <= set(names)


def test_an_svg_needs_nothing_from_elsewhere_and_knows_dark_paper() -> None:
    text = line_chart("t", "x", "y", TWO)
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://\S+?\"", text) == ['http://www.w3.org/2000/svg"']


def test_lines_differ_by_more_than_their_colour() -> None:
    many = [ChartLine(f"line {n}", [(1, n), (2, n + 1)]) for n in range(9)]
    chart = ElementTree.fromstring(line_chart("t", "x", "y", many))
    markers = {marker.get("d") for group in chart.iter(f"{SVG}g") for marker in group.iter(f"{SVG}path")}
    assert len(markers) == 9


def test_names_of_lines_that_end_together_do_not_lie_on_one_another() -> None:
    close = [ChartLine(f"line {n}", [(1, 5), (2, 7 + n / 1000)]) for n in range(9)]
    chart = ElementTree.fromstring(line_chart("t", "x", "y", close))
    heights = sorted(float(text.get("y", 0)) for text in chart.iter(f"{SVG}text") if "series" in text.get("class", ""))
    assert min(b - a for a, b in pairwise(heights)) > 14


def test_a_larger_value_is_drawn_higher_and_further_right() -> None:
    chart = ElementTree.fromstring(line_chart("t", "x", "y", [ChartLine("s", [(1, 1), (10, 3), (100, 2)])], log_x=True))
    line = next(path.get("d", "") for path in chart.iter(f"{SVG}path") if path.get("class") == "series0-edge")
    (x1, y1), (x2, y2), (x3, y3) = (map(float, point.split()) for point in line[1:].split("L"))
    assert x2 - x1 == pytest.approx(x3 - x2)
    assert y2 < y3 < y1


@pytest.mark.parametrize("points", [[], [(1.0, math.nan)], [(0.0, 1.0)], [(5.0, 5.0)]])
def test_what_cannot_be_drawn_is_left_out(points: list[tuple[float, float]]) -> None:
    text = line_chart("t", "x", "y", [ChartLine("s", points)], log_x=True)
    ElementTree.fromstring(text)
    assert ("nothing to draw" in text) == (points != [(5.0, 5.0)])
    assert "nan" not in text
    assert terminal_chart([ChartLine("s", points)], log_x=True)


def test_a_terminal_chart_keeps_its_width_and_shows_the_ends() -> None:
    rising = [ChartLine("s", [(1.0, 0.0), (10.0, 8.0)])]
    lines = terminal_chart(rising, width=40, height=6).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0].lstrip().startswith("8")
    assert lines[5].lstrip().startswith("0")
    ends = [len(line.rstrip()) for line in lines[:6]]
    assert ends == sorted(ends, reverse=True), "a rising line is furthest right at the top"


def test_several_lines_in_a_terminal_have_marks_and_a_legend() -> None:
    text = terminal_chart(TWO, width=60, log_x=True)
    assert "● a & b" in text
    assert "■ <second>" in text


def test_between_one_and_two_devices_there_is_nothing_to_write() -> None:
    drawn = line_chart("t", "devices", "speed-up", [ChartLine("dp", [(1, 1.0), (2, 1.8)])])
    assert re.findall(r'class="ink mid">([\d.]+)<', drawn) == ["1", "2"]
