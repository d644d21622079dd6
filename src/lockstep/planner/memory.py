"""Bytes of a rank at its fullest moment, for the first and the last pipeline stage.

The moment is the beginning of a backward: the activations of all micro-batches in flight are there, the loss or the
block that is gone back through needs its own, and gradients fill up as activations go.
"""

from __future__ import annotations

from lockstep.config import Schedule
from lockstep.planner.estimate import Memory
from lockstep.planner.job import Job
from lockstep.planner.model import Part
from lockstep.planner.stacks import STACKS, Stack, find_stack

FORMATS = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 2.0, "fp4": 2.0}
"""Bytes of an activation: products in 8 or 4 bits read what is kept in 16."""


def estimate_memory(job: Job) -> tuple[Memory, ...]:
    """One estimate a pipeline stage that differs: the first, and with pp the last."""
    stack = STACKS.get(job.stack) or find_stack(job.stack)
    first, last = stage_blocks(job, stack)
    if job.layout.pp == 1:
        return (_rank(job, stack, 0, float(job.model.blocks.count), True, True),)
    turns = job.schedule in ("zbv", "dualpipev")  # the first rank has the last stage too
    return (
        _rank(job, stack, 0, first + (last if turns else 0.0), True, turns),
        _rank(job, stack, job.layout.pp - 1, 2 * first if turns else last, False, not turns),
    )


def fits(job: Job, memories: tuple[Memory, ...]) -> bool:
    """Whether every stage fits even if the estimate is too low by its band: what is said to fit shall run."""
    gpu = job.machine.gpu
    return max(memory.total * (1 + memory.band) for memory in memories) <= gpu.memory_gb * 1e9 * gpu.usable


