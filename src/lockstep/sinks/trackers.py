"""W&B and MLflow beside a training: each in a process of its own that reads the event log.

Not in rank 0: their calls take time from its steps (W&B's about half a millisecond a step), may hang for minutes where
the network does, and leave threads and handlers of signals behind. A process that only reads can do none of that.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from lockstep.errors import UserError
from lockstep.record.events import Event

SECONDS_TO_FINISH = 30.0
"""How long the end of a run waits for what is still being sent; after that it is sent without being waited for."""


def check_installed(names: Iterable[str]) -> None:
    """Refuse trackers whose package is not there."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name is no package: W&B leaves one where it runs
            raise UserError(f"log_to names {name}, which is not installed", f"pip install lockstep-train[{name}]")


class Tracker:
    """Starts the process that tells W&B or MLflow of a run, when the run starts, and ends it with the run."""

    def __init__(self, name: str, folder: Path, say: Callable[[str], None]) -> None:
        self._name = name
        self._folder = folder
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    @property
    def log(self) -> Path:
        """What the process has to say."""
        return self._folder / "logs" / f"{self._name}.log"

    def handle(self, event: Event) -> None:
        """Start with the run; say once when it has ended before the run."""
        if self._is_over:
            return
        try:
            if self._process is None and event["kind"] == "start":
                self._process = self._begin()
            if self._process is not None and self._process.poll() is not None:
                raise ChildProcessError(f"see {self.log}")
        except OSError as error:
            # Over first: what is said may come back here as an event.
            self._is_over = True
            self._say(f"nothing more is sent to {self._name} ({error})")

    def close(self) -> None:
        """Let it send the rest."""
        process, self._is_over = self._process, True
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(SECONDS_TO_FINISH)
        except subprocess.TimeoutExpired:
            print(f"{self._name} still sends what is left; see {self.log}", file=sys.stderr)

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "lockstep.sinks.tracking", self._name, str(self._folder)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            # A Ctrl-C at the terminal is for the training. Its standard input ends when this process does, however.
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
