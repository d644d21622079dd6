"""Which steps and ranks of a run a user picks, to profile them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import UserError

MOST_STEPS = 50
"""A trace of more is too large to look at, and to write while the training waits."""


@dataclass(frozen=True)
class StepRange:
    """Steps of a run from `first` to `last`, both included; the first step of a run is 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"


def parse_steps(text: str) -> StepRange:
    """The steps of "10-12" or "10"; another text is a ValueError with the fix."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if found is None:
        raise ValueError(f"profile is {text!r}: write the steps as FIRST-LAST, such as 10-12, or one step, such as 10")
    steps = StepRange(int(found[1]), int(found[2] or found[1]))
    if steps.first < 1:
        raise ValueError(f"profile is {text!r}: the first step of a run is 1")
    if steps.last < steps.first:
        raise ValueError(f"profile is {text!r}, which ends before it begins: write {steps.last}-{steps.first}")
    if steps.last - steps.first >= MOST_STEPS:
        count = steps.last - steps.first + 1
        raise ValueError(f"profile is {text!r}, {count} steps: profile at most {MOST_STEPS}, a few show as much")
    return steps


def parse_ranks(text: str) -> Sequence[int] | None:
    """The ranks of "0,3"; None for "all"; another text is a ValueError with the fix."""
    if text.strip() == "all":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d+", part) for part in parts):
        raise ValueError(f"profile_ranks is {text!r}: write ranks such as 0 or 0,3, or all")
    return sorted({int(part) for part in parts})


def ranks_of(text: str, world_size: int) -> Sequence[int]:
    """The ranks that a checked text means in a run of so many processes."""
    ranks = parse_ranks(text)
    if ranks is None:
        return range(world_size)
    if ranks[-1] >= world_size:
        have = "the run has rank 0 alone" if world_size == 1 else f"the ranks of this run are 0 to {world_size - 1}"
        raise UserError(f"--profile-ranks {text} names rank {ranks[-1]}", f"{have}; all means every one")
    return ranks


def check_in_reach(profile: str | None, total_steps: int | None) -> None:
    """Refuse steps that a run does not come to."""
    if profile is not None and total_steps is not None and parse_steps(profile).last > total_steps:
        raise UserError(
            f"profile is {profile!r} and the run has {total_steps} steps", "profile earlier ones, or do more"
        )
