"""What the run measures of its machine: on every node one thread looks at the host, and every rank at itself.

The numbers travel with those of `ranks`, so that they cost no collective of their own; docs/events.md explains them.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from lockstep.record.events import HostTold, MachinesTold, ProcessesTold
from lockstep.runtime.host.gpus import has_driver
from lockstep.runtime.host.node_facts import cpu_quota
from lockstep.runtime.host.sensors import Counts, GpuReading, SensorLook, Sensors, descendants
from lockstep.runtime.rank_env import Place
from lockstep.text.units import rounded

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_A_LOOK_LASTS = 3.0
"""How old a look may be and still be told of as now."""
COUNTED = ("sent", "received", "read", "written")
SECONDS_TO_END = 2.0
"""How long a driver that does not answer may hold up the end of a run."""


class Telemetry:
    """What one rank knows of its machine, since it was asked before. The first rank of a node knows its host too."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self._node = place.node_rank
        self._gpu = _identity(device) if device.type == "cuda" else []
        self._host = None
        if place.local_rank == 0:
            # A run on CPUs asks too: GPUs that nobody uses are worth a word.
            has_gpus = device.type == "cuda" or has_driver(Path("/"))
            self._host = HostSampler(Sensors(_nvml() if has_gpus else None))
        self._since, self._used = time.perf_counter(), processor_seconds()

    def start(self) -> None:
        """The attempt begins."""
        if self._host is not None:
            self._host.start()

    def take(self, workers: int = 0) -> dict[str, Any]:
        """What is told of this rank, as JSON; it has so many data workers.

        What goes wrong here fails no run, and all ranks gather the same things: then nothing is known of this rank.
        """
        told: dict[str, Any] = {"node": self._node, "workers": workers, "gpu": self._gpu}
        with suppress(Exception):
            return {**told, **self._measure()}
        return {**told, "cores": None, "memory": None, "threads": None, "may_use": 0, "host": None}

    def _measure(self) -> dict[str, Any]:
        now, used = time.perf_counter(), processor_seconds()
        passed, worked = now - self._since, used - self._used
        self._since, self._used = now, used
        return {
            "cores": rounded(max(0.0, worked) / max(passed, 1e-9)),
            "memory": _bytes(psutil.Process().memory_info().rss),
            "threads": torch.get_num_threads(),
            "may_use": sum(1 << core for core in os.sched_getaffinity(0)),
            "host": self._host.take() if self._host is not None else None,
        }

    def close(self) -> None:
        """The attempt ends."""
        if self._host is not None:
            self._host.close()


