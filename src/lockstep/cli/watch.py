"""`lockstep watch`: a run in a terminal, also one that another host writes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import open_terminal

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.text import Text

    from lockstep.page.panels import Advice
    from lockstep.page.reading.reader import RunReader
    from lockstep.page.reading.summary import Summary
    from lockstep.record.events import Event
    from lockstep.record.log import LogReader
    from lockstep.sinks.watched import Watched

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_OF_READING = 0.2
"""A long log is read piece by piece, and shown between them."""
SECONDS_BETWEEN_ADVICE = 10.0


def watch_command(
    run: Annotated[Path, typer.Argument(help="A run folder; it may still wait to start.")],
    once: Annotated[bool, typer.Option("--once", help="Show how it is now, and end.")] = False,
) -> int:
    """Show a run while it goes on, from its events alone. Ctrl-C ends the showing, not the run."""
    from lockstep.sinks.watched import Watched

    folder = opt.find_run(run)
    terminal = open_terminal()
    watched = Watched()
    try:
        if once:
            deque(_news(_log(folder), watched), maxlen=0)
            _print(folder, watched, terminal)
        elif terminal.is_interactive:
            _live(folder, watched, terminal)
        else:
            _lines(folder, watched, terminal)
    except KeyboardInterrupt:
        terminal.print("not shown any more; the run goes on as it was", style="dim")
        return 0
    return 1 if watched.run.state(time.time()) == "failed" else 0


def _log(folder: Path) -> LogReader:
    from lockstep.record.folder import EVENTS
    from lockstep.record.log import LogReader

    return LogReader(folder / EVENTS)


def _news(log: LogReader, watched: Watched) -> Iterator[Event | None]:
    """What was written since, taken in; None is a line that could not be read."""
    for told in log.read():
        yield watched.take(told)
    watched.run.changed = log.changed


def _live(folder: Path, watched: Watched, terminal: Terminal) -> None:
    """The whole screen, until the run is over; its last state stays on the terminal."""
    from rich.console import Group
    from rich.live import Live

    adviser, log = _Adviser(folder), _log(folder)
    threading.Thread(target=adviser.look_now_and_then, daemon=True).start()
    with Live(console=terminal, screen=True, auto_refresh=False) as live:
        while True:
            has_more = _read_for_a_moment(log, watched)
            live.update(Group(*_view(folder, watched, terminal, adviser.advice, low=True)), refresh=True)
            if not has_more and watched.is_over(time.time()):
                break
            time.sleep(0.01 if has_more else SECONDS_BETWEEN_LOOKS)
    _print(folder, watched, terminal)


def _read_for_a_moment(log: LogReader, watched: Watched) -> bool:
    """Read on, but not for long; whether there is more."""
    end = time.monotonic() + SECONDS_OF_READING
    return any(time.monotonic() > end for _ in _news(log, watched))


def _lines(folder: Path, watched: Watched, terminal: Terminal) -> None:
    """Lines as `train` writes them into a pipe, until the run is over."""
    from lockstep.sinks.closing import show_closing
    from lockstep.sinks.console import Console

    console, log = Console(terminal), _log(folder)
    was_silent = False
    while True:
        for event in _news(log, watched):
            if event is None:
                continue
            if event["kind"] == "failure":  # the console leaves it to the launcher
                console.say(f"{event['text']}{'; it is started again' * event['restarted']}", "warning")
            else:
                console.handle(event)
        if watched.is_over(time.time()):
            break
        silence = watched.silence(time.time())
        if silence and not was_silent:
            console.print_line(silence)
        was_silent = bool(silence)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    if damage := watched.damage():
        console.print_line(damage)
    show_closing(folder, terminal)


def _print(folder: Path, watched: Watched, terminal: Terminal) -> None:
    """The state as it is, for good; and what it has come to where it is over."""
    from lockstep.sinks.closing import print_closing

    adviser = _Adviser(folder)
    adviser.look()
    terminal.print(*_view(folder, watched, terminal, adviser.advice, low=False), sep="\n")
    now = time.time()
    if adviser.summary is not None and (watched.is_over(now) or watched.run.state(now) == "lost"):
        print_closing(adviser.summary, folder, terminal)


def _view(folder: Path, watched: Watched, terminal: Terminal, advice: list[Advice], low: bool) -> list[Text]:
    from lockstep.sinks.watch_view import Screen, view

    width, height = terminal.size
    screen = Screen(width, height if low else None, terminal.encoding.startswith("utf"))
    return view(str(folder), watched, time.time(), screen, advice)


class _Adviser:
    """Looks a run over and says what to change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader: RunReader | None = None
        self.summary: Summary | None = None
        self.advice: list[Advice] = []

    def look(self) -> None:
        """Take in what is new."""
        from lockstep.page.advice.choose import advise
        from lockstep.page.reading.reader import RunReader

        try:
            self._reader = self._reader or RunReader(self._folder)
            self._reader.read()
            self.summary = self._reader.summary(time.time())
            self.advice = advise(self.summary)
        except Exception:  # it has not started, or its log is damaged: what else there is to see is worth more
            self.advice = []

    def look_now_and_then(self) -> None:
        """In a thread, beside the view: it takes longer than a view may."""
        while True:
            self.look()
            time.sleep(SECONDS_BETWEEN_ADVICE)
