"""From timed runs of one recipe to a scaling table: time, speed-up, efficiency, memory, waiting.

A run is measured by its event log alone. Every layout runs several times, in turns with the others, so that a machine
that slows down slows all of them, and a speed-up is the ratio of two runs of the same turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lockstep.errors import UserError
from lockstep.layout import AXES, Layout
from lockstep.record.events import Event, RanksEvent, StartEvent, StepEvent
from lockstep.record.log import without_non_finite
from lockstep.text.charts import ChartLine, line_chart
from lockstep.text.units import how_many

MOST_WARM_UP_STEPS = 5
SAME_LOSS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""By how much the last losses of two layouts may differ, relative, before they are not the same training."""

MUCH_BUSY = 0.15


@dataclass(frozen=True)
class Conditions:
    """What the runs had of the machine."""

    cores: int
    on_cpu: bool
    threads: int
    """Of every process."""
    busy: float = 0.0
    """The share of the cores that others used."""


@dataclass(frozen=True)
class Timed:
    """One run of a layout: seconds of its median step after the warm-up, and what a step is."""

    step: float
    items: float
    item: str
    loss: float | None
    """Of the last step; None where it is not finite."""
    memory: int
    """Bytes, of the rank that needed most."""
    waiting: float
    """The share of a step that ranks stood still in collectives: exposed communication."""
    steps_per_epoch: int | None

    @property
    def rate(self) -> float:
        """Items a second."""
        return self.items / self.step


