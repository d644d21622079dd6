"""The page as a PDF: every kind of panel is printed, whatever its names and numbers are."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest

from lockstep.page import panels as p
from lockstep.page.panels import Page, Panel, RunPage, Section
from lockstep.page.pdf import draw_panel, page_pdf
from lockstep.page.pdf.charts import _thinned, _time_ticks
from lockstep.page.pdf.paper import Paper, value_text
from tests.browser.example import START, comparison_page, example_page, example_run, large_page, sparse_page

HOSTILE = "</script><img src=x onerror=alert(1)> \x00\x1b[31m \ud800 \u202e日本 عربي 😀 {all} \\( %PDF"
NAN, INFINITY = float("nan"), float("inf")


def pages_of(document: bytes) -> int:
    return len(re.findall(rb"/Type /Page\b(?!s)", document))


def drawing_of(document: bytes) -> bytes:
    """What is drawn on the pages, as PDF operators."""
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", document, re.DOTALL)
    drawn = b""
    for stream in streams:
        try:
            content = zlib.decompress(stream)
        except zlib.error:
            continue
        drawn += content if b" Td" in content or b" re" in content else b""
    return drawn


def page_with(*panels: Panel) -> Page:
    run = replace(example_run(), sections=[Section("only", "Only", list(panels))])
    return replace(example_page(), runs=[run])


@pytest.fixture(scope="module")
def paper() -> Iterator[Paper]:
    """One document for many panels; at the end it is written."""
    paper = Paper("many", "foot", START)
    yield paper
    assert pages_of(bytes(paper.output())) == paper.pages_count


def test_a_page_is_a_small_file_with_an_outline() -> None:
    document = page_pdf(example_page())
    assert document.startswith(b"%PDF-1.")
    assert len(document) < 2_000_000
    assert 2 <= pages_of(document) <= 8
    assert b"/Outlines" in document


def test_the_same_page_gives_the_same_file() -> None:
    assert page_pdf(example_page()) == page_pdf(example_page())


def test_a_page_with_much_data_stays_small() -> None:
    assert len(page_pdf(large_page())) < 2_000_000


def test_a_run_of_which_hardly_anything_is_known_is_printed() -> None:
    assert 1 <= pages_of(page_pdf(sparse_page())) <= 2


def test_names_may_hold_anything() -> None:
    def spoil(value: Any) -> Any:
        if isinstance(value, str):
            return value if value in ALLOWED else HOSTILE
        if isinstance(value, list):
            return [spoil(one) for one in value]
        if isinstance(value, tuple):
            return tuple(spoil(one) for one in value)
        if hasattr(value, "__dataclass_fields__"):
            return replace(value, **{name: spoil(getattr(value, name)) for name in value.__dataclass_fields__})
        return value

    document = page_pdf(spoil(example_page()))
    assert pages_of(document) >= 2
    assert b"/JavaScript" not in document
    assert b"/JS" not in document


ALLOWED = {
    *("lines", "stack", "shares", "heat", "timeline", "mesh", "timetable", "table", "text", "line", "points", "dashed"),
    *("step", "time", "ranks", "s", "B", "share", "toml", "", "good", "info", "warning", "error"),
    *("running", "finished", "stopped", "failed", "lost", "F", "B", "W", "I"),
}
"""What panels.py names itself."""


@pytest.mark.parametrize(
    "panel",
    [
        p.Lines("a", "A", "step", "y", []),
        p.Lines("a", "A", "step", "y", [p.Curve("c", [], [])]),
        p.Lines("a", "A", "step", "y", [p.Curve("c", [1.0, 2.0], [None, NAN])], log=True),
        p.Lines("a", "A", "step", "y", [p.Curve("c", [1.0, 2.0], [0.0, -1.0])], log=True),
        p.Lines("a", "A", "step", "y", [p.Curve("c", [1.0, 2.0], [INFINITY, 3.0], [2.0, None], [3.0, INFINITY])]),
        p.Lines("a", "A", "time", "y", [p.Curve("c", [1e300, 2e300], [1.0, 2.0])]),
        p.Lines(
            "a", "A", "time", "y", [p.Curve("c", [START], [0.0])], marks=[p.Mark(NAN, "never")], unit="share", most=1.0
        ),
        p.Lines("a", "A", "step", "y", [p.Curve("c", [1.0, 2.0], [1e-320, 1e308])], unit="B/s"),
        p.Stack("a", "A", "step", "y", [], []),
        p.Stack("a", "A", "step", "y", [5.0], [p.Curve("c", [5.0], [1.0]), p.Curve("d", [5.0], [None])]),
        p.Stack("a", "A", "time", "y", [START, START + 1], [p.Curve("c", [START, START + 1], [NAN, -1.0])]),
        p.Stack("a", "A", "step", "y", [5.0, 9.0], [p.Curve("c", [5.0, 9.0], [1.0, 2.0])], begin=3.0),
        p.Lines("a", "A", "seconds", "y", [p.Curve("c", [0.0, 0.25], [1.0, 2.0])], unit="B"),
        p.Shares("a", "A", "s", []),
        p.Shares("a", "A", "items", [p.Share("none", 0.0), p.Share("odd", NAN)]),
        p.Heat("a", "A", "step", [], [], []),
        p.Heat("a", "A", "step", [1.0], ["r"], [p.Layer("l", "s", [[None]])]),
        p.Heat("a", "A", "step", [1.0], ["r"], [p.Layer("l", "share", [[0.5]])]),
        p.Timeline("a", "A", [], []),
        p.Timeline("a", "A", [p.Span(1, START, START, "lost")], [p.Moment(0.0, 7, None, "info", "w", "t")]),
        p.Mesh("a", "A", [], []),
        p.Mesh("a", "A", [p.MeshAxis("dp", 4000, "gradients")], []),
        p.Mesh("a", "A", [p.MeshAxis("pp", 2, "activations"), p.MeshAxis("dp", 100, "gradients")], ["h"] * 3, [199]),
        p.Timetable("a", "A", 0.0, [], []),
        p.Timetable("a", "A", 1.0, [[("?", 0, 0, -1.0, 9.0)], []], [0.5]),
        p.Table("a", "A", [], [], []),
        p.Table("a", "A", ["one"] * 30, [["x" * 500] * 30], [True] * 3),
        p.Table("a", "A", ["one", "two"], [["1"], ["1", "2", "3"]], []),
        p.Text("a", "A", ""),
        p.Text("a", "A", "x" * 100_000 + "\n" * 5_000),
    ],
)
def test_panels_with_little_or_too_much_in_them_are_printed(paper: Paper, panel: Panel) -> None:
    before = paper.get_y(), paper.page_no()
    draw_panel(paper, panel)
    assert (paper.get_y(), paper.page_no()) != before
    assert paper.get_y() <= paper.h


def test_a_comparison_comes_before_the_runs() -> None:
    page = comparison_page()
    titles = re.findall(rb"/Title \(((?:\\.|[^\\)])*)\)", page_pdf(page))
    names = [title.removeprefix(b"\xfe\xff").replace(b"\x00", b"").decode("latin-1") for title in titles]
    wanted = [page.comparison[0].title, *(run.name for run in page.runs)]
    assert [name for name in names if name in wanted] == wanted


def test_what_a_font_has_no_shape_for_is_a_box(paper: Paper) -> None:
    assert paper.clean("loss → 3 µs, Ωя") == "loss → 3 µs, Ωя"
    assert paper.clean("日\x00\ud800\u202e") == "□□□□"
    assert paper.clean("a\tb\r\nc") == "a    b\nc"


def test_a_text_is_cut_to_its_room_and_says_so(paper: Paper) -> None:
    assert paper.short("short", 100) == "short"
    cut = paper.short("far too long for this little room", 20)
    assert cut.endswith("…")
    assert paper.get_string_width(cut) <= 20


def test_a_heat_map_of_one_value_is_a_sentence_and_no_block_of_ink() -> None:
    def height_of(values: list[list[p.Number]]) -> float:
        paper = Paper("one", "foot", START)
        draw_panel(paper, p.Heat("a", "A", "step", [1.0, 2.0], ["r0", "r1"], [p.Layer("l", "s", values)]))
        return paper.get_y()

    assert height_of([[0.5, 0.5], [0.5, None]]) + 5 < height_of([[0.5, 0.5], [0.5, 0.6]])


def test_values_are_written_with_their_unit() -> None:
    texts = [
        value_text(*one)
        for one in [(0.0, "s"), (0.25, "s"), (1.5e9, "B"), (2e6, "B/s"), (0.934, "share"), (312.0, "W")]
    ]
    assert texts == ["0 s", "250 ms", "1.5 GB", "2 MB/s", "93 %", "312 W"]
    assert [value_text(4.1e14, "flop/s"), value_text(182_000.0, "/s")] == ["410 Tflop/s", "182 k/s"]
    assert [value_text(-2500.0, "W"), value_text(42.0, "/s"), value_text(0.0, "W")] == ["-2.5 kW", "42/s", "0 W"]
    assert [value_text(None, "s"), value_text(NAN, "B"), value_text(1234.0, "items")] == ["-", "-", "1,234"]


def test_the_extremes_of_a_long_curve_are_printed() -> None:
    points = [(n / 1000, 0.0) for n in range(100_000)]
    points[31_337], points[77_777] = (31.337, 9.0), (77.777, -9.0)
    kept = _thinned(points)
    assert len(kept) < 2000
    assert {(31.337, 9.0), (77.777, -9.0), points[0], points[-1]} <= set(kept)
    assert kept == sorted(kept)


def test_a_stack_is_drawn_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    paper, drawn = Paper("one", "foot", START), []
    monkeypatch.setattr(paper, "polygon", lambda points, **_: drawn.append(points))
    draw_panel(paper, p.Stack("a", "A", "step", "y", [20.0, 100.0], [p.Curve("c", [], [1.0, 4.0])], begin=0.0))
    (points,) = drawn
    left, right = points[0][0], points[3][0]
    assert [x for x, _ in points[:4]] == pytest.approx([left, *[left + 0.2 * (right - left)] * 2, right])
    heights = [points[-1][1] - y for _, y in points[:4]]
    assert heights[0] == heights[1] > 0
    assert heights[2] == heights[3] == pytest.approx(4 * heights[0])


def test_ticks_of_time_are_round_and_few() -> None:
    from lockstep.text.charts import Axis

    for span in (3.0, 70.0, 4000.0, 86_400.0, 40 * 86_400.0):
        ticks = _time_ticks(Axis(START, START + span, False))
        assert 1 <= len(ticks) <= 9
    minutes = [text for _, text in _time_ticks(Axis(START, START + 3600, False))]
    assert {text[-1] for text in minutes} <= {"0", "5"}


def test_every_panel_kind_of_the_page_draws_something() -> None:
    panels = {panel.kind: panel for section in example_run().sections for panel in section.panels}
    assert set(panels) == {kind.__name__.lower() for kind in get_args(Panel)}
    for kind, panel in panels.items():
        paper = Paper("one", "foot", START)
        draw_panel(paper, replace(panel, title="", note=""))
        assert len(drawing_of(bytes(paper.output()))) > 1000, kind


def test_a_run_without_advice_facts_or_sections_is_printed() -> None:
    headline = replace(example_run().headline, facts=[])
    assert pages_of(page_pdf(replace(example_page(), runs=[RunPage("x", headline, [], [], [])]))) == 1
