"""When a run stops by itself: somebody left a stop file in its folder, or its time is nearly used up."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.disk.attempts import TAKEN_OVER

STOP_FILE = "stop"
KEEP_STOP_FILE = "LOCKSTEP_KEEP_STOP_FILE"
"""Set by the script of a job: a stop that was asked for before Python had started counts, too."""
SECONDS_BETWEEN_LOOKS = 1.0


@dataclass
class StopConditions:
    """What rank 0 looks at between two steps; when it finds a reason, all ranks stop together after the next step."""

    folder: Path
    began: float
    max_seconds: float | None = None
    is_overtaken: Callable[[], bool] = lambda: False
    """Whether another attempt has begun, as after a node was cut off and the job requeued."""
    _looked: float = 0.0
    _asked: float = 0.0
    _longest: float = 0.0

    def begin(self) -> None:
        """A stop file of before this command was meant for what ran before; a job's script clears it itself."""
        if os.environ.get(KEEP_STOP_FILE):
            return
        file = self.folder / STOP_FILE
        with suppress(FileNotFoundError):
            if file.stat().st_mtime < self.began:
                file.unlink()

    def reason(self, save_seconds: float, step_seconds: float) -> str | None:
        """Why to stop now, if there is a reason; so long a save and a step take at present."""
        now = time.time()
        if self._asked:
            self._longest = max(self._longest, now - self._asked)
        self._asked = now
        if self.max_seconds is not None:
            left = self.began + self.max_seconds - now
            # Whatever may come before the ranks agree, a validation say, then a step, and the save with a margin.
            if left < self._longest + 2 * step_seconds + 1.5 * save_seconds + 2:
                return "max_time is nearly used up"
        if now - self._looked > SECONDS_BETWEEN_LOOKS:
            self._looked = now
            if self.is_overtaken():
                print(f"lockstep: {TAKEN_OVER}", file=sys.stderr, flush=True)
                os._exit(1)  # whatever Python would still do, it may not write into the run
            if (self.folder / STOP_FILE).exists():
                return f"the file {self.folder / STOP_FILE} was there"
        return None
