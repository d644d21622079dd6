"""Bytes of a rank at its fullest moment, for the ranks of a pipeline that differ.

The moment is the beginning of a backward: the activations of all micro-batches in flight are there, the loss or the
block that is gone back through needs its own, and gradients fill up as activations go.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.schema import Schedule
from lockstep.planner.cost.estimate import Memory
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.stack import TrainingStack
from lockstep.planner.cost.stages import stages_of_job
from lockstep.planner.model.parts import AttentionSize, ModelPart


@dataclass(slots=True)
class Rank:
    """What one rank has of a job."""

    number: int
    """Along pp."""
    blocks: int
    has_first: bool
    has_last: bool
    flights: float
    """Micro-batches whose activations it holds, of all its stages."""
    block_parameters: float
    """Of one block, after tp."""
    ends: float
    """Parameters outside of blocks."""
    head_weights: float
    """Of these, what the head multiplies by."""
    own: float
    """All its parameters."""
    shards: int
    samples: float
    """Of a micro-batch; a part of one with cp."""
    rounds: bool
    """Autocast: what products read is rounded to 16 bits for them."""
    whole_gradients: bool
    kept: float
    """Bytes of one sample that a block keeps from its forward to its backward."""
    live: float
    """And those beside, while it is gone back through."""


def estimate_memory(job: Job) -> tuple[Memory, ...]:
    """One estimate for every rank of a pipeline that may be the fullest, and for the last one."""
    cut = stages_of_job(job)
    block = _kept(job, job.model.blocks), _live_block(job, job.model.blocks)
    return tuple(
        _at_the_peak(job, _rank(job, number, cut.blocks[number], number == cut.head, block)) for number in cut.differing
    )


def states(
    stack: TrainingStack, parameters: float, zero: int, shards: int, whole_gradients: bool = False
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state of a rank that is responsible for so many parameters."""
    sharded = zero == 3 or (zero == 2 and stack.gathers_for_zero2)
    weights = stack.weights * parameters / (shards if sharded else 1)
    gradients = stack.gradients * parameters / (1 if whole_gradients or zero < 2 else shards)
    return weights, gradients, stack.optimizer * parameters / (shards if zero else 1)


def in_flight(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int, rank: int) -> int:
    """Forwards of stages that a rank holds at most, as the timetables of parallel/pipeline/timetable.py have it."""
    everything = micro_batches * per_rank
    if schedule == "1f1b":
        return min(everything, ranks - rank)
    in_a_round = micro_batches // max(1, micro_batches // ranks)
    if schedule == "interleaved-1f1b":
        return min(everything, (per_rank - 1) * in_a_round + 2 * (ranks - 1 - rank) + 1)
    if schedule == "interleaved-zero-bubble":
        return min(everything, (per_rank - 1) * in_a_round + ranks)
    if schedule == "zbv":
        return min(everything, per_rank * ranks)
    if schedule == "dualpipev":
        return min(everything, 2 * ranks + 1)
    return everything


def flights_of(job: Job, rank: int) -> float:
    """Micro-batches that a rank of a pipeline holds, averaged over its stages."""
    if job.layout.pp == 1:
        return 1.0
    forwards = in_flight(job.schedule, job.layout.pp, job.stages_per_rank, job.micro_batches, rank)
    return forwards / job.stages_per_rank


def logit_bytes(job: Job) -> float:
    """Of a logit at the fullest moment of the loss."""
    stack = job.stack
    if job.layout.tp == 1:
        return stack.logits
    return stack.cut_logits + (stack.rounded_logits if job.width == 2.0 else 0.0)


def _rank(job: Job, number: int, blocks: int, has_last: bool, block: tuple[float, float]) -> Rank:
    stack = job.stack
    layout, model, zero = job.layout, job.model, job.effective_zero
    ends, head_weights = model.end_parameters(number == 0, has_last, layout.tp)
    block_parameters = model.blocks.parameters - model.blocks.cut_parameters * (1 - 1 / layout.tp)
    accumulates = job.micro_batches > 1 or layout.pp > 1
    return Rank(
        number=number,
        blocks=blocks,
        has_first=number == 0,
        has_last=has_last,
        flights=flights_of(job, number),
        block_parameters=block_parameters,
        ends=ends,
        head_weights=head_weights,
        own=blocks * block_parameters + ends,
        shards=layout.fsdp * (layout.cp if stack.shards_over_context else 1),
        samples=job.micro_batch / layout.cp,
        rounds=stack.casts_weights and job.width == 2.0,
        whole_gradients=zero < 2 or (stack.accumulates_whole and accumulates),
        kept=block[0],
        live=block[1],
    )


