"""What is known of a run from its events so far: the state behind `lockstep watch`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lockstep.page.reading.series import Series
from lockstep.record import events
from lockstep.record.run_state import SILENT_STEPS, RunState
from lockstep.sinks.console import Pace
from lockstep.text.units import clock, how_many

MOST_POINTS = 1024
SECONDS_FOR_A_VERDICT = 10.0
"""So long after a stop the launcher may still say why, or that it starts the run again."""
SECONDS_OF_SILENCE = 60.0


@dataclass
class Watched:
    """A run as its events tell it. Kinds and fields that this version does not know are passed over."""

    run: RunState = field(default_factory=RunState)
    why: str = ""
    """What it waits for, or how it ended."""
    start: events.StartEvent | None = None
    step: events.StepEvent | None = None
    validation: events.ValidationEvent | None = None
    best: tuple[float, int] | None = None
    test: events.TestEvent | None = None
    checkpoint: events.CheckpointEvent | None = None
    ranks: events.RanksEvent | None = None
    machine: events.MachineEvent | None = None
    losses: Series = field(default_factory=lambda: Series(MOST_POINTS))
    pace: Pace = field(default_factory=Pace)
    logged: dict[str, float] = field(default_factory=dict)
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=5))

    def take(self, told: dict[str, Any] | str) -> events.Event | None:
        """One more line of the log, as its reader gives it; returns the event, or None where it cannot be read."""
        self.run.take(told)
        event = events.settled(told) if isinstance(told, dict) else None
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

    def _take(self, event: events.Event) -> None:
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
                self.warnings.append(event["text"])
            case "message" if event["level"] == "warning":  # stragglers too are said as one
                self.warnings.append(event["text"])
            case "failure":
                self.why = event["text"]
                if event["restarted"]:
                    self.warnings.append(event["text"])
            case "stop":
                self.why = event["text"]
            case "end":
                self.why = ""
            case "job" if self.run.newest is None:
                self.why = f"job {event['id']} is {event['state'].lower()}"
