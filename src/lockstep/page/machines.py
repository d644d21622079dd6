"""What the hosts, their GPUs and the ranks' processes did, from the `machine` events."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.page.attempts import Attempt
from lockstep.page.damage import Damage, Fields, array, cut, finite_or_none, inner, listed, text, whole
from lockstep.page.series import Array, Grid
from lockstep.page.summary import GpuSummary, HostSummary, RankSummary

OF_HOSTS = ("cpu", "memory", "sent", "received", "read", "written", "watts")
OF_GPUS = ("busy", "memory", "watts", "celsius")
OF_RANKS = ("cores", "memory")
MOST_HOSTS = 4096
MOST_GPUS = 64
"""Of one host."""


@dataclass
class _Gpu:
    """One GPU over an attempt."""

    host: str
    index: int
    name: str = ""
    ranks: tuple[int, ...] = ()
    memory_total: int | None = None
    busy: list[float] = field(default_factory=lambda: [0.0, 0])
    """Sum, and how many."""
    watts: list[float] = field(default_factory=lambda: [0.0, 0])
    memory: float | None = None


@dataclass
class _Host:
    cores: int
    cpu: list[float] = field(default_factory=lambda: [0.0, 0])


class Machines:
    """Takes `machine` events in: a bounded grid over time, and the means of the last attempt that told."""

    def __init__(self, damage: Damage) -> None:
        self._damage = damage
        self.grid = Grid()
        self.users: dict[str, tuple[int, ...]] = {}
        """Of every GPU, by its name in the grid: the ranks that use it."""
        self._names: list[tuple[str, str]] = []
        self._places = np.empty(0, np.intp)
        self._attempt = 0
        self._hosts: dict[str, _Host] = {}
        self._gpus: dict[tuple[str, int], _Gpu] = {}
        self._ranks: dict[str, Array] = {}
        self._looks = 0

    def take(self, event: Fields, time: float, attempt: Attempt, line: int) -> None:
        """One event. A host that cannot be read is left out, and counted."""
        ranks = inner(event, "ranks")
        told = {name: array(listed(ranks, name)) for name in ("cores", "memory", "threads", "workers")}
        if self._attempt != attempt.number:
            self._attempt, self._hosts, self._gpus, self._ranks, self._looks = attempt.number, {}, {}, {}, 0
        names: list[tuple[str, str]] = []
        values: list[Any] = []
        for host in listed(event, "hosts", MOST_HOSTS):
            try:
                self._take_host(host, attempt, names, values)
            except Exception as error:  # whatever a host is in this file
                self._damage.event("machine", f"one of its hosts is not readable ({type(error).__name__})", line)
        for what in OF_RANKS:
            names += [(f"rank {what}", str(rank)) for rank in range(len(told[what]))]
        self._add_up(told)
        if names != self._names:
            self._names, self._places = names, self.grid.places_of(names)
        looks = np.concatenate([array(values), *(told[what] for what in OF_RANKS)])
        self.grid.add(time, self._places, looks)

    def _take_host(self, host: Fields, attempt: Attempt, names: list[tuple[str, str]], values: list[Any]) -> None:
        name, cores = text(host, "host", 60), whole(host, "cores")
        cards = [(whole(card, "index"), card) for card in listed(host, "gpus", MOST_GPUS)]
        joules = finite_or_none(host, "joules")
        before = attempt.joules.get(name)
        attempt.joules[name] = joules if before is None else max(before, joules or 0.0)
        kept = self._hosts.setdefault(name, _Host(cores))
        kept.cores = cores
        _count(kept.cpu, host.get("cpu"))
        names += [(f"host {what}", name) for what in OF_HOSTS]
        values += [host.get(what) for what in OF_HOSTS]
        for index, card in cards:
            whose = f"{name} GPU {index}"
            names += [(f"gpu {what}", whose) for what in OF_GPUS]
            values += [card.get(what) for what in OF_GPUS]
            gpu = self._gpus.setdefault((name, index), _Gpu(name, index))
            gpu.name = cut(card["name"])
            gpu.ranks = self.users[whose] = tuple(rank for rank in card["ranks"] if type(rank) is int)
            gpu.memory_total = card.get("memory_total")
            _count(gpu.busy, card.get("busy"))
            _count(gpu.watts, card.get("watts"))
            memory = finite_or_none(card, "memory")
            gpu.memory = memory if gpu.memory is None else max(gpu.memory, memory or 0.0)

    def _add_up(self, told: dict[str, Array]) -> None:
        self._looks += 1
        before = self._ranks.get("cores", np.zeros(0))
        size = max(len(before), len(told["cores"]))
        both = (np.append(values, np.zeros(size - len(values))) for values in (before, np.nan_to_num(told["cores"])))
        self._ranks = {"cores": sum(both, np.zeros(size)), "threads": told["threads"], "workers": told["workers"]}

    def hosts(self, ranks_on: dict[str, int]) -> list[HostSummary]:
        """Every host; `ranks_on` says how many ranks of the run are there."""
        return [
            HostSummary(name, host.cores, _mean(host.cpu), ranks_on.get(name, 0)) for name, host in self._hosts.items()
        ]

    def gpus(self) -> list[GpuSummary]:
        """Every GPU of every host."""
        return [
            GpuSummary(
                host=gpu.host,
                index=gpu.index,
                name=gpu.name,
                busy=_mean(gpu.busy),
                memory=None if gpu.memory is None else int(gpu.memory),
                memory_total=gpu.memory_total if isinstance(gpu.memory_total, int) else None,
                watts=_mean(gpu.watts),
                ranks=gpu.ranks,
            )
            for gpu in self._gpus.values()
        ]

    def with_processes(self, ranks: list[RankSummary]) -> list[RankSummary]:
        """The same ranks, with what their processes used of the host."""
        if not self._ranks:
            return ranks
        cores, threads, workers = (self._ranks[name] for name in ("cores", "threads", "workers"))
        return [
            replace(
                one,
                cores=float(cores[one.rank]) / self._looks if one.rank < len(cores) else None,
                threads=_whole_at(threads, one.rank),
                workers=_whole_at(workers, one.rank),
            )
            for one in ranks
        ]


def _count(kept: list[float], value: object) -> None:
    if isinstance(value, int | float) and np.isfinite(value):
        kept[0] += value
        kept[1] += 1


def _mean(kept: list[float]) -> float | None:
    return kept[0] / kept[1] if kept[1] else None


def _whole_at(values: Array, rank: int) -> int | None:
    return int(values[rank]) if rank < len(values) and np.isfinite(values[rank]) else None
