"""`profile` and `timetable` events: what one rank, or one step of a pipeline, did in detail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.page.panels import Timetable
from lockstep.page.reading.damage import Fields, UnusableError, cut, finite, inner, listed, text, whole

MOST_PROFILES = 8
"""The last ones."""
MOST_LANES = 256
MOST_DONE = 20_000
"""Forwards and backwards of a timetable."""
MOST_LINES = 30
MOST_MEMORY_POINTS = 100_000
SECONDS = ("whole", "compute", "communication", "overlapped", "idle")


@dataclass(frozen=True)
class Profile:
    """What was recorded on one rank."""

    rank: int
    host: str
    first_step: int
    last_step: int
    path: str
    seconds: dict[str, float]
    kernels: list[tuple[str, int, float]]
    gaps: list[tuple[float, float, str, str]]
    memory: list[tuple[float, float]]
    tensors: list[tuple[float, str, str]]
    text: str
    on_cpu: bool


def profile_of(event: Fields, *, on_cpu: bool) -> Profile:
    """An event as it can be shown."""
    seconds = inner(event, "seconds")
    return Profile(
        rank=whole(event, "rank"),
        host=text(event, "host", 120),
        first_step=whole(event, "first_step"),
        last_step=whole(event, "last_step"),
        path=text(event, "path", 300),
        seconds={name: finite(seconds, name) for name in SECONDS},
        kernels=[(_name(a), int(_number(b)), _number(c)) for a, b, c in _rows(event, "kernels", 3)],
        gaps=[(_number(a), _number(b), _name(c), _name(d)) for a, b, c, d in _rows(event, "gaps", 4)],
        memory=[(_number(a), _number(b)) for a, b in _rows(event, "memory", 2, MOST_MEMORY_POINTS)],
        tensors=[(_number(a), _name(b), _name(c)) for a, b, c in _rows(event, "tensors", 3)],
        text=text(event, "text"),
        on_cpu=on_cpu,
    )


def timetable_of(event: Fields) -> Timetable:
    """An event as the page draws it."""
    step, seconds = whole(event, "step"), finite(event, "seconds")
    lanes = [
        [(_name(what), int(_number(stage)), int(_number(micro)), _number(begin), _number(end))
         for what, stage, micro, begin, end in _checked(lane, "lanes", 5, MOST_DONE)]
        for lane in listed(event, "lanes", MOST_LANES)
    ]  # fmt: skip
    if sum(map(len, lanes)) > MOST_DONE:
        raise UnusableError(f"its lanes have more than {MOST_DONE:,} entries")
    short = [
        [(what, stage, micro, round(begin, 6), round(end, 6)) for what, stage, micro, begin, end in lane]
        for lane in lanes
    ]
    busy = [round(_number(share), 4) for share in listed(event, "busy", MOST_LANES)]
    note = f"Step {step}, as it was measured on the first rank of every place."
    return Timetable("timetable", "Pipeline timetable", seconds, short, busy, note)


def _rows(event: Fields, name: str, width: int, most: int = 10_000) -> list[list[Any]]:
    rows = _checked(event.get(name), name, width, most)
    return rows if name == "memory" else rows[:MOST_LINES]


def _checked(rows: object, name: str, width: int, most: int) -> list[list[Any]]:
    fits = isinstance(rows, list) and len(rows) <= most
    if isinstance(rows, list) and fits and all(isinstance(row, list) and len(row) == width for row in rows):
        return rows
    raise UnusableError(f"its field {name!r} is not a list of at most {most:,} lists of {width}")


def _number(value: object) -> float:
    return finite({"of a list": value}, "of a list")


def _name(value: object) -> str:
    return cut(str(value))
