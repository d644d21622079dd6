"""Other people's training software, as the planner's formulas see it: what it stores and keeps, and how fast it is.

Sources stand beside the figures: the code of a stack, what its authors say, or a fit to its published rows
(benchmarks/planner.py --refit). `lockstep plan` plans for Lockstep alone.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.errors import unknown
from lockstep.planner.cost.stack import LOCKSTEP, Speeds, TrainingStack

# Megatron-LM: 18 bytes a parameter, 6 + 12/dp with its distributed optimizer (report_theoretical_memory).
MEGATRON = TrainingStack(
    "megatron",
    speeds=Speeds(0.97, 0.95, 1.0, 0.15, gradient_bytes=2, overlaps=False),
    weights=2.0,
    gradients=4.0,
    optimizer=12.0,
    gathered=2.0,
    summed=4.0,
    fragments=0.05,
)

# FSDP2 with fp32 shards and a bf16 policy; peak reserved.
TORCHTITAN = TrainingStack(
    "torchtitan",
    speeds=Speeds(0.86, 1.05, 0.65, 0.15),
    weights=4.0,
    gradients=4.0,
    optimizer=8.0,
    gathered=2.0,
    summed=4.0,
    gradients_stay=False,
    selective="products",
    shards_over_context=True,
    # loss_parallel goes back through x, its one-hot, exp(x) and their sum, all in fp32.
    cut_logits=16.0,
    fragments=0.15,
    base=0.5e9,
    band=0.15,
)

STACKS = {
    stack.name: stack
    for stack in (
        LOCKSTEP,
        MEGATRON,
        replace(MEGATRON, name="megatron-core", speeds=Speeds(0.95, 0.63, 0.56, 0.19, best_flash=True), cut="early"),
        # DeepSpeed's ZeRO-1 has gradients in 16 bits and, of its own part, weights, moments and gradients in fp32; its
        # optimizer for bf16 accumulates all gradients in fp32. Buckets of 5e8 elements, communicators: nvidia-smi's.
        TrainingStack(
            "deepspeed-megatron",
            speeds=Speeds(0.82, 0.45, 1.0, 0.15, gradient_bytes=2, overlaps=False, regathers=True),
            weights=2.0,
            gradients=2.0,
            optimizer=16.0,
            gathered=2.0,
            summed=2.0,
            bf16_gradients=4.0,
            fragments=0.2,
            base=5e9,
            band=0.12,
        ),
        TORCHTITAN,
        # Since then its loss is compiled: logits and their gradient, both in 16 bits, are all that is written down.
        replace(TORCHTITAN, name="torchtitan-2025", logits=4.0),
        TrainingStack(
            "composer",
            speeds=Speeds(0.9, 1.5, 0.95, 0.4),
            weights=4.0,
            gradients=4.0,
            optimizer=8.0,
            gathered=2.0,
            summed=4.0,
            gathers_for_zero2=True,
            gradients_stay=False,
            # Its loss is a fused kernel that reads and writes logits in 16 bits (loss_fn: fused_crossentropy).
            logits=6.0,
            cut_logits=6.0,
            kept_logits=2.0,
            fragments=0.1,
            base=0.5e9,
        ),
        # bf16 weights, fp32 gradient accumulation, fp32 master; `copies` fitted to the grid of its authors.
        TrainingStack(
            "nanotron",
            speeds=Speeds(0.9, 2.5, 1.15, 0.4, step_bytes=80.0),
            weights=2.0,
            gradients=4.0,
            optimizer=12.0,
            gathered=2.0,
            summed=2.0,
            buckets=1.0,
            copies=3.0,
            pipeline_copies=1.0,
            gathered_inputs=2.0,
            cut="early",
            base=0.3e9,
            band=0.12,
        ),
        # fp32 master weights and bf16 weights, moments in fp32, gradients in bf16 (train_gpt2.cu).
        TrainingStack(
            "llm.c",
            speeds=Speeds(1.05, 0.8, 1.05, 0.15, launch=5e-6, gradient_bytes=2),
            weights=2.0,
            gradients=2.0,
            optimizer=12.0,
            gathered=2.0,
            summed=2.0,
            base=0.5e9,
        ),
    )
}


def find_stack(name: str) -> TrainingStack:
    """By its name."""
    if name not in STACKS:
        raise unknown("stack", name, STACKS)
    return STACKS[name]
