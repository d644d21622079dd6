"""What the tests in this folder do with a page: find a panel, drag, count pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.page.panels import Chapter, Page
from tests.browser import example


def panel(tab: Any, title: str) -> Any:
    """The panel of that title, drawn."""
    found = tab.locator(".panel").filter(has=tab.get_by_role("heading", name=title, exact=True))
    found.scroll_into_view_if_needed()
    found.locator(".body > *").first.wait_for()
    return found


def draw_all(tab: Any) -> None:
    """Scroll through, so that everything is drawn."""
    tab.evaluate(
        """async () => {
          for (let y = 0; y < document.documentElement.scrollHeight; y += 1400) {
            scrollTo(0, y);
            await new Promise(requestAnimationFrame);
          }
          await new Promise((done) => setTimeout(done, 60));
          scrollTo(0, 0);
        }"""
    )


def drag(tab: Any, chart: Any, begin: float, end: float) -> None:
    box = chart.locator(".u-over").bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + begin * box["width"], middle)
    tab.mouse.down()
    tab.mouse.move(box["x"] + end * box["width"], middle, steps=4)
    tab.mouse.up()


def ink_of(chart: Any, colour: str) -> int:
    """How many pixels of a chart have a colour."""
    return int(
        chart.locator("canvas").first.evaluate(
            """(canvas, wanted) => {
              const { width, height } = canvas;
              const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
              copy.drawImage(canvas, 0, 0);
              const { data } = copy.getImageData(0, 0, width, height);
              const parts = [1, 3, 5].map((at) => parseInt(wanted.slice(at, at + 2), 16));
              let count = 0;
              for (let at = 0; at < data.length; at += 4) {
                const isNear = parts.every((part, number) => Math.abs(data[at + number] - part) < 12);
                if (data[at + 3] > 200 && isNear) count++;
              }
              return count;
            }""",
            colour,
        )
    )


def with_panels(panels: list[Any]) -> Page:
    """A page with these panels alone."""
    run = example.example_run(steps=300)
    return replace(
        example.example_page(steps=30), runs=[replace(run, advice=[], sections=[Chapter("only", "Only", panels)])]
    )
