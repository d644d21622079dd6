"""Activation recompute: a block's activations are dropped after the forward and computed again in the backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.statistics import batch_norms, not_counting


def recompute(block: nn.Module) -> None:
    """Make a block recompute itself.

    Only `forward` is replaced: names stay, and hooks of the block (its random stream, its unsharding) run outside the
    recomputed region. A reseeding hook inside it would read the key of another micro-batch.
    """
    forward = block.forward
    counting = batch_norms(block)
    # The second forward of a batch must not enter the running statistics again. torch.compile knows no such contexts.
    contexts: dict[str, Any] = {"context_fn": lambda: (nullcontext(), not_counting(counting))} if counting else {}

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **contexts, **kwargs)

    block.forward = recomputed
