"""What Lockstep says when it refuses or stops: one sentence with the cause, one with the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """The input is wrong. Commands print it as one sentence and exit with 2; nothing was started or written."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(cause, fix)
        self.cause = cause
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.cause}: {self.fix}"


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is NaN or infinite. Nothing is saved any more.

    For a loss, `rank` names who saw it and the weights are still those of the step before; a gradient is a sum over
    ranks, so there `rank` is None and the samples are all of the step.
    """

    def __init__(self, what: str, step: int, rank: int | None, sample_ids: Sequence[int]) -> None:
        super().__init__(what, step, rank, list(sample_ids))
        self.what = what
        self.step = step
        self.rank = rank
        self.sample_ids = list(sample_ids)

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        shown = ", ".join(map(str, self.sample_ids[:16]))
        more = f" and {len(self.sample_ids) - 16} more" if len(self.sample_ids) > 16 else ""
        return (
            f"the {self.what} is not finite at step {self.step}{where} (sample ids {shown}{more}): "
            "look at these samples, or lower the learning rate if they are sound"
        )


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option a user most likely meant by `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(name, list(options), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown(kind: str, name: str, options: Iterable[str]) -> UserError:
    """The error for a name that is not one of `options`: says the nearest one, else all of them."""
    options = list(options)
    close = nearest(name, options)
    fix = f"did you mean {close!r}?" if close else f"choose one of {', '.join(options)}"
    return UserError(f"unknown {kind} {name!r}", fix)
