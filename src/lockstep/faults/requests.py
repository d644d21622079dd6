"""What any rank may ask for between two steps, and what all ranks then do together.

A signal handler or a clock only raises a flag here. The flags travel with the numbers every step exchanges anyway, so
that all ranks act on them after the same step.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType

from lockstep.runtime import stop_signals

STOPS = tuple(stop_signals.CODES)
KINDS = (*STOPS, "validate", "save", "unsaved", "ranks", "timetable")


class Requests:
    """Flags of this rank, and those that were agreed on at the last step boundary."""

    def __init__(self) -> None:
        self._raised: set[str] = set()
        self.agreed: frozenset[str] = frozenset()
        self._is_interrupted = False
        self._is_settled = False
        self.why: dict[str, str] = {}
        """Why this rank asked, where it was not a signal."""
        self.heard: Callable[[FrameType | None], None] = lambda _: None
        """Called after a signal, with what the main thread was at."""
        self._before: dict[signal.Signals, stop_signals.Handler] = {}

    def ask(self, kind: str, why: str | None = None) -> None:
        """Raise a flag; all ranks see it after the step that is running now."""
        assert kind in KINDS
        if why is not None:
            self.why.setdefault(kind, why)
        self._raised.add(kind)

    def votes(self, kinds: Sequence[str] = KINDS) -> list[float]:
        """This rank's flags as numbers to add up over the ranks."""
        return [float(kind in self._raised) for kind in kinds]

    def agree(self, sums: Sequence[float], kinds: Sequence[str] = KINDS) -> None:
        """Take the sums over all ranks: one vote is enough. What was agreed of other kinds stays."""
        voted = {kind for kind, votes in zip(kinds, sums, strict=True) if votes > 0}
        self.agreed = frozenset(voted | (self.agreed - set(kinds)))
        self._raised -= voted

    def listen(self) -> None:
        """Turn Ctrl-C and a scheduler's signals into requests, those that came before as well. A second Ctrl-C ends the
        process at once; a second SIGTERM does not: a scheduler signals every process, and the launcher passes its own
        on."""
        self._before = stop_signals.listen(self._handle)
        noted = stop_signals.take()
        self._raised |= noted
        self._is_interrupted = "interrupt" in noted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._is_interrupted:
                stop_signals.end_at_once(stop_signals.CODES["interrupt"])
            self._is_interrupted = True
        self._raised.add(stop_signals.STOPS[signal.Signals(number)])
        if not self._is_settled:
            self.heard(frame)

    def settle(self) -> None:
        """The ranks have agreed to stop: until this process has ended, no signal but a second Ctrl-C changes that."""
        self._is_settled = True

    def close(self) -> None:
        """Give the signals back to whoever had them, unless the run was stopped: then they have done their work."""
        if self._is_settled and self._before:
            stop_signals.ignore(self._before)
            return
        # Of a rank that has left its run nobody waits for the next step.
        after = {
            number: stop_signals.stop_the_command if was is stop_signals.note else was
            for number, was in self._before.items()
        }
        stop_signals.give_back(after)
        self._before = {}
