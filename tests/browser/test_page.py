"""The page in a real browser: it draws every panel, anybody can use it, and nothing gets in or out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.page.html import data_text, page_html
from tests.browser import example
from tests.browser.conftest import OpenPage
from tests.browser.looking import draw_all, ink_of, panel, with_panels
from tests.patience import patient, wait_for

pytestmark = pytest.mark.browser

KINDS = ("lines", "stack", "shares", "heat", "timeline", "mesh", "timetable", "table", "text")


def test_every_kind_of_panel_is_drawn(open_page: OpenPage) -> None:
    tab = open_page(example.example_page())
    draw_all(tab)
    for kind in KINDS:
        assert tab.locator(f".panel-{kind} .body > *").count() >= 1, kind
    assert tab.get_by_role("heading", level=1).inner_text() == "lm-wikitext"
    assert tab.locator(".state").inner_text().strip() == "✓ finished"
    assert tab.locator(".advice li").count() == 3
    assert ink_of(panel(tab, "Loss"), "#0067a5") > 300
    assert tab.locator("#plain").count() == 0
    boxes = [tab.locator(".panel-lines").nth(number).bounding_box() for number in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"], "charts stand two in a row"


def test_hostile_strings_stay_text_and_are_not_wider_than_a_phone(open_page: OpenPage) -> None:
    tab = open_page(example.hostile_page(), width=360)
    draw_all(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    tab.get_by_role("button", name="Table", exact=True).first.click()
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("img").count() == 0
    assert tab.get_by_role("heading", level=1).inner_text().startswith("</script><img")


def test_the_browser_itself_refuses_html_made_of_text(open_page: OpenPage) -> None:
    tab = open_page(example.sparse_page())
    answer = tab.evaluate("try { document.body.innerHTML = '<b>x</b>'; 'done' } catch (error) { error.name }")
    assert answer == "TypeError"
    tab.problems.clear()


def test_one_step_no_validation_and_values_that_are_no_numbers(open_page: OpenPage) -> None:
    tab = open_page(example.sparse_page())
    draw_all(tab)
    assert ink_of(panel(tab, "One step"), "#0067a5") > 10
    assert ink_of(panel(tab, "Holes"), "#0067a5") > 30, "values between holes get a dot each"
    assert ink_of(panel(tab, "Nothing finite"), "#0067a5") == 0
    assert "2 values are not above 0" in panel(tab, "All zero").inner_text()
    for title in ("No curve", "Nothing spent", "No attempt", "No pipeline", "No row", "No text"):
        assert "Nothing was recorded." in panel(tab, title).inner_text()
    assert "Line 12 of events.jsonl" in tab.locator(".unreadable").inner_text()
    assert tab.locator(".section").last.inner_text().split("\n")[-1] == "Nothing was recorded."


def test_times_count_from_the_start_or_follow_the_clock(open_page: OpenPage) -> None:
    tab = open_page(example.example_page(), timezone_id="UTC")
    events = panel(tab, "Attempts")
    assert events.locator("tbody td").first.inner_text() == "+42 s"
    tab.get_by_role("button", name="Clock time").click()
    assert events.locator("tbody td").first.inner_text() == "2025-10-09 08:54:02"


def test_the_theme_follows_the_system_until_somebody_chooses(open_page: OpenPage) -> None:
    tab = open_page(example.example_page(), theme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(paper) == "rgb(14, 18, 22)"
    loss = panel(tab, "Loss")
    assert ink_of(loss, "#6cb8f0") > 300
    tab.get_by_role("button", name="Dark").click()
    wait_for(lambda: ink_of(loss, "#0067a5") > 300, "the other theme")
    assert tab.evaluate(paper) == "rgb(244, 246, 248)"
    tab.reload()
    assert tab.evaluate(paper) == "rgb(244, 246, 248)"


def test_everything_is_reached_with_the_tab_key_and_the_first_stop_skips_the_bar(open_page: OpenPage) -> None:
    tab = open_page(with_panels(example.example_run().sections[0].panels[:1]))
    panel(tab, "Loss")
    tab.evaluate("scrollTo(0, 0)")
    stops = []
    for _ in range(16):
        tab.keyboard.press("Tab")
        stops.append(tab.evaluate("document.activeElement.innerText || document.activeElement.className"))
    assert stops[0] == "Skip to the content"
    if "Skip to the content" in stops[1:]:
        stops = stops[: stops.index("Skip to the content", 1)]
    assert [stop for stop in stops if stop in ("Clock time", "Dark", "Overview", "Log", "Table", "plot")] == [
        "Clock time", "Dark", "Overview", "Log", "Table", "plot",
    ]  # fmt: skip
    assert any(stop.startswith("validation") for stop in stops)
    tab.get_by_role("button", name="Log").focus()
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"


def test_several_runs_are_tabs_behind_their_comparison(open_page: OpenPage) -> None:
    tab = open_page(example.comparison_page(steps=300))
    assert tab.get_by_role("heading", level=1).inner_text() == "Three runs of lm"
    headings = tab.get_by_role("heading", level=2).all_inner_texts()
    assert headings.index("Scaling") < headings.index("lm 1 GPUs")
    tabs = tab.get_by_role("tab")
    assert tabs.count() == 3
    tabs.first.focus()
    tabs.first.press("ArrowRight")
    assert tabs.nth(1).get_attribute("aria-selected") == "true"
    assert tab.get_by_role("heading", name="lm 4 GPUs").is_visible()
    assert not tab.get_by_role("heading", name="lm 1 GPUs").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_nothing_and_no_page_is_wider_than_its_window(
    open_page: OpenPage, axe: str, theme: str, width: int
) -> None:
    others = [example.comparison_page(steps=300)] if (theme, width) == ("dark", 360) else [example.sparse_page()]
    for page in (example.example_page(steps=300), *others):
        # The page forbids any script but its own: that one has to be let in for once.
        tab = open_page(page, width=width, theme=theme, bypass_csp=True)
        draw_all(tab)
        for chart in tab.get_by_role("button", name="Table", exact=True).all()[:2]:
            chart.click()
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        tab.evaluate(axe)
        found = tab.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        assert [(one["id"], one["nodes"][0]["target"], one["help"]) for one in found["violations"]] == []


def test_it_prints_light_whole_and_without_what_only_a_screen_needs(open_page: OpenPage, tmp_path: Path) -> None:
    tab = open_page(example.comparison_page(steps=300), theme="dark")
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for selector in (".nav", ".tools", ".bar-tools", ".tabs"):
        assert not tab.locator(selector).first.is_visible(), selector
    tab.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").stat().st_size > 50_000
    # Also what nobody has scrolled to, and the tabs nobody has opened, were drawn for it.
    assert tab.locator(".panel-heat canvas").count() == 3 * 4, "three runs, and all layers of each"
    assert tab.locator(".panel-timetable svg").count() == 3
    tab.set_viewport_size({"width": 700, "height": 900})
    wide = tab.evaluate(
        "Math.max(...[...document.querySelectorAll('canvas, svg')].map((one) => one.getBoundingClientRect().right))"
    )
    assert wide <= 700


def test_without_script_there_are_headline_advice_and_tables(open_page: OpenPage) -> None:
    tab = open_page(example.example_page(), java_script_enabled=False)
    text = tab.locator("body").inner_text()
    assert "need JavaScript" in text
    assert "It finished all 3,000 steps" in text
    assert "Give rank 5 on node2 faster input" in text
    assert "checkpoints/step-00003000" in text


def test_five_megabytes_open_at_once(open_page: OpenPage) -> None:
    page = example.large_page(5.0)
    assert len(data_text(page)) > 5e6
    tab = open_page(page)
    tab.locator(".panel-lines canvas").first.wait_for()
    milliseconds = tab.evaluate("new Promise((done) => requestAnimationFrame(() => done(performance.now())))")
    # Two seconds are promised; this machine may be a slow one.
    assert milliseconds < 1000 * patient(5)


def test_nothing_in_the_file_points_outside() -> None:
    text = page_html(example.example_page())
    hosts = set(re.findall(r"(?:https?:)?//([\w.-]+\.\w+)", text)) - {"www.w3.org"}
    assert hosts == set(), "namespaces of SVG aside"
