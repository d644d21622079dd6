"""How a rank puts events into the log without waiting for its GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.events import EventLog


class Recorder:
    """Writes events on rank 0 and drops them elsewhere.

    An event with a number that is still on a GPU is written together with the next one: by then it has arrived.
    """

    def __init__(self, log: EventLog | None) -> None:
        self._log = log
        self._pending: tuple[str, dict[str, Any]] | None = None

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event."""
        if self._log is None:
            return
        self.flush()
        self._pending = (kind, fields)
        if not _is_on_gpu(fields):
            self.flush()

    def flush(self) -> None:
        """Write the event that was held back, if there is one."""
        if self._pending and self._log:
            (kind, fields), self._pending = self._pending, None
            self._log.emit(kind, **_plain(fields))

    def close(self) -> None:
        """Write what is left and close the log."""
        self.flush()
        if self._log:
            self._log.close()


def _is_on_gpu(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_is_on_gpu(part) for part in value.values())
    return bool(getattr(value, "is_cuda", False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return value.item() if hasattr(value, "item") else value
