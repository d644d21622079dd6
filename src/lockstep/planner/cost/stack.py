"""How training softwares differ: what they store for a parameter, keep for the backward, hold at the peak.

The planner plans for Lockstep's own; those of others, by which its formulas are judged, are in benchmarks/stacks.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BlocksOfStages = Literal["evenly", "early", "late"]


@dataclass(frozen=True)
class Speeds:
    """What one software makes of a GPU. The first four are fitted (benchmarks/planner.py), the rest is how it works."""

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


NEUTRAL = Speeds(0.9, 1.0, 1.0, 0.2)
"""Where a fit begins, for all stacks alike."""


@dataclass(frozen=True)
class TrainingStack:
    """One software. Bytes are those of one parameter, or of one element."""

    name: str
    weights: float
    """Of a parameter between steps."""
    gradients: float
    optimizer: float
    """Moments, and a master copy in fp32 where weights are not."""
    gathered: float
    """Of a parameter that ZeRO-3 has gathered for a forward."""
    summed: float
    """Of a parameter in a buffer whose gradients are being summed over ranks."""
    buckets: float = 0.0
    """Of a parameter in buffers beside the gradients, which stay, where data ranks sum whole gradients."""
    residual: float = 2.0
    """Of an element of the stream of residuals, where products are in 16 bits."""
    copies: float = 0.0
    """Elements of hidden a token and block that stay for the backward though the mathematics does not need them."""
    casts_weights: bool = False
    """Autocast: rounded copies of the weights live from a forward to its backward."""
    gathers_for_zero2: bool = False
    """ZeRO-2 shards weights between steps and has all of them gathered from the forward to the backward."""
    accumulates_whole: bool = False
    """Gradients are reduced in the last backward only: until then every rank has whole ones, sharded or not."""
    gradients_stay: bool = True
    """Gradients have their memory all the time; else they come into being in the backward."""
    gathered_inputs: float = 0.0
    """With sequence parallelism: inputs of products, of width hidden, that a block keeps gathered instead of in parts.

    With pp half of them, and only where tp stays in a node.
    """
    pipeline_copies: float = 0.0
    """As `copies`, with pp."""
    bf16_gradients: float = 0.0
    """Of a parameter, in gradients that are accumulated in fp32 beside those in bf16."""
    selective: Literal["attention", "products"] = "attention"
    """What recompute "selective" leaves out: attention, or all but attention and every other product."""
    logits: float = 12.0
    """Of a logit at the fullest moment of the loss."""
    cut_logits: float = 12.0
    """The same where tp cuts the vocabulary."""
    rounded_logits: float = 0.0
    """The same beside `cut_logits`, where products are in 16 bits."""
    kept_logits: float = 4.0
    """Of a logit from the forward to the backward."""
    cut: BlocksOfStages = "evenly"
    """Pipeline stages have as many blocks each, or by their work, so that the one with the head has fewer.

    Where blocks do not divide, the early stages are the full ones, or the late ones.
    """
    shards_over_context: bool = False
    """The cp axis shards states too."""
    parts_cross: bool = True
    """With pp and tp: every rank hands its part of the values on, instead of all of them."""
    gathers_keys: bool = False
    """With cp, every block keeps the keys and values of whole samples; else those of the rank's own tokens."""
    drops_for_all_ranks: bool = False
    """With tp or cp dropout is drawn for all ranks at once; and attention without flash computes in 32 bits."""
    sums_shards_over_context: bool = False
    """Gradients that fsdp has sharded are summed over cp, in one buffer."""
    fragments: float = 0.0
    """What the allocator holds and nobody uses, as a share of everything but the states."""
    base: float = 0.0
    """Workspaces of libraries."""
    speeds: Speeds = NEUTRAL
    band: float = 0.1
    """The share by which an estimate may be wrong, from the measured errors (docs/plan.md)."""

    def residual_bytes(self, width: float) -> float:
        """Of an element of the stream of residuals, where activations have so many."""
        return self.residual if width == 2.0 else width


# What our engine does: fp32 everything, autocast, `fully_shard`, gradients reduced in the last backward.
LOCKSTEP = TrainingStack(
    "lockstep",
    speeds=Speeds(0.9, 2.1, 1.0, 0.4, launch=4.5e-5, once=3.5e-3, regathers=True, best_flash=True),
    weights=4.0,
    gradients=4.0,
    optimizer=8.0,
    gathered=4.0,
    summed=4.0,
    residual=4.0,
    casts_weights=True,
    gathers_for_zero2=True,
    accumulates_whole=True,
    gradients_stay=False,
    # Its tp loss, by the trace: logits in fp32, their exponents and two more, and what the product wrote.
    cut_logits=16.0,
    parts_cross=False,
    rounded_logits=2.0,
    # A product that has gathered its input keeps it whole.
    gathered_inputs=2.0,
    cut="late",
    gathers_keys=True,
    drops_for_all_ranks=True,
    sums_shards_over_context=True,
    fragments=0.05,
    base=0.1e9,
    band=0.08,
)
