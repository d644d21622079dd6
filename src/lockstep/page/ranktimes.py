"""Where the time of the steps went on every rank, from the `ranks` events."""

from __future__ import annotations

import numpy as np

from lockstep.page.attempts import Attempt
from lockstep.page.damage import Damage, Fields, UnusableError, array, cut, finite, listed, whole
from lockstep.page.series import Array, Grid
from lockstep.page.summary import RankSummary

LISTS = ("input", "compute", "optimizer", "between", "wait", "memory")
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
        self.most_memory = 0.0
        self._places: tuple[int, Array] = (-1, np.empty(0, np.intp))
        self._attempt = 0
        self._since = (0.0, 0.0, 0.0)  # time, stalls and validation of the attempt when the ranks told before
        self._last_step = 0
        self._steps = 0.0
        self._sums: dict[str, Array] = {}

    def take(self, event: Fields, time: float, attempt: Attempt, line: int) -> None:
        """One event."""
        step, steps, seconds = whole(event, "step"), whole(event, "steps", 1), finite(event, "seconds")
        lists = {name: array(listed(event, name, MOST_RANKS)) for name in LISTS if name in event or name not in NEWER}
        count = max(len(values) for values in lists.values())
        lists = {**dict.fromkeys(NEWER, np.zeros(count)), **lists}
        if count == 0:
            raise UnusableError("it has no ranks")
        hosts = [cut(host) if isinstance(host, str) else "" for host in listed(event, "hosts", MOST_RANKS)]
        self._miss(lists, attempt, count, line)
        lists = {name: _as_long(values, count) for name, values in lists.items()}
        self.hosts = [*hosts[:count], *[""] * (count - len(hosts))]
        memory = lists["memory"][np.isfinite(lists["memory"])]
        self.most_memory = max(self.most_memory, float(memory.max())) if len(memory) else self.most_memory
        lists["compute"] = np.maximum(lists["compute"] - lists["optimizer"] - lists["between"], 0.0)
        self._add_up(lists, attempt, steps, count)

        means = {name: _mean(lists[name]) for name in LISTS if name != "memory"}
        attempt.told_steps += steps
        attempt.told_seconds += steps * seconds
        for name, mean in means.items():
            attempt.parts[name] = attempt.parts.get(name, 0.0) + steps * mean
        self._show(step, steps, {**means, **self._outside(time, attempt, steps, seconds)}, lists, count)

    def _miss(self, lists: dict[str, Array], attempt: Attempt, count: int, line: int) -> None:
        world = attempt.started.world_size if attempt.started else count
        shortest = min(len(values) for values in lists.values())
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

    def _add_up(self, lists: dict[str, Array], attempt: Attempt, steps: int, count: int) -> None:
        if self._attempt != attempt.number:
            self._attempt, self._steps, self._sums = attempt.number, 0.0, {}
            self._since = (attempt.first_done, 0.0, 0.0)
        self._steps += steps
        for name, values in lists.items():
            known = np.nan_to_num(values)
            before = self._sums.get(name, np.zeros(0))
            size = max(count, len(before))
            if name == "memory":
                self._sums[name] = np.maximum(_as_long(before, size, 0.0), _as_long(known, size, 0.0))
            else:
                self._sums[name] = _as_long(before, size, 0.0) + steps * _as_long(known, size, 0.0)

    def _outside(self, time: float, attempt: Attempt, steps: int, seconds: float) -> dict[str, float]:
        """Of the time since the ranks told before: waiting for checkpoints, and what is neither in a step nor there."""
        begin, stalls, validation = self._since
        self._since = (time, attempt.stalls, attempt.validation)
        stall = attempt.stalls - stalls
        idle = (time - begin) - steps * seconds - stall - (attempt.validation - validation)
        return {"stall": stall / steps, "idle": max(0.0, idle) / steps if begin else 0.0}

    def _show(self, step: int, steps: int, means: dict[str, float], lists: dict[str, Array], count: int) -> None:
        if self._places[0] != count:
            names = [("steps", EVERYONE), *((part, EVERYONE) for part in PARTS)]
            names += [(f"rank {what}", str(rank)) for what in SHOWN for rank in range(count)]
            self._places = (count, self.grid.places_of(names))
        if step <= self._last_step:
            self.grid.go_back(max(1, step - steps + 1))
        self._last_step = step
        # Weighted by steps: a column of the stack is the mean step, however many looks it is made of.
        own = [float(steps), *(steps * means[part] for part in PARTS)]
        self.grid.add(step, self._places[1], np.concatenate([own, *(lists[what] for what in SHOWN)]))

    def stack(self) -> dict[str, Array]:
        """The parts of a mean step over the columns of the grid."""
        mean = self.grid.mean()
        steps = mean[self.grid.of("steps")[EVERYONE]]
        return {part: mean[self.grid.of(part)[EVERYONE]] / steps for part in PARTS}

    def summaries(self) -> list[RankSummary]:
        """Of every rank, without what its processes used of the host."""
        if not self._sums:
            return []
        mean = {name: values / self._steps for name, values in self._sums.items()}
        hosts = [*self.hosts, *[""] * len(mean["compute"])]
        return [
            RankSummary(
                rank=rank,
                host=hosts[rank],
                input=float(mean["input"][rank]),
                compute=float(mean["compute"][rank]),
                optimizer=float(mean["optimizer"][rank]),
                between=float(mean["between"][rank]),
                wait=float(mean["wait"][rank]),
                memory=int(self._sums["memory"][rank]),
            )
            for rank in range(len(mean["compute"]))
        ]


def _as_long(values: Array, count: int, filler: float = np.nan) -> Array:
    return values if len(values) == count else np.append(values, np.full(count - len(values), filler))


def _mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else 0.0
