"""Random streams that belong to logical coordinates, never to ranks.

Every draw of a run follows from `seed_of(run seed, what, step, micro-batch, ...)`, so that it is the same on any layout
and after any restart.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_of(*coordinates: int | str) -> int:
    """A 63-bit seed for one logical coordinate; different coordinates give unrelated seeds."""
    digest = hashlib.blake2b(repr(coordinates).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_torch(seed: int) -> None:
    """Seed the streams that a forward pass draws from, on the CPU and on this rank's GPU.

    Not `torch.manual_seed`: it queues a call with a stack trace for every accelerator that is not in use, which takes
    milliseconds and grows without end.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread (private in torch 2.11 and 2.13)."""
    return torch._C._current_graph_task_id() != -1


def seed_host(seed: int) -> None:
    """Seed torch on the CPU, numpy and `random`: for code of the user's that may draw from any of them."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_everything(seed: int) -> None:
    """Seed all of them, and this rank's GPU."""
    seed_host(seed)
    seed_torch(seed)