class HostSampler:
    """Looks at a host about once a second, beside the training, and says what it did between two questions."""

    def __init__(self, sensors: Sensors) -> None:
        self._sensors = sensors
        self._closing = threading.Event()
        self._noting = threading.Lock()  # never held while the driver is asked, which may take its time
        self._before: Counts | None = None
        self._looked_before: SensorLook | None = None
        self._last: SensorLook | None = None
        self._seen = _Seen()
        self._thread = threading.Thread(target=self._look_now_and_then, name="lockstep-telemetry", daemon=True)

    def start(self) -> None:
        """From now on, in a thread. What happens in it never fails the run: a look less is no harm."""
        self._thread.start()

    def _look_now_and_then(self) -> None:
        while True:
            with suppress(Exception):
                self.look()
            if self._closing.wait(SECONDS_BETWEEN_LOOKS):
                return

    def look(self) -> None:
        """Look once: the thread alone does, because a driver that does not answer would hold up who asks it."""
        look = self._sensors.look(time.monotonic())
        with self._noting:
            self._looked_before = self._looked_before or look
            self._last = look
            self._seen.add(look)

    def take(self) -> dict[str, Any] | None:
        """What the host did since this was asked before, as a `machine` event has it; None where nothing is known."""
        with suppress(Exception):
            counts = self._sensors.count(time.monotonic())
            with self._noting:
                before, self._before = self._before or counts, counts
                looked_before, last = self._looked_before, self._last
                if looked_before is None or last is None:
                    return None
                self._looked_before = last
                seen, self._seen = self._seen, _Seen()
            if seen.is_empty and counts.at - last.at <= SECONDS_A_LOOK_LASTS:
                seen.add(last)
            return {**_counted(before, counts), **_looked_at(looked_before, last, seen)}
        return None

    def close(self) -> None:
        """End the thread, and let go of the driver."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(SECONDS_TO_END)
        if not self._thread.is_alive():
            with suppress(Exception):
                self._sensors.close()


class _Seen:
    """What several looks have seen."""

    def __init__(self) -> None:
        self._values: defaultdict[tuple[int, str], tuple[float, int, float]] = defaultdict(lambda: (0.0, 0, 0.0))

    @property
    def is_empty(self) -> bool:
        return not self._values

    def add(self, look: SensorLook) -> None:
        self._add(-1, "memory", look.memory)
        for gpu in look.gpus:
            for name in ("busy", "memory", "watts", "celsius"):
                self._add(gpu.index, name, getattr(gpu, name))

    def _add(self, gpu: int, name: str, value: float | None) -> None:
        if value is not None:
            total, count, most = self._values[gpu, name]
            self._values[gpu, name] = total + value, count + 1, max(most, value)

    def mean(self, gpu: int, name: str) -> float | None:
        total, count, _ = self._values[gpu, name]
        return rounded(total / count) if count else None

    def most(self, gpu: int, name: str) -> int | None:
        _, count, most = self._values[gpu, name]
        return _bytes(most) if count else None


def _counted(before: Counts, now: Counts) -> dict[str, Any]:
    """What a host has counted between two moments."""
    busy, whole = now.cpu_busy - before.cpu_busy, now.cpu_whole - before.cpu_whole
    return {
        "cpu": rounded(min(1.0, max(0.0, busy / whole))) if whole > 0 else None,
        **{name: _rate(getattr(before, name), getattr(now, name), now.at - before.at) for name in COUNTED},
        "quota": cpu_quota(Path("/")),
    }


def _looked_at(before: SensorLook, last: SensorLook, seen: _Seen) -> dict[str, Any]:
    """What was seen of a host between two looks."""
    joules = [joules for joules in (last.cpu_joules, *(gpu.joules for gpu in last.gpus)) if joules is not None]
    measured = last.cpu_joules is not None and before.cpu_joules is not None and last.at > before.at
    return {
        "memory": seen.most(-1, "memory"),
        "memory_total": _bytes(last.memory_total),
        "watts": _rate(before.cpu_joules or 0.0, last.cpu_joules or 0.0, last.at - before.at) if measured else None,
        "joules": round(sum(joules), 1) if joules else None,
        "gpus": [_gpu_told(gpu, seen) for gpu in last.gpus],
    }


def _rate(before: float, now: float, seconds: float) -> float:
    """By how much something grew in a second. A counter that was reset has counted nothing that is known."""
    return rounded(max(0.0, now - before) / seconds) if seconds > 0 else 0.0


def _gpu_told(gpu: GpuReading, seen: _Seen) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "name": gpu.name,
        "busy": seen.mean(gpu.index, "busy"),
        "memory": seen.most(gpu.index, "memory"),
        "memory_total": None if gpu.memory_total is None else _bytes(gpu.memory_total),
        "watts": seen.mean(gpu.index, "watts"),
        "celsius": seen.mean(gpu.index, "celsius"),
        "identity": gpu.identity,
    }


def machine_event(told: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> MachinesTold:
    """The fields of a `machine` event, from what every rank tells and the names of the ranks' hosts."""
    return {
        "hosts": [_host(told, hosts, rank) for rank in _first_of_nodes(told) if told[rank]["host"] is not None],
        "ranks": cast(ProcessesTold, {name: [rank[name] for rank in told] for name in ProcessesTold.__annotations__}),
    }


def _first_of_nodes(told: Sequence[Mapping[str, Any]]) -> list[int]:
    """The rank that has looked at the host, for each node in their order."""
    firsts: dict[int, int] = {}
    for rank, own in enumerate(told):
        if own["host"] is not None:
            firsts.setdefault(own["node"], rank)
    return [firsts[node] for node in sorted(firsts)]


def _host(told: Sequence[Mapping[str, Any]], hosts: Sequence[str], first: int) -> HostTold:
    here = {rank: own for rank, own in enumerate(told) if own["node"] == told[first]["node"]}
    measured = dict(told[first]["host"])
    may_use, quota = 0, measured.pop("quota")
    for own in here.values():  # each rank may be bound to cores of its own
        may_use |= own["may_use"]
    cores = may_use.bit_count()
    gpus = []
    for gpu in measured.pop("gpus"):
        identity = set(gpu.pop("identity"))
        gpus.append({**gpu, "ranks": [rank for rank, own in here.items() if identity & set(own["gpu"])]})
    cores = cores if quota is None else min(cores, math.ceil(quota))
    return cast(HostTold, {"host": hosts[first], "cores": cores, **measured, "gpus": gpus})


def processor_seconds() -> float:
    """CPU time of this process and of all it has started: its data workers, also those that have ended."""
    times = os.times()
    used = time.process_time() + times.children_user + times.children_system
    for pid in descendants(os.getpid()):
        with suppress(psutil.Error):
            used += sum(psutil.Process(pid).cpu_times()[:4])  # user, system, and those of its own ended children
    return used


def _identity(device: torch.device) -> list[str]:
    """UUID and place on the PCI bus of the GPU that this rank computes on, as the driver writes them."""
    gpu: Any = torch.cuda.get_device_properties(device)
    identity = [f"GPU-{gpu.uuid}"] if hasattr(gpu, "uuid") else []
    if hasattr(gpu, "pci_bus_id"):
        identity.append(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    return identity


def _nvml() -> Any:
    """The driver's library, where it is installed. Imported here: a fork while a thread imports would get stuck."""
    with suppress(Exception):  # whatever is wrong with it, the run goes on without
        import pynvml

        return pynvml
    return None


def _bytes(number: float) -> int:
    return int(rounded(number))
