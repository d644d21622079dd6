"""Where a rank's output goes: every rank to its own log file, rank 0 to the console as well."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def redirect_to(path: Path) -> Callable[[], None]:
    """Send stdout and stderr of this process, C++ libraries included, to a file; returns how to undo it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    saved = [os.dup(1), os.dup(2)]
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)

    def undo() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, old in zip((1, 2), saved, strict=True):
            os.dup2(old, descriptor)
            os.close(old)

    return undo


def tee_to(path: Path) -> Callable[[], None]:
    """Copy what Python writes to stdout and stderr into a file as well; returns how to undo it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a", encoding="utf-8", buffering=1)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Tee(streams[0], log), _Tee(streams[1], log)

    def undo() -> None:
        sys.stdout, sys.stderr = streams
        log.close()

    return undo


class _Tee:
    """A text stream that writes to a second one too; everything else is the first one's."""

    def __init__(self, stream: IO[str], copy: IO[str]) -> None:
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._copy.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
