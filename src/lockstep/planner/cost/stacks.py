"""How training softwares differ: what they store for a parameter, keep for the backward, hold at the peak.

Sources stand beside the figures: the code of a stack, what its authors say, or a fit to its published rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lockstep.errors import unknown

Cut = Literal["evenly", "early", "late"]


@dataclass(frozen=True)
class Stack:
    """One software, as far as memory goes. Bytes are those of one parameter, or of one element."""

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
    cut: Cut = "evenly"
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
    band: float = 0.1
    """The share by which an estimate may be wrong, from the measured errors (docs/plan.md)."""

    def residual_bytes(self, width: float) -> float:
        """Of an element of the stream of residuals, where activations have so many."""
        return self.residual if width == 2.0 else width


# Megatron-LM: 18 bytes a parameter, 6 + 12/dp with its distributed optimizer (report_theoretical_memory).
MEGATRON = Stack("megatron", weights=2.0, gradients=4.0, optimizer=12.0, gathered=2.0, summed=4.0, fragments=0.05)

# FSDP2 with fp32 shards and a bf16 policy; peak reserved.
TORCHTITAN = Stack(
    "torchtitan",
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
        # What our engine does: fp32 everything, autocast, `fully_shard`, gradients reduced in the last backward.
        Stack(
            "lockstep",
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
        ),
        MEGATRON,
        replace(MEGATRON, name="megatron-core", cut="early"),
        # DeepSpeed's ZeRO-1 has gradients in 16 bits and, of its own part, weights, moments and gradients in fp32; its
        # optimizer for bf16 accumulates all gradients in fp32. Buckets of 5e8 elements, communicators: nvidia-smi's.
        Stack(
            "deepspeed-megatron",
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
        Stack(
            "composer",
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
        Stack(
            "nanotron",
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
        # ZeRO's arithmetic: weights and gradients in fp16, 12 bytes of optimizer state (arXiv 1910.02054, Figure 1).
        Stack("zero-paper", weights=2.0, gradients=2.0, optimizer=12.0, gathered=2.0, summed=2.0, band=0.0),
        # fp32 master weights and bf16 weights, moments in fp32, gradients in bf16 (train_gpt2.cu).
        Stack("llm.c", weights=2.0, gradients=2.0, optimizer=12.0, gathered=2.0, summed=2.0, base=0.5e9),
    )
}


def find_stack(name: str) -> Stack:
    """By its name."""
    if name not in STACKS:
        raise unknown("stack", name, STACKS)
    return STACKS[name]
