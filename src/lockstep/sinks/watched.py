"""What is known of a run from its events so far: the state behind `lockstep watch`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lockstep.record.events import (
    AlarmEvent,
    CheckpointEvent,
    Event,
    FailureEvent,
    MachineEvent,
    MessageEvent,
    RanksEvent,
    StartEvent,
    StepEvent,
    TestEvent,
    ValidationEvent,
    settled,
)
from lockstep.record.run_state import SILENT_STEPS, RunState
from lockstep.sinks.console import Pace
from lockstep.text.units import clock, how_many

MOST_POINTS = 1024
SECONDS_FOR_A_VERDICT = 10.0
"""So long after a stop the launcher may still say why, or that it starts the run again."""
SECONDS_OF_SILENCE = 60.0


@dataclass
class LossCurve:
    """The loss over a run's steps in little memory: neighbours are merged, their extremes stay."""

    points: list[tuple[int, float, float]] = field(default_factory=list)
    """First step, lowest and highest loss of `width` steps each."""
    width: int = 1
    _in_last: int = 0

    def add(self, step: int, loss: float) -> None:
        """One more step. Of one that is done again the later loss counts; what is not finite cannot be drawn."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
            self._in_last = self.width
        if not math.isfinite(loss):
            return
        if self.points and self._in_last < self.width:
            first, low, high = self.points[-1]
            self.points[-1] = (first, min(low, loss), max(high, loss))
            self._in_last += 1
            return
        self.points.append((step, loss, loss))
        self._in_last = 1
        if len(self.points) > MOST_POINTS:
            self._merge()

    def _merge(self) -> None:
        pairs = zip(self.points[::2], self.points[1::2], strict=False)
        last = [self.points[-1]] * (len(self.points) % 2)
        self.points = [(one[0], min(one[1], two[1]), max(one[2], two[2])) for one, two in pairs] + last
        self._in_last += 0 if last else self.width
        self.width *= 2


@dataclass
class Watched:
    """A run as its events tell it. Kinds and fields that this version does not know are passed over."""

    run: RunState = field(default_factory=RunState)
    why: str = ""
    """What it waits for, or how it ended."""
    start: StartEvent | None = None
    step: StepEvent | None = None
    validation: ValidationEvent | None = None
    best: tuple[float, int] | None = None
    test: TestEvent | None = None
    checkpoint: CheckpointEvent | None = None
    ranks: RanksEvent | None = None
    machine: MachineEvent | None = None
    losses: LossCurve = field(default_factory=LossCurve)
    pace: Pace = field(default_factory=Pace)
    logged: dict[str, float] = field(default_factory=dict)
    warnings: deque[AlarmEvent | MessageEvent | FailureEvent] = field(default_factory=lambda: deque(maxlen=5))

    def take(self, told: dict[str, Any] | str) -> Event | None:
        """One more line of the log, as its reader gives it; returns the event, or None where it cannot be read."""
        self.run.take(told)
        event = settled(told) if isinstance(told, dict) else None
        if event is not None:
            self._take(event)
        elif isinstance(told, dict):
            self.run.damaged += 1
        return event

    @property
    def last_time(self) -> float | None:
        """When it was last heard of."""
        return self.run.newest.end if self.run.newest else None

    def is_over(self, now: float) -> bool:
        """Whether nothing more is to come."""
        state = self.run.state(now)
        if state in ("failed", "stopped"):
            return now - (self.last_time or 0.0) > SECONDS_FOR_A_VERDICT
        return state == "finished"

    def silence(self, now: float) -> str:
        """A word where a run that should say something has not for long."""
        if self.last_time is None or self.run.state(now) in ("failed", "stopped", "finished", "queued"):
            return ""
        patience = max(SECONDS_OF_SILENCE, SILENT_STEPS * (self.step["seconds"] if self.step else 0.0))
        quiet = now - self.last_time
        return f"no event for {clock(quiet)}: it may have died, or its host" if quiet > patience else ""

    def damage(self) -> str:
        """A word where lines of the log could not be read."""
        return f"{how_many(self.run.damaged, 'line')} of the log could not be read" if self.run.damaged else ""

    def _take(self, event: Event) -> None:
        match event["kind"]:
            case "status":
                self.why = event["text"]
            case "start":
                self.start, self.step, self.why = event, None, "waiting for the first step"
                self.pace, self.logged = Pace(), {}
            case "step":
                self.why = ""
                self.pace.add(event)
                self.losses.add(event["step"], event["loss"])
                self.step = event
            case "metric":
                self.logged |= event["values"]
            case "validation":
                self.why = ""
                self.pace.pause_seconds += event["seconds"]
                self.validation = event
                if event["best"]:
                    self.best = (event["loss"], event["step"])
            case "test":
                self.test = event
            case "checkpoint":
                self.why = ""
                self.pace.pause_seconds += event["stall"]
                self.checkpoint = event
            case "ranks":
                self.ranks = event
            case "machine":
                self.machine = event
            case "alarm":
                self.warnings.append(event)
            case "message" if event["level"] == "warning":  # stragglers too are said as one
                self.warnings.append(event)
            case "failure":
                self.why = event["text"]
                if event["restarted"]:
                    self.warnings.append(event)
            case "stop":
                self.why = event["text"]
            case "end":
                self.why = ""
            case "job" if self.run.newest is None:
                self.why = f"job {event['id']} is {event['state'].lower()}"
