"""How a run stands, in one word: derived here from its event log, for everybody who says it.

Only the heads of events and the few fields that decide are looked at, so that an event which another version wrote, or
which lacks something else, still counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.record.log import LogReader

State = Literal["queued", "starting", "running", "restarting", "stopped", "failed", "lost", "finished"]
"""`lost`: no event says that it ended, and none came for long."""
GOES_ON: tuple[State, ...] = ("starting", "running", "restarting")

SILENCE = 600.0
"""Seconds without an event after which a run that has not ended is lost: to load and compile may take minutes."""
SILENT_STEPS = 20
"""The same in steps, where these take long."""
OVER: Mapping[str, State] = {
    **dict.fromkeys(("TIMEOUT", "PREEMPTED", "CANCELLED", "COMPLETED"), "stopped"),
    **dict.fromkeys(("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"), "failed"),
}
"""What Slurm calls a job that is over, and what that means for an attempt that says nothing itself."""
ENDINGS = ("end", "stop", "failure")
"""The kinds of events that say how an attempt ended."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")


@dataclass
class AttemptState:
    """One start of a run, as far as it was read: when it was heard of, and how it says that it ended."""

    number: int
    begin: float = math.inf
    end: float = -math.inf
    """The times of its first event and of its last."""
    first_step: int | None = None
    step_seconds: float = 0.0
    """Of its last step."""
    last_word: str = ""
    """The kind of the event that says how it ended: "end", "stop" or "failure"."""
    ending: State | None = None
    restarts: bool = False
    """Whether its failure says that another attempt follows."""
    why: str = ""
    job: str = ""
    job_state: str = ""
    """Where Slurm says that the job of this attempt is over."""

    def hear_ending(self, event: Mapping[str, Any]) -> None:
        """An `end`, `stop` or `failure`. The launcher, who tells of failures, knows more than a rank that stops."""
        kind, why = event["kind"], str(event.get("text", ""))
        if kind == "stop" and self.last_word == "failure":
            return
        failed = kind == "failure" or event.get("reason") == "failed"
        self.ending = "finished" if kind == "end" else "failed" if failed else "stopped"
        self.restarts = kind == "failure" and event.get("restarted") is True
        self.last_word, self.why = kind, why

    def hear_job(self, job: str, state: str) -> None:
        """At a start, Slurm's word on the start before comes first: that is not of this attempt."""
        if state == "RUNNING":
            self.job = job
        elif state != "PENDING" and math.isfinite(self.begin):
            self.job, self.job_state = self.job or job, state.split()[0] if state else ""

    def state(self, now: float, *, is_last: bool = True) -> State:
        """How it ended, or that it still goes on."""
        is_silent = now - self.end > max(SILENCE, SILENT_STEPS * self.step_seconds)
        if self.ending is not None:
            return "restarting" if self.restarts and is_last and not is_silent else self.ending
        if self.job_state in OVER:
            return OVER[self.job_state]
        if is_silent or not is_last:
            return "lost"
        return "starting" if self.first_step is None else "running"


@dataclass(frozen=True)
class JobWord:
    """What Slurm has said of the run's job since the run itself said anything."""

    state: str = ""
    time: float = 0.0
    attempt: int = 0


NO_WORD = JobWord()


def state_of(newest: AttemptState | None, job: JobWord, now: float, changed: float) -> State:
    """The state of a run: from its newest attempt, Slurm's word after it, and when the log was last written."""
    if job.state in WAITING:
        return "queued"
    is_new_start = newest is None or newest.ending is not None or job.attempt > newest.number
    if job.state and job.state not in OVER and is_new_start:
        return "starting" if now - job.time <= SILENCE else "lost"
    if newest is not None and (newest.ending is not None or job.state not in OVER):
        return newest.state(now)
    if job.state:
        return OVER[job.state]
    if not changed:
        return "queued"  # it has not said anything yet
    return "starting" if now - changed <= SILENCE else "lost"


@dataclass
class RunState:
    """How far a run is, from the objects of its log, one after another."""

    newest: AttemptState | None = None
    """The last start that has told of itself."""
    starts: int = 0
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    micro_batch: int | None = None
    job: str | None = None
    job_state: str | None = None
    damaged: int = 0
    """Lines that cannot be read."""
    changed: float = 0.0
    """When the log was last written."""
    _job_word: JobWord = NO_WORD
    _shrunk: list[tuple[int, int]] = field(default_factory=list)

    @property
    def attempt(self) -> int:
        """The number of the last start, 0 before the first."""
        return self.newest.number if self.newest else 0

    def state(self, now: float) -> State:
        """How the run stands."""
        return state_of(self.newest, self._job_word, now, self.changed)

    @property
    def is_finished(self) -> bool:
        """Whether its last start has come to the end."""
        return self.newest is not None and self.newest.ending == "finished"

    def most_since(self, first: int) -> int | None:
        """The micro-batch that memory had room for, where it ran out since the attempt `first`."""
        return next((size for attempt, size in reversed(self._shrunk) if attempt >= first), None)

    def take(self, event: dict[str, Any] | str) -> None:
        """One more line of the log, as its reader gives it."""
        if isinstance(event, str):
            self.damaged += 1
            return
        kind, time, number = event["kind"], event["time"], event["attempt"]
        if kind == "job":
            self._take_job(event, time)
            return
        self._job_word = NO_WORD
        if self.newest is None or number > self.newest.number:
            self.newest = AttemptState(number, time)
        attempt = self.newest
        if number < attempt.number:  # told late, by a start that lost the run
            return
        attempt.end = max(attempt.end, time)
        if kind == "step":
            self.step = _whole(event.get("step")) or self.step
            self.loss = _number(event.get("loss"))
            attempt.first_step = attempt.first_step or self.step
            attempt.step_seconds = _number(event.get("seconds")) or 0.0
        elif kind == "start":
            self.starts += 1
            self.total_steps, self.micro_batch = _whole(event.get("total_steps")), _whole(event.get("micro_batch"))
        elif kind in ENDINGS:
            attempt.hear_ending(event)
            if kind == "failure" and (size := _whole(event.get("micro_batch"))):
                self._shrunk.append((number, size))

    def _take_job(self, event: Mapping[str, Any], time: float) -> None:
        self.job, self.job_state = str(event.get("id")), str(event.get("state"))
        self._job_word = JobWord(self.job_state, time, event["attempt"])
        if self.newest is not None and event["attempt"] == self.newest.number:
            self.newest.hear_job(self.job, self.job_state)


def read_state(log: Path) -> RunState:
    """How far the run is that writes this log, which may not be there yet."""
    run, reader = RunState(), LogReader(log)
    for event in reader.read():
        run.take(event)
    run.changed = reader.changed
    return run


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _number(value: object) -> float | None:
    """A number, of those too that JSON cannot write."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None
