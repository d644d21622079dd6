"""All ways to run a training on a machine, ranked by their predicted step time.

What is tried: every layout that the model, the GPUs and the batch allow (tp inside a node), with all micro-batches that
are powers of two, with and without recompute, with every schedule of a pipeline and every level of sharding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from lockstep.config.schema import Schedule
from lockstep.layout import Layout
from lockstep.parallel.pipeline.timetable import ONE_STAGE, SPLITS_BACKWARD, V_SHAPED
from lockstep.planner.cost.checks import (
    context_fits,
    divisors,
    leaves_ranks_empty,
    most_stages,
    schedule_takes,
    tables,
    tensor_limit,
    verdict,
)
from lockstep.planner.cost.estimate import Memory, Time, fullest_of
from lockstep.planner.cost.job import Job, Recompute, count_micro_batches
from lockstep.planner.cost.memory import estimate_memory
from lockstep.planner.cost.step_time import estimate_time

Zero = Literal[1, 2, 3]

STAGES_PER_RANK = (2, 4)
"""What is tried for schedules with several stages a rank."""

QUICK: tuple[Schedule, ...] = ("1f1b", "interleaved-1f1b", "zbv")
"""The schedules of a quick search."""

LEAST_TOKENS = 512
"""Of a rank: sequences are not cut into smaller pieces."""


@dataclass(frozen=True)
class Asked:
    """What is decided already; None is left to the search."""

    layout: Layout | None = None
    micro_batch: int | None = None
    recompute: Recompute | None = None
    zero: Zero | None = None
    schedule: Schedule | None = None
    stages_per_rank: int | None = None


NOTHING = Asked()


@dataclass(frozen=True)
class Candidate:
    """One way to run it, and what is predicted of it."""

    job: Job
    memory: Memory
    """Of the fullest stage."""
    time: Time


@dataclass
class SearchResult:
    """What a search has come to."""

    fitting: list[Candidate] = field(default_factory=list)
    """The fastest first."""
    considered: int = 0
    """All that were looked at: those that fit and the rest."""
    refused: Counter[str] = field(default_factory=Counter)
    """How many were not possible or did not fit, by reason."""
    least: tuple[float, Job] | None = None
    """The one that needs the least memory of those that do not fit."""

    @property
    def front(self) -> list[Candidate]:
        """Those than which no other is both faster and smaller, the fastest first."""
        found: list[Candidate] = []
        for candidate in self.fitting:
            if not found or candidate.memory.total < found[-1].memory.total:
                found.append(candidate)
        return found

    @property
    def best_or_least(self) -> Job | None:
        """The fastest, or where nothing fits the one that needs the least memory."""
        return self.fitting[0].job if self.fitting else self.least[1] if self.least else None

    @property
    def best_of_kinds(self) -> list[Candidate]:
        """The fastest of each kind of layout: its tp, cp and pp, and whether it has replicas, shards or both."""
        return self._first_of(lambda layout: (layout.tp, layout.cp, layout.pp, layout.dp > 1, layout.fsdp > 1))

    @property
    def best_of_layouts(self) -> list[Candidate]:
        """The fastest of each layout."""
        return self._first_of(lambda layout: layout)

    def _first_of(self, kind: Callable[[Layout], object]) -> list[Candidate]:
        best: dict[object, Candidate] = {}
        for candidate in self.fitting:
            best.setdefault(kind(candidate.job.layout), candidate)
        return list(best.values())


def search(base: Job, world_size: int, asked: Asked = NOTHING, quick: bool = False) -> SearchResult:
    """All that can be done with so many GPUs of the machine of `base`, whose layout and choices are not looked at.

    `quick` tries what is mostly best: dp or fsdp alone, all of it sharded, and three schedules.
    """
    if quick:
        asked = replace(asked, zero=asked.zero or 3)
    found = SearchResult()
    for layout in _layouts(base, world_size, asked, found, quick):
        sizes = (asked.micro_batch,) if asked.micro_batch else powers(base.global_batch // layout.data_size)
        for zero, (schedule, stages) in _ways(base, layout, asked, quick):
            counts = {size: count_micro_batches(base.global_batch, layout.data_size, size) for size in sizes}
            possible = [
                size
                for size in sizes
                if layout.pp == 1 or schedule_takes(schedule, stages, layout, base.global_batch, size)
            ]
            # Where recompute does not help, nothing without it fits.
            ways: tuple[Recompute, ...] = (asked.recompute,) if asked.recompute else ("full", "none")
            found.considered += len(ways) * len(sizes)
            found.refused["the schedule cannot take their micro-batches"] += len(ways) * (len(sizes) - len(possible))
            job = _changed(
                base,
                layout=layout,
                zero=zero,
                schedule=schedule,
                stages_per_rank=stages,
                sequence_parallel=base.sequence_parallel and layout.pp == 1,
            )
            for number, recompute in enumerate(ways):
                if not _try(job, recompute, possible, counts, found):
                    found.refused["does not fit"] += (len(ways) - number - 1) * len(possible)
                    break
    found.refused = +found.refused
    found.fitting.sort(key=lambda candidate: (candidate.time.total, candidate.memory.total))
    return found


def _try(job: Job, recompute: Recompute, sizes: list[int], counts: dict[int, int], found: SearchResult) -> bool:
    """Micro-batches from small to large; returns whether any fits.

    After one that does not, a larger one needs more, unless it is the only one of a step, or fewer are in flight.
    """
    any_fits = is_full = False
    grows = job.layout.pp == 1 or job.schedule == "1f1b"
    for size in sizes:
        if is_full and grows and counts[size] > 1:
            found.refused["does not fit"] += 1
            continue
        tried = _changed(job, recompute=recompute, micro_batch=size)
        memory = fullest(tried)
        says = verdict(memory, tried.machine.gpu)
        if says == "fits":
            any_fits = True
            found.fitting.append(Candidate(tried, memory, estimate_time(tried)))
            continue
        is_full = True
        found.refused[says] += 1
        if found.least is None or memory.total < found.least[0]:
            found.least = (memory.total, tried)
    return any_fits


def _changed(job: Job, **changes: Any) -> Job:
    """As `replace`, which takes most of the time of a search over tens of thousands of jobs."""
    found = object.__new__(Job)
    found.__dict__.update(job.__dict__, **changes)
    found.__dict__.pop("micro_batches", None)
    return found


def fullest(job: Job) -> Memory:
    """The estimate for the stage that needs most."""
    return fullest_of(estimate_memory(job))


def powers(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(max(1, most).bit_length()))


# ---- what is tried


def _layouts(base: Job, world_size: int, asked: Asked, found: SearchResult, quick: bool) -> Iterator[Layout]:
    """Those that the model and the batch allow."""
    if asked.layout is not None:
        yield asked.layout
        return
    for tp, cp, pp in teams(base, world_size):
        data = world_size // (tp * cp * pp)
        sizes = sorted({1, data}) if quick else divisors(data)
        if data * (asked.micro_batch or 1) > base.global_batch:
            found.refused["fewer samples than data ranks"] += len(sizes)
            found.considered += len(sizes)
            continue
        for fsdp in sizes:
            yield Layout(pp=pp, dp=data // fsdp, fsdp=fsdp, cp=cp, tp=tp)


def teams(base: Job, world_size: int) -> Iterator[tuple[int, int, int]]:
    """The sizes of tp, cp and pp that can be."""
    limit, node = tensor_limit(base.model), base.machine.gpus_per_node
    entries = tables(base.model)
    for tp in divisors(world_size):
        if tp > node or (tp > 1 and (not limit or limit % tp)):
            continue
        if any(leaves_ranks_empty(size, tp) for size in entries):
            continue
        for cp in divisors(world_size // tp):
            if context_fits(base.model, cp) and (cp == 1 or base.model.sequence // cp >= LEAST_TOKENS):
                yield tp, cp, 1
        for pp in divisors(world_size // tp):
            if 1 < pp <= most_stages(base.model):
                yield tp, 1, pp


def _ways(base: Job, layout: Layout, asked: Asked, quick: bool) -> Iterator[tuple[Zero, tuple[Schedule, int]]]:
    """Levels of sharding and schedules."""
    levels: tuple[Zero, ...] = (3,) if layout.fsdp == 1 else (asked.zero,) if asked.zero else (1, 2, 3)
    schedules = list(_schedules(base, layout.pp, asked, quick))
    for zero in levels:
        for schedule in schedules:
            # As zero2, which is tried as well.
            if len(levels) == 1 or zero < 3 or schedule[0] not in SPLITS_BACKWARD:
                yield zero, schedule


def _schedules(base: Job, pp: int, asked: Asked, quick: bool) -> Iterator[tuple[Schedule, int]]:
    if pp == 1:
        yield "1f1b", 1
        return
    for schedule in (asked.schedule,) if asked.schedule else QUICK if quick else get_args(Schedule):
        if base.compiled and schedule in SPLITS_BACKWARD:
            continue
        usual = (1,) if schedule in ONE_STAGE else (2,) if schedule in V_SHAPED else STAGES_PER_RANK
        for stages in (asked.stages_per_rank,) if asked.stages_per_rank else usual:
            if pp * stages <= most_stages(base.model) and _can_have(schedule, stages):
                yield schedule, stages


def _can_have(schedule: Schedule, stages: int) -> bool:
    return stages == 1 if schedule in ONE_STAGE else stages == 2 if schedule in V_SHAPED else stages > 1
