"""The same model on more and more GPUs: weak and strong scaling, how often to save, what failures cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from lockstep.errors import UserError
from lockstep.planner.cost.figures import Figures, figures
from lockstep.planner.cost.job import Job
from lockstep.planner.machine.hardware import Machine
from lockstep.planner.search.rank_layouts import Asked, Candidate, SearchResult, search
from lockstep.record.events import Event

GPU_HOURS_BETWEEN_FAILURES = 54 * 24 / 419 * 16384
"""Of one GPU with its share of a node: 419 unexpected interruptions in 54 days of 16,384 H100.

The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.4.
"""

GPU_WRITES_GB_S = 2000 / 16384
"""A GPU's share of what storage takes for a long time: 2 TB/s for 16,384 H100 (the same paper, section 3.3.1)."""

BYTES_SAVED = 12
"""Of a parameter: the weight and Adam's two averages, in fp32."""

LLAMA = "Llama 3's training"

RESTART_SECONDS = 300.0
"""From a failure to the first step after it: assumed. A run's own is in its `recovered` events."""

MOST = 1 << 20


@dataclass(frozen=True)
class Saving:
    """What failures and checkpoints cost a job, in seconds."""

    save: float
    """The training waits so long for a checkpoint."""
    restart: float
    """From a failure to the first step after it."""
    between_failures: float
    """Of the whole job, on average."""

    @property
    def interval(self) -> float:
        """Between two checkpoints, by Daly's estimate of higher order."""
        return daly(self.save, self.between_failures)

    @property
    def goodput(self) -> float:
        """The share of the time that is training which is not lost again."""
        return goodput(self.interval, self.save, self.restart, self.between_failures)


def young(save: float, between_failures: float) -> float:
    """Seconds from the end of a checkpoint to the next: sqrt(2 d M) (Young 1974)."""
    return math.sqrt(2 * save * between_failures)


def daly(save: float, between_failures: float) -> float:
    """The same of higher order, which still holds when saving takes long (Daly 2006)."""
    if save >= 2 * between_failures:
        return between_failures
    ratio = save / (2 * between_failures)
    return young(save, between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def goodput(interval: float, save: float, restart: float, between_failures: float) -> float:
    """Useful time over all time when failures come at random (Daly 2006)."""
    if math.isinf(between_failures):
        return interval / (interval + save)
    exponent = (interval + save) / between_failures
    if exponent + restart / between_failures > 500:
        return 0.0
    whole = between_failures * math.exp(restart / between_failures) * math.expm1(exponent)
    return interval / whole


@dataclass(frozen=True)
class Costs:
    """What is known of failures and saving, for a machine of any size."""

    gpu_hours_between_failures: float = GPU_HOURS_BETWEEN_FAILURES
    node_gb_s: float | None = None
    """What a node writes, where that was measured; None: as many times `GPU_WRITES_GB_S` as it has GPUs."""
    waited: float = 1.0
    """The share of a save for which the training waits."""
    restart: float = RESTART_SECONDS
    save_seconds: float | None = None
    """Of any size: stated by the user."""
    source: str = LLAMA
    """Of what is known of saving."""
    failures: str = LLAMA

    def saving(self, parameters: int, machine: Machine) -> Saving:
        """For a model on a machine."""
        size = BYTES_SAVED * parameters
        save = self.save_seconds
        if save is None:
            each = GPU_WRITES_GB_S * machine.gpus_per_node if self.node_gb_s is None else self.node_gb_s
            save = self.waited * size / (each * 1e9 * machine.nodes)
        return Saving(save, self.restart, self.gpu_hours_between_failures * 3600 / machine.gpus)


def measured_costs(events: Iterable[Event], costs: Costs, run: str) -> Costs:
    """The costs that a run's log tells: how fast its nodes save, how long it waits for that and for a restart."""
    nodes, saves, restarts = 1, [], []
    for event in events:
        if event["kind"] == "start":
            nodes = event["nodes"]
        elif event["kind"] == "checkpoint" and event["seconds"] > 0:
            saves.append((event["bytes"] / event["seconds"] / nodes, event["stall"] / event["seconds"]))
        elif event["kind"] == "recovered":
            took = event["seconds"]
            restarts.append(took["stop"] + took["start"] + took["load"] + took["step"])
    if not saves:
        raise UserError(f"{run} has saved no checkpoint", "name a run that has, or say --save-seconds")
    return replace(
        costs,
        node_gb_s=median(speed for speed, _ in saves) / 1e9,
        waited=median(min(1.0, share) for _, share in saves),
        restart=median(restarts) if restarts else costs.restart,
        source=f"{len(saves)} checkpoint{'s' if len(saves) > 1 else ''} of {run}",
    )


@dataclass(frozen=True)
class Point:
    """One size of a curve."""

    gpus: int
    global_batch: int
    best: Candidate | None
    figures: Figures | None = None
    efficiency: float | None = None
    """Tokens a second and GPU, over those of the smallest size of the curve that fits."""
    why: str | None = None
    """Why there is no best one."""


@dataclass(frozen=True)
class ScalingCurves:
    """Both curves and what failures do to them."""

    strong: list[Point]
    """The same batch on all sizes."""
    weak: list[Point]
    """The same number of samples for every GPU."""
    savings: dict[int, Saving]
    """By number of GPUs."""


def parse_sizes(text: str) -> list[int]:
    """The powers of two of `1..16384`, its ends included."""
    first, dots, last = text.partition("..")
    if not dots or not (first.strip().isdecimal() and last.strip().isdecimal()):
        raise UserError(f"cannot read --scale {text}", "write it as 1..16384, from the smallest to the largest")
    low, high = int(first), int(last)
    if not 1 <= low <= high <= MOST:
        raise UserError(f"--scale {text} is no range of GPUs", f"go up from 1 or more, to {MOST:,} at most")
    doubled = [low * 2**power for power in range(21) if low * 2**power < high]
    return [*doubled, high]


def scale(base: Job, sizes: list[int], asked: Asked, costs: Costs) -> ScalingCurves:
    """Both curves. For weak scaling a GPU has as many samples as the batch of `base` gives it on the largest size."""
    strong = [(size, base.global_batch) for size in sizes]
    weak = [(size, size * max(1, round(base.global_batch / sizes[-1]))) for size in sizes]
    return ScalingCurves(
        strong=_curve(base, strong, asked),
        weak=_curve(base, weak, asked),
        savings={size: costs.saving(base.model.parameters, base.machine.with_gpus(size)) for size in sizes},
    )


def _curve(base: Job, sizes: list[tuple[int, int]], asked: Asked) -> list[Point]:
    points: list[Point] = []
    first: float | None = None
    for gpus, global_batch in sizes:
        job = replace(base, machine=base.machine.with_gpus(gpus), global_batch=global_batch)
        searched = search(job, gpus, replace(asked, layout=None), quick=True)
        if not searched.fitting:
            points.append(Point(gpus, global_batch, None, why=_why(searched)))
            continue
        best = searched.fitting[0]
        found = figures(best.job, best.time)
        rate = found.items_per_second / gpus
        first = first or rate
        points.append(Point(gpus, global_batch, best, found, rate / first))
    return points


def _why(searched: SearchResult) -> str:
    """Why a size has no layout."""
    if searched.least is not None:
        return f"it takes {searched.least[0] / 1e9:,.0f} GB a GPU at least"
    return "no layout has a sample for every rank"
