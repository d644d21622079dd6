"""Ways out where a training does not fit: changes after which it does, and a number of GPUs that would do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.planner.cost.checks import check_job, divisors, verdict
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.step_time import estimate_time
from lockstep.planner.search.rank_layouts import Asked, Candidate, fullest, powers, search, teams

MOST_GPUS = 1 << 20
MORE_GPUS = tuple(2**power for power in range(1, 11))
"""How many times as many are tried."""
WAYS = 3
TRIED_NODES = 64
"""Up to so many nodes all numbers of them are tried."""


@dataclass(frozen=True)
class Way:
    """A change after which it fits."""

    text: str
    candidate: Candidate


def ways_to_fit(job: Job) -> list[Way]:
    """Up to three changes after which a job fits: of different kinds, the fastest first, and then more GPUs."""
    found: dict[str, Candidate] = {}
    for kind, changed in _changes(job):
        if (kind in found and kind != "cut") or not _is_possible(changed):
            continue
        memory = fullest(changed)
        if verdict(memory, job.machine.gpu) != "fits":
            continue
        candidate = Candidate(changed, memory, estimate_time(changed))
        if kind not in found or candidate.time.total < found[kind].time.total:
            found[kind] = candidate
    for best in search(job, job.layout.world_size, quick=True).fitting[:1]:
        found["other"] = best
    ways = (Way(difference(job, candidate.job), candidate) for candidate in found.values())
    different = {way.text: way for way in ways}.values()
    here = sorted(different, key=lambda way: way.candidate.time.total)[: WAYS - 1]
    return [*here, *islice(_more_gpus(job), WAYS - len(here))]


def _more_gpus(job: Job) -> Iterator[Way]:
    """The fastest on twice, four, eight times as many GPUs, where anything fits there."""
    for times in MORE_GPUS:
        world_size = job.layout.world_size * times
        with suppress(UserError):  # such a machine cannot be
            grown = replace(job, machine=job.machine.with_gpus(world_size))
            for best in search(grown, world_size, quick=True).fitting[:1]:
                yield Way(difference(job, best.job), best)


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    """Changes by kind, the mildest of a kind first."""
    layout = job.layout
    smaller = [size for size in reversed(powers(job.micro_batch)) if size < job.micro_batch]
    for size in smaller:
        yield "micro-batch", replace(job, micro_batch=size)
    if job.recompute != "full":
        for size in (job.micro_batch, *smaller):
            yield "recompute", replace(job, recompute="full", micro_batch=size)
    saving = (job, replace(job, micro_batch=1), replace(job, micro_batch=1, recompute="full"))
    for changed in saving:
        if layout.pp > 1:
            yield "schedule", replace(changed, schedule="1f1b", stages_per_rank=1)
        if layout.fsdp > 1:
            for level in (2, 3):
                if level > job.effective_zero:
                    yield "sharding", replace(changed, zero=level)
        for fsdp in divisors(layout.data_size):
            if fsdp > layout.fsdp:
                yield (
                    "sharding",
                    replace(changed, zero=3, layout=replace(layout, dp=layout.data_size // fsdp, fsdp=fsdp)),
                )
        for axis in ("tp", "pp", "cp"):
            for times in divisors(layout.data_size)[1:]:
                yield "cut", _cut_more(changed, axis, times)


def _cut_more(job: Job, axis: str, times: int) -> Job:
    """The same number of GPUs, with an axis that many times as large, at the expense of shards and replicas."""
    layout = job.layout
    left = layout.data_size // times
    fsdp = max(size for size in divisors(left) if size <= layout.fsdp)
    changed = replace(layout, **{axis: layout.size(axis) * times, "dp": left // fsdp, "fsdp": fsdp})  # type: ignore[arg-type]
    return replace(job, layout=changed, sequence_parallel=job.sequence_parallel and changed.pp == 1)


def _is_possible(job: Job) -> bool:
    """Whether it can be, with tp inside a node."""
    try:
        job.layout.resolve(job.layout.world_size)
        check_job(job)
    except UserError:
        return False
    return job.layout.tp <= job.machine.gpus_per_node


def difference(before: Job, after: Job) -> str:
    """What was changed, as a user would say it."""
    told = []
    if after.layout != before.layout:
        told.append(f"layout {after.layout}")
    if after.layout.world_size != before.layout.world_size:
        told[-1] += f" on {after.layout.world_size:,} GPUs"
    if after.micro_batch != before.micro_batch:
        told.append(f"micro-batch {after.micro_batch}")
    if after.recompute != before.recompute:
        told.append("recompute" if after.recompute == "full" else "no recompute")
    if after.layout.pp > 1 and (after.schedule, after.stages_per_rank) != (before.schedule, before.stages_per_rank):
        told.append(f"schedule {after.schedule}")
    if after.layout.fsdp > 1 and after.effective_zero != before.effective_zero:
        told.append(f"shard.level zero{after.effective_zero}")
    return ", ".join(told)


@dataclass(frozen=True)
class Enough:
    """A number of GPUs on which a training fits."""

    gpus: int
    job: Job
    is_least: bool
    """Whether all smaller numbers were tried: more GPUs do not always need less memory each."""


def enough_gpus(base: Job, asked: Asked, at_once: bool = False) -> Enough | None:
    """The fewest GPUs, in whole nodes or even parts of one, on which something fits that saves memory, and how.

    Beyond `TRIED_NODES` sizes are doubled, and then halved where that fits as well. `at_once` gives every rank one
    sample a step, whatever the batch of `base`: gradients that are not added up over micro-batches are sharded as they
    come.
    """
    node = (base.machine.whole or base.machine).gpus_per_node
    for size in (*divisors(node), *(count * node for count in range(2, TRIED_NODES + 1))):
        if (job := _saving(base, size, asked, at_once)) is not None:
            return Enough(size, job, is_least=True)
    low, high = TRIED_NODES, 2 * TRIED_NODES
    while (job := _saving(base, high * node, asked, at_once)) is None:
        low, high = high, 2 * high
        if high * node > MOST_GPUS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if (smaller := _saving(base, middle * node, asked, at_once)) is not None:
            high, job = middle, smaller
        else:
            low = middle
    return Enough(high * node, job, is_least=False)


def _saving(base: Job, world_size: int, asked: Asked, at_once: bool) -> Job | None:
    """A way that fits, tried from the side of the least memory."""
    try:
        sized = replace(base, machine=base.machine.with_gpus(world_size))
    except UserError:
        return None
    for tp, cp, pp in teams(sized, world_size):
        data = world_size // (tp * cp * pp)
        if data > base.global_batch or (at_once and pp > 1):
            continue
        job = replace(sized, global_batch=data) if at_once else sized
        # Many micro-batches of one sample have the fewest activations, a single micro-batch has sharded gradients.
        sizes = (asked.micro_batch,) if asked.micro_batch else sorted({1, -(-job.global_batch // data)})
        saving = replace(asked, layout=Layout(pp=pp, fsdp=data, cp=cp, tp=tp), recompute=asked.recompute or "full")
        for size in sizes:
            for found in search(job, world_size, replace(saving, micro_batch=size), quick=True).fitting[:1]:
                return found.job
    return None