def _at_the_peak(job: Job, rank: Rank) -> Memory:
    """Either the loss is gone back through, or one block."""
    stack = job.stack
    layout, zero = job.layout, job.effective_zero
    parameters, gradients, optimizer = states(stack, rank.own, zero, rank.shards, rank.whole_gradients)
    if job.precision == "bf16":
        gradients += stack.bf16_gradients * rank.own
    gathered, one_block = _gathered(job, rank)
    activations = _waiting(job, rank)
    logits, head, loss = _loss(job, rank)
    live = rank.live * rank.samples
    if rank.rounds and job.recompute == "full":
        live += 2.0 * rank.block_parameters
    if loss + head > live + one_block:
        activations, logits = activations + head, logits + loss
    else:
        activations, gathered = activations + live, gathered + one_block
    shared = 0.0
    # Buckets, in which replicas sum gradients up, are there all the time.
    in_buckets = layout.dp * layout.tp > 1 or (layout.cp > 1 and layout.fsdp == 1) or zero == 1
    if not (stack.gradients_stay or in_buckets or (rank.whole_gradients and job.micro_batches > 1)):
        # Gradients come as activations go: the fuller of the two moments counts.
        shared = min(gradients, activations + logits)
    if stack.sums_shards_over_context and layout.cp > 1 and layout.fsdp > 1:
        # Later all gradients are copied into one buffer, which is summed over cp.
        gathered += max(0.0, 4.0 * rank.own / rank.shards - (activations + logits + gathered - shared))
    held = activations + logits + gathered - shared
    return Memory(
        stage=rank.number,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        communication=gathered,
        slack=stack.fragments * held + stack.base,
        band=stack.band,
        shared=shared,
        host=12.0 * rank.own / (rank.shards if zero else 1),
    )


def _waiting(job: Job, rank: Rank) -> float:
    """Bytes of activations that wait for their backward, of all micro-batches in flight, those of the head apart."""
    found = rank.blocks * rank.kept * rank.samples
    if rank.has_first:
        found += rank.samples * _edge(job, job.model.first)
    if rank.rounds and job.recompute != "full":
        # Every forward makes its own copies; a block that recomputes itself makes them again.
        found += 2.0 * rank.blocks * rank.block_parameters
    found *= rank.flights
    if heads := _heads_waiting(job, rank):
        found += heads * rank.samples * _edge(job, job.model.last)
    return found


def _heads_waiting(job: Job, rank: Rank) -> int:
    """Micro-batches that wait behind the head while one is gone back through."""
    all_first = job.schedule in ("gpipe", "looped-bfs") and job.layout.pp > 1
    return job.micro_batches - 1 if all_first and rank.has_last and job.model.logits else 0


def _loss(job: Job, rank: Rank) -> tuple[float, float, float]:
    """Bytes of logits that wait, of what the head keeps, and of the logits while the loss is gone back through."""
    if not (rank.has_last and job.model.logits):
        return 0.0, 0.0, 0.0
    logits = rank.samples * job.model.logits / job.layout.tp
    head = rank.samples * _edge(job, job.model.last)
    if rank.rounds:
        head += 2.0 * rank.head_weights
    return logits * job.stack.kept_logits * _heads_waiting(job, rank), head, logits * logit_bytes(job)


def _gathered(job: Job, rank: Rank) -> tuple[float, float]:
    """Bytes gathered, on their way to other ranks or from them; and those beside while a block is gone back through."""
    stack = job.stack
    layout, zero = job.layout, job.effective_zero
    found = one_block = 0.0
    # A pipeline that accumulates whole gradients sums them when all activations are gone.
    summed = 0.0 if stack.accumulates_whole and layout.pp > 1 else stack.summed
    if zero == 3 and rank.shards > 1:
        # What is outside of blocks stays, and while the loss is gone back through the last block is gathered.
        found = stack.gathered * (rank.ends + rank.block_parameters)
        # Later there are the present block and the next, its gradients, and what is sent.
        one_block = (2 * stack.gathered + stack.gathered + summed) * rank.block_parameters
    elif zero == 2 and rank.shards > 1:
        found = stack.gathered * rank.own if stack.gathers_for_zero2 else 0.0
        one_block = (stack.gathered + summed) * rank.block_parameters
    elif layout.dp * rank.shards > 1:
        found = stack.buckets * rank.own
    if layout.pp > 1:
        found += 2 * rank.samples * job.model.blocks.border * job.residual / job.rows
    return found, one_block


