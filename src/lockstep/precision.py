"""Number formats of a run. Weights, gradients, their reduction and the optimizer state stay fp32 in both modes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]


def compute_in(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass.

    bf16 is autocast in every layout, sharded ones too: casting the shards instead would round norms and embeddings as
    well, and the same script would give other numbers than on one device. Its weight cache is off because it would
    keep a bf16 copy of every gathered shard alive.
    """
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
