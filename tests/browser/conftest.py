"""A real browser for the tests in this folder: started once, and nothing may leave it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.page import html
from lockstep.page.panels import Page
from tests.patience import patient

FRONT = Path(html.__file__).parent / "front"
AXE = FRONT / "node_modules/axe-core/axe.min.js"
FIX = "`.ci/install-browser` installs it"

OpenPage = Callable[..., Any]

SECONDS = 90.0
"""For anything a test waits for in a page: less than a test has, so that what did not come is named."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip(f"needs chromium: {FIX}")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: `make setup` installs it")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script that looks for what people with other abilities could not use."""
    if not AXE.exists():
        pytest.skip(f"needs the npm packages of the page: {FIX}")
    return AXE.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Page], Path]:
    """A page as a file, written once for all tests."""
    folder = tmp_path_factory.mktemp("pages")
    written: dict[int, tuple[Page, Path]] = {}

    def file(page: Page) -> Path:
        if id(page) not in written:
            target = folder / f"{len(written)}.html"
            target.write_text(html.page_html(page), encoding="utf-8")
            written[id(page)] = (page, target)
        return written[id(page)][1]

    return file


@pytest.fixture
def open_page(browser: Any, file_of: Callable[[Page], Path]) -> Iterator[OpenPage]:
    """`open_page(page)` opens it from a file and gives the tab. A request that would leave, or an error, fails."""
    problems: list[str] = []
    contexts: list[Any] = []

    def opened(
        page: Page | None = None, *, url: str = "", width: int = 1280, theme: str = "light", **options: Any
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce", **options
        )
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(1000 * patient(SECONDS))
        if page is not None:
            url = file_of(page).as_uri()

        # A file may ask for nothing but itself, a board's page for what is the board's.
        own = "/".join(url.split("/")[:3]) + "/" if url.startswith("http:") else url
        tab.asked = []

        def watched(route: Any) -> None:
            asked = route.request.url.partition("#")[0]
            tab.asked.append(asked)
            if asked.startswith(own):
                route.continue_()
            else:
                problems.append(f"asked for {asked}")
                route.abort()

        tab.route("**/*", watched)

        def heard(message: Any) -> None:
            if message.type in ("error", "warning"):
                problems.append(message.text)

        tab.on("console", heard)
        tab.on("pageerror", lambda error: problems.append(f"{error}\n{error.stack}"))
        tab.goto(url)
        tab.problems = problems
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
