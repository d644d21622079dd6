"""What the page is made of: a run is a headline, advice and sections of panels, each of one of the kinds below.

They are plain data. The page's script draws them, on the screen and on paper, and does not know what a loss or a rank
is. As JSON, a number that is not finite is null, and `kind` says which panel it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lockstep.record.run_state import State

NO_ADVICE = "Nothing stands out."
Number = float | None
Level = Literal["good", "info", "warning", "error"]


@dataclass(frozen=True)
class Fact:
    """One number of the headline: "Goodput", "93.1 %", and in a note what it means or why there is none."""

    label: str
    value: str
    note: str = ""
    level: Level = "info"


@dataclass(frozen=True)
class Headline:
    """What ran where, how it went, and the numbers that matter most."""

    title: str
    subtitle: str
    state: State
    verdict: str
    """One sentence."""
    facts: list[Fact]


@dataclass(frozen=True)
class Advice:
    """One thing to change, and the numbers that say so."""

    text: str
    evidence: str
    section: str = ""
    """The section of the page where this is to be seen."""


@dataclass(frozen=True)
class Curve:
    """A line. Where points were merged, `low` and `high` are the extremes of what each stands for."""

    name: str
    x: list[float]
    y: list[Number]
    low: list[Number] | None = None
    high: list[Number] | None = None
    style: Literal["line", "points", "dashed"] = "line"


@dataclass(frozen=True)
class Mark:
    """A moment on the x axis that is worth a word: a restart, a value that was not finite."""

    x: float
    text: str
    level: Level = "info"


@dataclass(frozen=True)
class Lines:
    """A chart of lines over steps, over time (Unix seconds), over numbers of ranks, or over seconds since something."""

    id: str
    title: str
    x: Literal["step", "time", "ranks", "seconds"]
    y: str
    """What the y axis counts, with its unit."""
    curves: list[Curve]
    note: str = ""
    marks: list[Mark] = field(default_factory=list)
    log: bool = False
    """Begin with a logarithmic axis; the page can switch."""
    unit: Literal["", "s", "B", "B/s", "share", "W", "flop/s", "/s"] = ""
    """How the page writes values: seconds, bytes, a share of 1 as per cent, watts, a rate."""
    most: float | None = None
    """The end of the y axis where it is known, such as 1 for shares."""
    from_zero: bool = False
    """Begin the y axis at 0, as it does with a unit: for amounts, such as degrees, that none of the units fits."""
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Stacked:
    """Parts that add up, over steps or time: each column stands for all from the one before it to its own x."""

    id: str
    title: str
    x: Literal["step", "time"]
    y: str
    at: list[float]
    parts: list[Curve]
    """Each with `x` equal to `at`."""
    note: str = ""
    marks: list[Mark] = field(default_factory=list)
    unit: Literal["", "s", "B", "share", "W"] = "s"
    begin: float | None = None
    """Where the first column begins; None: it is as wide as the second."""
    kind: Literal["stack"] = "stack"


@dataclass(frozen=True)
class Share:
    """A part of a whole."""

    name: str
    amount: float
    good: bool = False
    """Useful, rather than lost."""
    note: str = ""


@dataclass(frozen=True)
class Shares:
    """One bar, cut into parts."""

    id: str
    title: str
    unit: Literal["s", "B", "items"]
    parts: list[Share]
    note: str = ""
    kind: Literal["shares"] = "shares"


@dataclass(frozen=True)
class HeatLayer:
    """One number for each row and column of a heat map."""

    name: str
    unit: Literal["", "s", "B", "share"]
    values: list[list[Number]]


@dataclass(frozen=True)
class Heat:
    """Rows (ranks, or groups of them) over steps or time; one layer is shown at a time."""

    id: str
    title: str
    x: Literal["step", "time"]
    at: list[float]
    rows: list[str]
    layers: list[HeatLayer]
    note: str = ""
    kind: Literal["heat"] = "heat"


@dataclass(frozen=True)
class Moment:
    """Something that happened."""

    time: float
    attempt: int
    step: int | None
    level: Level
    what: str
    """In a word: "checkpoint", "straggler"."""
    text: str


@dataclass(frozen=True)
class AttemptBar:
    """An attempt, from its first event to its last."""

    attempt: int
    begin: float
    end: float
    state: State
    text: str = ""


@dataclass(frozen=True)
class Timeline:
    """The attempts of a run as bars, and what happened in them."""

    id: str
    title: str
    spans: list[AttemptBar]
    moments: list[Moment]
    note: str = ""
    kind: Literal["timeline"] = "timeline"


@dataclass(frozen=True)
class MeshAxis:
    """An axis of the layout, and what its ranks tell each other."""

    name: str
    size: int
    talk: str


@dataclass(frozen=True)
class Mesh:
    """Every rank in its place, outermost axis first: rank numbers count with the last axis fastest."""

    id: str
    title: str
    axes: list[MeshAxis]
    hosts: list[str]
    """Of every rank; empty where it is not known."""
    slow: list[int] = field(default_factory=list)
    """Ranks that hold the others up."""
    note: str = ""
    kind: Literal["mesh"] = "mesh"


@dataclass(frozen=True)
class Timetable:
    """What each place of a pipeline did when: (what, stage, micro_batch, begin, end), in seconds."""

    id: str
    title: str
    seconds: float
    lanes: list[list[tuple[str, int, int, float, float]]]
    busy: list[float]
    note: str = ""
    kind: Literal["timetable"] = "timetable"


@dataclass(frozen=True)
class Table:
    """Columns and rows of text; numbers are right-aligned where `right` says so."""

    id: str
    title: str
    columns: list[str]
    rows: list[list[str]]
    right: list[bool]
    note: str = ""
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Text:
    """Text as it is: a config, a sample of what the model writes."""

    id: str
    title: str
    text: str
    note: str = ""
    language: Literal["", "toml"] = ""
    kind: Literal["text"] = "text"


Panel = Lines | Stacked | Shares | Heat | Timeline | Mesh | Timetable | Table | Text


@dataclass(frozen=True)
class Chapter:
    """A chapter of the page."""

    id: str
    title: str
    panels: list[Panel]
    note: str = ""


@dataclass(frozen=True)
class RunPage:
    """One run, as the page shows it."""

    name: str
    headline: Headline
    advice: list[Advice]
    """At most three. Where there is none, the page says `NO_ADVICE`."""
    unreadable: list[str]
    """What of the log could not be read, in sentences."""
    sections: list[Chapter]


@dataclass(frozen=True)
class Page:
    """All of a page: one run, or several with a comparison before them."""

    title: str
    made: float
    version: str
    runs: list[RunPage]
    comparison: list[Chapter] = field(default_factory=list)
    live: bool = False
    """Whether more may come: the page asks for it."""


def as_json(value: Any) -> Any:
    """A page as data that JSON can write: what is not finite is null."""
    return _finite(asdict(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
