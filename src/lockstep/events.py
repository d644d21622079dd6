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
from contextlib import ExitStack
from pathlib import Path
from time import sleep
from time import time as now
from types import NoneType, UnionType
from typing import Any, Protocol, TypeAlias, get_args

import orjson

from lockstep.errors import UserError, unknown

Event: TypeAlias = dict[str, Any]

# A field is of a type, of one of several types, an object with fields of its own, or a list of what stands in [].
Shape: TypeAlias = "type | UnionType | Mapping[str, Shape] | list[Shape]"

NUMBER = int | float
NUMBER_OR_NULL = int | float | None
METRICS: Shape = {"*": {"sum": NUMBER, "count": NUMBER, "value": NUMBER}}

GPU: Shape = {
    "index": int,
    "name": str,
    "busy": NUMBER_OR_NULL,
    "memory": NUMBER_OR_NULL,
    "memory_total": NUMBER_OR_NULL,
    "watts": NUMBER_OR_NULL,
    "celsius": NUMBER_OR_NULL,
    "ranks": [int],
}
HOST: Shape = {
    "host": str,
    "cores": int,
    "cpu": NUMBER_OR_NULL,
    "memory": NUMBER_OR_NULL,
    "memory_total": NUMBER_OR_NULL,
    "sent": NUMBER_OR_NULL,
    "received": NUMBER_OR_NULL,
    "read": NUMBER_OR_NULL,
    "written": NUMBER_OR_NULL,
    "watts": NUMBER_OR_NULL,
    "joules": NUMBER_OR_NULL,
    "gpus": [GPU],
}

COMPARED: Shape = {"predicted": NUMBER, "measured": NUMBER_OR_NULL, "error": NUMBER_OR_NULL}

COMMON: Mapping[str, Shape] = {"time": NUMBER, "kind": str, "attempt": int}

SCHEMA: Mapping[str, Mapping[str, Shape]] = {
    # Every named field is always there. "*" stands for any further name.
    "start": {
        "run": str,
        "layout": str,
        "world_size": int,
        "nodes": int,
        "device": str,
        "precision": str,
        "formats": {"*": str},
        "resumed_from_step": int | None,
        "total_steps": int | None,
        "steps_per_epoch": int | None,
        "global_batch": int,
        "micro_batch": int,
        "item": str,
        "versions": {"lockstep": str, "torch": str, "python": str},
        "parameters": int,
        "host": str,
    },
    "status": {"text": str},
    "step": {
        "step": int,
        "epoch": NUMBER,
        "loss": NUMBER,
        "grad_norm": NUMBER,
        "lr": NUMBER,
        "weight": NUMBER,
        "items": int,
        "padding": int,
        "seconds": NUMBER,
        "skipped": bool,
        "loss_scale": NUMBER,
    },
    "validation": {
        "step": int,
        "epoch": NUMBER,
        "loss": NUMBER,
        "metrics": METRICS,
        "samples": int,
        "seconds": NUMBER,
        "best": bool,
    },
    "test": {"step": int, "loss": NUMBER, "metrics": METRICS, "samples": int, "seconds": NUMBER},
    "checkpoint": {"step": int, "path": str, "seconds": NUMBER, "stall": NUMBER, "bytes": int, "best": bool},
    "metric": {"step": int, "values": {"*": NUMBER}},
    "baseline": {"name": str, "loss": NUMBER},
    "sample": {"step": int, "prompt": str, "text": str},
    "message": {"text": str, "level": str},
    "failure": {
        "rank": int,
        "host": str,
        "cause": str,
        "text": str,
        "where": str,
        "step": int | None,
        "restarted": bool,
        "micro_batch": int | None,
    },
    "recovered": {"step": int, "seconds": {"stop": NUMBER, "start": NUMBER, "load": NUMBER, "step": NUMBER}},
    "alarm": {
        "what": str,
        "step": int,
        "rank": int | None,
        "sample_ids": list,
        "loss": NUMBER,
        "action": str,
        "text": str,
    },
    "ranks": {
        "step": int,
        "steps": int,
        "seconds": NUMBER,
        "input": [NUMBER],
        "compute": [NUMBER],
        "optimizer": [NUMBER],
        "between": [NUMBER],
        "wait": [NUMBER],
        "samples": [int],
        "memory": [int],
        "hosts": [str],
    },
    "machine": {
        "step": int,
        "hosts": [HOST],
        "ranks": {
            "cores": [NUMBER_OR_NULL],
            "memory": [NUMBER_OR_NULL],
            "threads": [int | None],
            "workers": [int | None],
        },
    },
    "timetable": {"step": int, "seconds": NUMBER, "busy": list, "lanes": list},
    "flops": {"per_sample": NUMBER_OR_NULL, "by": {"*": NUMBER}, "peak": NUMBER_OR_NULL, "source": str, "reason": str},
    "settings": {"text": str},
    "profile": {
        "rank": int,
        "host": str,
        "first_step": int,
        "last_step": int,
        "path": str,
        "seconds": {"whole": NUMBER, "compute": NUMBER, "communication": NUMBER, "overlapped": NUMBER, "idle": NUMBER},
        "kernels": list,
        "gaps": list,
        "memory": list,
        "tensors": list,
        "text": str,
    },
    "straggler": {
        "step": int,
        "rank": int | None,
        "host": str | None,
        "cause": str,
        "seconds": NUMBER,
        "others": NUMBER_OR_NULL,
        "text": str,
    },
    "job": {
        "id": str,
        "restart": int,
        "state": str,
        "reason": str,
        "nodes": str,
        "partition": str,
        "account": str,
        "exit_code": str,
    },
    "prediction": {
        "memory_bytes": NUMBER_OR_NULL,
        "step_seconds": NUMBER_OR_NULL,
        "machine": str | None,
        "band": NUMBER_OR_NULL,
        "source": str,
        "reason": str,
    },
    "prediction_error": {"step": int, "machine": str, "memory_bytes": COMPARED, "step_seconds": COMPARED},
    "stop": {"reason": str, "step": int, "text": str},
    "end": {
        "step": int,
        "loss": NUMBER,
        "best_loss": NUMBER_OR_NULL,
        "best_step": int | None,
        "metrics": METRICS,
        "seconds": NUMBER,
    },
    "config": {"*": str | int | float | bool | None},
}