@dataclass(frozen=True)
class Spread:
    """A number over the repeats: the median, the smallest and the largest."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return Spread(median(values), min(values), max(values))


@dataclass(frozen=True)
class ScalingRow:
    """A line of the table; `failure` says why there are no numbers."""

    layout: Layout
    repeats: int = 0
    step: Spread | None = None
    rate: Spread | None = None
    speed_up: Spread | None = None
    efficiency: Spread | None = None
    epoch: Spread | None = None
    memory: int | None = None
    waiting: Spread | None = None
    loss: float | None = None
    same_loss: bool | None = None
    """None where losses are not compared."""
    failure: str | None = None


@dataclass(frozen=True)
class LayoutTable:
    """All that is shown and written."""

    title: str
    same_training: bool
    """Whether a step has the same samples under every layout."""
    item: str
    cores: int
    rows: list[ScalingRow]
    remarks: list[str]


def warm_up_steps(steps: int) -> int:
    """How many of a run's first steps are left out."""
    return min(MOST_WARM_UP_STEPS, steps // 4)


def read_run(events: Iterable[Event]) -> Timed:
    """What a finished run's event log says of its speed."""
    starts: list[StartEvent] = []
    steps: list[StepEvent] = []
    told: list[RanksEvent] = []
    for event in events:
        match event["kind"]:
            case "start":
                starts.append(event)
            case "step":
                steps.append(event)
            case "ranks":
                told.append(event)
    if not steps or not told:
        raise UserError("the run has done no step", "give it more --steps")
    first = warm_up_steps(steps[-1]["step"])
    timed = [event for event in steps if event["step"] > first]
    ranks = [event for event in told if event["step"] - event["steps"] >= first] or told[-1:]
    whole = sum(event["steps"] * event["seconds"] for event in ranks)
    waited = sum(event["steps"] * sum(event["wait"]) / len(event["wait"]) for event in ranks)
    return Timed(
        step=median(event["seconds"] for event in timed),
        items=sum(event["items"] for event in timed) / len(timed),
        item=starts[-1]["item"],
        loss=last if (last := steps[-1]["loss"]) is not None and math.isfinite(last) else None,
        memory=max(max(event["memory"]) for event in told),
        waiting=waited / whole,
        steps_per_epoch=starts[-1]["steps_per_epoch"],
    )


def tabulate(
    layouts: Sequence[Layout],
    runs: dict[str, list[Timed]],
    failures: dict[str, str],
    *,
    same_training: bool,
    precision: str = "fp32",
) -> list[ScalingRow]:
    """The table of what was measured so far, by the layouts' names. Speed-ups are against the first, by items a second.

    Losses are compared where all do the same training.
    """
    base = layouts[0]
    base_runs = runs.get(str(base), [])
    rows = []
    for layout in layouts:
        timed = runs.get(str(layout), [])
        if not timed:
            rows.append(ScalingRow(layout, failure=failures.get(str(layout), "not measured")))
            continue
        ratios = [ours.rate / theirs.rate for ours, theirs in zip(timed, base_runs, strict=False)]
        share = layout.world_size / base.world_size
        epochs = [run.step * run.steps_per_epoch for run in timed if run.steps_per_epoch]
        loss = timed[-1].loss
        is_compared = same_training and bool(base_runs) and layout is not base
        rows.append(
            ScalingRow(
                layout,
                repeats=len(timed),
                step=Spread.of([run.step for run in timed]),
                rate=Spread.of([run.rate for run in timed]),
                speed_up=Spread.of(ratios) if ratios else None,
                efficiency=Spread.of([ratio / share for ratio in ratios]) if ratios else None,
                epoch=Spread.of(epochs) if epochs else None,
                memory=max(run.memory for run in timed),
                waiting=Spread.of([run.waiting for run in timed]),
                loss=loss,
                same_loss=_agrees(loss, base_runs[0].loss, precision) if is_compared else None,
                failure=failures.get(str(layout)),
            )
        )
    return rows


def remarks(rows: Sequence[ScalingRow], had: Conditions, *, same_training: bool) -> list[str]:
    """What has to be said beside the table, for it to be honest."""
    told = []
    most = max(row.layout.world_size for row in rows)
    if (repeats := max(row.repeats for row in rows)) > 1:
        told.append(f"medians of {repeats} runs in turns; ± is half the way from the smallest to the largest")
    if had.on_cpu and had.cores < most:
        told.append(f"{how_many(had.cores, 'core')} for {most} ranks: speed-ups here say nothing about more cores")
    if had.on_cpu and had.busy > MUCH_BUSY:
        share = f"{100 * had.busy:.0f} %"
        told.append(f"other programs used {share} of the cores when this began: ask again when they rest")
    if had.on_cpu:
        told.append(f"every process computes with {how_many(had.threads, 'thread')}, as if that were its device")
    if had.on_cpu and any(row.memory for row in rows):
        told.append("memory is all of a process in the host's, Python and torch included")
    if not same_training:
        told.append(
            "a step of more replicas has more samples: these are different trainings, with fewer steps in an epoch and "
            "other losses. The 92, 25 and 14 minutes that a course shows for the same epochs on more GPUs are of this "
            "kind"
        )
    return told + (_loss_remarks(rows) if same_training else [])


def _loss_remarks(rows: Sequence[ScalingRow]) -> list[str]:
    """Whether the last losses agree, or why nobody can tell."""
    first, others = rows[0], [row for row in rows[1:] if row.step is not None]
    if first.step is None:
        return [f"the losses are not compared: {first.layout} failed, and has none"] if others else []
    different = [row for row in others if row.same_loss is False]
    if different:
        told = ", ".join(f"{row.layout} {_loss(row)}" for row in different)
        return [
            f"the last loss of {first.layout} is {_loss(first)}, and others differ: {told}; lockstep verify "
            "--layout finds the first number that does"
        ]
    if any(row.same_loss for row in others):
        return [f"the losses agree: {_loss(first)} after the last step"]
    return [f"the losses are not compared: the last one of {first.layout} is not finite"] if others else []


def _loss(row: ScalingRow) -> str:
    return "not finite" if row.loss is None else f"{row.loss:.6g}"


def _agrees(loss: float | None, base: float | None, precision: str) -> bool | None:
    """Whether two losses are those of one training; None where neither is a number."""
    if loss is None or base is None:
        return None if loss is base else False
    return math.isclose(loss, base, rel_tol=SAME_LOSS[precision])


def speed_ups(scaling: LayoutTable) -> dict[str, list[tuple[int, float]]]:
    """Of every layout but the first, over its devices, by the axes it has."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in scaling.rows[1:]:
        if row.speed_up is not None:
            found.setdefault(kind_of(row.layout), []).append((row.layout.world_size, row.speed_up.middle))
    return found


def draw_chart(scaling: LayoutTable) -> str:
    """Speed-ups over devices as an SVG, a line for each kind of layout, with the ideal one."""
    base = scaling.rows[0].layout
    most = max(row.layout.world_size for row in scaling.rows)
    begin = (float(base.world_size), 1.0)
    series = [ChartLine(kind, sorted([begin, *points])) for kind, points in speed_ups(scaling).items()]
    ideal = ChartLine("ideal", [(base.world_size, 1.0), (most, most / base.world_size)])
    return line_chart(scaling.title, "devices", f"speed-up against {base}", [*series, ideal])


def to_json(scaling: LayoutTable) -> dict[str, Any]:
    """All of it for programs; spreads are [median, smallest, largest]."""
    item = scaling.item

    def plain(spread: Spread | None) -> list[float] | None:
        return None if spread is None else [spread.middle, spread.low, spread.high]

    table = [
        {
            "layout": str(row.layout),
            "processes": row.layout.world_size,
            "devices": row.layout.world_size,
            "repeats": row.repeats,
            "step_seconds": plain(row.step),
            f"{item}_per_second": plain(row.rate),
            "speed_up": plain(row.speed_up),
            "efficiency": plain(row.efficiency),
            "epoch_seconds": plain(row.epoch),
            "peak_memory_bytes": row.memory,
            "exposed_communication": plain(row.waiting),
            "last_loss": row.loss,
            "same_loss": row.same_loss,
            "failure": row.failure,
        }
        for row in scaling.rows
    ]
    return {
        "experiment": "fixed global batch" if scaling.same_training else "fixed batch per replica",
        "title": scaling.title,
        "item": item,
        "cores": scaling.cores,
        "rows": [without_non_finite(row) for row in table],
        "remarks": scaling.remarks,
    }


def kind_of(layout: Layout) -> str:
    """Which axes a layout has, as the name of a line: "dp" of dp=4, "dp,tp" of dp=2,tp=2."""
    return ",".join(axis for axis in AXES if layout.size(axis) > 1) or "single"