def _kept(job: Job, block: ModelPart) -> float:
    """Bytes of one sample that a block keeps from its forward to its backward."""
    tp = job.layout.tp
    rows, residual = job.rows, job.residual
    if job.recompute == "full":
        return block.border * residual / rows
    if job.recompute == "selective" and job.stack.selective == "products":
        return block.border * residual / rows + job.width * block.alternate_products(tp, rows)
    return _all_kept(job, block)


def _all_kept(job: Job, block: ModelPart) -> float:
    stack, tp, rows, width = job.stack, job.layout.tp, job.rows, job.width
    rounded = block.kept - block.kept_residual
    whole = (
        block.kept_residual * job.residual + rounded * width + block.kept_bytes + stack.copies * block.border * width
    )
    kept = whole / rows + block.cut_kept * width / tp
    if job.layout.pp > 1:
        kept += stack.pipeline_copies * block.border * width / rows
    if rows > 1 and (job.layout.pp == 1 or tp <= job.machine.gpus_per_node):
        kept += stack.gathered_inputs / (1 if job.layout.pp == 1 else 2) * block.border * width * (1 - 1 / tp)
    if stack.casts_weights and width == 2.0:
        # Norms write 32 bits, and every product that reads them rounds a copy for itself.
        kept += (block.readers - 2) * block.border * width
    dropped = job.model.shape is not None and job.model.shape.dropout
    if dropped and stack.drops_for_all_ranks and tp * job.layout.cp > 1:
        # Two masks, of numbers and not of bits, for all tokens.
        kept += 2 * block.border * (width * job.layout.cp - 1 / rows)
    if block.attention:
        if stack.gathers_keys and job.layout.cp > 1:
            kept += _whole_keys(job, block.attention)
        if not job.uses_flash and (job.recompute == "none" or stack.drops_for_all_ranks):
            kept += _scores(job, block.attention)
    return kept


def _whole_keys(job: Job, attention: AttentionSize) -> float:
    """Bytes that cp adds to a sample's part on a rank, which is counted as 1/cp of one."""
    keys = 2 * attention.kv_heads * attention.head_dim * attention.tokens
    # One product for queries, keys and values keeps the rank's own keys alive beside the gathered ones.
    has_own = job.model.shape is None or job.model.shape.fused
    # Both chunks of a causal sequence are kept by attention, and once more when they are put together.
    mixed = attention.heads * attention.head_dim * attention.tokens if attention.causal else 0
    return (keys * (job.layout.cp - (0 if has_own else 1)) + mixed) * job.width / job.layout.tp


def _scores(job: Job, attention: AttentionSize) -> float:
    """Bytes of one sample for the square of scores: softmax and, with dropout, its mask and what it leaves."""
    tp, cp = job.layout.tp, job.layout.cp
    dropped = job.model.shape is not None and job.model.shape.dropout
    own = attention.scores / cp / tp
    if not job.stack.drops_for_all_ranks:
        return own * (2 * job.width + 1 if dropped else job.width)
    if not dropped:
        return own * 4.0
    if tp * cp == 1:
        return own * (12.0 if job.machine.gpu.is_cpu else 9.0)
    # The mask, of 32 bits an element, is drawn for all ranks.
    return own * (4.0 + job.width + 4.0 * tp * cp)


def _live_block(job: Job, block: ModelPart) -> float:
    """Bytes of one sample while a block is gone back through: its gradients, and all it keeps if it is recomputed."""
    tp = job.layout.tp
    rows, residual = job.rows, job.residual
    live = 2 * block.border * residual / rows + block.widest * 2 * job.width / tp
    if rows > 1:
        live += 2 * block.border * job.width
    if job.recompute == "full":
        live += _all_kept(job, block)
    return live


def _edge(job: Job, part: ModelPart | None) -> float:
    """Bytes of one sample that the embedding or the head keeps."""
    if part is None:
        return 0.0
    kept = part.kept_residual * job.residual + (part.kept - part.kept_residual) * job.width
    return kept / job.rows + part.kept_bytes + part.cut_kept * job.width / job.layout.tp