def states(
    stack: Stack, parameters: float, zero: int, shards: int, whole_gradients: bool = False
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state of a rank that is responsible for so many parameters."""
    sharded = zero == 3 or (zero == 2 and stack.gathers_for_zero2)
    weights = stack.weights * parameters / (shards if sharded else 1)
    gradients = stack.gradients * parameters / (1 if whole_gradients or zero < 2 else shards)
    return weights, gradients, stack.optimizer * parameters / (shards if zero else 1)


def in_flight(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int, rank: int) -> int:
    """Forwards of stages that a rank holds at most, as the timetables of parallel/timetable.py have it."""
    everything = micro_batches * per_rank
    if schedule == "1f1b":
        return min(everything, ranks - rank)
    if schedule == "interleaved-1f1b":
        return min(everything, (per_rank - 1) * ranks + 2 * (ranks - 1 - rank) + 1)
    if schedule in ("interleaved-zero-bubble", "zbv"):
        return min(everything, per_rank * ranks)
    if schedule == "dualpipev":
        return min(everything, 2 * ranks + 1)
    return everything


def stage_blocks(job: Job, stack: Stack) -> tuple[float, float]:
    """Blocks of the first and of the last stage (of a rank's share of them, where it has several)."""
    stages = job.layout.pp * (job.stages_per_rank if job.schedule in ("zbv", "dualpipev") else 1)
    count = job.model.blocks.count
    if not stack.by_work:
        most = -(-count // stages)
        return float(most), float(max(count - most * (stages - 1), count // stages))
    if stages == 1:
        return float(count), float(count)
    # The head counts as so many blocks; of the two ways to round, the one whose slowest stage is faster.
    fair = max(0.0, (count - job.model.head_work * (stages - 1)) / stages)
    last = min((int(fair), int(fair) + 1), key=lambda own: max(own + job.model.head_work, (count - own) / (stages - 1)))
    return float(-(-(count - last) // (stages - 1))), float(last)


def _rank(job: Job, stack: Stack, rank: int, blocks: float, has_first: bool, has_last: bool) -> Memory:
    layout, model = job.layout, job.model
    block = model.blocks
    tp, shards = layout.tp, layout.fsdp * (layout.cp if stack.shards_over_context else 1)
    samples = job.micro_batch / layout.cp
    micro_batches = job.micro_batches
    width = FORMATS[job.precision]
    ends, end_weights = model.end_parameters(has_first, has_last, tp)
    block_parameters = block.parameters - block.cut_parameters * (1 - 1 / tp)
    own = blocks * block_parameters + ends
    whole_gradients = job.zero < 2 or (stack.accumulates_whole and micro_batches > 1)
    parameters, gradients, optimizer = states(stack, own, job.zero, shards, whole_gradients)

    # What the backward needs, of all micro-batches in flight.
    of_stages = job.stages_per_rank if layout.pp > 1 else 1
    flights = 1.0
    if layout.pp > 1:
        flights = in_flight(job.schedule, layout.pp, of_stages, micro_batches, rank) / of_stages
    activations = flights * blocks * _kept(job, stack, block, width) * samples
    if has_first:
        activations += flights * samples * _edge(job, stack, model.first, width)
    if stack.casts_weights and width == 2.0:
        # Every forward makes its own copies; a block that recomputes itself makes them again.
        activations += 2.0 * (0.0 if job.recompute == "full" else flights * blocks * block_parameters)
        activations += 2.0 * (end_weights if has_last else 0.0)

    # What is gathered, on its way to other ranks, or comes from them.
    communication = 0.0
    one_block = 0.0
    if job.zero == 3 and shards > 1:
        # What is outside of blocks stays, and while the loss is gone back through the last block is gathered.
        communication = stack.gathered * (ends + block_parameters)
        # Later there are the present block and the next, its gradients, and what is sent.
        one_block = (2 * stack.gathered + stack.gathered + stack.summed) * block_parameters
    elif job.zero == 2 and shards > 1:
        communication = stack.gathered * own if stack.gathers_for_zero2 else 0.0
        one_block = (stack.gathered + stack.summed) * block_parameters
    elif layout.dp * shards > 1:
        communication = stack.buckets * own
    if layout.pp > 1:
        communication += 2 * samples * block.border * width / (tp if job.sequence_parallel else 1)

    # Either the loss is gone back through, or one block.
    live = _live_block(job, stack, block, width) * samples
    if stack.casts_weights and width == 2.0 and job.recompute == "full":
        live += 2.0 * block_parameters
    logits = loss = 0.0
    if has_last and model.logits:
        waiting = micro_batches - 1 if job.schedule in ("gpipe", "looped-bfs") and layout.pp > 1 else 0
        activations += samples * _edge(job, stack, model.last, width) * (1 + waiting)
        logits = samples * model.logits / tp * stack.kept_logits * waiting
        loss = samples * model.logits / tp * (stack.cut_logits if tp > 1 else stack.logits)
    if loss > live + one_block:
        logits += loss
    else:
        activations += live
        communication += one_block

    shared = 0.0
    come_and_go = not stack.gradients_stay and layout.dp == tp == 1 and job.zero != 1
    if come_and_go and not (whole_gradients and micro_batches > 1):
        # Gradients come as activations go: the fuller of the two moments counts.
        shared = min(gradients, activations + logits)
    held = activations + logits + communication - shared
    return Memory(
        stage=rank,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        communication=communication,
        slack=stack.fragments * held + stack.base,
        band=stack.band,
        shared=shared,
        host=12.0 * own / (shards if job.zero else 1),
    )


def _kept(job: Job, stack: Stack, block: Part, width: float) -> float:
    """Bytes of one sample that a block keeps from its forward to its backward."""
    tp = job.layout.tp
    rows = tp if job.sequence_parallel else 1
    residual = stack.residual if width == 2.0 else width
    if job.recompute == "full":
        return block.border * residual / rows
    if job.recompute == "selective" and stack.selective == "products":
        return block.border * residual / rows + width * block.alternate_products(tp, rows)
    return _all_kept(job, stack, block, width)


def _all_kept(job: Job, stack: Stack, block: Part, width: float) -> float:
    tp = job.layout.tp
    rows = tp if job.sequence_parallel else 1
    residual = stack.residual if width == 2.0 else width
    rounded = block.kept - block.kept_residual
    whole = block.kept_residual * residual + rounded * width + block.kept_bytes + stack.copies * block.border * width
    kept = whole / rows + block.cut_kept * width / tp
    if rows > 1 and stack.keeps_gathered_input and job.layout.pp == 1:
        kept += 2 * block.border * width * (1 - 1 / tp)
    if block.attention and not job.flash and job.recompute == "none":
        # Softmax and, with dropout, its mask and what it leaves.
        dropped = job.model.shape is not None and job.model.shape.dropout
        kept += block.attention.scores / job.layout.cp * (2 * width + 1 if dropped else width) / tp
    return kept


def _live_block(job: Job, stack: Stack, block: Part, width: float) -> float:
    """Bytes of one sample while a block is gone back through: its gradients, and all it keeps if it is recomputed."""
    tp = job.layout.tp
    rows = tp if job.sequence_parallel else 1
    residual = stack.residual if width == 2.0 else width
    live = 2 * block.border * residual / rows + block.widest * 2 * width / tp
    if rows > 1:
        live += 2 * block.border * width
    if job.recompute == "full":
        live += _all_kept(job, stack, block, width)
    return live


def _edge(job: Job, stack: Stack, part: Part | None, width: float) -> float:
    """Bytes of one sample that the embedding or the head keeps."""
    if part is None:
        return 0.0
    rows = job.layout.tp if job.sequence_parallel else 1
    residual = stack.residual if width == 2.0 else width
    kept = part.kept_residual * residual + (part.kept - part.kept_residual) * width
    return kept / rows + part.kept_bytes + part.cut_kept * width / job.layout.tp
