"""Activation recompute (checkpointing): activations of a block are dropped, and computed again in the backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.follow.around import Forward, replace_forward
from lockstep.parallel.replicate.statistics import batch_norms, not_counting


def recompute(block: nn.Module) -> None:
    """Make a block recompute itself.

    Only `forward` is replaced: hooks of the block (its random stream, its unsharding) run outside the recomputed
    region. A reseeding hook inside it would read the key of another micro-batch.
    """
    counts = bool(batch_norms(block))
    replace_forward(block, lambda forward: _recomputing(forward, counts))


def _recomputing(forward: Forward, counts: bool) -> Forward:
    def recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(block, *args, **kwargs)
        contexts: dict[str, Any] = {}
        if counts:  # the second forward must not enter the running statistics again (torch.compile cannot do that)
            layers = batch_norms(block)
            contexts["context_fn"] = lambda: (nullcontext(), not_counting(layers))
        return checkpoint(forward, block, *args, use_reentrant=False, preserve_rng_state=True, **contexts, **kwargs)

    return recomputed
