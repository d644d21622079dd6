"""Where the time of the steps went on every rank, from the `ranks` events."""

from __future__ import annotations

import numpy as np

from lockstep.page.reading.damage import Damage, Fields, UnusableError, array, cut, finite, listed, whole
from lockstep.page.reading.series import Array, Grid
from lockstep.page.reading.starts import Attempt
from lockstep.page.reading.summary import RankSummary

LISTS = ("input", "compute", "wait", "memory", "optimizer", "between")
INPUT, COMPUTE, WAIT, MEMORY, OPTIMIZER, BETWEEN = range(len(LISTS))
NEWER = ("optimizer", "between")
"""What logs of versions before this one do not have."""
SHOWN = ("compute", "wait", "input", "memory")
"""For every rank over steps."""
PARTS = ("input", "compute", "wait", "optimizer", "between", "stall", "idle")
"""Of a mean step: what the stack shows."""
EVERYONE = ""
MOST_RANKS = 16384
MISSING_NAMED = 8


class RankTimes:
    """Takes `ranks` events in: a bounded grid over steps for all ranks, and the sums of the last attempt that told."""

    def __init__(self, damage: Damage) -> None:
        self._damage = damage
        self.grid = Grid()
        self.hosts: list[str] = []
        self._told_hosts: list[object] = []
        self.most_memory = 0.0
        self._places: tuple[int, Array] = (-1, np.empty(0, np.intp))
        self._attempt = 0
        self._since = (0.0, 0.0, 0.0)  # the time when the ranks told before, what was accounted for by then, stalls
        self.first_step = 0
        self._last_step = 0
        self._steps = 0.0
        self._sums: Array = np.zeros((len(LISTS), 0))

    def take(self, event: Fields, time: float, attempt: Attempt, line: int) -> None:
        """One event."""
        step, steps, seconds = whole(event, "step"), whole(event, "steps", 1), finite(event, "seconds")
        lists = [array(listed(event, name, MOST_RANKS)) for name in LISTS if name in event or name not in NEWER]
        hosts = listed(event, "hosts", MOST_RANKS)
        lengths = [len(values) for values in lists]
        count = max(lengths)
        if count == 0:
            raise UnusableError("it has no ranks")
        self._miss(min(lengths), attempt, count, line)
        lists += [np.zeros(count)] * (len(LISTS) - len(lists))
        table = np.array([_as_long(values, count) for values in lists])
        if hosts != self._told_hosts:
            names = [cut(host) if isinstance(host, str) else "" for host in hosts[:count]]
            self._told_hosts, self.hosts = hosts, [*names, *[""] * (count - len(names))]
        table[COMPUTE] = np.maximum(table[COMPUTE] - table[OPTIMIZER] - table[BETWEEN], 0.0)
        known = np.where(np.isfinite(table), table, 0.0)
        self.most_memory = max(self.most_memory, float(known[MEMORY].max()))
        self._add_up(known, attempt, steps, count)

        told = np.maximum(np.isfinite(table).sum(axis=1), 1)
        means = dict(zip(LISTS, (known.sum(axis=1) / told).tolist(), strict=True))
        attempt.told_seconds += steps * seconds
        for name, mean in means.items():
            attempt.parts[name] = attempt.parts.get(name, 0.0) + steps * mean
        self._show(step, steps, {**means, **self._outside(time, attempt, steps)}, table, count)

    def _miss(self, shortest: int, attempt: Attempt, count: int, line: int) -> None:
        world = attempt.started.world_size if attempt.started else count
        if shortest >= world:
            return
        missing = range(shortest, world)
        named = ", ".join(map(str, missing[:MISSING_NAMED])) + (", ..." if len(missing) > MISSING_NAMED else "")
        self._damage.count(
            f"missing {shortest} {world}",
            line,
            lambda times, where: (
                f"{times:,} ranks event{'' if times == 1 else 's'} of {world} ranks "
                f"{'tells' if times == 1 else 'tell'} nothing, or not all, of "
                f"{'rank' if len(missing) == 1 else 'ranks'} {named} ({where})"
            ),
        )

    def _add_up(self, known: Array, attempt: Attempt, steps: int, count: int) -> None:
        if self._attempt != attempt.number:
            self._attempt, self._steps, self._sums = attempt.number, 0.0, np.zeros((len(LISTS), 0))
            self._since = (attempt.first_done, attempt.first_seconds, 0.0)
        missing = count - self._sums.shape[1]
        if missing > 0:
            self._sums = np.pad(self._sums, ((0, 0), (0, missing)))
        self._steps += steps
        most = np.maximum(self._sums[MEMORY, :count], known[MEMORY])
        self._sums[:, :count] += steps * known
        self._sums[MEMORY, :count] = most

    def _outside(self, time: float, attempt: Attempt, steps: int) -> dict[str, float]:
        """Of the time since the ranks told before: waiting for checkpoints, and what no event accounts for.

        The ranks may leave steps out, such as profiled ones: what all steps took is known from the steps themselves.
        """
        begin, accounted, stalls = self._since
        self._since = (time, attempt.accounted, attempt.stalls)
        idle = (time - begin) - (attempt.accounted - accounted)
        return {"stall": (attempt.stalls - stalls) / steps, "idle": max(0.0, idle) / steps if begin else 0.0}

    def _show(self, step: int, steps: int, means: dict[str, float], table: Array, count: int) -> None:
        if self._places[0] != count:
            names = [("steps", EVERYONE), *((part, EVERYONE) for part in PARTS)]
            names += [(f"rank {what}", str(rank)) for what in SHOWN for rank in range(count)]
            self._places = (count, self.grid.places_of(names))
        begin = step - steps
        self.first_step = min(self.first_step, begin) if self._last_step else begin
        if step <= self._last_step:
            self.grid.go_back(max(1, step - steps + 1))
        self._last_step = step
        # Weighted by steps: a column of the stack is the mean step, however many looks it is made of.
        own = [float(steps), *(steps * means[part] for part in PARTS)]
        self.grid.add(step, self._places[1], np.concatenate([own, *(table[LISTS.index(what)] for what in SHOWN)]))

    def stack(self) -> dict[str, Array]:
        """The parts of a mean step over the columns of the grid."""
        mean = self.grid.mean()
        steps = mean[self.grid.of("steps")[EVERYONE]]
        return {part: mean[self.grid.of(part)[EVERYONE]] / steps for part in PARTS}

    def summaries(self) -> list[RankSummary]:
        """Of every rank, without what its processes used of the host."""
        mean = self._sums / max(self._steps, 1.0)
        hosts = [*self.hosts, *[""] * mean.shape[1]]
        return [
            RankSummary(
                rank=rank,
                host=hosts[rank],
                input=float(mean[INPUT, rank]),
                compute=float(mean[COMPUTE, rank]),
                optimizer=float(mean[OPTIMIZER, rank]),
                between=float(mean[BETWEEN, rank]),
                wait=float(mean[WAIT, rank]),
                memory=int(self._sums[MEMORY, rank]),
            )
            for rank in range(mean.shape[1])
        ]


def _as_long(values: Array, count: int) -> Array:
    return values if len(values) == count else np.append(values, np.full(count - len(values), np.nan))
