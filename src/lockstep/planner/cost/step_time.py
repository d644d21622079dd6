"""Seconds of one optimizer step: a roofline of compute, alpha-beta collectives, overlap and the bubble.

Constants of the hardware are in the catalogue, those of the software in stack.py; benchmarks/planner.py says how far
the result is from published runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from lockstep.planner.cost.estimate import Time
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.stages import stages_of_job
from lockstep.planner.machine.hardware import GpuKind
from lockstep.planner.model.parts import AttentionSize, Matmul, ModelPart

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.8), (64, 64, 0.62))
"""What one multiprocessor computes at a time: rows, columns, and the share of the best speed it reaches."""
DEPTH = 400.0
"""Length of the inner dim at which a product reaches half its speed: a tile has to be filled and drained."""
FP32_DEPTH = 50.0
"""The same without tensor cores, beside whose speed filling a tile hardly shows."""
FP32_SHARE = 0.93
"""Of the peak, that products without tensor cores keep up: they do not draw the power that limits the others."""
UNALIGNED = ((8, 0.5), (64, 0.75))
"""A product whose inner dim or columns are no multiple of so many elements reaches so much of its speed."""
NARROW = {"fp8": 1.0, "fp4": 0.6}
"""The share of its peak that a narrow format keeps, relative to bf16: fp4 has scales for every few elements."""
BACKWARD_SPEED = 0.75
"""Of a flash kernel's backward, relative to its forward."""
ASYNC_TENSOR = 0.3
"""What still shows of tensor-parallel communication that runs beside the products."""
COMPILED = 0.6
"""Kernels, and bytes moved beside products, that are left when torch.compile has fused what it can."""
ADAM_BYTES = 30
"""Read and written for every parameter: weight, two moments, gradient, and the copy that computes."""
CPU_LAUNCH = 1e-5
"""Seconds that an operation costs on a CPU beside its work; a guess that `lm` on two cores agrees with."""
BUBBLE = {"interleaved-zero-bubble": 1 / 3, "zbv": 0.05, "dualpipev": 0.1}
"""What the ends of a pipeline leave empty, relative to 1F1B with as many stages a rank."""

Kind = Literal["all-reduce", "all-gather", "reduce-scatter"]