CHOICES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("start", "item"): ("tokens", "samples"),
    ("message", "level"): ("info", "warning"),
    ("failure", "cause"): ("refused", "exception", "exit", "signal", "memory", "hang", "left"),
    ("alarm", "what"): ("loss", "gradient", "spike"),
    ("alarm", "action"): ("warn", "skip", "rollback", "stop"),
    ("straggler", "cause"): ("input", "compute", "communication"),
    ("stop", "reason"): ("interrupted", "terminated", "failed"),
}


_PLAIN: Mapping[Any, Mapping[str, frozenset[type]]] = {
    kind: {name: frozenset(get_args(shape) or (shape,)) for name, shape in {**COMMON, **fields}.items()}
    for kind, fields in SCHEMA.items()
    if not any(isinstance(shape, Mapping | list) for shape in fields.values())
    and "*" not in fields
    and kind not in {choice for choice, _ in CHOICES}
}
"""The types of the fields of kinds that have nothing but fields."""


class Reader(Protocol):
    """Whatever wants to see a run's events as they happen."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None: ...


def validate(event: Event, *, of_any_version: bool = False) -> None:
    """Refuse an event outside the schema, naming the field that is missing, unknown or of the wrong type.

    Where it may be `of_any_version`, kinds, fields and choices that a later one has added are fine.
    """
    kind = str(event.get("kind"))
    if _is_plainly_right(event, _PLAIN.get(kind)):  # most are, and there is one of every step
        return
    if kind not in SCHEMA and not of_any_version:
        raise unknown("event kind", kind, SCHEMA)
    _check(event, {**COMMON, **SCHEMA.get(kind, {})}, kind, "", of_any_version)
    for (choice_kind, field), options in CHOICES.items():
        if kind == choice_kind and event[field] not in options and not of_any_version:
            raise unknown(f"{field} of the {kind} event", event[field], options)


def _is_plainly_right(event: Event, plain: Mapping[str, frozenset[type]] | None) -> bool:
    """Whether an event has just its fields, each of exactly one of its types; what else may be right is looked at."""
    if plain is None or len(event) != len(plain):
        return False
    return all(type(event.get(name, validate)) in types for name, types in plain.items())


def _check(value: object, shape: Shape, kind: str, field: str, of_any_version: bool) -> None:
    types = _types(shape)
    # To Python True is an int; to other readers of the file it is not a number.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join("null" if one is NoneType else one.__name__ for one in types)
        cause = f"the field {field!r} of the {kind} event is of type {type(value).__name__}"
        raise UserError(cause, f"make it {wanted}")
    prefix = field + "." if field else ""
    if isinstance(shape, list) and isinstance(value, list) and not _are_plainly(value, shape[0]):
        for place, item in enumerate(value):
            _check(item, shape[0], kind, f"{prefix}{place}", of_any_version)
    if not isinstance(shape, Mapping) or not isinstance(value, dict):
        return
    for name in shape:
        if name != "*" and name not in value:
            raise UserError(f"the {kind} event has no field {prefix + name!r}", "add it: it is always there")
    for name, item in value.items():
        if name in shape or "*" in shape:
            _check(item, shape[name] if name in shape else shape["*"], kind, prefix + str(name), of_any_version)
        elif not of_any_version:
            raise unknown(f"field of the {kind} event", prefix + str(name), [prefix + known for known in shape])


def _types(shape: Shape) -> tuple[type, ...]:
    """What Python makes of a field of this shape."""
    if isinstance(shape, Mapping):
        return (dict,)
    return (list,) if isinstance(shape, list) else get_args(shape) or (shape,)


def _are_plainly(values: list[Any], shape: Shape) -> bool:
    """Whether all are of exactly one of the types of a shape that is nothing but types; of every rank there is one."""
    return not isinstance(shape, Mapping | list) and set(map(type, values)) <= set(_types(shape))


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
    """The events of a log so far, oldest first. A last line that a crash tore is left out."""
    try:
        for number, line in enumerate(_complete_lines(path, 0), start=1):
            yield _parse(line, path, number)
    except FileNotFoundError:
        raise UserError(f"there is no event log at {path}", "name the folder of a run that has started") from None


def follow_events(path: Path, stopped: Callable[[], bool]) -> Iterator[Event]:
    """The events of a log from its first one, as they are written; the file may not exist yet.

    Ends once `stopped()` is true and everything written before that was given.
    """
    offset = number = 0
    while True:
        last_round = stopped()  # asked before reading, so that nothing written before the stop is missed
        try:
            for line in _complete_lines(path, offset):
                offset += len(line)
                number += 1
                yield _parse(line, path, number)
        except FileNotFoundError:
            pass
        if last_round:
            return
        sleep(0.1)


def events_from(path: Path, offset: int) -> Iterator[tuple[int, Event | None]]:
    """What is in a log behind an offset, each event with the offset behind it; None for a line that cannot be read.

    For readers that come back for more, and that rather miss a damaged line than all that follows: every event that
    they get has the fields of its kind, each of its type. Where there is no file yet there is nothing in it.
    """
    try:
        for line in _complete_lines(path, offset):
            offset += len(line)
            try:
                event = _parse(line, path, 0)
                validate(event, of_any_version=True)
            except UserError:
                yield offset, None
            else:
                yield offset, event
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


def _parse(line: bytes, path: Path, number: int) -> Event:
    try:
        event = parsed(line)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict) or not COMMON.keys() <= event.keys() or not isinstance(event["kind"], str):
        raise UserError(
            f"line {number} of {path} is not an event",
            "the file was damaged after it was written; restore it, or delete that line to read the rest",
        )
    return {name: _with_non_finite(value, SCHEMA.get(event["kind"], {}).get(name)) for name, value in event.items()}


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
    if isinstance(shape, list) and isinstance(value, list) and not _are_plainly(value, shape[0]):
        return [_with_non_finite(item, shape[0]) for item in value]
    if shape in (NUMBER, NUMBER_OR_NULL) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return value
