"""All ways to run a training on a machine, ranked by their predicted step time; and ways out where one does not fit.

What is tried: every layout that the model, the GPUs and the batch allow (tp inside a node), with all micro-batches that
are powers of two, with and without recompute, with every schedule of a pipeline and every level of sharding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, get_args

from lockstep.config import Schedule
from lockstep.layout import Layout
from lockstep.parallel.timetable import ONE_STAGE, V_SHAPED
from lockstep.planner.checks import (
    capacity,
    context_fits,
    divisors,
    most_stages,
    schedule_fits,
    tables,
    tensor_limit,
    verdict,
)
from lockstep.planner.estimate import Memory, Time
from lockstep.planner.job import Job, Recompute
from lockstep.planner.memory import estimate_memory
from lockstep.planner.step_time import estimate_time

Zero = Literal[1, 2, 3]

STAGES_PER_RANK = (2, 4)
"""What is tried for schedules with several stages a rank."""

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


@dataclass(frozen=True)
class Candidate:
    """One way to run it, and what is predicted of it."""

    job: Job
    memory: Memory
    """Of the fullest stage."""
    time: Time

    @property
    def tokens_per_second(self) -> float:
        """Over all GPUs; samples, for a model whose samples are not sequences."""
        return self.job.tokens / self.time.total


@dataclass
class Found:
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
    def best_of_layouts(self) -> list[Candidate]:
        """The fastest of each layout."""
        best: dict[Layout, Candidate] = {}
        for candidate in self.fitting:
            best.setdefault(candidate.job.layout, candidate)
        return list(best.values())


def search(base: Job, world_size: int, asked: Asked = Asked()) -> Found:
    """All that can be done with so many GPUs of the machine of `base`, whose layout and choices are not looked at."""
    found = Found()
    for layout in _layouts(base, world_size, asked, found):
        for zero, (schedule, stages) in _ways(base, layout, asked):
            for recompute in (asked.recompute,) if asked.recompute else ("none", "full"):
                job = replace(
                    base,
                    layout=layout,
                    zero=zero,
                    schedule=schedule,
                    stages_per_rank=stages,
                    recompute=recompute,
                    sequence_parallel=base.sequence_parallel and layout.pp == 1,
                )
                _try_micro_batches(job, asked, found)
    found.fitting.sort(key=lambda one: (one.time.total, one.memory.total))
    return found


def _try_micro_batches(job: Job, asked: Asked, found: Found) -> None:
    """From small to large, as long as they fit: a larger one never needs less."""
    sizes = (asked.micro_batch,) if asked.micro_batch else _powers(job.global_batch // job.data_size)
    for number, micro_batch in enumerate(sizes):
        found.considered += 1
        one = replace(job, micro_batch=micro_batch)
        if job.layout.pp > 1 and not schedule_fits(
            job.schedule, job.layout.pp, job.stages_per_rank, one.micro_batches
        ):
            found.refused["the schedule cannot take their micro-batches"] += 1
            continue
        memory = fullest(one)
        says = verdict(memory, job.machine.gpu)
        if says != "fits":
            if found.least is None or memory.total < found.least[0]:
                found.least = (memory.total, one)
            rest = len(sizes) - number
            found.considered += rest - 1
            found.refused[says] += rest
            return
        found.fitting.append(Candidate(one, memory, estimate_time(one)))


def fullest(job: Job) -> Memory:
    """The estimate for the stage that needs most."""
    return max(estimate_memory(job), key=lambda memory: memory.total)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(max(1, most).bit_length()))


# ---- what is tried


def _layouts(base: Job, world_size: int, asked: Asked, found: Found) -> Iterator[Layout]:
    """Those that the model and the batch allow."""
    if asked.layout is not None:
        yield asked.layout
        return
    for tp, cp, pp in _teams(base, world_size):
        data = world_size // (tp * cp * pp)
        if data > base.global_batch:
            found.refused["fewer samples than data ranks"] += len(divisors(data))
            found.considered += len(divisors(data))
            continue
        for fsdp in divisors(data):
            yield Layout(pp=pp, dp=data // fsdp, fsdp=fsdp, cp=cp, tp=tp)


def _teams(base: Job, world_size: int) -> Iterator[tuple[int, int, int]]:
    """The sizes of tp, cp and pp that can be."""
    limit, node = tensor_limit(base.model), base.machine.gpus_per_node
    entries = tables(base.model)
    for tp in divisors(world_size):
        if tp > node or (tp > 1 and (not limit or limit % tp)):
            continue
        if any(size <= -(-size // tp) * (tp - 1) for size in entries):
            continue
        for cp in divisors(world_size // tp):
            if context_fits(base.model, cp) and (cp == 1 or base.model.sequence // cp >= LEAST_TOKENS):
                yield tp, cp, 1
        for pp in divisors(world_size // tp):
            if 1 < pp <= most_stages(base.model):
                yield tp, 1, pp


def _ways(base: Job, layout: Layout, asked: Asked) -> Iterator[tuple[Zero, tuple[Schedule, int]]]:
    """Levels of sharding and schedules."""
    levels: tuple[Zero, ...] = (3,) if layout.fsdp == 1 else (asked.zero,) if asked.zero else (1, 2, 3)
    schedules = list(_schedules(base, layout.pp, asked))
    for zero in levels:
        for schedule in schedules:
            yield zero, schedule


def _schedules(base: Job, pp: int, asked: Asked) -> Iterator[tuple[Schedule, int]]:
    if pp == 1:
        yield "1f1b", 1
        return
    for schedule in (asked.schedule,) if asked.schedule else get_args(Schedule):
        usual = (1,) if schedule in ONE_STAGE else (2,) if schedule in V_SHAPED else STAGES_PER_RANK
        for stages in (asked.stages_per_rank,) if asked.stages_per_rank else usual:
            if pp * stages <= most_stages(base.model) and _can_have(schedule, stages):
                yield schedule, stages


def _can_have(schedule: Schedule, stages: int) -> bool:
    return stages == 1 if schedule in ONE_STAGE else stages == 2 if schedule in V_SHAPED else stages > 1


# ---- when it does not fit


@dataclass(frozen=True)
class Way:
    """A change after which it fits."""

    text: str
    candidate: Candidate


def ways_to_fit(job: Job) -> list[Way]:
    """Up to three changes after which a job fits, each of another kind; those without more GPUs first, by their time."""
    found: dict[str, Way] = {}
    for kind, changed in _changes(job):
        if (kind in found and kind != "cut") or not _is_possible(changed):
            continue
        memory = fullest(changed)
        if verdict(memory, job.machine.gpu) != "fits":
            continue
        way = Way(_difference(job, changed), Candidate(changed, memory, estimate_time(changed)))
        if kind not in found or way.candidate.time.total < found[kind].candidate.time.total:
            found[kind] = way
    more = found.pop("more GPUs", None)
    ranked = sorted(found.values(), key=lambda way: way.candidate.time.total)
    return ([*ranked[:2], more] if more and len(ranked) >= 2 else [*ranked, *([more] if more else [])])[:3]


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    """Changes by kind, the mildest of a kind first."""
    layout = job.layout
    smaller = [size for size in reversed(_powers(job.micro_batch)) if size < job.micro_batch]
    for size in smaller:
        yield "micro-batch", replace(job, micro_batch=size)
    least = replace(job, micro_batch=1)
    if job.recompute != "full":
        yield "recompute", replace(job, recompute="full")
        for size in smaller:
            yield "recompute", replace(job, recompute="full", micro_batch=size)
    for whole in (job, least, replace(least, recompute="full")):
        for level in (level for level in (1, 2, 3) if layout.fsdp > 1 and level > job.zero):
            yield "sharding", replace(whole, zero=level)
        for fsdp in divisors(layout.data_size):
            if fsdp > layout.fsdp:
                yield "sharding", replace(whole, zero=3, layout=replace(layout, dp=layout.data_size // fsdp, fsdp=fsdp))
    for whole in (job, least, replace(least, recompute="full")):
        for axis in ("tp", "pp", "cp"):
            for times in divisors(layout.data_size)[1:]:
                if (changed := _cut_more(whole, axis, times)) is not None:
                    yield "cut", changed
    for times in (2**power for power in range(1, 11)):
        grown = replace(layout, fsdp=layout.fsdp * times)
        machine = job.machine.with_gpus(grown.world_size)
        for whole in (job, least, replace(least, recompute="full")):
            yield "more GPUs", replace(whole, layout=grown, machine=machine, zero=3)


def _cut_more(job: Job, axis: str, times: int) -> Job | None:
    """The same number of GPUs, with an axis that many times as large, at the expense of replicas and shards."""
    layout = job.layout
    left = layout.data_size // times
    fsdp = max(size for size in divisors(left) if layout.fsdp % size == 0 or size <= layout.fsdp)
    size = layout.size(axis) * times
    if axis == "tp" and size > job.machine.gpus_per_node:
        return None
    changed = replace(layout, **{axis: size}, dp=left // fsdp, fsdp=fsdp)
    if changed.cp > 1 and changed.pp > 1:
        return None
    return replace(job, layout=changed, sequence_parallel=job.sequence_parallel and changed.pp == 1)


def _is_possible(job: Job) -> bool:
    from lockstep.errors import UserError
    from lockstep.planner.checks import check_job

    try:
        check_job(job)
    except UserError:
        return False
    return True


def _difference(before: Job, after: Job) -> str:
    """What was changed, as a user would set it."""
    told = []
    if after.layout != before.layout:
        told.append(f"--layout {after.layout}")
    if after.layout.world_size != before.layout.world_size:
        told.append(f"on {after.layout.world_size:,} GPUs")
    if after.micro_batch != before.micro_batch:
        told.append(f"micro_batch={after.micro_batch}")
    if after.recompute != before.recompute:
        told.append("recompute=true")
    if after.layout.fsdp > 1 and (after.zero != before.zero or before.layout.fsdp == 1):
        told.append(f"shard.level=zero{after.zero}")
    return " ".join(told)


def least_gpus(base: Job, asked: Asked, most: int = 1 << 20) -> tuple[int, Job] | None:
    """The smallest number of GPUs, in whole nodes or halves of one, on which anything fits."""
    node = base.machine.gpus_per_node
    sizes = chain(
        (size for size in divisors(node)), (node * 2**power for power in range(1, 21) if node * 2**power <= most)
    )
    for size in sizes:
        if (job := _smallest(base, size, asked)) is not None:
            return size, job
    return None


def _smallest(base: Job, world_size: int, asked: Asked) -> Job | None:
    """A way that fits, tried from the side of the least memory."""
    saving = replace(asked, layout=None, micro_batch=1, recompute="full", zero=3)
    one = replace(base, machine=base.machine.with_gpus(world_size))
    for tp, cp, pp in _teams(one, world_size):
        data = world_size // (tp * cp * pp)
        if data <= base.global_batch:
            layout = Layout(pp=pp, fsdp=data, cp=cp, tp=tp)
            for found in search(one, world_size, replace(saving, layout=layout)).fitting[:1]:
                return found.job
    return None


def room(job: Job) -> float:
    """Bytes of its GPU."""
    return capacity(job.machine.gpu)