@dataclass(frozen=True)
class RankWork:
    """What a rank does with one micro-batch, in seconds, without communication."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    waiting: float = 0.0
    """For kernels to be started."""

    @property
    def total(self) -> float:
        """As the GPU sees it."""
        return self.products + self.attention + self.traffic + self.waiting

    def __add__(self, other: RankWork) -> RankWork:
        return RankWork(
            self.products + other.products,
            self.attention + other.attention,
            self.traffic + other.traffic,
            self.waiting + other.waiting,
        )

    def __mul__(self, count: float) -> RankWork:
        return RankWork(self.products * count, self.attention * count, self.traffic * count, self.waiting * count)


def estimate_time(job: Job) -> Time:
    """The step that this job would take."""
    speeds = job.stack.speeds
    layout, model, block = job.layout, job.model, job.model.blocks
    forward, backward = part_work(job, block)
    backward += _again(job, forward)
    tensor, context = _tensor(job), _context(job, forward, backward)
    block_seconds = forward.total + backward.total + tensor + context

    ends = {part.name: _both(part_work(job, part)) for part in model.parts if part is not block}
    tail = sum((work for name, work in ends.items() if name != model.parts[0].name or layout.pp == 1), RankWork())
    count, has_head = stages_of_job(job).slowest(tail.total / block_seconds)
    besides = tail if has_head else RankWork()
    stage = (forward + backward) * count + besides
    average = (block.count * block_seconds + sum(work.total for work in ends.values())) / layout.pp

    crossing = 2 * job.stages_per_rank * neighbour_seconds(job) if layout.pp > 1 else 0.0
    empty = (layout.pp - 1) / job.stages_per_rank * BUBBLE.get(job.schedule, 1.0)
    # With fewer micro-batches than ranks a rank waits for every one of its stages but the last.
    empty += (1 - 1 / job.stages_per_rank) * max(0, layout.pp - job.micro_batches)
    data, hidden = _data(job, count, forward.total, backward.total)
    on_rank = model.parameters / layout.pp / layout.tp / (layout.fsdp if job.effective_zero >= 2 else 1)
    updated = on_rank / (layout.fsdp if job.effective_zero == 1 else 1)
    times = job.micro_batches
    return Time(
        compute=times * (stage.products + stage.attention),
        memory_bound=times * stage.traffic,
        # What Python does once a step shows only where the GPU waits for it anyway.
        launch=times * stage.waiting + (speeds.once if stage.waiting > stage.total / 2 else 0.0),
        tensor=times * count * tensor,
        context=times * count * context,
        pipeline=times * crossing,
        data=data,
        bubble=empty * (average + crossing / job.stages_per_rank),
        optimizer=(updated * ADAM_BYTES + on_rank * speeds.step_bytes) / (job.machine.gpu.memory_gb_s * 1e9),
        hidden={"data": hidden},
    )


# ---- Compute


@lru_cache(maxsize=1 << 16)
def fill(rows: int, columns: int, batch: int, multiprocessors: int) -> float:
    """The share of the GPU that computes something wanted: tiles stand over edges, and the last wave is not full."""
    best = 0.0
    for high, wide, speed in TILES:
        tiles = batch * math.ceil(rows / high) * math.ceil(columns / wide)
        waves = math.ceil(tiles / multiprocessors)
        best = max(best, speed * batch * rows * columns / (waves * multiprocessors * high * wide))
    return best


def product_seconds(
    rows: float, inner: float, columns: float, gpu: GpuKind, speed: float, *, batch: float = 1, width: float = 2.0
) -> float:
    """[rows, inner] x [inner, columns], so many of them at once: by flops at `speed`, or by bytes of `width` each."""
    share = inner / (inner + (DEPTH if width == 2.0 else FP32_DEPTH))
    if not gpu.is_cpu:
        share *= fill(max(1, round(rows)), max(1, round(columns)), max(1, round(batch)), gpu.multiprocessors)
        share *= next(
            (slower for multiple, slower in UNALIGNED if round(inner) % multiple or round(columns) % multiple), 1
        )
    moved = width * batch * (rows * inner + inner * columns + rows * columns)
    return max(2.0 * batch * rows * inner * columns / (speed * share), moved / (gpu.memory_gb_s * 1e9))


def part_work(job: Job, part: ModelPart) -> tuple[RankWork, RankWork]:
    """Forward and backward of one micro-batch through one part on one rank."""
    speeds = job.stack.speeds
    gpu, tp = job.machine.gpu, job.layout.tp
    scale = job.micro_batch / job.layout.cp
    width = job.width
    # Only products of the blocks are narrower than 16 bits: embedding, head and attention are not.
    narrow = job.precision in NARROW
    kept_up = FP32_SHARE if job.precision == "fp32" and not gpu.is_cpu else gpu.matmul
    wide_speed = gpu.tflops["bf16" if narrow else job.precision] * 1e12 * kept_up * speeds.matmul
    speed = wide_speed
    moved = (part.traffic / (tp if job.sequence_parallel else 1) + part.cut_traffic / tp) * scale * width
    products = [_cut(matmul, scale, tp) for matmul in part.matmuls]
    if narrow and part is job.model.blocks:
        speed = gpu.tflops[job.precision] * NARROW[job.precision] * 1e12 * gpu.matmul * speeds.matmul
        # The inputs of every product are read for their largest value, read again and written as bytes.
        moved += 5.0 * sum(rows * inner for rows, inner, _ in products)
    ahead = back = 0.0
    for rows, inner, columns in products:
        ahead += product_seconds(rows, inner, columns, gpu, speed, width=width)
        back += product_seconds(rows, columns, inner, gpu, speed, width=width)
        back += product_seconds(inner, rows, columns, gpu, speed, width=width)
    attention, attention_back = _attention(job, part.attention, wide_speed, width) if part.attention else (0.0, 0.0)
    fused = COMPILED if job.compiled else 1.0
    traffic = moved * speeds.traffic * fused / (gpu.memory_gb_s * 1e9)
    starting = part.kernels * fused * (CPU_LAUNCH if gpu.is_cpu else speeds.launch)
    if gpu.is_cpu:  # which computes only when it has started
        return RankWork(ahead, attention, traffic, starting), RankWork(back, attention_back, 2 * traffic, 2 * starting)
    return (
        RankWork(ahead, attention, traffic, max(0.0, starting - ahead - attention - traffic)),
        RankWork(back, attention_back, 2 * traffic, max(0.0, 2 * starting - back - attention_back - 2 * traffic)),
    )


def _cut(matmul: Matmul, scale: float, tp: int) -> tuple[float, float, float]:
    inner = matmul.inner / tp if matmul.cut == "inner" else matmul.inner
    columns = matmul.columns / tp if matmul.cut == "columns" else matmul.columns
    return matmul.rows * scale, inner, columns


def _attention(job: Job, attention: AttentionSize, speed: float, width: float) -> tuple[float, float]:
    """Forward and backward of the scores and what is made of them."""
    speeds = job.stack.speeds
    gpu, cp = job.machine.gpu, job.layout.cp
    heads = attention.heads / job.layout.tp * job.micro_batch
    rows, tokens, dim = attention.tokens / cp, attention.tokens, attention.head_dim
    if job.uses_flash:
        flops = 4.0 * heads * dim * rows * tokens * (0.5 if attention.causal else 1.0)
        # Short heads leave tensor cores waiting for the exponents, few blocks of queries leave some without work.
        blocks = heads * rows / 128
        share = dim / (dim + 32) * blocks / (blocks + gpu.multiprocessors)
        kernel = (gpu.best_flash or gpu.flash) if speeds.best_flash else gpu.flash
        forward = flops / (speed / speeds.matmul * kernel * speeds.attention * share)
        return forward, 2.5 * forward / BACKWARD_SPEED
    scores = product_seconds(rows, dim, tokens, gpu, speed, batch=heads, width=width)
    mixed = product_seconds(rows, tokens, dim, gpu, speed, batch=heads, width=width)
    # Softmax reads and writes the scores; dropout does so again, with a mask.
    passes = heads * rows * tokens * (4 * width + 1) * speeds.traffic / (gpu.memory_gb_s * 1e9)
    return scores + mixed + passes, 2 * (scores + mixed) + 1.2 * passes


def _both(work: tuple[RankWork, RankWork]) -> RankWork:
    return work[0] + work[1]


def _again(job: Job, forward: RankWork) -> RankWork:
    """What the backward does a second time."""
    if job.recompute == "none":
        return RankWork()
    if job.recompute == "full":
        return forward
    return forward * 0.5 if job.stack.selective == "products" else RankWork(attention=forward.attention)


# ---- Communication


def collective_seconds(job: Job, kind: Kind, size: float, ranks: int, stride: int) -> float:
    """A collective of `size` bytes over `ranks` ranks that stand `stride` apart, while all their peers do the same."""
    if ranks == 1 or size == 0:
        return 0.0
    machine = job.machine
    here = max(1, min(ranks, machine.gpus_per_node // stride))
    nodes = math.ceil(ranks / here)
    bandwidth = 1 / machine.inside.beta if here > 1 else math.inf
    messages = machine.inside.alpha * (here - 1)
    if nodes > 1:
        # The groups of a node share its cards, and the more nodes they span, the less of them they can use.
        share = here / machine.gpus_per_node * nodes**-machine.congestion
        bandwidth = min(bandwidth, share / machine.outside.beta)
        # Sums go up and down a tree of nodes, the others round a ring.
        messages += machine.outside.alpha * (math.log2(nodes) if kind == "all-reduce" else nodes - 1)
    volume = (ranks - 1) / ranks * size
    return (volume / bandwidth + messages) * (2 if kind == "all-reduce" else 1)


def neighbour_seconds(job: Job) -> float:
    """What a pipeline stage hands to the next, from all GPUs of a node at once."""
    machine, layout = job.machine, job.layout
    size = job.model.blocks.border * job.micro_batch / layout.cp * job.residual
    size /= layout.tp if job.stack.parts_cross else 1
    stride = layout.world_size // layout.pp
    if stride * 2 <= machine.gpus_per_node or machine.nodes == 1:
        return machine.inside.seconds(size)
    return machine.outside.seconds(size * min(machine.gpus_per_node, stride))


def hidden_behind(compute: float, communication: float, contention: float) -> float:
    """Seconds that communication adds to the compute beside which it runs."""
    return max(0.0, communication - compute) + contention * min(compute, communication)


def _tensor(job: Job) -> float:
    """Sums over tp: two in the forward of a block, two in its backward, and two more when the forward is done again."""
    size = job.model.blocks.border * job.micro_batch / job.layout.cp * job.width
    sums = (6 if job.recompute == "full" else 4) * collective_seconds(job, "all-reduce", size, job.layout.tp, 1)
    return sums * (ASYNC_TENSOR if job.async_tensor else 1.0)


def _context(job: Job, forward: RankWork, backward: RankWork) -> float:
    """Keys and values of a whole sequence come together on each of its ranks, and their gradients go back."""
    attention, cp = job.model.blocks.attention, job.layout.cp
    if cp == 1 or attention is None:
        return 0.0
    keys = attention.kv_heads * attention.head_dim * attention.tokens
    both = 2 * keys * job.micro_batch * job.width / job.layout.tp
    around = collective_seconds(job, "all-gather", both, cp, job.layout.tp)
    if job.stack.gathers_keys:
        return 3 * around
    exposed = hidden_behind(forward.attention, around, job.stack.speeds.contention)
    return exposed + hidden_behind(backward.attention, 2 * around, job.stack.speeds.contention)


def _data(job: Job, blocks: int, forward: float, backward: float) -> tuple[float, float]:
    """Seconds of a step for weights and gradients: those that show, and those that run behind compute."""
    layout, model, stack, speeds = job.layout, job.model, job.stack, job.stack.speeds
    wide = layout.cp if stack.shards_over_context else 1
    shards = layout.fsdp * wide if job.effective_zero >= 2 else 1
    replicas = layout.data_size * layout.cp // shards
    stride = layout.tp * (1 if wide > 1 else layout.cp if shards > 1 else 1)
    parameters = model.parameters / layout.pp / layout.tp
    sums = collective_seconds(job, "all-reduce", parameters / shards * speeds.gradient_bytes, replicas, stride * shards)
    gather = scatter = again = 0.0
    if shards > 1:
        unit = parameters / max(1, blocks)
        weight = 4.0 if job.precision == "fp32" else stack.gathered
        gather = collective_seconds(job, "all-gather", unit * weight, shards, stride)
        scatter = collective_seconds(job, "reduce-scatter", unit * speeds.gradient_bytes, shards, stride)
        # With zero2 weights stay from the first forward of a step to its last backward.
        again = gather if job.effective_zero == 3 else 0.0
    gathers = job.micro_batches if job.effective_zero == 3 else 1
    scatters = 1 if stack.accumulates_whole else job.micro_batches
    # A pipeline sums after its last micro-batch, when there is nothing left to hide behind.
    overlaps = layout.pp == 1 and speeds.overlaps
    beside = [
        (gathers * blocks, forward, gather),
        ((job.micro_batches - scatters) * blocks, backward, again),
        ((scatters - 1) * blocks, backward, again + scatter),
        (blocks, backward, again + scatter + (sums / blocks if overlaps else 0.0)),
    ]
    shown = sum(count * hidden_behind(compute, talk, speeds.contention) for count, compute, talk in beside)
    hidden = sum(count * min(compute, talk) for count, compute, talk in beside)
    # The first gather of a forward has nothing before it.
    shown += gathers * gather + (0.0 if overlaps else sums)
    if job.effective_zero == 1 and speeds.regathers:
        # Every rank updates its part of the weights, and then all have to have all of them.
        shown += collective_seconds(job, "all-gather", parameters * stack.weights, layout.fsdp, layout.tp * layout.cp)
    return shown, hidden
