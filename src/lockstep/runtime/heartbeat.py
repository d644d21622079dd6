"""The heartbeat of a rank: what it is doing now. Set in the hot loop, read by threads beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Beat:
    """The phase of the training that this rank is in, the step it works on, and a count that grows with progress.

    `gathered` are the sharded blocks that were called in the step, in order, and the ends of its forwards; in an
    evaluation those that were called for the samples which are scored now.
    """

    __slots__ = ("_busy", "_step", "gathered", "phase", "ticks")

    def __init__(self) -> None:
        self.phase = "starting"
        self.ticks = 0
        self.gathered: list[str] = []
        self.step = 0
        self._busy: set[int] = set()

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self.gathered = []  # first: a thread beside this one must not take the old ones for the new step's
        self._step = step

    @property
    def is_busy(self) -> bool:
        """Whether a thread of this rank does something that others may wait for as long as it takes."""
        return bool(self._busy)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While this thread reads or writes files, or prepares something for all ranks, it is not taken for stuck."""
        me = threading.get_ident()
        outer = me in self._busy
        self._busy.add(me)
        try:
            yield
        finally:
            if not outer:
                self.tick()  # first: between the two it would be taken for stuck all that time
                self._busy.discard(me)

    def at(self, phase: str) -> None:
        """A new phase begins."""
        if phase == "scoring":  # of one group of samples, and of a whole evaluation nobody wants them all
            self.gathered = []
        self.phase = phase
        self.ticks += 1

    def tick(self) -> None:
        """Something long goes on, and is not stuck."""
        self.ticks += 1


def beat_file(scratch: Path, rank: int) -> Path:
    """Where a rank writes its heartbeat for its launcher, on its own node."""
    return scratch / f"beat.{rank}.json"
