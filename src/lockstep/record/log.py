"""The event log of a run: everything observable is one JSON object a line in `events.jsonl`.

Rank 0 writes it with `EventLog`; the progress bar, TensorBoard, the live page and tests only read it, all with one
`LogReader`, which copes with whatever is in the file, or as a `Reader` of the log. docs/events.md explains every field.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from time import time as now
from typing import IO, Any, Protocol, cast

import orjson

from lockstep.errors import UserError
from lockstep.record.events import Event, settled, validate

CHUNK = 1 << 22
LONGEST_LINE = 1 << 26
"""Bytes: what is longer was not written by a run."""
HEAD = 256
"""So many bytes of the beginning tell one log from another in the same place."""
LATEST = 1e11
"""Unix time: no clock is further off than this. Attempts and steps are fewer too."""


class Reader(Protocol):
    """Whatever wants to see a run's events as they happen."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """The one writer of a run's `events.jsonl`; hands each event on to `readers` once it is in the file."""

    def __init__(self, path: Path, attempt: int, readers: Sequence[Reader] = ()) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._attempt = attempt
        self._readers = tuple(readers)
        # Watchdog threads emit too, and a reader may itself emit a message while it handles an event.
        self._lock = threading.RLock()
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._open = ExitStack()
        self._open.callback(os.close, self._descriptor)
        for reader in self._readers:
            self._open.callback(reader.close)
        _cut_torn_line(self._descriptor)

    def emit(self, kind: str, *, time: float | None = None, **fields: Any) -> None:
        """Append one event, that happened now or at `time`, and show it to every reader."""
        self.emit_all([(now() if time is None else time, kind, fields)])

    def emit_all(self, told: Iterable[tuple[float, str, Mapping[str, Any]]]) -> None:
        """Append several events at once: time, kind and fields of each. Those before a wrong one are written."""
        events: list[Event] = []
        lines: list[bytes] = []
        try:
            for time, kind, fields in told:
                event = {"time": round(time, 6), "kind": kind, "attempt": self._attempt, **fields}
                validate(event)
                lines.append(_as_line(event))
                events.append(cast(Event, event))
        finally:
            self._append(b"".join(lines), events)

    def _append(self, lines: bytes, events: Sequence[Event]) -> None:
        with self._lock:
            if os.write(self._descriptor, lines) != len(lines):
                _cut_torn_line(self._descriptor)
                raise OSError(errno.ENOSPC, "no room for the event log: free some disk space")
            for event in events:
                for reader in self._readers:
                    reader.handle(event)

    def close(self) -> None:
        """Close every reader, then the file. A second call does nothing."""
        with self._lock:
            self._descriptor = -1
            self._open.close()


def _as_line(event: Mapping[str, Any]) -> bytes:
    """JSON by the fast writer, where it writes what json would: it has no half surrogates, and null for a NaN."""
    try:
        line = orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
        if b"null" not in line:
            return line
    except TypeError:
        pass
    return json.dumps(without_non_finite(event), allow_nan=False, separators=(",", ":")).encode() + b"\n"


class LogReader:
    """Follows a log that may not be there yet: every line once, in pieces, and again where the file has grown.

    Nothing in the file makes it raise: a line that is no event costs nothing but itself, and is counted.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._begin(offset)

    def _begin(self, offset: int) -> None:
        self.offset = offset
        """Behind the last line that was given."""
        self.lines = 0
        """How many were read, whatever is in them."""
        self.damaged = 0
        """How many of these were no event that can be used."""
        self.torn = 0
        """Bytes behind the last newline: what a crash leaves, or what is being written."""
        self.changed = 0.0
        self.is_another = False
        """Whether the last look found another file in the place of the one before, and began anew."""
        self._passes_over = False
        self._file: tuple[int, int] | None = None
        self._head = b""

    def read(self) -> Iterator[dict[str, Any] | str]:
        """What was written since, line by line: an object that has the head of an event, or a text that says why not.

        What else it lacks is not looked at here: of an event of another version, or a damaged one, that much is right.
        """
        self.is_another = False
        try:
            # Opened anew for each look: network file systems show what other hosts wrote only from open to open.
            file = self.path.open("rb")
            state, head = os.fstat(file.fileno()), file.read(HEAD)
            is_same = self._file in (None, (state.st_dev, state.st_ino)) and head.startswith(self._head)
            if is_another := not is_same or state.st_size < self.offset:
                self._begin(0)
            self.is_another, self.changed = is_another, state.st_mtime
            self._file, self._head = (state.st_dev, state.st_ino), head[: self.offset]
        except FileNotFoundError:
            return iter(())
        return self._lines_in(file, head)

    def _lines_in(self, file: IO[bytes], head: bytes) -> Iterator[dict[str, Any] | str]:
        with file:
            file.seek(self.offset)
            rest = b""
            while chunk := file.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self.offset += len(line) + 1
                    if self._passes_over:  # this is how a line ends that was too long
                        self._passes_over = False
                        continue
                    self.lines += 1
                    if told := _parse(line):
                        if told.__class__ is str:
                            self.damaged += 1
                        yield told
                if len(rest) > LONGEST_LINE:
                    self.offset += len(rest)
                    rest = b""
                    if not self._passes_over:
                        self._passes_over = True
                        self.lines += 1
                        self.damaged += 1
                        yield "longer than any event"
            self.torn, self._head = len(rest), head[: self.offset]

    def events(self) -> Iterator[Event | None]:
        """The same as events, each as its kind is declared; None for a line that is not."""
        for told in self.read():
            event = settled(told) if isinstance(told, dict) else None
            self.damaged += event is None and isinstance(told, dict)
            yield event


def _parse(line: bytes) -> dict[str, Any] | str:
    """The object of a line by the fast reader, and where that does not understand it by the patient one."""
    try:
        event = orjson.loads(line)
    except ValueError:
        try:
            event = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError):
            return "not JSON" if line.strip() else ""
    if type(event) is not dict:
        return "JSON, but no object"
    get = event.get
    time, attempt = get("time"), get("attempt")
    if type(get("kind")) is not str:
        return "without a kind"
    if (type(time) is not float and type(time) is not int) or not 0 <= time < LATEST:
        return "without a time that can be"
    if type(attempt) is not int or not 0 < attempt < LATEST:
        return "without the number of an attempt"
    return event


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log so far, oldest first. Lines that cannot be read, and a torn last one, are passed over."""
    if not path.exists():
        raise UserError(f"there is no event log at {path}", "name the folder of a run that has started")
    return (event for event in LogReader(path).events() if event is not None)


def follow_events(path: Path, stopped: Callable[[], bool]) -> Iterator[Event]:
    """The events of a log from its first one, as they are written; the file may not exist yet.

    Ends once `stopped()` is true and everything written before that was given.
    """
    log = LogReader(path)
    while True:
        last_round = stopped()  # asked before reading, so that nothing written before the stop is missed
        yield from (event for event in log.events() if event is not None)
        if last_round:
            return
        sleep(0.1)


def _cut_torn_line(descriptor: int) -> None:
    """Drop what a crash left after the last newline.

    Cut rather than ended with a newline, so that every line with a newline is a whole event and readers need
    no rule for half ones. No reader has ever seen it as an event.
    """
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(0, end - 65536)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(descriptor, end)


def without_non_finite(value: Any) -> Any:
    """JSON has no NaN: write the strings that both Python's float() and JavaScript's Number() read back."""
    if isinstance(value, dict):
        return {name: without_non_finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_non_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
