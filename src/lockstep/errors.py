"""What Lockstep says when it refuses or stops: one sentence with the cause, one with the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal


class UserError(ValueError):
    """The input is wrong. Commands print it as one sentence and exit with 2.

    Before the first step nothing was started or written; later what was learnt is kept, as after any exception.
    """

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

    `rank` is who saw it, where it was the samples of one rank alone, and `sample_ids` are those of the micro-batches
    whose loss it was; of these `with_nan` hold a NaN themselves. A gradient is a sum over ranks: there `rank` is None
    and the samples are all of the step. `tensor` names a parameter or buffer that was not finite before the step: then
    it was no sample.
    """

    def __init__(
        self,
        what: Literal["loss", "gradient"],
        step: int,
        rank: int | None,
        sample_ids: Sequence[int],
        tensor: str | None = None,
        with_nan: Sequence[int] = (),
        is_everywhere: bool = False,
    ) -> None:
        super().__init__(what, step, rank, list(sample_ids), tensor, list(with_nan), is_everywhere)
        self.what: Literal["loss", "gradient"] = what
        self.step = step
        self.rank = rank
        self.sample_ids = list(sample_ids)
        self.tensor = tensor
        self.with_nan = list(with_nan)
        self.is_everywhere = is_everywhere

    @property
    def cause(self) -> str:
        """What is not finite, and because of what."""
        if self.tensor is not None:
            return f"the {self.what} is not finite at step {self.step}, because {self.tensor} was not before it"
        of_all = " of every micro-batch" if self.is_everywhere else ""
        where = "" if self.rank is None else f" on rank {self.rank}"
        samples = some_samples(self.sample_ids)
        if self.with_nan:
            samples += f"; NaN is in {some_samples(self.with_nan)}"
        return f"the {self.what}{of_all} is not finite at step {self.step}{where} ({samples})"

    @property
    def fix(self) -> str:
        """What to do about it."""
        if self.tensor is not None and self.step == 1:
            return "look at how the model is built, or at the checkpoint that its weights come from"
        if self.tensor is not None:
            return "go back to an older checkpoint (--resume PATH) with a lower learning rate or clipped gradients"
        if self.is_everywhere and not self.with_nan:
            return (
                "lower the learning rate or clip the gradients, or look at these samples where they see each other "
                "(BatchNorm, a contrastive loss)"
            )
        return "look at these samples, or lower the learning rate if they are sound"

    def __str__(self) -> str:
        return f"{self.cause}: {self.fix}"


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


class SampleError(RuntimeError):
    """Samples could not be read: which, why, and the innermost line of the user's code where one raised."""

    def __init__(self, samples: str, why: str, where: str = "") -> None:
        super().__init__(samples, why, where)
        self.samples = samples
        self.why = why
        self.where = where

    @property
    def text(self) -> str:
        """All but the line."""
        return f"{self.samples} could not be read: {self.why}"

    def __str__(self) -> str:
        return f"{self.text} (at {self.where})" if self.where else self.text


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
