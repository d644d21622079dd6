"""Where the time of this rank's steps goes: waiting for samples, waiting in collectives, and the rest.

Of the rest two parts are told apart: the optimizer, and the script's own code around the engine's steps.

All ranks of a training take equally long over a step, because they wait for each other in it. Only the time that a rank
does not wait tells which one is slow: it is the one that waits least.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from lockstep.runtime.torch_private import in_backward
from lockstep.runtime.torch_private.waits import WaitsSeen

Stall = Literal["input", "wait"]
Work = Literal["optimizer", "between"]
Moment = float | torch.cuda.Event
Pair = tuple[Stall | Work, Work | None, torch.cuda.Event, torch.cuda.Event]
"""What began and ended at two events, and the work that stood still for it, where it is a stall."""

STEPS_BEFORE_FIRST_REPORT = 5
SECONDS_BETWEEN_REPORTS = 5.0
RANKS_OF_A_SHORT_REPORT = 64
"""Of more ranks a report is longer, and comes less often."""
MOST_SPARE_EVENTS = 1000


@dataclass(frozen=True)
class Spent:
    """The seconds of some steps, and how many of these this rank stood still for samples or in collectives."""

    steps: int
    seconds: float
    input: float
    wait: float
    samples: int
    """What this rank computed."""
    optimizer: float = 0.0
    between: float = 0.0
    """The script's own code, before and after the engine's step. Both without what they stood still for."""


class StepClock:
    """Measures the steps of one rank, from the end of one to the end of the next.

    On a CPU the host's clock is read around every part. On a GPU the host runs ahead: there a pair of events is laid
    around it on the stream that computes. The time between the two is what the stream stood still or worked, however
    long the host took, and it is read once the GPU has passed both.
    """

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        self._pause = SECONDS_BETWEEN_REPORTS * (1 + ranks / RANKS_OF_A_SHORT_REPORT)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._main = threading.get_ident()
        self._optimizer = _Optimizer(self)
        self._waits: WaitsSeen | None = None
        self._parts = _nothing()  # of the step that runs
        self.is_stalled = False
        self.working: Work | None = None
        self._script_began: Moment | None = None  # while the script's own code runs
        self._spare: list[torch.cuda.Event] = []
        self._open: list[Pair] = []
        self._passed: deque[Pair] = deque()
        self._steps_ever = 0
        self._is_reported = False
        self._began = self._last_report = time.perf_counter()
        self._clear()

    def _clear(self) -> None:
        self.steps = self._samples = 0
        self._seconds = 0.0
        self._sums = _nothing()

    def listen(self) -> None:
        """From now on notice when this rank waits for others."""
        self._waits = WaitsSeen(lambda: self.stalled("wait") if self._is_training() else None, self._stream)

    def restore(self) -> None:
        """Leave torch as it was."""
        if self._waits is not None:
            self._waits.close()

    def _is_training(self) -> bool:
        """Whether this thread trains: checkpoints are written by others, and autograd has its own for a GPU."""
        return threading.get_ident() == self._main or in_backward()

    def stalled(self, kind: Stall) -> AbstractContextManager[None]:
        """Inside the training may stand still."""
        return _Stall(self, kind)

    def optimizing(self) -> AbstractContextManager[None]:
        """Inside the gradients are clipped, or the weights updated."""
        return self._optimizer

    def script_begins(self) -> None:
        """The script's own code goes on: it has got a batch, or the engine is done with one."""
        self.working = "between"
        self._script_began = self.now()

    def script_ends(self) -> None:
        """It waits: the engine is given a batch, or the loader is asked for one."""
        began = self._script_began
        self._forget_script()
        if began is not None:
            self.add("between", began)

    def _forget_script(self) -> None:
        self.working = self._script_began = None

    def add(self, part: Stall | Work, before: Moment) -> None:
        """A part of the step ends now. What stands still while it works did not work."""
        if isinstance(before, float):
            seconds = time.perf_counter() - before
            self._parts[part] += seconds
            if self.working is not None:
                self._parts[self.working] -= seconds
        else:
            self._open.append((part, self.working, before, self._event()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside nothing is measured, and none of it is part of a step."""
        self.is_stalled = True
        try:
            yield
        except BaseException:
            self._forget_script()  # no more events for a GPU that may have failed: they would hide why
            raise
        finally:
            self.is_stalled = False
            self.start()

    def now(self) -> Moment:
        return time.perf_counter() if self._stream is None else self._event()

    def _event(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def start(self) -> None:
        """What was done since the last step is not part of the next one."""
        self._parts = _nothing()
        self._give_back(self._open)
        self._open = []
        if self._script_began is not None:
            self._script_began = self.now()
        self._began = time.perf_counter()

    def step_done(self, samples: int, *, counts: bool = True) -> float:
        """A step ends here, and the next one begins; returns how long it took. `take` tells of those that count."""
        now = time.perf_counter()
        seconds = now - self._began
        self._steps_ever += 1
        if self._steps_ever == 2:  # the first one warms up: it counts only while it is alone
            self._clear()
            self._give_back(self._passed)
            self._passed.clear()
        if not counts:
            self.start()
            self.script_begins()
            return seconds
        self.steps += 1
        self._samples += samples
        self._seconds += seconds
        for part, took in self._parts.items():
            self._sums[part] += took
            self._parts[part] = 0.0
        if self._stream is not None:
            self._passed.extend(self._open)
            self._open = []
            self._read(wait=False)
        self.script_begins()
        self._began = now
        return seconds

    def _read(self, wait: bool) -> None:
        """Add up what the GPU has passed by now; with `wait`, everything."""
        while self._passed:
            part, working, before, after = pair = self._passed[0]
            if wait:
                after.synchronize()
            elif not after.query():
                return
            self._passed.popleft()
            seconds = before.elapsed_time(after) / 1000
            self._sums[part] += seconds
            if working is not None:
                self._sums[working] -= seconds
            self._give_back([pair])

    def _give_back(self, pairs: Iterable[Pair]) -> None:
        for _, _, before, after in pairs:
            if len(self._spare) < MOST_SPARE_EVENTS:
                self._spare += (before, after)

    @property
    def is_due(self) -> bool:
        """Whether it is time to compare the ranks: soon after the start, then every few seconds."""
        if not self._is_reported:
            return self.steps >= STEPS_BEFORE_FIRST_REPORT
        return self.steps > 0 and time.perf_counter() - self._last_report >= self._pause

    def take(self, *, last: bool) -> Spent:
        """What was measured since this was asked before; the `last` time the GPU is waited for."""
        self._read(wait=last)
        sums = {part: max(0.0, seconds) for part, seconds in self._sums.items()}
        spent = Spent(steps=self.steps, seconds=self._seconds, samples=self._samples, **sums)
        self._is_reported, self._last_report = True, time.perf_counter()
        self._clear()
        return spent


class _Stall:
    """A part of a step in which the training may stand still."""

    # Not made from a generator, which would cost every step several times as much.
    __slots__ = ("_before", "_clock", "_kind")

    def __init__(self, clock: StepClock, kind: Stall) -> None:
        self._clock = clock
        self._kind: Stall = kind
        self._before: Moment | None = None  # where nothing is measured, or a dataset talks to other ranks

    def __enter__(self) -> None:
        clock = self._clock
        if clock.is_stalled:
            return
        if self._kind == "input":
            clock.script_ends()
        self._before = clock.now()
        clock.is_stalled = True

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._before is not None:
            self._clock.is_stalled = False
            if error is None:  # else a GPU may have failed: it would raise another one, and hide why
                self._clock.add(self._kind, self._before)


class _Optimizer:
    """The part of a step that clips and updates: never in itself, so that there is one of it."""

    __slots__ = ("_before", "_clock")

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._before = self._clock.now()
        self._clock.working = "optimizer"

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._clock.working = None
        if error is None:
            self._clock.add("optimizer", self._before)


def _nothing() -> dict[Stall | Work, float]:
    return {"input": 0.0, "wait": 0.0, "optimizer": 0.0, "between": 0.0}
