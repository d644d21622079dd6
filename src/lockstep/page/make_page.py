"""One page of one or several runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lockstep import __version__
from lockstep.page.panels import Page
from lockstep.page.reading.reader import RunReader
from lockstep.text.units import listed


def build_page(folders: Sequence[Path], *, live: bool = False) -> Page:
    """Read the logs of these runs and make their page; with several, a comparison comes first."""
    readers = [RunReader(folder) for folder in folders]
    for reader in readers:
        reader.read()
    return page_of(readers, live=live)


def page_of(readers: Sequence[RunReader], *, live: bool = False) -> Page:
    """The page of runs that are being followed, as far as they were read."""
    from lockstep.page.sections.comparison import compare_runs

    now = time.time()
    summaries = [reader.summary(now) for reader in readers]
    runs = [reader.page(now, live=live, summary=summary) for reader, summary in zip(readers, summaries, strict=True)]
    comparison = compare_runs(summaries) if len(readers) > 1 else []
    title = listed([run.name for run in runs]) if len(runs) < 4 else f"{len(runs)} runs"
    return Page(title=title, made=now, version=__version__, runs=runs, comparison=comparison, live=live)
