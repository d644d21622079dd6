"""The events of a run as they are read, kept as what a page needs: never the events themselves.

Steps take 80 bytes each (steps.py); all else is bounded, however long the run.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.page.panels import Level, Timetable
from lockstep.page.reading.damage import (
    Damage,
    Fields,
    UnusableError,
    cut,
    finite,
    finite_or_none,
    inner,
    number,
    text,
    whole,
    whole_or_none,
)
from lockstep.page.reading.machines import Machines
from lockstep.page.reading.moments import Moments
from lockstep.page.reading.predicted import Predictions
from lockstep.page.reading.profiles import MOST_PROFILES, Profile, profile_of, timetable_of
from lockstep.page.reading.ranktimes import RankTimes
from lockstep.page.reading.series import Series
from lockstep.page.reading.starts import Attempt, started_of
from lockstep.page.reading.steps import FIELDS, Steps, pack, values_of
from lockstep.page.reading.summary import StragglerSummary
from lockstep.record.log import LATEST
from lockstep.record.run_state import ENDINGS, NO_WORD, JobWord
from lockstep.text.units import duration_text, loss_text, seconds_text

MOST_ATTEMPTS = 10_000
MOST_METRICS = 40
MOST_BASELINES = 10
MOST_STRAGGLERS = 1000
MOST_CHECKPOINTS = 200
"""The last ones, for the table."""
MOST_SAMPLES = 5
LONGEST_CONFIG = 100_000
CLOCK_BACK = 1.0
"""Seconds that the clock may go back before it is worth a word."""
BEHIND_THE_STEPS = {"step", "validation", "metric", "ranks", "machine", "checkpoint", "timetable"}
"""What an attempt may not add to once a later one has done steps."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint."""

    time: float
    attempt: int
    step: int
    path: str
    seconds: float
    stall: float
    size: int
    best: bool


