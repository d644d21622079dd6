"""`lockstep report`: the page of a run as one file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer, check_output
from lockstep.errors import UserError

SUFFIXES = (".html", ".pdf")


def report_command(
    runs: opt.Runs,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="NAME.html or NAME.pdf. Default: report.html in the run's folder."),
    ] = None,
    pdf: Annotated[
        bool,
        typer.Option(
            "--pdf", help="Print it into a PDF as well, beside the page, with the Chromium or Chrome of this machine."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The page's data as JSON on stdout, text for people on stderr.")
    ] = False,
) -> int:
    """Write what a run did into one file that opens anywhere: where the time went, and what to change."""
    from lockstep.page.make_page import build_page
    from lockstep.page.panels import as_json as page_data
    from lockstep.page.paper import find_browser
    from lockstep.page.report import write_page
    from lockstep.record.folder import EVENTS, REPORT, existing_runs

    folders = existing_runs(runs)
    for run in folders:
        if not (run / EVENTS).is_file():
            board = f"lockstep board {shlex.quote(str(run))}"
            raise UserError(f"{run} has not begun", f"wait for its first event; {board} does")
    target = output or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    if target.suffix not in SUFFIXES and not target.is_dir():
        raise UserError(f"--output {target} is neither a page nor a PDF", f"call it {target.with_suffix('.html')}")
    targets = list(dict.fromkeys([target, *([target.with_suffix(".pdf")] if pdf else [])]))
    for file in targets:
        check_output("--output", file, file.suffix if file.suffix in SUFFIXES else ".html")
    if any(file.suffix == ".pdf" for file in targets):
        find_browser()
    page = build_page(folders)
    for file in targets:
        write_page(page, file)
        print(f"report: {file}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        answer(page_data(page))
    return 0
