"""How long tests wait. Seconds in tests are those of an idle machine; here they become longer on one that is busy.

wait_for((folder / "reached").exists, "the last step")  # polls, and fails after a minute of an idle machine
lockstep.init(timeout_minutes=patient(15) / 60)  # a limit of the product that a busy machine must not run into
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep  # by name: tests put clocks of their own into `time`

CORES = len(os.sched_getaffinity(0))
LOAD = Path("/proc/loadavg")


def slowness() -> float:
    """How many times longer everything takes now than on an idle machine: the processes that want a core, per core."""
    last_minute, _, _, now, _ = LOAD.read_text().split()
    return max(1.0, float(last_minute) / CORES, int(now.partition("/")[0]) / CORES)


def patient(seconds: float) -> float:
    """What so many seconds of an idle machine are on this one now."""
    return seconds * slowness()


class Deadline:
    """Passes after so many seconds of an idle machine. Looked at often, it follows the load as it comes and goes."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = monotonic()

    @property
    def left(self) -> float:
        """Seconds of an idle machine."""
        now = monotonic()
        self._left -= (now - self._looked) / slowness()
        self._looked = now
        return max(0.0, self._left)

    @property
    def passed(self) -> bool:
        return self.left == 0


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Poll until something is so."""
    deadline = Deadline(seconds)
    while not condition():
        assert not deadline.passed, f"waited {seconds:g} s for {what}"
        sleep(0.02)
