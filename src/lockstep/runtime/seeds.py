"""Random streams that belong to logical coordinates, never to ranks.

Every draw of a run follows from `seed_of(run seed, what, step, micro-batch, ...)`, so that it is the same on any layout
and after any restart.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from lockstep.runtime.torch_private import saving_hooks


def seed_of(*coordinates: int | str) -> int:
    """A 63-bit seed for one logical coordinate; different coordinates give unrelated seeds."""
    digest = hashlib.blake2b(repr(coordinates).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def draw_seed(seed: int, step: int, *coordinates: int) -> int:
    """Seeds what a forward draws: for one sample of a step, by its place there, or for the step as a whole.

    `coordinates` are (position,) or, inside a module with a stream of its own, (position, number, call); without a
    sample (), or (-1, number, call).
    """
    return seed_of(seed, "draw", step, *coordinates)


def seed_torch(seed: int) -> None:
    """Seed the streams that a forward pass draws from, on the CPU and on this rank's GPU.

    Not `torch.manual_seed`: it queues a call with a stack trace for every accelerator that is not in use, which takes
    milliseconds and grows without end.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def is_computed_again() -> bool:
    """Whether what is computed now will be computed again in the backward pass, as torch.utils.checkpoint has it.

    It either keeps no graph or stands where tensors are saved for the backward.
    """
    return not torch.is_grad_enabled() or saving_hooks() is not None


def seed_host(seed: int) -> None:
    """Seed torch on the CPU, numpy and `random`: for code of the user's that may draw from any of them."""
    seed_streams(("torch", "numpy", "random"), seed)


def hosts_have_moved(seed: int) -> bool:
    """Whether anybody drew from numpy or `random` since they were given a seed; they have it again afterwards."""

    def state() -> tuple[object, ...]:
        return random.getstate(), repr(np.random.get_state())

    before = state()
    np.random.seed(seed % 2**32)
    random.seed(seed)
    return before != state()


def seed_everything(seed: int) -> None:
    """Seed all of them, and this rank's GPU."""
    seed_host(seed)
    seed_torch(seed)


def host_streams() -> dict[str, str]:
    """A digest of where each stream of the host stands, by the name of its library."""
    numpy: Any = np.random.get_state(legacy=False)["state"]
    states = {
        "random": repr(random.getstate()).encode(),
        "numpy": repr(numpy["pos"]).encode() + numpy["key"].tobytes(),
        "torch": torch.random.get_rng_state().numpy().tobytes(),
    }
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


def seed_streams(names: Collection[str], seed: int) -> None:
    """Seed some streams of the host."""
    if "torch" in names:
        torch.default_generator.manual_seed(seed)
    if "numpy" in names:
        np.random.seed(seed % 2**32)
    if "random" in names:
        random.seed(seed)
