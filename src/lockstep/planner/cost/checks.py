"""What a model, a machine and a batch allow: other layouts are refused, with the nearest values that can be.

The rules are those of `lockstep train`. It deals an uneven batch, an uneven vocabulary and an uneven number of blocks
out exactly, so that these are remarks; heads and hidden sizes that do not divide are refused.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

from lockstep.config.schema import PipelineConfig, Schedule
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.parallel.pipeline.timetable import SPLITS_BACKWARD, check, check_micro_batches
from lockstep.planner.cost.estimate import Memory
from lockstep.planner.cost.job import Job
from lockstep.planner.machine.hardware import GpuKind, Machine
from lockstep.planner.model.parts import Model, ModelPart
from lockstep.text.units import bytes_text

Verdict = Literal["fits", "too close to say", "does not fit"]


def capacity(gpu: GpuKind) -> float:
    """The bytes that a training can have of a GPU."""
    return gpu.memory_gb * 1e9 * gpu.usable


def verdict(memory: Memory, gpu: GpuKind) -> Verdict:
    """Whether it fits, with the error of the estimate on the side of caution."""
    if memory.total * (1 + memory.band) <= capacity(gpu):
        return "fits"
    return "too close to say" if memory.total * (1 - memory.band) <= capacity(gpu) else "does not fit"


def settle_layout(text: str, world_size: int) -> Layout:
    """The layout that a user wrote, for so many GPUs."""
    try:
        return Layout.parse(text).resolve(world_size)
    except UserError as error:
        raise UserError(error.cause.replace("processes", "GPUs"), error.fix.replace("--nproc", "--gpus")) from None


def check_job(job: Job) -> list[str]:
    """Refuse a job that cannot be; returns what has to be said of one that can."""
    check_precision(job.precision, job.machine)
    _check_tensor(job.model, job.layout.tp)
    _check_context(job.model, job.layout.cp)
    _check_stages(job)
    _check_batch(job)
    return _remarks(job)


def check_precision(precision: str, machine: Machine) -> None:
    """Refuse a number format that the GPU has no products of."""
    if precision not in machine.gpu.tflops:
        usual = [name for name in ("bf16", "fp16", "fp32") if name in machine.gpu.tflops]
        raise UserError(f"{machine.gpu.name} has no {precision} products", f"use --precision {' or '.join(usual)}")


# ---- tp


@cache
def tensor_limit(model: Model) -> int:
    """What a tp axis has to divide: heads, key and value heads, and the widths inside of blocks; 0: nothing is cut."""
    return math.gcd(*(size for size, _ in _cut_sizes(model)))


def _cut_sizes(model: Model) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for part in model:
        is_cut = any(matmul.cut != "whole" for matmul in part.matmuls)
        if part.attention is not None and is_cut:
            found += [(part.attention.heads, "heads"), (part.attention.kv_heads, "key and value heads")]
        if _is_inside(part, model):
            found += [(matmul.inner, "rows of a matrix") for matmul in part.matmuls if matmul.cut == "inner"]
            found += [(matmul.columns, "columns of a matrix") for matmul in part.matmuls if matmul.cut == "columns"]
    return found


def _is_inside(part: ModelPart, model: Model) -> bool:
    """Whether it is a block: outside of blocks what does not divide is dealt out unevenly."""
    return part.count > 1 or part is model.blocks


def tables(model: Model) -> list[int]:
    """Entries that tp deals out, evenly or not: the columns of the head, as many as the vocabulary has."""
    outside = (part for part in model if not _is_inside(part, model))
    return [matmul.columns for part in outside for matmul in part.matmuls if matmul.cut == "columns"]


def leaves_ranks_empty(entries: int, tp: int) -> bool:
    """Whether dealing so many entries out, a whole share to each rank in turn, leaves nothing for the last."""
    return entries <= -(-entries // tp) * (tp - 1)


def _check_tensor(model: Model, tp: int) -> None:
    if tp == 1:
        return
    sizes = _cut_sizes(model)
    if not sizes:
        raise UserError(f"nothing that tp={tp} could cut was found in {model.name}", "use dp, fsdp or pp")
    for size, what in sizes:
        if size % tp:
            possible = _either(_near_divisors(tensor_limit(model), tp), "tp=")
            raise UserError(f"tp={tp} does not divide the {size:,} {what} of {model.name}", f"use {possible}")
    for entries in tables(model):
        if leaves_ranks_empty(entries, tp):
            raise UserError(
                f"a vocabulary of {entries:,} is too small for tp={tp}, and some ranks would have nothing of it",
                f"use {_either(_near_divisors(math.gcd(entries, tensor_limit(model)), tp), 'tp=')}",
            )


# ---- cp and pp


def context_fits(model: Model, cp: int) -> bool:
    """Whether its sequences can be shared out, two chunks a rank."""
    return cp == 1 or (model.sequence > 1 and model.sequence % (2 * cp) == 0)


def _check_context(model: Model, cp: int) -> None:
    if context_fits(model, cp):
        return
    if model.sequence <= 1:
        raise UserError(f"cp={cp} cuts sequences, and the samples of {model.name} are none", "use dp, fsdp, tp or pp")
    half, rest = model.sequence // 2, model.sequence % 2
    fix = "use an even --seq, or no cp" if rest else f"use {_either(_near_divisors(half, cp), 'cp=')}"
    raise UserError(f"cp={cp} cannot share {model.sequence:,} tokens out, two equal chunks a rank", fix)


@cache
def most_stages(model: Model) -> int:
    """How many pipeline stages it can be cut into: a block each at least."""
    return model.blocks.count if model.blocks.count > 1 else len(model.parts)


def _check_stages(job: Job) -> None:
    pp, per_rank = job.layout.pp, job.stages_per_rank
    if pp == 1:
        return
    most = most_stages(job.model)
    if pp * per_rank > most:
        many = f"pp={pp}" if per_rank == 1 else f"pp={pp} with {per_rank} stages a rank"
        sizes = [size for size in divisors(job.layout.world_size) if size * per_rank <= most]
        fewer = "" if per_rank == 1 else " or fewer stages a rank (--set pipeline.stages_per_rank)"
        raise UserError(
            f"{many} needs {pp * per_rank} blocks at least, and {job.model.name} has {most}",
            f"use pp={sizes[-1]}{fewer}",
        )
    if job.compiled and job.schedule in SPLITS_BACKWARD:
        raise UserError(
            f"schedule {job.schedule} splits the backward of a block, which compiled code cannot do",
            "use --set compile=off, or a schedule such as 1f1b or interleaved-1f1b",
        )
    config = PipelineConfig(schedule=job.schedule, stages_per_rank=per_rank)
    check_micro_batches(config, job.layout, job.global_batch, job.micro_batch, None)


def schedule_takes(schedule: Schedule, stages_per_rank: int, layout: Layout, samples: int, micro_batch: int) -> bool:
    """Whether a schedule can take the micro-batches that so many samples make on every data rank.

    As `check_micro_batches` has it, and fast enough for a search.
    """
    fewest, more = divmod(-(-samples // micro_batch), layout.data_size)
    most = fewest + bool(more)
    numbers = {most} if layout.fsdp > 1 else {fewest, most}
    return all(_schedule_fits(schedule, layout.pp, stages_per_rank, number) for number in numbers)


@cache
def _schedule_fits(schedule: Schedule, pp: int, stages_per_rank: int, micro_batches: int) -> bool:
    """Whether a schedule can take so many micro-batches."""
    try:
        check(schedule, pp, stages_per_rank, micro_batches)
    except UserError:
        return False
    return True


# ---- batch


def _check_batch(job: Job) -> None:
    ranks = job.data_size
    if job.global_batch < ranks:
        team = job.layout.world_size // ranks
        needed = -(-job.layout.world_size // job.global_batch)
        raise UserError(
            f"a global batch of {job.global_batch} leaves {ranks - job.global_batch} of {ranks} data ranks "
            f"({_axes(job.layout)}) without a sample",
            f"use --global-batch {ranks} or more, or let tp x cp x pp be {needed} at least, not {team}",
        )
    if -(-job.global_batch // job.micro_batch) < ranks:
        raise UserError(
            f"a global batch of {job.global_batch} makes {-(-job.global_batch // job.micro_batch)} micro-batches of "
            f"{job.micro_batch}, and there are {ranks} data ranks ({_axes(job.layout)})",
            f"use --micro-batch {job.global_batch // ranks} or less, or a larger --global-batch",
        )


def _axes(layout: Layout) -> str:
    named = [f"{axis}={layout.size(axis)}" for axis in ("dp", "fsdp") if layout.size(axis) > 1]
    return " x ".join(named) or "dp=1"


# ---- remarks


def _remarks(job: Job) -> list[str]:
    layout, model, told = job.layout, job.model, list(job.machine.warnings)
    node = job.machine.gpus_per_node
    if layout.tp > node and layout.world_size > node:
        inside = max(size for size in divisors(layout.tp) if size <= node)
        told.append(
            f"tp={layout.tp} is larger than a node of {node} GPUs, so that every block waits for the network: "
            f"tp={inside} stays inside"
        )
    for entries in tables(model) if layout.tp > 1 else ():
        if entries % layout.tp:
            even = -(-entries // layout.tp) * layout.tp
            told.append(
                f"a vocabulary of {entries:,} is dealt out unevenly over tp={layout.tp}: padded to {even:,} it is even"
            )
    stages, blocks = layout.pp * job.stages_per_rank, most_stages(model)
    if layout.pp > 1 and blocks % stages:
        near = [size for size in divisors(blocks) if size % job.stages_per_rank == 0 and size > job.stages_per_rank]
        closest = sorted(sorted(near, key=lambda size: abs(size - stages))[:2])
        sizes = [size // job.stages_per_rank for size in closest]
        told.append(
            f"{blocks} blocks over {stages} stages: some have {-(-blocks // stages)}, others {blocks // stages}, and "
            "the fullest is counted" + (f"; {_either(sizes, 'pp=')} would be even" if sizes else "")
        )
    samples, rest = divmod(job.global_batch, job.data_size)
    if rest:
        told.append(
            f"{job.global_batch} samples over {job.data_size} data ranks: some have {samples + 1}, and the others wait "
            f"for them; a global batch of {samples * job.data_size} or {(samples + 1) * job.data_size} is even"
        )
    elif samples % job.micro_batch:
        told.append(f"the last micro-batch of a rank has {samples % job.micro_batch} samples, not {job.micro_batch}")
    return told


def host_remarks(job: Job, memory: Memory) -> list[str]:
    """What has to be said of the memory of the nodes, where it is known."""
    machine = job.machine
    taken = memory.host * machine.gpus_per_node
    if machine.host_gb is None or taken <= machine.host_gb * 1e9:
        return []
    return [
        f"to write a checkpoint in the background takes {bytes_text(taken)} of a node's memory, and it has "
        f"{bytes_text(machine.host_gb * 1e9)}: the training will wait until it is written"
    ]


# ---- numbers


@cache
def divisors(number: int) -> tuple[int, ...]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def _near_divisors(number: int, wanted: int) -> list[int]:
    """Divisors of a number on both sides of what was wanted."""
    found = divisors(number)
    below = [size for size in found if size < wanted][-2:]
    return below + [size for size in found if size > wanted][:1]


def _either(numbers: list[int], prefix: str) -> str:
    *others, last = (f"{prefix}{number}" for number in numbers)
    return f"{', '.join(others)} or {last}" if others else last
