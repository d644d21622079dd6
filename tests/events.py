"""Events as tests look at them: any field of any kind, without asking for the kind first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.record import log

Event: TypeAlias = Any


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log, as `lockstep.record.log.read_events` gives them."""
    return log.read_events(path)


def follow_events(path: Path, stopped: Callable[[], bool]) -> Iterator[Event]:
    """The same as `lockstep.record.log.follow_events` gives them."""
    return log.follow_events(path, stopped)
