"""The event log of a run: everything observable is one JSON object a line in `events.jsonl`.

Rank 0 writes it with `EventLog`; the progress bar, TensorBoard, the live page and tests only read it, from
the file (`read_events`, `follow_events`) or as a `Reader` of the log. docs/events.md explains every field.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import sleep
from time import time as now
from typing import Any, Protocol

import orjson

from lockstep.errors import UserError
from lockstep.record.events import NUMBER, NUMBER_OR_NULL, SCHEMA, Event, Shape, are_plainly, has_head, validate


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
                event: Event = {"time": round(time, 6), "kind": kind, "attempt": self._attempt, **fields}
                validate(event)
                lines.append(_as_line(event))
                events.append(event)
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


def _as_line(event: Event) -> bytes:
    """JSON by the fast writer, where it writes what json would: it has no half surrogates, and null for a NaN."""
    try:
        line = orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
        if b"null" not in line:
            return line
    except TypeError:
        pass
    return json.dumps(without_non_finite(event), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def parsed(line: bytes) -> Any:
    """What a line of a log says, by the fast reader, and where that does not understand it by the patient one."""
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line.decode(errors="replace"))


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log so far, oldest first. Lines that cannot be read, and a torn last one, are passed over."""
    if not path.exists():
        raise UserError(f"there is no event log at {path}", "name the folder of a run that has started")
    return (event for _, event in events_from(path, 0) if event is not None)


def read_heads(path: Path) -> Iterator[Event | None]:
    """Every line of a log that has the time, kind and attempt of an event, whatever else it lacks; None for others.

    For whoever only asks how far a run is: of an event of another version, or a damaged one, that much may be right.
    """
    return (_parse(line) for line in _complete_lines(path, 0))


def follow_events(path: Path, stopped: Callable[[], bool]) -> Iterator[Event]:
    """The events of a log from its first one, as they are written; the file may not exist yet.

    Ends once `stopped()` is true and everything written before that was given.
    """
    offset = 0
    while True:
        last_round = stopped()  # asked before reading, so that nothing written before the stop is missed
        for behind, event in events_from(path, offset):
            offset = behind
            if event is not None:
                yield event
        if last_round:
            return
        sleep(0.1)


def events_from(path: Path, offset: int) -> Iterator[tuple[int, Event | None]]:
    """What is in a log behind an offset, each event with the offset behind it; None for a line that cannot be read.

    A damaged line costs nothing but itself: every event that comes has the fields of its kind, each of its type.
    Where there is no file yet there is nothing in it.
    """
    try:
        for line in _complete_lines(path, offset):
            offset += len(line)
            yield offset, _checked(_parse(line))
    except FileNotFoundError:
        return


def _complete_lines(path: Path, offset: int) -> Iterator[bytes]:
    # Opened anew for each look: network file systems show what other hosts wrote only from open to open.
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line


def _parse(line: bytes) -> Event | None:
    try:
        event = parsed(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not has_head(event):
        return None
    return {name: _with_non_finite(value, SCHEMA.get(event["kind"], {}).get(name)) for name, value in event.items()}


def _checked(event: Event | None) -> Event | None:
    """An event that has the fields of its kind, each of its type, and None for others."""
    if event is not None:
        with suppress(UserError):
            validate(event, of_any_version=True)
            return event
    return None


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


def _with_non_finite(value: Any, shape: Shape | None) -> Any:
    if isinstance(shape, Mapping) and isinstance(value, dict):
        return {name: _with_non_finite(item, shape.get(name, shape.get("*"))) for name, item in value.items()}
    if isinstance(shape, list) and isinstance(value, list) and not are_plainly(value, shape[0]):
        return [_with_non_finite(item, shape[0]) for item in value]
    if shape in (NUMBER, NUMBER_OR_NULL) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return value
