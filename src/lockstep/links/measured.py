"""What `lockstep bench` found, as it is shown, written and read again; docs/bench.md explains every field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.errors import UserError, reason
from lockstep.links.collective_cost import Collective, Link, bus_factor
from lockstep.links.findings import Finding
from lockstep.links.fit import Point, TimeCurve, fit_link, worst_miss

WORLD = "world"
"""What stands for an axis where all ranks of several axes talk to one another."""


class Record(BaseModel):
    """One kind of result."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Row(Record):
    """One collective over one axis with buffers of one size."""

    axis: str
    ranks: int = Field(ge=2)
    collective: Collective
    bytes: int = Field(gt=0)
    seconds: float | None = Field(None, gt=0)
    """Of one call: the median over batches of calls, each as long as the rank that took longest. None: see `note`."""
    fastest: float | None = Field(None, gt=0)
    slowest: float | None = Field(None, gt=0)
    iterations: int = 0
    """Timed calls, in all batches."""
    algbw_gb_s: float | None = None
    """Of the operation: bytes by seconds."""
    busbw_gb_s: float | None = None
    """Of the busiest link: what can be compared with hardware, and between numbers of ranks."""
    note: str = ""
    """Why there are no times."""


class Pair(Record):
    """Two ranks that sent to each other; where there are many, pairs that share no rank did so at the same time."""

    a: int = Field(ge=0)
    b: int = Field(ge=0)
    gb_s: float = Field(gt=0)
    latency: float = Field(gt=0)
    """Seconds of a message of 8 bytes, one way."""


class Speed(Record):
    """What the device of one rank can do by itself, while the others do the same."""

    rank: int = Field(ge=0)
    device: str
    matmul_tflops: dict[str, float]
    copy_gb_s: float = Field(gt=0)
    """Bytes read and written."""


class Fit(Record):
    """Two numbers for a collective over an axis."""

    axis: str
    ranks: int
    collective: Collective
    alpha: float = Field(ge=0)
    beta: float = Field(ge=0)
    worst_miss: float
    """How far alpha + beta x bytes is from a measured time, relative to it, where it is farthest."""


class Bench(Record):
    """One run of `lockstep bench`."""

    version: Literal[1] = 1
    lockstep: str
    torch: str
    when: str
    complete: bool
    layout: str
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    hosts: list[str]
    """The host of every rank."""
    nodes: list[int]
    """The node of every rank, counted from 0."""
    rows: list[Row]
    pairs: list[Pair]
    speeds: list[Speed]
    fits: list[Fit]
    findings: list[Finding]

    def points(self, axis: str, collective: str) -> list[Point]:
        """Bytes and seconds of what was measured."""
        return [
            (row.bytes, row.seconds)
            for row in self.rows
            if (row.axis, row.collective) == (axis, collective) and row.seconds is not None
        ]

    def curve(self, axis: str, collective: str) -> TimeCurve | None:
        """The time of any size; None where none was measured."""
        points = self.points(axis, collective)
        return TimeCurve.through(points) if points else None

    def link(self, axis: str, collective: str) -> Link | None:
        """The time of any size by two numbers; None where none was measured."""
        points = self.points(axis, collective)
        return fit_link(points) if points else None

    @property
    def spans(self) -> dict[tuple[str, Collective], tuple[int, int]]:
        """By axis and collective, the smallest and the largest size with a time."""
        sizes: dict[tuple[str, Collective], list[int]] = {}
        for row in self.rows:
            if row.seconds is not None:
                sizes.setdefault((row.axis, row.collective), []).append(row.bytes)
        return {key: (min(found), max(found)) for key, found in sizes.items()}


def timed_row(
    axis: str, ranks: int, collective: Collective, size: int, batches: Sequence[float], iterations: int
) -> Row:
    """The row of a size that was measured: `batches` are seconds of one call, each over a batch of calls."""
    seconds = median(batches)
    return Row(
        axis=axis,
        ranks=ranks,
        collective=collective,
        bytes=size,
        seconds=seconds,
        fastest=min(batches),
        slowest=max(batches),
        iterations=iterations,
        algbw_gb_s=size / seconds / 1e9,
        busbw_gb_s=size / seconds / 1e9 * bus_factor(collective, ranks),
    )


def fits_of(rows: Sequence[Row]) -> list[Fit]:
    """The two numbers of every collective and axis that was measured, in that order."""
    found = []
    for axis, ranks, collective in dict.fromkeys((row.axis, row.ranks, row.collective) for row in rows):
        points = [
            (float(row.bytes), row.seconds)
            for row in rows
            if (row.axis, row.collective) == (axis, collective) and row.seconds is not None
        ]
        if points:
            link = fit_link(points)
            miss = worst_miss(link, points)
            found.append(
                Fit(axis=axis, ranks=ranks, collective=collective, alpha=link.alpha, beta=link.beta, worst_miss=miss)
            )
    return found


def medians(pairs: Sequence[Pair], nodes: Sequence[int]) -> dict[bool, tuple[float, float, int]]:
    """GB/s, latency and number of the pairs inside a node (True) and between nodes (False), where there are any."""
    found = {}
    for inside in (True, False):
        these = [pair for pair in pairs if (nodes[pair.a] == nodes[pair.b]) is inside]
        if these:
            found[inside] = (median(p.gb_s for p in these), median(p.latency for p in these), len(these))
    return found


def read_bench(path: Path) -> Bench:
    """What was written before, checked; a UserError says what is wrong with the file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({reason(error)})", "give the file that lockstep bench -o wrote"
        ) from None
    try:
        found = Bench.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the text"
        raise UserError(
            f"{path} is not a result of lockstep bench: {where}: {first['msg'].lower()}", "measure again, with -o"
        ) from None
    ranks = len(found.hosts)
    if len(found.nodes) != ranks or any(max(pair.a, pair.b) >= ranks for pair in found.pairs):
        raise UserError(f"{path} names ranks that it does not have", "measure again, with -o")
    return found


def write_bench(bench: Bench, path: Path) -> None:
    """Write it whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f".{path.name}.new")
        own.write_text(bench.model_dump_json(indent=1) + "\n", encoding="utf-8")
        own.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({reason(error)})", "choose another place") from None


def file_name(bench: Bench) -> str:
    """What results are kept as: only those of the same machines, devices, backend and layout share a name."""
    count = len(set(bench.nodes))
    nodes = f"{count}-node{'s' if count > 1 else ''}"
    return f"{bench.hosts[0]}-{nodes}-{bench.device}-{bench.backend}-{bench.layout}.json"


def is_better(new: Bench, path: Path) -> bool:
    """Whether a result may take the place of the one that lies there: nothing whole is given up for a part."""
    try:
        old = read_bench(path)
    except UserError:
        return True
    if old.complete and not new.complete:
        return False
    nothing = (math.inf, -math.inf)
    spans = [(new.spans.get(key, nothing), span) for key, span in old.spans.items()]
    return all(ours[0] <= theirs[0] and ours[1] >= theirs[1] for ours, theirs in spans)
