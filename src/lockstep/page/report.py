"""The report: the page of some runs as one file with its data inside, or printed as a PDF by a browser.

`write_report` makes it; `leave_report` is for the end of a run, which it can neither fail nor hold up for long.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import UserError, reason
from lockstep.page.panels import Page
from lockstep.record.folder import EVENTS, REPORT
from lockstep.text.units import bytes_text

if TYPE_CHECKING:
    from lockstep.page.reading.reader import RunReader

MOST_BYTES = 2_000_000_000
"""Of a log that is read at the end of a run without being asked to: about a minute's work."""


def write_report(folder: Path, target: Path | None = None) -> Path:
    """Write the report of one run, by default into its folder; returns where it is."""
    from lockstep.page.make_page import build_page

    target = target or folder / REPORT
    write_page(build_page([folder]), target)
    return target


def write_page(page: Page, target: Path) -> None:
    """Write a page to a file, as a PDF where it is called so: all of it, or nothing."""
    from lockstep.page.html import page_html
    from lockstep.page.paper import print_pdf

    html = page_html(page)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        is_pdf = target.suffix == ".pdf"
        temporary.write_bytes(print_pdf(html, target.parent) if is_pdf else html.encode("utf-8", "replace"))
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"{target} cannot be written ({reason(error)})", "name a file somewhere else with -o") from None


def is_long(folder: Path) -> bool:
    """Whether the log of a run is too long to be read at its end without being asked for."""
    return (folder / EVENTS).stat().st_size > MOST_BYTES


def leave_report(folder: Path, reader: RunReader | None = None) -> str:
    """Write the report of a run that has just ended; where it cannot be, say in one line why there is none.

    What `reader` has taken in of the log is not read again, nor by whoever is given it afterwards.
    """
    from lockstep.page.make_page import page_of
    from lockstep.page.reading.reader import RunReader

    again = f"lockstep report {shlex.quote(str(folder))}"
    try:
        if is_long(folder):
            size = (folder / EVENTS).stat().st_size
            return f"no report: the log has {bytes_text(size)}; {again} reads it all the same"
        reader = reader or RunReader(folder)
        reader.read()
        write_page(page_of([reader]), folder / REPORT)
    except Exception as error:
        # Whatever it is, the run has ended as it has.
        said = str(error).splitlines() or [type(error).__name__]
        return f"no report: {said[0]}"
    return ""
