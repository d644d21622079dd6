"""What the hosts, their GPUs and the ranks' processes did, from the `machine` events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.page.reading.damage import Damage, Fields, array, cut, inner, listed
from lockstep.page.reading.series import Array, Grid
from lockstep.page.reading.starts import Attempt
from lockstep.page.reading.summary import GpuSummary, HostSummary, RankSummary

OF_HOSTS = ("cpu", "memory", "sent", "received", "read", "written", "watts")
OF_GPUS = ("busy", "memory", "watts", "celsius")
OF_RANKS = ("cores", "memory", "threads", "workers")
MOST_HOSTS = 4096
MOST_GPUS = 64
"""Of one host."""


@dataclass(frozen=True)
class Gpu:
    """What does not change in an attempt."""

    host: str
    index: int
    name: str
    memory_total: int | None
    ranks: tuple[int, ...]


class Machines:
    """Takes `machine` events in: a bounded grid over time, and the means of the last attempt that told."""

    def __init__(self, damage: Damage) -> None:
        self._damage = damage
        self.grid = Grid()
        self.gpus: dict[str, Gpu] = {}
        """By their names in the grid; those of the last attempt that told."""
        self.users: dict[str, tuple[int, ...]] = {}
        """Of every GPU of the grid that was ever used: the ranks that used it last."""
        self._cores: dict[str, int] = {}
        self._key: tuple[int, list[int], list[tuple[str, list[int]]]] = (0, [], [])
        self._places = np.empty(0, np.intp)
        self._sum, self._count, self._most, self._last = np.zeros((4, 0))

    def take(self, event: Fields, time: float, attempt: Attempt, line: int) -> None:
        """One event. A host that cannot be read is left out, and counted."""
        ranks = inner(event, "ranks")
        told = [array(listed(ranks, name)) for name in OF_RANKS]
        all_hosts = listed(event, "hosts", MOST_HOSTS)
        hosts = [host for host in all_hosts if _is_readable(host)]
        for _ in range(len(all_hosts) - len(hosts)):
            self._damage.event("machine", "one of its hosts is not as it has to be", line)
        cards = [(host["host"], [gpu["index"] for gpu in host["gpus"]]) for host in hosts]
        key = (attempt.number, list(map(len, told)), cards)
        if key != self._key:
            self._arrange(hosts, key[1], is_new=key[0] != self._key[0])
            attempt.sharing = sum(len(gpu.ranks) - 1 for gpu in self.gpus.values() if gpu.ranks)
            self._key = key
        values: list[Any] = []
        for host in hosts:
            values += map(host.get, OF_HOSTS)
            for gpu in host["gpus"]:
                values += map(gpu.get, OF_GPUS)
            joules, watts, name = host.get("joules"), host.get("watts"), host["host"][:60]
            if isinstance(watts, int | float) or not host["gpus"]:
                attempt.measured_cpus.add(name)
            if isinstance(joules, int | float) and 0 <= joules < 1e18:
                attempt.joules[name] = max(attempt.joules.get(name) or 0.0, float(joules))
            else:
                attempt.joules.setdefault(name, None)
        looks = np.concatenate([array(values), *told])
        self.grid.add(time, self._places, looks)
        self._add_up(looks)

    def _arrange(self, hosts: list[Fields], ranks: list[int], is_new: bool) -> None:
        """Whom the numbers of the next events are of."""
        if is_new:
            self.gpus, self._cores = {}, {}
        names: list[tuple[str, str]] = []
        for host in hosts:
            name = cut(host["host"], 60)
            self._cores[name] = host["cores"]
            names += [(f"host {what}", name) for what in OF_HOSTS]
            for gpu in host["gpus"]:
                whose = f"{name} GPU {gpu['index']}"
                names += [(f"gpu {what}", whose) for what in OF_GPUS]
                users = gpu.get("ranks")
                users = users if isinstance(users, list) else []
                total = gpu.get("memory_total")
                self.gpus[whose] = Gpu(
                    host=name,
                    index=gpu["index"],
                    name=cut(str(gpu.get("name"))),
                    memory_total=total if type(total) is int else None,
                    ranks=tuple(dict.fromkeys(rank for rank in users if type(rank) is int)),
                )
        for what, count in zip(OF_RANKS, ranks, strict=True):
            names += [(f"rank {what}", str(rank)) for rank in range(count)]
        self._places = self.grid.places_of(names)
        for whose, known in self.gpus.items():
            if known.ranks and self.grid.row("gpu busy", whose) is not None:
                self.users[whose] = known.ranks
        size = int(self._places.max(initial=-1)) + 1
        kept = np.zeros((4, max(size, 0 if is_new else len(self._sum))))
        if not is_new:
            kept[:, : len(self._sum)] = self._sum, self._count, self._most, self._last
        self._sum, self._count, self._most, self._last = kept

    def _add_up(self, looks: Array) -> None:
        known = np.isfinite(looks) & (self._places >= 0)
        at, looks = (self._places, looks) if known.all() else (self._places[known], looks[known])
        self._sum[at] += looks
        self._count[at] += 1
        self._most[at] = np.maximum(self._most[at], looks)
        self._last[at] = looks

    def _row(self, what: str, who: str) -> int | None:
        """Of somebody who has told a number in the last attempt."""
        row = self.grid.row(what, who)
        return row if row is not None and row < len(self._count) and self._count[row] else None

    def _mean(self, what: str, who: str) -> float | None:
        row = self._row(what, who)
        return None if row is None else float(self._sum[row] / self._count[row])

    def _whole(self, kept: Array, what: str, who: str) -> int | None:
        row = self._row(what, who)
        return None if row is None else int(kept[row])

    def host_summaries(self, ranks_on: dict[str, int]) -> list[HostSummary]:
        """Every host; `ranks_on` says how many ranks of the run are there."""
        return [
            HostSummary(name, cores, self._mean("host cpu", name), ranks_on.get(name, 0))
            for name, cores in self._cores.items()
        ]

    def gpu_summaries(self) -> list[GpuSummary]:
        """Every GPU of every host."""
        return [
            GpuSummary(
                host=gpu.host,
                index=gpu.index,
                name=gpu.name,
                busy=self._mean("gpu busy", whose),
                memory=self._whole(self._most, "gpu memory", whose),
                memory_total=gpu.memory_total,
                watts=self._mean("gpu watts", whose),
                ranks=gpu.ranks,
            )
            for whose, gpu in self.gpus.items()
        ]

    def with_processes(self, ranks: list[RankSummary]) -> list[RankSummary]:
        """The same ranks, with what their processes used of the host."""
        return [
            replace(
                one,
                cores=self._mean("rank cores", str(one.rank)),
                threads=self._whole(self._last, "rank threads", str(one.rank)),
                workers=self._whole(self._last, "rank workers", str(one.rank)),
            )
            for one in ranks
        ]


def _is_readable(host: Any) -> bool:
    """Whether it has what tells hosts and GPUs apart; numbers that are none are passed over later."""
    if not isinstance(host, dict) or not isinstance(host.get("host"), str) or type(host.get("cores")) is not int:
        return False
    gpus = host.get("gpus")
    if not isinstance(gpus, list) or len(gpus) > MOST_GPUS:
        return False
    return all(isinstance(gpu, dict) and type(gpu.get("index")) is int for gpu in gpus)
