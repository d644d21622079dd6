"""What a host can say of itself: counters of its CPUs, network and disks, its memory, its power and its GPUs.

What cannot be read is None, never a guess. What sysfs says is read below `root`, so that a
test can plant a machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lockstep.runtime.host.gpus import ask, handles_of, identity_of
from lockstep.runtime.host.node_facts import memory_here, number_of, text_of

IPOIB = "32"
"""The type of a network interface that InfiniBand ports carry (ARPHRD_INFINIBAND in Linux' if_arp.h)."""
BYTES_OF_A_PORT_COUNT = 4
"""InfiniBand ports count in words (Linux, Documentation/ABI/stable/sysfs-class-infiniband)."""

SECONDS_BETWEEN_COUNTS = 10.0
"""How often a GPU's energy counter is read: that takes the driver 2.5 ms (an H200, driver 580), all else 0.01 ms."""


@dataclass(frozen=True)
class GpuReading:
    """One GPU of the node as the driver sees it now; `joules` since the first reading."""

    index: int
    name: str
    identity: tuple[str, str]
    """UUID and place on the PCI bus."""
    busy: float | None
    memory: int | None
    memory_total: int | None
    watts: float | None
    celsius: float | None
    joules: float | None


@dataclass(frozen=True)
class Counts:
    """What a host counts by itself, from anywhere: only differences mean something."""

    at: float
    """Of a clock that does not jump."""
    cpu_busy: float
    cpu_whole: float
    sent: int
    received: int
    read: int
    written: int


@dataclass(frozen=True)
class SensorLook:
    """What has to be looked at now and then, because nobody counts it, or a counter begins again."""

    at: float
    memory: int
    memory_total: int
    cpu_joules: float | None
    """Since the first look."""
    gpus: list[GpuReading]


class Sensors:
    """Reads a host; `nvml` is the module `pynvml`, or None where its GPUs are of no interest."""

    def __init__(self, nvml: Any = None, root: Path = Path("/")) -> None:
        self._root = root
        self._ports = sorted((root / "sys/class/infiniband").glob("*/ports/*/counters"))
        self._interfaces = _interfaces(root, without_ipoib=bool(self._ports))
        self._disks = _devices(root / "sys/block")
        self._cpus = Rapl(root)
        self._gpus = GpuSensors(nvml)

    def count(self, now: float) -> Counts:
        """The counters, at `now` of a clock that does not jump."""
        times = psutil.cpu_times()
        # Linux counts the time of virtual machines twice: as guest, and as user or nice.
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        # Not made monotonic by psutil: it holds a lock for that, which a forked data worker would find taken.
        interfaces = psutil.net_io_counters(pernic=True, nowrap=False) or {}
        disks = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        used = [interfaces[name] for name in self._interfaces if name in interfaces]
        plates = [disks[name] for name in self._disks if name in disks]
        return Counts(
            at=now,
            cpu_busy=whole - times.idle - getattr(times, "iowait", 0.0),
            cpu_whole=whole,
            sent=sum(counters.bytes_sent for counters in used) + self._over_infiniband("port_xmit_data"),
            received=sum(counters.bytes_recv for counters in used) + self._over_infiniband("port_rcv_data"),
            read=sum(counters.read_bytes for counters in plates),
            written=sum(counters.write_bytes for counters in plates),
        )

    def look(self, now: float) -> SensorLook:
        """The rest. A driver may take its time for it."""
        total, free = memory_here(self._root)
        return SensorLook(now, total - free, total, self._cpus.joules(), self._gpus.read(now))

    def _over_infiniband(self, counter: str) -> int:
        return sum(number_of(port / counter) or 0 for port in self._ports) * BYTES_OF_A_PORT_COUNT

    def close(self) -> None:
        """Let go of the driver."""
        self._gpus.close()


class Rapl:
    """The energy of the CPUs since the first look, from the counters that Intel's and AMD's have."""

    def __init__(self, root: Path) -> None:
        # Of the whole sockets: what lies below one is part of it, and "psys" is the whole machine once more.
        found = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        sockets = [path for path in found if path.name.count(":") == 1 and text_of(path / "name") != "psys"]
        self._counters = {path: number_of(path / "energy_uj") for path in sockets}
        self._ranges = {path: number_of(path / "max_energy_range_uj") or 0 for path in sockets}
        self._joules = 0.0
        # On many machines only root may read them.
        self._is_readable = bool(sockets) and None not in self._counters.values()

    def joules(self) -> float | None:
        """How many joules all sockets took since this began; None where nobody may read it."""
        if not self._is_readable:
            return None
        for path, before in self._counters.items():
            now = number_of(path / "energy_uj")
            if now is not None and before is not None:
                again = self._ranges[path] if now < before else 0  # it has started again from zero
                self._joules += (now - before + again) / 1e6
                self._counters[path] = now
        return self._joules


@dataclass
class _Meter:
    """What one GPU has used since the first reading."""

    at: float
    ask_again: float = -math.inf
    counter: int | None = None
    """What the driver said when it was asked; and what had been used until then."""
    counted: float = 0.0
    joules: float = 0.0
    told: float = 0.0
    """Never less than before."""


class GpuSensors:
    """All GPUs of the node, also those that this process may not use."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._known: dict[int, tuple[Any, str, str, str]] | None = None
        self._meters: dict[int, _Meter] = {}

    def _open(self) -> dict[int, tuple[Any, str, str, str]]:
        if self._nvml is None:
            return {}
        try:
            self._nvml.nvmlInit()
            handles, _ = handles_of(self._nvml)
        except Exception:  # its own errors, or those of a library that is not the driver's
            self._nvml = None
            return {}
        return {index: (handle, *identity_of(self._nvml, handle)) for index, handle in handles.items()}

    def read(self, now: float) -> list[GpuReading]:
        """Every GPU now; an empty list without a driver."""
        if self._known is None:  # not before the first reading: it takes a while, and may be done beside the training
            self._known = self._open()
        return [self._read(now, index) for index in self._known]

    def _read(self, now: float, index: int) -> GpuReading:
        assert self._known is not None
        handle, name, uuid, bus = self._known[index]
        busy = ask(self._nvml, handle, "nvmlDeviceGetUtilizationRates")
        memory = ask(self._nvml, handle, "nvmlDeviceGetMemoryInfo")
        milliwatts = ask(self._nvml, handle, "nvmlDeviceGetPowerUsage")
        watts = None if milliwatts is None else milliwatts / 1000
        return GpuReading(
            index=index,
            name=name,
            identity=(uuid, bus),
            busy=None if busy is None else busy.gpu / 100,
            memory=getattr(memory, "used", None),
            memory_total=getattr(memory, "total", None),
            watts=watts,
            celsius=ask(self._nvml, handle, "nvmlDeviceGetTemperature", 0),
            joules=self._joules(now, index, handle, watts),
        )

    def _joules(self, now: float, index: int, handle: Any, watts: float | None) -> float | None:
        """By the driver's own counter (in millijoules), and since it was asked, or without it, by power and time."""
        meter = self._meters.setdefault(index, _Meter(now))
        if watts is not None:
            meter.joules += watts * (now - meter.at)
        meter.at = now
        if now >= meter.ask_again:
            counted = ask(self._nvml, handle, "nvmlDeviceGetTotalEnergyConsumption")
            if counted is not None and meter.counter is not None and counted >= meter.counter:
                meter.counted += (counted - meter.counter) / 1000
                meter.joules = meter.counted
            meter.counter, meter.counted, meter.ask_again = counted, meter.joules, now + SECONDS_BETWEEN_COUNTS
        if watts is None and meter.counter is None:
            return None
        meter.told = max(meter.told, meter.joules)
        return meter.told

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None and self._known is not None:
            self._nvml.nvmlShutdown()
            self._known = {}


def _interfaces(root: Path, *, without_ipoib: bool) -> list[str]:
    """Those that bytes leave the host by, each byte once: no loopback, and no bond or bridge over others."""
    folder = root / "sys/class/net"
    found = [name for name in _devices(folder) if name != "lo"]
    return [name for name in found if not (without_ipoib and text_of(folder / name / "type") == IPOIB)]


def _devices(folder: Path) -> list[str]:
    """The entries of a class that are hardware; in a container, where none is, all of them."""
    names = sorted(path.name for path in folder.glob("*"))
    return [name for name in names if (folder / name / "device").exists()] or names


def descendants(pid: int, root: Path = Path("/")) -> Iterable[int]:
    """The processes that a process has started and that still run, and those that they started.

    Asked of the kernel by parent: looking through all processes of a large node would take long.
    """
    tasks = root / f"proc/{pid}/task"
    try:
        threads = os.listdir(tasks)
    except OSError:  # it has ended meanwhile
        return
    for thread in threads:
        for child in map(int, text_of(tasks / thread / "children").split()):
            yield child
            yield from descendants(child, root)
