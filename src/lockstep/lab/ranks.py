"""The ranks of the lab: processes of this machine, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.launch.probe import Seat, first_trouble, run_ranks

SECONDS = 120.0


class RankFailedError(Exception):
    """A rank did not come to its end; the text says which one, and what happened to it."""


def on_ranks(work: Callable[[Seat], Any], ranks: int) -> list[Any]:
    """What `work` returns on each of so many ranks."""
    answers = run_ranks(work, ranks, seconds=SECONDS)
    if trouble := first_trouble(answers):
        raise RankFailedError(f"rank {trouble.rank} of {ranks} failed: {trouble.trouble}")
    return [answer.value for answer in answers]
