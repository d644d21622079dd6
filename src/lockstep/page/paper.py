"""The page as a PDF: the Chromium or Chrome of this machine prints it with the page's own print style."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from lockstep.errors import UserError, reason

VARIABLE = "LOCKSTEP_BROWSER"
BROWSERS = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell"),
    *("microsoft-edge", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"),
)
LONGEST = 300.0
"""Seconds that the browser may take: a page of 5 MB takes a few."""
FLAGS = (
    *("--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--no-default-browser-check"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--force-device-scale-factor=2",  # charts are drawn in pixels
    *("--no-pdf-header-footer", "--generate-pdf-document-outline"),
)


def find_browser() -> str:
    """The browser that prints: the one that LOCKSTEP_BROWSER names, or the first one there is."""
    named = os.environ.get(VARIABLE)
    found = filter(None, map(shutil.which, [named] if named else BROWSERS))
    browser = next(found, None)
    if browser is not None:
        return browser
    if named:
        raise UserError(f"{VARIABLE}={named} is no program", "name the program of a Chromium or a Chrome")
    raise UserError(
        "a PDF is printed by Chromium or Chrome, and there is none on this machine",
        f"install it (apt install chromium) or name it with {VARIABLE}=/path/to/it; "
        "or write -o NAME.html and print that in any browser",
    )


def print_pdf(html: str, folder: Path) -> bytes:
    """A page in HTML as a PDF. The two meet in `folder` for a moment: a packaged browser may not see all of /tmp."""
    browser = find_browser()
    with (
        tempfile.TemporaryDirectory(prefix=".print-", dir=folder) as here,
        tempfile.TemporaryDirectory(prefix="lockstep-browser-", ignore_cleanup_errors=True) as profile,
    ):
        page, target = Path(here, "page.html").absolute(), Path(here, "page.pdf").absolute()
        page.write_text(html, encoding="utf-8", errors="replace")
        command = [browser, *FLAGS, *["--no-sandbox"] * (os.geteuid() == 0)]  # Chromium has no sandbox for root
        command += [f"--user-data-dir={profile}", f"--print-to-pdf={target}", page.as_uri()]
        why = _failure(command, Path(here, "said"))
        if not target.is_file():
            raise UserError(
                f"{browser} has printed nothing ({why})",
                f"name another browser with {VARIABLE}, or write -o NAME.html and print that in any browser",
            )
        return target.read_bytes()


def _failure(command: list[str], said: Path) -> str:
    """Run the browser; returns what it said at last, should it have failed."""
    try:
        with said.open("wb") as file:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=LONGEST
            ).returncode
    except subprocess.TimeoutExpired:
        return f"it took longer than {LONGEST:.0f} s"
    except OSError as error:
        return reason(error)
    lines = said.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
