"""What happened in a run, as a bounded number of moments: errors are the last to be left out."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from lockstep.page.panels import Level, Moment
from lockstep.page.reading.damage import cut

MOST_MOMENTS = 500
LONGEST = 600
WORST_FIRST: tuple[Level, ...] = ("error", "warning", "good", "info")


class Moments:
    """Keeps the first and the last moments of each level."""

    def __init__(self) -> None:
        # Each with its number, by which those of one time stand in the order of the log.
        self._first: dict[Level, list[tuple[int, Moment]]] = {level: [] for level in WORST_FIRST}
        self._last: dict[Level, deque[tuple[int, Moment]]] = {
            level: deque(maxlen=MOST_MOMENTS // 2) for level in WORST_FIRST
        }
        self._count: dict[Level, int] = dict.fromkeys(WORST_FIRST, 0)

    def add(self, time: float, attempt: int, step: int | None, level: Level, what: str, text: str) -> None:
        """Something happened."""
        number = sum(self._count.values())
        self._keep(number, Moment(round(time, 3), attempt, step, level, what, cut(text, LONGEST)))

    def _keep(self, number: int, moment: Moment) -> None:
        self._count[moment.level] += 1
        first = self._first[moment.level]
        (first if len(first) < MOST_MOMENTS // 2 else self._last[moment.level]).append((number, moment))

    def only_followed(self, attempt: int) -> None:
        """The stop that this attempt told of as an error came from a failure elsewhere, which is told by itself."""
        for kept in (self._last["error"], self._first["error"]):
            if kept and kept[-1][1].what == "stop" and kept[-1][1].attempt == attempt:
                number, moment = kept.pop()
                self._count["error"] -= 1
                self._keep(number, replace(moment, level="info"))
                return

    def chosen(self) -> tuple[list[Moment], str]:
        """What there is room for, in order of time, and a sentence on what there is not."""
        kept: list[tuple[int, Moment]] = []
        left_out: list[str] = []
        for level in WORST_FIRST:
            all_of_it = [*self._first[level], *self._last[level]]
            room = MOST_MOMENTS - len(kept)
            some = all_of_it if len(all_of_it) <= room else [*all_of_it[: room // 2], *all_of_it[-(room - room // 2) :]]
            some = some[:room]
            kept += some
            if missing := self._count[level] - len(some):
                left_out.append(f"{missing:,} of {self._count[level]:,} with level {level}")
        said = f"Left out, from the middle of the run: {', '.join(left_out)}." if left_out else ""
        return [moment for _, moment in sorted(kept, key=lambda one: (one[1].time, one[0]))], said