class Digest:
    """All that is known of a run so far."""

    def __init__(self) -> None:
        self.damage = Damage()
        self.events = 0
        self.attempts: dict[int, Attempt] = {}
        self.first_time = math.inf
        self.steps = Steps()
        self.ranks = RankTimes(self.damage)
        self.machines = Machines(self.damage)
        self.moments = Moments()
        self.validation = Series()
        self.best: list[tuple[int, float]] = []
        """Validations with the lowest loss so far, of steps that still count."""
        self.scores: dict[str, Series] = {}
        self.metrics: dict[str, Series] = {}
        self.metrics_left_out: set[str] = set()
        self.baselines: dict[str, float] = {}
        self.test: tuple[int, float, dict[str, float]] | None = None
        self.flops: Mapping[str, object] = {}
        self.predicted = Predictions()
        self.settings = ""
        self.chosen: dict[str, str] = {}
        self.micro_batch: int | None = None
        """Where it was chosen while running, in the last attempt."""
        self.timetable: Timetable | None = None
        self.profiles: deque[Profile] = deque(maxlen=MOST_PROFILES)
        self.samples: deque[tuple[int, str, str]] = deque(maxlen=MOST_SAMPLES)
        self.saved: deque[SavedCheckpoint] = deque(maxlen=MOST_CHECKPOINTS)
        self.saving, self.stalling = Series(), Series()
        self.checkpoints, self.stalls, self.largest = 0, 0.0, 0
        self.stragglers: dict[tuple[int | None, str], StragglerSummary] = {}
        self.alarms: deque[tuple[int, str]] = deque(maxlen=50)
        self.not_finite = ""
        """What stopped the last attempt: "loss of step 20"."""
        self.alarm_count = self.warning_count = 0
        self.job_word = NO_WORD
        self._newest = 0  # of the attempts that have done steps
        self._attempt = Attempt(0)
        self._time = 0.0
        self._waits_since = 0.0
        self._line = 0
        self._handlers = {
            **{name.removeprefix("_take_"): getattr(self, name) for name in dir(self) if name.startswith("_take_")},
            "prediction": self.predicted.take,
            "prediction_error": self.predicted.take_error,
        }

    def take(self, event: dict[str, Any] | str, line: int) -> None:
        """What the log's reader found in this line; what cannot be used is counted."""
        if isinstance(event, str):
            self.damage.line(event, line)
            return
        kind, time, number_of = event["kind"], event["time"], event["attempt"]
        handler = self._handlers.get(kind)
        if handler is None:
            self.damage.unknown_kind(kind, line)
            return
        attempt = self._attempt
        if attempt.number != number_of:
            found = self._attempt_of(number_of, line)
            if found is None:
                return
            attempt = self._attempt = found
        if number_of < self._newest and kind in BEHIND_THE_STEPS:
            self._late(attempt, line)
            return
        self._time, self._line = time, line
        if kind in ENDINGS:  # whatever else it lacks
            attempt.hear_ending(event)
        try:
            handler(event)
        except UnusableError as error:
            self.damage.event(kind, str(error), line)
            return
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            # Nothing in a file may keep the page from opening, also what nobody has thought of.
            self.damage.event(kind, f"it is not understood ({type(error).__name__})", line)
            return
        self.events += 1
        if time < self.first_time:
            self.first_time = time
        if kind != "job":  # told from outside, at any time
            self.job_word = NO_WORD
            if time > attempt.end:
                attempt.end = time
            elif time < attempt.end - CLOCK_BACK:
                self._clock_went_back(line)
            if time < attempt.begin:
                attempt.begin = time

    def _attempt_of(self, number_of: int, line: int) -> Attempt | None:
        found = self.attempts.get(number_of)
        if found is None:
            if len(self.attempts) >= MOST_ATTEMPTS:
                self.damage.line(f"of more than {MOST_ATTEMPTS:,} attempts", line)
                return None
            found = self.attempts[number_of] = Attempt(number_of)
        return found

    def _late(self, attempt: Attempt, line: int) -> None:
        newest = self._newest
        self.damage.count(
            f"late {attempt.number} {newest}",
            line,
            lambda count, where: (
                f"attempt {attempt.number} still wrote after attempt {newest} had done its first step: "
                f"{count:,} event{'' if count == 1 else 's'} ({where}) left out; two of them must not run at once"
            ),
        )

    def _clock_went_back(self, line: int) -> None:
        self.damage.count(
            "clock",
            line,
            lambda count, where: (
                f"the clock went back by more than {CLOCK_BACK:.0f} s {count:,} time{'' if count == 1 else 's'} "
                f"({where}): what is counted from one event to another is wrong by that much"
            ),
        )

    def _say(self, level: Level, what: str, said: str, step: int | None = None) -> None:
        self.moments.add(self._time, self._attempt.number, step, level, what, said)

    def _take_step(self, event: Fields) -> None:
        attempt, step = self._attempt, event.get("step")
        if type(step) is not int or not 0 < step < LATEST:
            raise UnusableError("its field 'step' is not a whole number from 1")
        try:
            row = pack(*values_of(event))
        except (KeyError, struct.error, OverflowError):
            # Logs of versions before this one know nothing of padding.
            values = [number(event, name) for name in FIELDS[:-1] if name != "padding" or name in event]
            values = values if "padding" in event else [*values[:-1], 0.0, values[-1]]
            row = pack(*values, event.get("skipped") is True)
        seconds = event["seconds"]
        if isinstance(seconds, str) or not 0 <= seconds < LATEST:
            raise UnusableError("its field 'seconds' is not a time")
        self.steps.add(attempt.number, row)
        self._newest = attempt.number
        if attempt.first_step is None:
            attempt.before_steps = attempt.accounted
            attempt.first_step, attempt.first_done, attempt.first_seconds = step, self._time, seconds
        attempt.last_step, attempt.done_until, attempt.step_seconds = step, self._time, seconds
        attempt.in_steps += seconds

    def _take_start(self, event: Fields) -> None:
        attempt = self._attempt
        attempt.started = started_of(event)
        self.micro_batch, self.not_finite = None, ""
        since = attempt.started.resumed_from_step
        after = f", after step {since}" if since else ""
        self._say("info", "start", f"attempt {attempt.number} starts: {attempt.started.layout}{after}", since)

    def _take_status(self, _: Fields) -> None:
        """What it waits for is of no interest later, but since when it does."""
        self._waits_since = self._time

    def _take_validation(self, event: Fields) -> None:
        step, loss, seconds = whole(event, "step"), number(event, "loss"), finite(event, "seconds")
        scores = _values(inner(event, "metrics"))
        self._attempt.validation += seconds
        self._attempt.done_until = self._time
        self.validation.add(step, loss)
        while self.best and self.best[-1][0] >= step:
            self.best.pop()
        if math.isfinite(loss) and (not self.best or loss < self.best[-1][1]):
            self.best.append((step, loss))
        for name, value in scores.items():
            self._add(self.scores, name, step, value)
        best = ", the best so far" if event.get("best") is True else ""
        self._say("good" if best else "info", "validation", f"validation loss {loss_text(loss)}{best}", step)

    def _add(self, kept: dict[str, Series], name: str, step: int, value: float) -> None:
        name = cut(name, 60)
        if name not in kept and len(kept) >= MOST_METRICS:
            if len(self.metrics_left_out) < 1000:
                self.metrics_left_out.add(name)
            return
        kept.setdefault(name, Series()).add(step, value)

    def _take_test(self, event: Fields) -> None:
        step, loss, seconds = whole(event, "step"), number(event, "loss"), finite(event, "seconds")
        self.test = (step, loss, _values(inner(event, "metrics")))
        self._attempt.validation += seconds
        self._attempt.done_until = self._time
        self._say("good", "test", f"test loss {loss_text(loss)} with the weights of step {step}", step)

    def _take_checkpoint(self, event: Fields) -> None:
        attempt, step, size = self._attempt, whole(event, "step"), whole(event, "bytes")
        seconds, stall, best = finite(event, "seconds"), finite(event, "stall"), event.get("best") is True
        path = text(event, "path", 120)
        self.saved.append(SavedCheckpoint(self._time, attempt.number, step, path, seconds, stall, size, best))
        self.saving.add(step, seconds)
        self.stalling.add(step, stall)
        attempt.saved_step = step
        attempt.stalls += stall
        if attempt.first_step is not None and step < attempt.first_step:
            attempt.before_steps += stall  # written in the background, and told of when it was on disk
        self.checkpoints, self.stalls, self.largest = self.checkpoints + 1, self.stalls + stall, max(self.largest, size)
        self._say("info", "checkpoint", f"{path} is on disk after {seconds_text(seconds)}", step)

    def _take_metric(self, event: Fields) -> None:
        step = whole(event, "step")
        for name, value in inner(event, "values").items():
            field = f"values.{cut(name, 40)}"
            self._add(self.metrics, name, step, number({field: value}, field))

    def _take_baseline(self, event: Fields) -> None:
        if len(self.baselines) < MOST_BASELINES:
            self.baselines[text(event, "name", 60)] = number(event, "loss")

    def _take_sample(self, event: Fields) -> None:
        attempt = self._attempt
        if self._waits_since >= attempt.done_until > 0:
            attempt.validation += max(0.0, self._time - self._waits_since)
            attempt.done_until = self._time
        self.samples.append((whole(event, "step"), text(event, "prompt"), text(event, "text", 4000)))

    def _take_message(self, event: Fields) -> None:
        said = text(event, "text")
        if event.get("level") == "warning":
            self.warning_count += 1
            self._say("warning", "warning", said)

    def _take_failure(self, event: Fields) -> None:
        attempt, said = self._attempt, text(event, "text")
        where = text(event, "where")
        then = "; it is started again" if attempt.restarts else ""
        self.moments.only_followed(attempt.number)
        self._say("error", "failure", f"{said}{f' ({where})' if where else ''}{then}", whole_or_none(event, "step"))

    def _take_recovered(self, event: Fields) -> None:
        step, parts = whole(event, "step"), inner(event, "seconds")
        spent = [finite(parts, name) for name in ("stop", "start", "load", "step")]
        self._say("good", "recovered", f"training again {duration_text(sum(spent))} after the failure", step)

    def _take_alarm(self, event: Fields) -> None:
        step, said = whole(event, "step"), text(event, "text")
        self.alarm_count += 1
        what = text(event, "what", 20)
        self.alarms.append((step, what))
        if event.get("action") == "stop" and what in ("loss", "gradient"):
            self.not_finite = f"{what} of step {step}"
        self._say("warning", "alarm", said, step)

    def _take_ranks(self, event: Fields) -> None:
        self.ranks.take(event, self._time, self._attempt, self._line)

    def _take_machine(self, event: Fields) -> None:
        self.machines.take(event, self._time, self._attempt, self._line)

    def _take_timetable(self, event: Fields) -> None:
        self.timetable = timetable_of(event)

    def _take_flops(self, event: Fields) -> None:
        self.flops = {
            "per_sample": finite_or_none(event, "per_sample"),
            "peak": finite_or_none(event, "peak"),
            "source": text(event, "source"),
            "reason": text(event, "reason"),
        }

    def _take_settings(self, event: Fields) -> None:
        self.settings = text(event, "text", LONGEST_CONFIG)

    def _take_config(self, event: Fields) -> None:
        chosen = event.get("micro_batch")
        self.micro_batch = chosen if type(chosen) is int and chosen > 0 else self.micro_batch
        for name, value in event.items():
            if name not in ("time", "kind", "attempt") and len(self.chosen) < 1000:
                self.chosen[cut(name)] = cut(str(value))

    def _take_profile(self, event: Fields) -> None:
        attempt = self._attempt
        profile = profile_of(event, on_cpu=attempt.started is not None and attempt.started.device == "cpu")
        self.profiles.append(profile)
        if attempt.done_until:
            # The ranks wrote their traces at the same time, and are told of one after the other.
            attempt.profiling += max(0.0, self._time - attempt.done_until)
            attempt.done_until = self._time
        attempt.profiled.add((profile.first_step, profile.last_step))
        self._say("info", "profile", profile.text, profile.first_step)

    def _take_straggler(self, event: Fields) -> None:
        rank, cause = whole_or_none(event, "rank"), text(event, "cause", 40)
        host = None if event.get("host") is None else text(event, "host", 120)
        others, said = finite_or_none(event, "others"), text(event, "text")
        before = self.stragglers.get((rank, cause))
        if before is None and len(self.stragglers) >= MOST_STRAGGLERS:
            return
        times = before.times + 1 if before else 1
        found = StragglerSummary(rank, host, cause, finite(event, "seconds"), others, said, times)
        self.stragglers[rank, cause] = found
        self._say("warning", "straggler", said, whole(event, "step"))

    def _take_job(self, event: Fields) -> None:
        state, job = text(event, "state", 40), text(event, "id", 60)
        nodes, reason = text(event, "nodes"), text(event, "reason")
        self._attempt.hear_job(job, state)
        self.job_word = JobWord(state, self._time, event["attempt"])
        more = "".join(f", {part}" for part in (nodes and f"on {nodes}", reason if reason != "None" else "") if part)
        self._say("info", "job", f"Slurm job {job} is {state}{more}")

    def _take_stop(self, event: Fields) -> None:
        said, reason = text(event, "text"), text(event, "reason", 40)
        self._say("error" if reason == "failed" else "warning", "stop", f"{reason}: {said}", whole(event, "step"))

    def _take_end(self, event: Fields) -> None:
        step = whole(event, "step")
        self._say("good", "end", f"finished after step {step}", step)


def _values(metrics: Fields) -> dict[str, float]:
    return {name: number(inner(metrics, name), "value") for name in list(metrics)[: 2 * MOST_METRICS]}
