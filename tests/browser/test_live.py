"""The board's side of the page: it asks for what is new, changes in place, and says when nobody answers."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lockstep.page.html import content_security_policy, page_html
from lockstep.page.panels import Page, as_json
from tests.browser import example
from tests.browser.conftest import OpenPage
from tests.browser.looking import drag, panel

pytestmark = pytest.mark.browser

LONGEST_WAIT = 20_000
"""Milliseconds after which the page has asked again, however seldom it asks."""


@dataclass
class Board:
    """What the server has, and how it was asked: the number of the version that the page already had, or None."""

    url: str
    page: Page
    version: int = 1
    answers: bool = True
    asked: list[str | None] | None = None


@contextmanager
def serve(page: Page) -> Iterator[Board]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/page":
                policy = content_security_policy(live=True)
                return self.say(200, page_html(page, data_url="data"), "text/html", {"Content-Security-Policy": policy})
            known = self.headers.get("If-None-Match")
            assert board.asked is not None
            board.asked.append(known)
            if not board.answers:
                return self.say(500, "", "text/plain", {})
            if known == f'"{board.version}"':
                return self.say(304, "", "application/json", {})
            return self.say(200, json.dumps(as_json(board.page)), "application/json", {"ETag": f'"{board.version}"'})

        def say(self, status: int, text: str, kind: str, headers: dict[str, str]) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        board = Board(f"http://127.0.0.1:{server.server_port}", page, asked=[])
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield board
        finally:
            server.shutdown()
            thread.join()


def with_own_clock(tab: Any) -> Any:
    """The page once more, with a clock that tests can put forward: nobody waits for the seconds between questions."""
    tab.clock.install()
    tab.reload()
    return tab


def longer(page: Page, *, live: bool = True) -> Page:
    """The same run, some steps later."""
    run = example.example_run(steps=1200)
    facts = [replace(run.headline.facts[0], value="91.0 %"), *run.headline.facts[1:]]
    return replace(page, runs=[replace(run, headline=replace(run.headline, facts=facts))], live=live)


def test_it_follows_the_run_and_keeps_zoom_toggles_scroll_and_focus(open_page: OpenPage) -> None:
    with serve(example.example_page(live=True, steps=600)) as board:
        tab = with_own_clock(open_page(url=f"{board.url}/page"))
        assert tab.get_by_role("status").first.inner_text() == "Live"
        loss = panel(tab, "Loss")
        drag(tab, loss, 0.2, 0.6)
        loss.get_by_role("button", name="validation").click()
        rate = panel(tab, "Learning rate")
        rate.get_by_role("button", name="Log").focus()
        tab.evaluate("scrollTo(0, 500)")
        before = loss.get_by_role("img").get_attribute("aria-label")
        board.page, board.version = longer(board.page), 2
        tab.clock.run_for(LONGEST_WAIT)
        tab.locator(".fact-value", has_text="91.0 %").wait_for()
        assert loss.get_by_role("img").get_attribute("aria-label") != before, "the curve has grown"
        assert loss.get_by_role("button", name="Reset zoom").is_visible()
        assert loss.get_by_role("button", name="validation").get_attribute("aria-pressed") == "false"
        assert tab.evaluate("document.activeElement.innerText") == "Log"
        assert tab.evaluate("scrollY") == 500
        assert tab.locator(".live-age").inner_text().startswith(", updated ")


def test_it_says_when_the_board_is_gone_when_it_is_back_and_when_the_run_is_over(open_page: OpenPage) -> None:
    with serve(example.example_page(live=True, steps=60)) as board:
        tab = with_own_clock(open_page(url=f"{board.url}/page"))
        words = tab.locator(".live [role=status]")
        assert board.asked is not None
        while board.asked[-1:] != ['"1"']:  # what it has is not sent again
            tab.clock.run_for(1000)
        board.answers = False
        tab.clock.run_for(LONGEST_WAIT)
        words.filter(has_text="does not answer").wait_for()
        tab.problems.clear()
        board.answers = True
        tab.clock.run_for(LONGEST_WAIT)
        words.filter(has_text="Live").wait_for()
        tab.problems.clear()
        board.page, board.version = longer(board.page, live=False), 2
        tab.clock.run_for(LONGEST_WAIT)
        words.filter(has_text="The run is over").wait_for()
        count = len(board.asked)
        tab.clock.run_for(60_000)
        assert len(board.asked) == count, "nobody asks any more"
