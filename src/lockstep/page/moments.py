"""What happened in a run, as a bounded number of moments: errors are the last to be left out."""

from __future__ import annotations

from collections import deque

from lockstep.page.damage import cut
from lockstep.page.panels import Level, Moment

MOST_MOMENTS = 500
LONGEST = 600
WORST_FIRST: tuple[Level, ...] = ("error", "warning", "good", "info")


class Moments:
    """Keeps the first and the last moments of each level."""

    def __init__(self) -> None:
        self._first: dict[Level, list[Moment]] = {level: [] for level in WORST_FIRST}
        self._last: dict[Level, deque[Moment]] = {level: deque(maxlen=MOST_MOMENTS // 2) for level in WORST_FIRST}
        self._count: dict[Level, int] = dict.fromkeys(WORST_FIRST, 0)

    def add(self, time: float, attempt: int, step: int | None, level: Level, what: str, text: str) -> None:
        """Something happened."""
        moment = Moment(round(time, 3), attempt, step, level, what, cut(text, LONGEST))
        self._count[level] += 1
        first = self._first[level]
        (first if len(first) < MOST_MOMENTS // 2 else self._last[level]).append(moment)

    def chosen(self) -> tuple[list[Moment], str]:
        """What there is room for, in order of time, and a sentence on what there is not."""
        kept: list[Moment] = []
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
        return sorted(kept, key=lambda moment: moment.time), said
