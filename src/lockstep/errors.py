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


class StoppedTogetherError(RuntimeError):
    """All ranks stop at the same step, of one mind, and the weights are still those of the step before."""


class NonFiniteError(StoppedTogetherError):
    """The loss or the gradient of a step is NaN or infinite.

    For a loss, `rank` names who saw it; a gradient is a sum over ranks, so there `rank` is None and the samples are all
    of the step.
    """

    def __init__(self, what: str, step: int, rank: int | None, sample_ids: Sequence[int]) -> None:
        super().__init__(what, step, rank, list(sample_ids))
        self.what = what
        self.step = step
        self.rank = rank
        self.sample_ids = list(sample_ids)

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return (
            f"the {self.what} is not finite at step {self.step}{where} ({some_samples(self.sample_ids)}): "
            "look at these samples, or lower the learning rate if they are sound"
        )


class MemoryFullError(RuntimeError):
    """The device or the host has no memory left for this step. `micro_batch` is what one forward was given."""

    def __init__(self, text: str, micro_batch: int) -> None:
        super().__init__(text)
        self.micro_batch = micro_batch


class SpikeError(StoppedTogetherError):
    """The loss of a step is far above those of the steps before, and `recover.on_spike` is "stop"."""


class RecoveryError(StoppedTogetherError):
    """Skipping steps, or going back to a checkpoint, does not help any more, or cannot be done."""


class InvariantError(RuntimeError):
    """What has to be equal on several ranks is not, or the model is not the one that is trained. Not to be retried."""


class SaveError(RuntimeError):
    """A checkpoint could not be written. The ones before it are as they were."""


def some_samples(ids: Sequence[int], most: int = 16) -> str:
    """The first ids of a list of samples, to stand inside of a sentence."""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f"sample ids {', '.join(map(str, ids[:most]))}{more}"


def reason(error: OSError) -> str:
    """Why the system refused something, to stand inside of a sentence."""
    return (error.strerror or str(error)).lower()


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
