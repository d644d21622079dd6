"""What is known of a run from its events so far: the state behind `lockstep watch`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from lockstep.page.reading.starts import SILENCE, SILENT_STEPS
from lockstep.record.events import Event
from lockstep.sinks.console import Pace
from lockstep.text.console_text import clock

State = Literal["waiting", "starting", "running", "restarting", "stopped", "failed", "finished"]

MOST_POINTS = 1024
MOST_WARNINGS = 5
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

    state: State = "waiting"
    why: str = ""
    """What it waits for, or how it ended."""
    attempts: int = 0
    start: Event | None = None
    step: Event | None = None
    validation: Event | None = None
    best: tuple[float, int] | None = None
    test: Event | None = None
    checkpoint: Event | None = None
    ranks: Event | None = None
    machine: Event | None = None
    losses: LossCurve = field(default_factory=LossCurve)
    pace: Pace = field(default_factory=Pace)
    logged: dict[str, float] = field(default_factory=dict)
    warnings: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_WARNINGS))
    last_time: float | None = None
    unreadable: int = 0

    def take(self, event: Event | None) -> None:
        """One more line of the log; None is one that could not be read."""
        if event is None:
            self.unreadable += 1
        else:
            self._take(event)

    @property
    def total_steps(self) -> int | None:
        """How many it will be, where that is known."""
        return self.start["total_steps"] if self.start else None

    def is_over(self, now: float) -> bool:
        """Whether nothing more is to come."""
        if self.state in ("failed", "stopped"):
            return now - (self.last_time or 0.0) > SECONDS_FOR_A_VERDICT
        return self.state == "finished"

    def is_lost(self, now: float) -> bool:
        """Whether it is taken for dead, by the rule of the report."""
        if self.last_time is None or self.state in ("waiting", "failed", "stopped", "finished"):
            return False
        return now - self.last_time > max(SILENCE, SILENT_STEPS * (self.step["seconds"] if self.step else 0.0))

    def silence(self, now: float) -> str:
        """A word where a run that should say something has not for long."""
        if self.last_time is None or self.state in ("failed", "stopped", "finished"):
            return ""
        patience = max(SECONDS_OF_SILENCE, SILENT_STEPS * (self.step["seconds"] if self.step else 0.0))
        quiet = now - self.last_time
        return f"no event for {clock(quiet)}: it may have died, or its host" if quiet > patience else ""

    def damage(self) -> str:
        """A word where lines of the log could not be read."""
        plural = "" if self.unreadable == 1 else "s"
        return f"{self.unreadable} line{plural} of the log could not be read" if self.unreadable else ""

    def _take(self, event: Event) -> None:
        kind = event["kind"]
        if kind != "job":  # told from outside, at any time
            self.last_time = event["time"]
        match kind:
            case "status":
                self.state, self.why = "running" if self.step else "starting", event["text"]
            case "start":
                self.start, self.step, self.state, self.why = event, None, "running", "waiting for the first step"
                self.attempts, self.pace, self.logged = self.attempts + 1, Pace(), {}
            case "step":
                self.state, self.why = "running", ""
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
                self.state = "restarting" if event["restarted"] else "failed"
                self.why = event["text"]
                if event["restarted"]:
                    self.warnings.append(event)
            case "stop":
                self.state, self.why = "failed" if event["reason"] == "failed" else "stopped", event["text"]
            case "end":
                self.state, self.why = "finished", ""
            case "job" if self.state == "waiting":
                self.why = f"job {event['id']} is {event['state'].lower()}"
