"""What a collective costs: messages of `alpha` seconds each, and `beta` seconds for every byte.

The algorithms are those of lab/algorithms.py, which runs them; a size is what nccl-tests calls one: the whole buffer of
a rank, so that all-gather counts what it ends with, and reduce-scatter what it begins with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.errors import UserError, unknown

Collective = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "gather", "scatter", "send-recv"
]
Algorithm = Literal["ring", "tree", "naive", "halving-doubling"]

ALGORITHMS: dict[Collective, tuple[Algorithm, ...]] = {
    "broadcast": ("tree", "naive"),
    "reduce": ("tree", "naive"),
    "all-reduce": ("ring", "tree", "naive", "halving-doubling"),
    "all-gather": ("ring", "naive", "halving-doubling"),
    "reduce-scatter": ("ring", "naive", "halving-doubling"),
    "all-to-all": ("ring", "naive"),
}
"""Which algorithms there are for a collective, the one to begin with first."""


@dataclass(frozen=True)
class Link:
    """A way from one rank to another: what a message costs, and what a byte of it costs, in seconds."""

    alpha: float
    beta: float

    def seconds(self, size: float, messages: float = 1) -> float:
        """For so many bytes in so many messages, one after the other."""
        return messages * self.alpha + size * self.beta


def bus_factor(collective: Collective, ranks: int) -> float:
    """What turns bytes per second of an operation (algbw) into those that its busiest link carries (busbw)."""
    share = (ranks - 1) / ranks
    return {"all-reduce": 2 * share, "broadcast": 1.0, "reduce": 1.0, "send-recv": 1.0}.get(collective, share)


def check_algorithm(collective: Collective, algorithm: Algorithm, ranks: int) -> None:
    """Refuse an algorithm that the collective does not have, or that so many ranks cannot do."""
    if collective not in ALGORITHMS:
        raise unknown("collective", collective, ALGORITHMS)
    if algorithm not in ALGORITHMS[collective]:
        if algorithm not in get_args(Algorithm):
            raise unknown("algorithm", algorithm, ALGORITHMS[collective])
        others = " or ".join(ALGORITHMS[collective])
        raise UserError(f"there is no {algorithm} algorithm for {collective}", f"use {others}")
    if algorithm == "halving-doubling" and ranks & (ranks - 1):
        below = 1 << (ranks.bit_length() - 1)
        raise UserError(
            f"halving-doubling pairs ranks off in halves, and {ranks} is not a power of two",
            f"use {below} or {2 * below} ranks, or the ring",
        )


def predict(collective: Collective, algorithm: Algorithm, ranks: int, size: float, link: Link) -> float:
    """Seconds of a collective of `size` bytes between `ranks` ranks whose links are alike and work both ways at once.

    A rank sends one message at a time, and receives one at a time.
    """
    check_algorithm(collective, algorithm, ranks)
    if ranks == 1:
        return 0.0
    others, rounds = ranks - 1, math.ceil(math.log2(ranks))
    part = size / ranks
    whole = link.seconds(size)
    if collective in ("broadcast", "reduce"):
        return (rounds if algorithm == "tree" else others) * whole
    if collective == "all-reduce":
        return {
            "ring": 2 * others * link.seconds(part),
            "tree": 2 * rounds * whole,
            "naive": 2 * others * whole,
            "halving-doubling": 2 * link.seconds(others * part, rounds),
        }[algorithm]
    if collective == "all-to-all":
        return others * link.seconds(part) * (1 if algorithm == "ring" else ranks)
    if algorithm == "naive":  # all to one, which has then everything, and from there to all
        return (
            others * link.seconds(part) + others * whole
            if collective == "all-gather"
            else others * whole + (others * link.seconds(part))
        )
    return link.seconds(others * part, others if algorithm == "ring" else rounds)
