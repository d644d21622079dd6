"""How fast software runs on a GPU: a few numbers a stack, fitted to published runs (benchmarks/planner.py).

What a stack keeps in memory, and in which order it works, is in stacks.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import unknown


@dataclass(frozen=True)
class Speeds:
    """What one stack makes of the hardware. The first four numbers are fitted, the others are how it works."""

    matmul: float
    """Share of the GPU's sustained speed that large products reach in a training."""
    traffic: float
    """Bytes moved beside products and flash attention, relative to one pass of every operation that must be."""
    attention: float
    """Speed of its flash kernel relative to the GPU's entry in the catalogue."""
    contention: float
    """The share of hidden communication that is paid nevertheless: it takes memory bandwidth and multiprocessors."""
    launch: float = 5e-5
    """Seconds to start one operation of a block from Python, with the small ones around it that are not counted."""
    once: float = 0.0
    """Seconds of Python for a step, beside those for every operation."""
    step_bytes: float = 20.0
    """Moved once a step for every weight of the rank: gradients measured, scaled and cleared, weights copied."""
    gradient_bytes: int = 4
    """Of one gradient, where ranks sum them up."""
    overlaps: bool = True
    """Replicas sum gradients up while the backward goes on."""
    regathers: bool = False
    """With zero1, gradients are summed on every rank and weights gathered, instead of scattered and gathered."""
    best_flash: bool = False
    """The fastest flash kernel there is for the GPU (cuDNN's, version 3), not version 2."""


_TORCHTITAN = Speeds(0.86, 1.05, 0.65, 0.15)
SPEEDS = {
    "lockstep": Speeds(0.9, 2.1, 1.0, 0.4, launch=4.5e-5, once=3.5e-3, regathers=True, best_flash=True),
    "composer": Speeds(0.9, 1.5, 0.95, 0.4),
    "torchtitan": _TORCHTITAN,
    "torchtitan-2025": _TORCHTITAN,
    "nanotron": Speeds(0.9, 2.5, 1.15, 0.4, step_bytes=80.0),
    "megatron": Speeds(0.97, 0.95, 1.0, 0.15, gradient_bytes=2, overlaps=False),
    "deepspeed-megatron": Speeds(0.82, 0.45, 1.0, 0.15, gradient_bytes=2, overlaps=False, regathers=True),
    "megatron-core": Speeds(0.95, 0.63, 0.56, 0.19, best_flash=True),
    "llm.c": Speeds(1.05, 0.8, 1.05, 0.15, launch=5e-6, gradient_bytes=2),
}


def speeds_of(stack: str) -> Speeds:
    """The numbers of one stack."""
    if stack not in SPEEDS:
        raise unknown("stack", stack, SPEEDS)
    return SPEEDS[stack]
