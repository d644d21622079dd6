"""Numbers that are not as they should be: what a step does about them, decided by all ranks together.

Non-finite losses are known when the ranks have exchanged theirs, spikes too; non-finite gradients once their norm is
read. Every rank has the same numbers by then and comes to the same decision: warn, skip the step, go back to the last
checkpoint, or stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.config.schema import RecoverConfig
from lockstep.errors import NonFiniteError, RecoveryError, SpikeError, StoppedTogetherError, some_samples
from lockstep.step.spikes import Spike

MOST_SKIPS = 10
"""So many steps in a row that had to be skipped are a training that learns nothing any more."""
MOST_ROLLBACKS = 3
"""Going back to one checkpoint so many times: what is wrong comes back every time."""

Action = Literal["warn", "skip", "rollback", "stop"]


@dataclass(frozen=True)
class Alarm:
    """What is wrong with a step, and what is done about it; equal on every rank.

    `what` is "loss" or "gradient" (not finite), or "spike". `rank` and its samples where one rank alone saw it, else
    None and all samples that may have caused it, none where it was the weights.
    """

    what: Literal["loss", "gradient", "spike"]
    step: int
    rank: int | None
    sample_ids: list[int]
    loss: float
    action: Action
    text: str


@dataclass(frozen=True)
class Surroundings:
    """What the run does for a step whose numbers are wrong: tell people, and go back to its last checkpoint.

    `rollback_target` is the step of that checkpoint, None where there is none. `roll_back` is told the step that the
    engine goes on from.
    """

    tell: Callable[[Alarm], None]
    rollback_target: Callable[[], int | None]
    roll_back: Callable[[int], None]


class Recovery:
    """The policy of a run, and how often it had to be used. Every rank calls everything here with the same numbers."""

    def __init__(self, config: RecoverConfig, surroundings: Surroundings | None = None) -> None:
        self.config = config
        self._surroundings = surroundings
        self._skipped_in_a_row = 0
        self._rollbacks = (-1, 0)  # to which step, and how many times

    @property
    def reads_gradients(self) -> bool:
        """Whether the gradient norm is read before every update, for which a GPU is waited for."""
        return self.config.on_nonfinite != "stop"

    def nonfinite(self, error: NonFiniteError, loss: float) -> Alarm:
        """The loss or the gradient of a step is not finite; raises where the run is to stop."""
        action = self.config.on_nonfinite
        if error.tensor is not None and action == "skip":
            action = "stop"  # the next step would have the same weights
        return self._decided(error.what, error.step, error.rank, error.sample_ids, loss, action, error.cause, error)

    def spike(
        self, found: Spike | None, loss: float, step: int, everybodys_ids: Callable[[], list[int]]
    ) -> Alarm | None:
        """What to do about a finite loss that may be a spike; raises where the run is to stop."""
        if found is None or (self.config.on_spike == "warn" and not found.first):
            return None
        ids = everybodys_ids()
        sentence = _spike_text(found, step, ids)
        error = SpikeError(f"{sentence}: look at these samples, or lower the learning rate if they are sound")
        alarm = self._decided("spike", step, None, ids, loss, self.config.on_spike, sentence, error)
        if alarm.action == "warn":
            self._tell(alarm)
            return None
        return alarm

    def fine(self) -> None:
        """A step has changed the weights."""
        self._skipped_in_a_row = 0

    def act(self, alarm: Alarm) -> None:
        """The step is counted and its samples are used up, the weights are as they were: do what was decided."""
        self._tell(alarm)
        if alarm.what != "spike":
            self._skipped_in_a_row += 1
        if alarm.action == "rollback" and self._surroundings is not None:
            self._skipped_in_a_row = 0
            self._surroundings.roll_back(alarm.step)

    def _decided(
        self,
        what: Literal["loss", "gradient", "spike"],
        step: int,
        rank: int | None,
        ids: Sequence[int],
        loss: float,
        action: Action,
        sentence: str,
        error: StoppedTogetherError,
    ) -> Alarm:
        then = {"warn": "the training goes on", "stop": "the run stops"}
        then["skip"] = "the step is skipped, weights and optimizer stay as they were"
        if action == "skip" and what != "spike" and self._skipped_in_a_row + 1 >= MOST_SKIPS:
            action, error = "stop", _too_many_skips(sentence)
        if action == "rollback":
            target = self._surroundings.rollback_target() if self._surroundings else None
            times = self._rollbacks[1] + 1 if self._rollbacks[0] == target else 1
            if target is None:
                action, error = "stop", _nowhere_to_go(sentence, "on_spike" if what == "spike" else "on_nonfinite")
            elif times >= MOST_ROLLBACKS:
                action, error = "stop", _comes_back(sentence, target, times - 1)
            else:
                self._rollbacks = (target, times)
                then["rollback"] = f"the run goes back to the checkpoint of step {target}"
        alarm = Alarm(what, step, rank, list(ids), loss, action, f"{sentence}: {then[action]}")
        if action == "stop":
            self._tell(alarm)
            raise error
        return alarm

    def _tell(self, alarm: Alarm) -> None:
        if self._surroundings is not None:
            self._surroundings.tell(alarm)


def _spike_text(spike: Spike, step: int, ids: Sequence[int]) -> str:
    rises = f"the loss jumps to {spike.loss:.4g} at step {step}, {spike.factor:.1f} times the {spike.level:.4g} before"
    return f"{rises} ({some_samples(ids)})"


def _too_many_skips(sentence: str) -> RecoveryError:
    return RecoveryError(
        f"{sentence}, and the {MOST_SKIPS - 1} steps before it had to be skipped too: nothing is learnt any more, "
        "lower the learning rate, or go back to an older checkpoint (--resume PATH)"
    )


def _nowhere_to_go(sentence: str, key: str) -> RecoveryError:
    return RecoveryError(
        f"{sentence}, and the run has no checkpoint to go back to: save earlier (save_every), or skip such steps "
        f'(recover.{key} = "skip")'
    )


def _comes_back(sentence: str, target: int, times: int) -> RecoveryError:
    return RecoveryError(
        f"{sentence}, after the run went back to the checkpoint of step {target} {times} times: lower the learning "
        "rate, or go back to an older checkpoint (--resume PATH)"
    )
