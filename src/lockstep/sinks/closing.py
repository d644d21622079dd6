"""What a run has come to, as a short table at its end."""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from lockstep.record.folder import EVENTS, REPORT
from lockstep.text import units

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.page.reading.reader import RunReader
    from lockstep.page.reading.summary import Compared, Summary, TimeSpent

LABEL = 11
WIDEST = 100
LEAST_SHARE = 0.005
"""Of the time: what is less is not named."""


def show_closing(folder: Path, terminal: Terminal, reader: RunReader | None = None, *, has_report: bool = True) -> None:
    """Print the table of a run, from its events; one that never began has none, nor one whose log is very long.

    `reader` may have read some of the events. Without a report of this end, one of an earlier end is not named.
    """
    from lockstep.page.reading.reader import RunReader
    from lockstep.page.report import is_long

    if not (folder / EVENTS).exists():
        return
    try:
        if is_long(folder):
            return
        reader = reader or RunReader(folder)
        reader.read()
        print_closing(reader.summary(time.time()), folder, terminal, has_report=has_report)
    except Exception as error:  # the training is done and saved: whatever is wrong here, it is not that
        terminal.print(f"no summary of the run ({type(error).__name__}: {error})", soft_wrap=True, markup=False)


def print_closing(summary: Summary, folder: Path, terminal: Terminal, *, has_report: bool = True) -> None:
    """Print the table under what is there."""
    report = folder / REPORT
    if summary.attempts:
        named = report if has_report and report.exists() else None
        table = closing_table(summary, named, min(terminal.width, WIDEST))
        terminal.print("", *table, sep="\n", soft_wrap=True)


def closing_table(summary: Summary, report: Path | None, width: int) -> list[Text]:
    """A run in a few lines: how far, how well, how fast, where the time went, and what it cost."""
    lines = []
    for label, text in closing_rows(summary, report):
        lines += [
            Text.assemble((f"{label if is_first else '':{LABEL}}", "bold"), line)
            for is_first, line in _wrapped(units.printable(text), max(width - LABEL, 20))
        ]
    return lines


def _wrapped(text: str, width: int) -> Iterator[tuple[bool, str]]:
    """Lines, and whether each is the first. A path stays whole, for whoever copies it, and so does "other 5 %"."""
    joined = re.sub(r" (?=[\d.]+ %)", "\xa0", text).replace(" %", "\xa0%")
    for place, line in enumerate(textwrap.wrap(joined, width, break_long_words=False, break_on_hyphens=False)):
        yield place == 0, line.replace("\xa0", " ")


def closing_rows(summary: Summary, report: Path | None = None) -> list[tuple[str, str]]:
    """The lines of the table; what is not known has none."""
    rows = [("run", f"{summary.name}, {summary.state}"), ("steps", _steps(summary)), ("loss", _losses(summary))]
    rows += [("speed", _speed(summary)), *_time(summary.spent)]
    if summary.memory:
        rows.append(("memory", f"{units.bytes_text(summary.memory)} on the fullest rank"))
    energy = f", {units.energy_text(summary.kwh)}" if summary.kwh is not None else ""
    cost = f"{units.device_time_text(summary.device_hours, summary.device)}{energy}"
    rows.append(("cost", cost if summary.device_hours else ""))
    compared = [_compared("a step", summary.predicted_step, units.seconds_text)]
    compared.append(_compared("memory", summary.predicted_memory, units.bytes_text))
    rows.append(("predicted", "; ".join(text for text in compared if text)))
    rows.append(("report", str(report) if report else ""))
    return [(label, text) for label, text in rows if text]


def _steps(summary: Summary) -> str:
    of = f" of {summary.total_steps}" if summary.total_steps else ""
    attempts = len(summary.attempts)
    tries = f", {attempts} attempts" if attempts > 1 else ""
    return f"{summary.steps}{of} in {units.duration_text(summary.spent.whole)}{tries}"


def _losses(summary: Summary) -> str:
    if not summary.steps:
        return ""
    parts = [f"{units.loss_text(summary.loss)} in training" if summary.loss is not None else "not finite in training"]
    if summary.best_loss is not None:
        parts.append(f"best in validation {units.loss_text(summary.best_loss)} (step {summary.best_step})")
    if summary.test_loss is not None:
        parts.append(f"test {units.loss_text(summary.test_loss)}")
    return ", ".join(parts)


def _speed(summary: Summary) -> str:
    from lockstep.page.reading.summary import is_over_the_peak

    parts = []
    if summary.items_per_second is not None:
        parts.append(f"{units.count_text(summary.items_per_second)} {summary.item}/s")
    if summary.step_seconds is not None:
        parts.append(f"{units.seconds_text(summary.step_seconds)} a step")
    if summary.mfu is not None:
        parts.append(f"MFU {units.share_text(summary.mfu)}")
    elif is_over_the_peak(summary):
        parts.append(f"no MFU: {summary.mfu_reason}")
    return ", ".join(parts)


def _time(spent: TimeSpent) -> list[tuple[str, str]]:
    """Where the time went: the goodput and what it is made of, and the rest."""
    from lockstep.page.reading.summary import IN_KEPT_STEPS, PARTS_OF_TIME

    if spent.goodput is None or not math.isfinite(spent.whole):
        return []
    shares = {name: getattr(spent, name) / spent.whole for name in PARTS_OF_TIME}
    kept = _named({text: shares[name] for name, text in PARTS_OF_TIME.items() if name in IN_KEPT_STEPS})
    lost = _named({text: shares[name] for name, text in PARTS_OF_TIME.items() if name not in IN_KEPT_STEPS})
    rows = [("goodput", units.share_text(spent.goodput) + (f": {kept}" if kept else ""))]
    return rows + ([("lost time", f"{units.share_text(1 - spent.goodput)}: {lost}")] if lost else [])


def _named(shares: dict[str, float]) -> str:
    largest = sorted(shares.items(), key=lambda share: -share[1])
    return ", ".join(f"{name} {units.percent(share)}" for name, share in largest if share >= LEAST_SHARE)


def _compared(what: str, compared: Compared | None, text: Callable[[float], str]) -> str:
    if compared is None or compared.measured is None or compared.error is None:
        return ""
    beside = units.beside_prediction(compared.measured, compared.predicted, text)
    return f"{what} {text(compared.measured)}, {beside}"
