"""The page on paper, printed by the real browser: all of it, on A4, with its title and its page numbers."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lockstep.page import panels as p
from lockstep.page.html import page_html
from lockstep.page.panels import Page
from lockstep.page.paper import print_pdf
from tests.browser import example
from tests.browser.conftest import FIX, OpenPage
from tests.browser.looking import panel, with_panels

pytestmark = pytest.mark.browser

NAN = float("nan")
START = example.START


@pytest.fixture(autouse=True)
def _needs_programs() -> None:
    for program in ("chromium", "pdftotext"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: {FIX}")


def words_of(document: bytes) -> list[str]:
    """The text of every page, in one line."""
    done = subprocess.run(["pdftotext", "-layout", "-", "-"], input=document, capture_output=True, check=True)
    return [" ".join(text.split()) for text in done.stdout.decode().split("\f")[:-1]]


def printed(page: Page, folder: Path) -> tuple[bytes, list[str]]:
    document = print_pdf(page_html(page), folder)
    assert list(folder.iterdir()) == []
    return document, words_of(document)


def test_it_is_a4_with_title_page_numbers_and_an_outline(tmp_path: Path) -> None:
    document, pages = printed(example.example_page(), tmp_path)
    assert document.startswith(b"%PDF-")
    assert len(document) < 2_000_000
    sizes = {tuple(map(float, box.split())) for box in re.findall(rb"/MediaBox \[([\d. ]+)\]", document)}
    assert [round(size) for box in sizes for size in box] == [0, 0, 595, 842]
    assert 4 <= len(pages) <= 12
    assert b"/Outlines" in document
    for number, text in enumerate(pages, start=1):
        assert re.search(rf"by Lockstep 0.1 {number} ?/ ?{len(pages)}$", text)
        assert "lm-wikitext · Made " in text


def test_every_panel_is_on_paper_with_all_that_a_screen_shows_on_request(tmp_path: Path) -> None:
    run = example.example_run()
    rows = [[f"row {number}", str(number)] for number in range(1, 241)]
    long = p.Table("long", "Many rows", ["name", "number"], rows, [False, True])
    marks = [p.Mark(10.0 * number, f"mark number {number}") for number in range(1, 9)]
    marked = p.Lines("marked", "Many marks", "step", "y", [p.Curve("c", [1.0, 90.0], [1.0, 2.0])], marks=marks)
    more = p.Chapter("more", "More", [long, marked])
    page = replace(example.example_page(), runs=[replace(run, sections=[*run.sections, more])])
    text = " ".join(printed(page, tmp_path)[1])
    panels = [one for section in page.runs[0].sections for one in section.panels]
    for one in panels:
        assert one.title in text
    heat = next(one for one in panels if isinstance(one, p.Heat))
    assert all(layer.name in text for layer in heat.layers)
    mesh = next(one for one in panels if isinstance(one, p.Mesh))
    assert all(f"{axis.name} = {axis.size} {axis.talk}" in text for axis in mesh.axes)
    assert [f"row {number}" in text for number in range(1, 241)] == [True] * 240
    assert [f"mark number {number}" in text for number in range(1, 9)] == [True] * 8
    for button in ("Show all", "Reset zoom", "Clock time", "Skip to the content"):
        assert button not in text


def test_a_comparison_comes_before_the_runs_and_each_run_begins_a_page(tmp_path: Path) -> None:
    page = example.comparison_page(steps=300)
    _, pages = printed(page, tmp_path)
    assert page.title in pages[0]
    assert page.comparison[0].title in pages[0]
    begins = [
        next(number for number, text in enumerate(pages) if text.startswith(run.headline.title)) for run in page.runs
    ]
    assert begins == sorted(set(begins))
    assert begins[0] > 0


def test_words_that_do_not_fit_are_left_out_of_bars_also_in_tabs_nobody_has_opened(open_page: OpenPage) -> None:
    tab = open_page(example.comparison_page(steps=300))
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    too_long = """[...document.querySelectorAll(".share")].filter((share) => {
      const words = share.firstElementChild;
      return words.textContent && words.offsetWidth > share.clientWidth;
    }).map((share) => share.textContent)"""
    assert tab.locator(".shares-bar").count() == 3
    assert tab.evaluate(too_long) == []
    assert tab.locator(".share").filter(has_text="%").count() >= 3


def test_no_panel_is_broken_over_two_pages_but_those_that_may_be_longer_than_one(open_page: OpenPage) -> None:
    tab = open_page(example.example_page(steps=300))
    tab.emulate_media(media="print")
    inside = "(kind) => getComputedStyle(document.querySelector(`.panel-${kind}`)).breakInside"
    for kind in ("lines", "stack", "shares", "timetable"):
        assert tab.evaluate(inside, kind) == "avoid", kind
    for kind in ("table", "text", "timeline", "heat", "mesh"):
        assert tab.evaluate(inside, kind) == "auto", kind
    assert tab.evaluate("getComputedStyle(document.querySelector('tr')).breakInside") == "avoid"


def test_names_may_hold_anything_and_a_page_may_be_nearly_empty(tmp_path: Path) -> None:
    document, pages = printed(example.hostile_page(), tmp_path)
    assert b"/JavaScript" not in document
    assert b"/JS" not in document
    assert "<img src=x onerror=" in pages[0]
    assert 1 <= len(printed(example.sparse_page(), tmp_path)[1]) <= 3
    empty = replace(example.example_run(), advice=[], sections=[])
    assert len(printed(replace(example.example_page(), runs=[empty]), tmp_path)[1]) == 1


ODD: list[p.Panel] = [
    p.Lines("a", "A", "step", "y", []),
    p.Lines("a", "A", "step", "y", [p.Curve("c", [], [])]),
    p.Lines("a", "A", "step", "y", [p.Curve("c", [1.0, 2.0], [None, NAN])], log=True),
    p.Lines("a", "A", "step", "y", [p.Curve("c", [1.0, 2.0], [0.0, -1.0])], log=True),
    p.Lines("a", "A", "step", "y", [p.Curve("c", [1.0, 2.0], [NAN, 3.0], [2.0, None], [3.0, NAN])]),
    p.Lines("a", "A", "time", "y", [p.Curve("c", [START], [0.0])], unit="share", most=1.0),
    p.Lines("a", "A", "step", "y", [p.Curve("c", [1.0, 2.0], [1e-320, 1e308])], unit="B/s"),
    p.Lines("a", "A", "seconds", "y", [p.Curve("c", [0.0, 0.25], [1.0, 2.0])], unit="B"),
    p.Stacked("a", "A", "step", "y", [], []),
    p.Stacked("a", "A", "step", "y", [5.0], [p.Curve("c", [5.0], [1.0]), p.Curve("d", [5.0], [None])]),
    p.Stacked("a", "A", "time", "y", [START, START + 1], [p.Curve("c", [START, START + 1], [NAN, -1.0])]),
    p.Stacked("a", "A", "step", "y", [5.0, 9.0], [p.Curve("c", [5.0, 9.0], [1.0, 2.0])], begin=3.0),
    p.Shares("a", "A", "s", []),
    p.Shares("a", "A", "items", [p.Share("none", 0.0), p.Share("odd", 1.0)]),
    p.Heat("a", "A", "step", [], [], []),
    p.Heat("a", "A", "step", [1.0], ["r"], [p.HeatLayer("l", "s", [[None]])]),
    p.Heat("a", "A", "step", [1.0], ["r"], [p.HeatLayer("l", "share", [[0.5]])]),
    p.Timeline("a", "A", [], []),
    p.Timeline("a", "A", [p.AttemptBar(1, START, START, "lost")], [p.Moment(0.0, 7, None, "info", "w", "t")]),
    p.Mesh("a", "A", [], []),
    p.Mesh("a", "A", [p.MeshAxis("dp", 4000, "gradients")], []),
    p.Mesh("a", "A", [p.MeshAxis("pp", 2, "activations"), p.MeshAxis("dp", 100, "gradients")], ["h"] * 3, [199]),
    p.Timetable("a", "A", 0.0, [], []),
    p.Timetable("a", "A", 1.0, [[("?", 0, 0, -1.0, 9.0)], []], [0.5]),
    p.Table("a", "A", [], [], []),
    p.Table("a", "A", ["one"] * 30, [["x" * 500] * 30], [True] * 3),
    p.Table("a", "A", ["one", "two"], [["1"], ["1", "2", "3"]], []),
    p.Text("a", "A", ""),
    p.Text("a", "A", "x" * 10_000 + "\n" * 500),
]


def test_panels_with_little_or_too_much_in_them_are_printed(open_page: OpenPage, tmp_path: Path) -> None:
    panels = [replace(odd, id=f"p{number}", title=f"Panel {number}.") for number, odd in enumerate(ODD)]
    tab = open_page(with_panels(panels))
    text = " ".join(words_of(tab.pdf(path=tmp_path / "odd.pdf", format="A4")))
    assert [number for number in range(len(ODD)) if f"Panel {number}." not in text] == []


def test_a_heat_map_of_one_value_is_a_sentence_and_no_block_of_ink(open_page: OpenPage) -> None:
    layers = [p.HeatLayer("flat", "s", [[0.5, 0.5], [0.5, None]]), p.HeatLayer("varied", "s", [[0.5, 0.5], [0.5, 0.6]])]
    tab = open_page(with_panels([p.Heat("a", "A", "step", [1.0, 2.0], ["r0", "r1"], layers)]))
    panel(tab, "A")
    tab.emulate_media(media="print")
    tab.locator(".heat-layer").nth(1).wait_for()
    first, second = tab.locator(".heat-layer").all()
    assert (first.inner_text().split("\n"), first.locator("canvas").count()) == (["flat", "500 ms everywhere"], 0)
    assert second.locator("canvas").count() == 1


def test_the_browser_asks_nothing_outside(tmp_path: Path) -> None:
    asked: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            hosts = [f"http://{host}:{server.server_port}/x.png" for host in ("127.0.0.1", "localhost")]
            print_pdf("".join(f'<img src="{url}">' for url in hosts), tmp_path)
        finally:
            server.shutdown()
    assert asked == []
