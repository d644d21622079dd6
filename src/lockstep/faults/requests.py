"""What any rank may ask for between two steps, and what all ranks then do together.

A signal handler or a clock only raises a flag here. The flags travel with the numbers every step exchanges anyway, so
that all ranks act on them after the same step.
"""

from __future__ import annotations

import signal
import types
from collections.abc import Sequence

from lockstep.faults import early

KINDS = ("interrupt", "terminate", "validate", "save", "unsaved", "ranks", "timetable")


class Requests:
    """Flags of this rank, and those that were agreed on at the last step boundary."""

    def __init__(self) -> None:
        self._raised: set[str] = early.take()
        self.agreed: frozenset[str] = frozenset()
        self._is_interrupted = False
        self.why: dict[str, str] = {}
        """Why this rank asked, where it was not a signal."""
        self._previous: dict[int, signal.Handlers | int | types.FrameType | object] = {}

    def ask(self, kind: str, why: str | None = None) -> None:
        """Raise a flag; all ranks see it after the step that is running now."""
        assert kind in KINDS
        if why is not None:
            self.why.setdefault(kind, why)
        self._raised.add(kind)

    def votes(self) -> list[float]:
        """This rank's flags as numbers to add up over the ranks."""
        return [float(kind in self._raised) for kind in KINDS]

    def agree(self, sums: Sequence[float]) -> None:
        """Take the sums over all ranks: one vote is enough."""
        self.agreed = frozenset(kind for kind, votes in zip(KINDS, sums, strict=True) if votes > 0)
        self._raised -= self.agreed

    def listen(self) -> None:
        """Turn Ctrl-C and a scheduler's signals into requests. A second Ctrl-C ends the process at once; a second
        SIGTERM does not: a scheduler signals every process, and the launcher passes its own on."""
        for number, kind in ((number, early.STOPS[number]) for number in early.heard()):

            def handle(received: int, _: object, kind: str = kind) -> None:
                if received == signal.SIGINT and self._is_interrupted:
                    signal.signal(received, signal.SIG_DFL)
                    signal.raise_signal(received)
                self._is_interrupted |= received == signal.SIGINT
                self._raised.add(kind)

            self._previous[number] = signal.signal(number, handle)

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
