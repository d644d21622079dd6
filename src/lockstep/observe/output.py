"""Where a rank's output goes: every rank to its own log file, rank 0 to the console as well."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TextIO

from lockstep.record.folder import RunFolder
from lockstep.record.log import Reader


def show_run(
    folder: RunFolder, rank: int, launched: bool, log_to: Sequence[str], say: Callable[[str], None]
) -> tuple[Callable[[], None], list[Reader]]:
    """Send a rank's output to its log, and rank 0's to the console where no launcher shows it.

    Returns how to undo that, and who reads the events.
    """
    from lockstep.sinks.tensorboard import TensorBoard
    from lockstep.sinks.trackers import Tracker

    log = folder.log_here(rank)
    readers: list[Reader] = [TensorBoard(folder.path / "tb", say)]
    readers += [Tracker(name, folder.path, say) for name in log_to]
    if launched:
        return (lambda: None), readers
    if rank != 0:
        return redirect_to(log), []
    from rich.console import Console as Terminal

    from lockstep.sinks.console import Console

    console = Console(Terminal(file=sys.stdout))
    return tee_to(log, console.print_line), [*readers, console]


def redirect_to(path: Path) -> Callable[[], None]:
    """Send stdout and stderr of this process, C++ libraries included, to a file; returns how to undo it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    saved = [os.dup(1), os.dup(2)]
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)

    def undo() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, old in zip((1, 2), saved, strict=True):
            os.dup2(old, descriptor)
            os.close(old)

    return undo


def tee_to(path: Path, show: Callable[[str], None]) -> Callable[[], None]:
    """Write what Python prints into a file, and `show` it line by line; returns how to undo it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a", encoding="utf-8", buffering=1)
    streams = sys.stdout, sys.stderr
    out, err = _Lines(streams[0], log, show), _Lines(streams[1], log, show)
    sys.stdout, sys.stderr = out, err

    def undo() -> None:
        sys.stdout, sys.stderr = streams
        out.end_line()
        err.end_line()
        log.close()

    return undo


class _Lines(io.TextIOBase):
    """A text stream that hands on whole lines, so that a live bar below them stays whole too."""

    def __init__(self, stream: TextIO, log: IO[str], show: Callable[[str], None]) -> None:
        self._stream = stream
        self._log = log
        self._write_log: Callable[[str], object] = log.write
        self._show = show
        self._rest = ""
        self._process = os.getpid()

    def write(self, text: str) -> int:
        if os.getpid() != self._process:
            self._be_of_a_fork()
        self._write_log(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._show(line)
        return len(text)

    def _be_of_a_fork(self) -> None:
        """In a loader's process: its parent's threads may have held any lock when it was made, so it takes none."""
        self._process, self._rest = os.getpid(), ""
        self._write_log = partial(_write, self._log.fileno())
        try:
            # Over the bar, which its owner draws again.
            begin = "\r\x1b[2K" if self._stream.isatty() else ""
            descriptor = self._stream.fileno()
            self._show = lambda line: _write(descriptor, f"{begin}{line}\n")
        except OSError:  # a stream that is no file
            self._show = lambda _: None

    def end_line(self) -> None:
        if self._rest:
            self._show(self._rest)
            self._rest = ""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


def _write(descriptor: int, text: str) -> None:
    with suppress(OSError):  # a terminal that is gone
        os.write(descriptor, text.encode("utf-8", "replace"))
