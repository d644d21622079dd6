"""What is measured of a machine: planted GPUs, energy counters, cards and disks; and what a rank keeps busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from lockstep.observe.telemetry import HostSampler, Telemetry, _nvml, machine_event, processor_seconds
from lockstep.record.events import validate
from lockstep.runtime.host.sensors import Counts, GpuSensors, Rapl, SensorLook, Sensors, descendants
from lockstep.runtime.rank_env import place_of
from tests.patience import wait_for

GB = 10**9


class NVMLError(Exception):
    """What the driver says no with."""


class PlantedDriver:
    """A stand-in for the module pynvml: two GPUs, the second of which is old and cannot say much."""

    NVMLError = NVMLError

    def __init__(self, *, opens: bool = True) -> None:
        self.opens = opens
        self.is_open = False
        self.busy, self.milliwatts, self.millijoules = 50, 300_000, 1_000_000

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.opens:
            raise NVMLError("Driver Not Loaded")
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index == 2:
            raise NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes | str:  # noqa: N802
        return "New GPU" if handle == 0 else b"Old GPU"

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-0000-{handle}"

    def nvmlDeviceGetPciInfo_v3(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{handle + 1:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=(handle + 1) * GB, total=80 * GB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        if handle == 1:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return self.milliwatts if handle == 0 else 100_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        if handle == 1:
            raise NVMLError("Not Supported")
        return self.millijoules

    def nvmlDeviceGetTemperature(self, _: int, __: int) -> int:  # noqa: N802
        return 60


def plant(root: Path, files: Mapping[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


def test_every_gpu_of_the_node_is_read_and_one_that_is_lost_is_left_out() -> None:
    driver = PlantedDriver()
    new, old = GpuSensors(driver).read(0.0)
    assert (new.index, new.name, new.identity) == (0, "New GPU", ("GPU-0000-0", "0000:01:00.0"))
    assert (new.busy, new.memory, new.memory_total, new.watts, new.celsius) == (0.5, GB, 80 * GB, 300.0, 60)
    assert (old.name, old.busy, old.watts) == ("Old GPU", None, 100.0), "what it cannot say is not guessed"


def test_joules_are_the_drivers_count_and_where_it_has_none_power_times_time() -> None:
    driver = PlantedDriver()
    gpus = GpuSensors(driver)
    assert [gpu.joules for gpu in gpus.read(100.0)] == [0.0, 0.0], "since the first look"
    driver.millijoules += 4_500_000
    assert [gpu.joules for gpu in gpus.read(101.5)] == [450.0, 150.0], "300 W and 100 W for 1.5 s"
    assert [gpu.joules for gpu in gpus.read(110.0)] == [4500.0, 1000.0], "the counter is asked every ten seconds"
    driver.millijoules = 7  # the driver was loaded again
    assert [gpu.joules for gpu in gpus.read(120.0)] == [7500.0, 2000.0]
    driver.millijoules += 2_000_000
    driver.milliwatts = 900_000
    assert [gpu.joules for gpu in gpus.read(129.0)] == [15600.0, 2900.0]
    assert [gpu.joules for gpu in gpus.read(130.0)] == [15600.0, 3000.0], "the counter has less, but it never falls"


def test_a_driver_that_does_not_open_has_no_gpus_and_is_let_go_of_where_it_does() -> None:
    assert GpuSensors(None).read(0.0) == []
    assert GpuSensors(PlantedDriver(opens=False)).read(0.0) == []
    driver = PlantedDriver()
    gpus = GpuSensors(driver)
    gpus.read(0.0)
    assert driver.is_open
    gpus.close()
    assert not driver.is_open


def test_energy_of_the_sockets_is_counted_over_a_counter_that_begins_again(tmp_path: Path) -> None:
    rapl = tmp_path / "sys/class/powercap"
    for name, kind in {"0": "package-0", "0:0": "core", "1": "package-1", "2": "psys"}.items():
        plant(
            rapl / f"intel-rapl:{name}", {"name": kind, "energy_uj": 900_000_000, "max_energy_range_uj": 1_000_000_000}
        )
    cpus = Rapl(tmp_path)
    assert cpus.joules() == 0.0
    plant(rapl, {"intel-rapl:0/energy_uj": 950_000_000, "intel-rapl:1/energy_uj": 30_000_000})
    plant(rapl, {"intel-rapl:0:0/energy_uj": 999_000_000, "intel-rapl:2/energy_uj": 999_000_000})
    assert cpus.joules() == pytest.approx(50 + 130), "parts of a socket and the whole machine are not added to it"
    assert Rapl(tmp_path / "elsewhere").joules() is None
    (rapl / "intel-rapl:1/energy_uj").unlink()
    assert Rapl(tmp_path).joules() is None, "half of the machine is not the machine"


def test_network_and_disks_are_hardware_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, block = tmp_path / "sys/class/net", tmp_path / "sys/block"
    plant(net, {"lo/type": 772, "bond0/type": 1, "eth0/type": 1, "eth0/device/vendor": 1})
    plant(net, {"ib0/type": 32, "ib0/device/vendor": 1})
    plant(block, {"nvme0n1/device/model": "disk", "dm-0/size": 1, "loop0/size": 1})
    plant(tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters", {"port_xmit_data": 25, "port_rcv_data": 50})
    card = SimpleNamespace(bytes_sent=1000, bytes_recv=2000)
    disk = SimpleNamespace(read_bytes=30, write_bytes=40)
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: dict.fromkeys(("lo", "bond0", "eth0", "ib0"), card))
    monkeypatch.setattr(psutil, "disk_io_counters", lambda **_: dict.fromkeys(("nvme0n1", "nvme0n1p1", "dm-0"), disk))
    counts = Sensors(root=tmp_path).count(0.0)
    assert (counts.sent, counts.received) == (1000 + 4 * 25, 2000 + 4 * 50), "a port counts words of four bytes"
    assert (counts.read, counts.written) == (30, 40)


class PlantedHost:
    """Sensors of a host whose numbers grow by known amounts."""

    def __init__(self) -> None:
        self.at = 0.0
        self.driver = PlantedDriver()
        self.gpus = GpuSensors(self.driver)
        self.closed = False

    def count(self, _: float) -> Counts:
        busy, whole = 6 * self.at, 8 * self.at  # of eight cores
        return Counts(self.at, busy, whole, int(1000 * self.at), int(2000 * self.at), 0, int(123_456 * self.at))

    def look(self, _: float) -> SensorLook:
        return SensorLook(self.at, int((10 + self.at) * GB), 64 * GB, 90.0 * self.at, self.gpus.read(self.at))

    def close(self) -> None:
        self.closed = True


def host_after(*moments: tuple[float, int]) -> dict[str, Any]:
    """What a sampler tells since the first of these times, after a look at each of a GPU that was so busy."""
    host = PlantedHost()
    sampler = HostSampler(host)  # type: ignore[arg-type]
    sampler.look()
    sampler.take()
    for host.at, host.driver.busy in moments:
        sampler.look()
    told = sampler.take()
    assert told is not None
    return told


def test_a_host_is_told_as_means_and_rates_and_the_most_memory() -> None:
    told = host_after((1.0, 90), (4.0, 60))
    assert told["cpu"] == 0.75
    assert (told["sent"], told["received"], told["read"]) == (1000.0, 2000.0, 0.0)
    assert told["written"] == 123500.0, "four digits are enough"
    assert (told["memory"], told["memory_total"]) == (14 * GB, 64 * GB)
    assert told["watts"] == 90.0
    assert told["joules"] == 4 * (90 + 300 + 100), "of the CPUs and both GPUs"
    new, old = told["gpus"]
    assert (new["busy"], new["watts"], new["celsius"], new["memory"]) == (0.75, 300.0, 60.0, GB)
    assert (old["busy"], old["watts"]) == (None, 100.0)


def test_a_second_question_is_about_the_time_since_the_first() -> None:
    host = PlantedHost()
    sampler = HostSampler(host)  # type: ignore[arg-type]
    for host.at in (0.0, 1.0, 2.0):
        sampler.look()
    sampler.take()
    host.at, host.driver.busy = 3.0, 80
    sampler.look()
    told = sampler.take()
    assert told is not None
    assert (told["gpus"][0]["busy"], told["sent"], told["watts"]) == (0.8, 1000.0, 90.0)
    assert told["joules"] == 3 * (90 + 300 + 100), "but energy counts from the beginning"


def test_a_thread_samples_until_the_end_and_troubles_in_it_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.observe.telemetry.SECONDS_BETWEEN_LOOKS", 0.01)
    host = PlantedHost()
    looks = []

    def look(now: float) -> SensorLook:
        looks.append(now)
        if len(looks) < 3:
            raise RuntimeError("a sensor that nobody has heard of")
        return PlantedHost.look(host, now)

    host.look = look  # type: ignore[assignment, method-assign]
    sampler = HostSampler(host)  # type: ignore[arg-type]
    assert sampler.take() is None, "there is nothing to tell"
    sampler.start()
    wait_for(lambda: len(looks) >= 5, "five looks")
    sampler.close()
    assert host.closed
    assert looks == sorted(looks)
    assert sampler.take() is not None
    assert "lockstep-telemetry" not in {thread.name for thread in threading.enumerate()}


def test_a_driver_that_does_not_answer_holds_nobody_up_and_what_it_said_last_is_told_for_a_while() -> None:
    host = PlantedHost()
    sampler = HostSampler(host)  # type: ignore[arg-type]
    sampler.look()
    sampler.take()
    asked, answer = threading.Event(), threading.Event()

    def look(_: float) -> SensorLook:
        asked.set()
        answer.wait()
        return PlantedHost.look(host, 0.0)

    host.look = look  # type: ignore[method-assign]
    sampler.start()
    asked.wait()
    try:
        told = []
        for host.at in (1.0, 60.0):
            told.append(sampler.take())
    finally:
        answer.set()
        sampler.close()
    soon, late = told
    assert soon is not None
    assert late is not None
    assert [one["sent"] for one in told if one] == [1000.0, 1000.0], "the kernel's counters go on"
    assert [one["watts"] for one in told if one] == [None, None], "nobody has looked since"
    assert (soon["memory"], soon["gpus"][0]["busy"]) == (10 * GB, 0.5)
    assert (late["memory"], late["gpus"][0]["busy"]) == (None, None), "an old look says nothing of now"


def told_by(node: int, *, gpu: list[str] | None = None, cores: int = 0b11, host: Any = None) -> dict[str, Any]:
    own = {"cores": 1.5, "memory": GB, "threads": 2, "workers": 1}
    return {**own, "node": node, "gpu": gpu or [], "may_use": cores, "host": host}


def host_told(**more: Any) -> dict[str, Any]:
    return {**host_after((1.0, 90)), "quota": None, **more}


def test_ranks_are_put_to_gpus_by_uuid_or_bus_and_hosts_in_the_order_of_nodes() -> None:
    told = [
        told_by(1, host=host_told(), gpu=["GPU-0000-1", "0000:02:00.0"]),
        told_by(0, host=host_told(), gpu=["GPU-of-a-slice", "0000:02:00.0"]),  # a part of a GPU has a UUID of its own
        told_by(0, gpu=["GPU-0000-1"]),
    ]
    event = machine_event(json.loads(json.dumps(told)), ["b", "a", "a"])
    validate({"time": 1.0, "kind": "machine", "attempt": 1, "step": 5, **event})
    assert [host["host"] for host in event["hosts"]] == ["a", "b"]
    assert [[gpu["ranks"] for gpu in host["gpus"]] for host in event["hosts"]] == [[[], [1, 2]], [[], [0]]]
    assert event["ranks"] == {"cores": [1.5] * 3, "memory": [GB] * 3, "threads": [2] * 3, "workers": [1] * 3}
    documented = {"host", "cores", "cpu", "memory", "memory_total", "sent", "received", "read", "written"}
    assert set(event["hosts"][0]) == documented | {"watts", "joules", "gpus"}
    of_a_gpu = {"index", "name", "busy", "memory", "memory_total", "watts", "celsius", "ranks"}
    assert set(event["hosts"][0]["gpus"][0]) == of_a_gpu


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (2.5, 3), (16.0, 4)])
def test_cores_are_those_of_all_ranks_of_a_node_as_far_as_the_control_group_allows(
    quota: float | None, cores: int
) -> None:
    told = [told_by(0, host=host_told(quota=quota), cores=0b0011), told_by(0, cores=0b1100), told_by(1, cores=0b1111)]
    assert machine_event(told, ["a", "a", "b"])["hosts"][0]["cores"] == cores


def test_the_event_of_a_thousand_ranks_is_no_burden() -> None:
    gpus = [{**gpu, "index": i} for i in range(4) for gpu in host_told()["gpus"]]
    told = [told_by(r // 8, gpu=["GPU-0"], host=host_told(gpus=gpus) if r % 8 == 0 else None) for r in range(1000)]
    event = machine_event(json.loads(json.dumps(told)), [f"node{r // 8}" for r in range(1000)])
    assert len(event["hosts"]) == 125
    assert len(json.dumps(event)) < 200_000, "and it comes every 83 seconds"


def clocks() -> NDArray[np.float64]:
    return np.array([time.process_time(), time.perf_counter()])


def burn(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def test_a_rank_keeps_busy_what_it_and_its_children_compute_also_those_that_have_ended() -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    before = processor_seconds()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert child.pid in descendants(os.getpid())
    running = processor_seconds() - before
    child.communicate(b"\n")
    ended = processor_seconds() - before
    assert 0.25 < running <= ended + 0.02, "it counts while it runs, and stays counted (the system counts in 10 ms)"
    assert ended < 0.5


def test_a_process_that_ends_while_it_is_asked_for_its_children_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, {"proc/1/task/1/children": "2 3", "proc/3/task/3/children": "4", "proc/3/task/9/children": ""})
    (tmp_path / "proc/2/task").mkdir(parents=True)

    def unless_ended(look: Any) -> Any:
        def looks(path: Any) -> Any:
            if Path(path) == tmp_path / "proc/2/task":
                raise ProcessLookupError(3, "No such process")  # as /proc says it
            return look(path)

        return looks

    monkeypatch.setattr(os, "listdir", unless_ended(os.listdir))
    monkeypatch.setattr(os, "scandir", unless_ended(os.scandir))
    assert list(descendants(1, tmp_path)) == [2, 3, 4]


def test_a_rank_that_cannot_measure_itself_tells_that_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = Telemetry(place_of(0, 1), torch.device("cpu"))
    known = telemetry.take(workers=2)

    def broken() -> float:
        raise ValueError("a kernel that nobody has heard of")

    monkeypatch.setattr("lockstep.observe.telemetry.processor_seconds", broken)
    told = telemetry.take(workers=2)
    assert told.keys() == known.keys(), "the others gather it all the same"
    assert (told["cores"], told["memory"], told["host"], told["workers"]) == (None, None, None, 2)
    event = machine_event([told, told_by(0, host=host_told())], ["a", "a"])
    validate({"time": 1.0, "kind": "machine", "attempt": 1, "step": 5, **event})
    assert event["ranks"]["cores"] == [None, 1.5]
    assert [host["cores"] for host in event["hosts"]] == [2]


def test_a_rank_that_burns_a_core_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # What other tests have started may compute meanwhile: children are counted, and are shown above.
    monkeypatch.setattr("lockstep.observe.telemetry.descendants", lambda _: [])
    ranks = [Telemetry(place_of(rank, 2, head="a:1"), torch.device("cpu")) for rank in range(2)]
    for rank in ranks:
        rank.start()
    wait_for_a_look(ranks[0])
    ranks[1].take()
    outer = clocks()
    ranks[0].take()
    inner = clocks()
    burn(0.3)
    inner = clocks() - inner
    told = [rank.take(workers=3) for rank in ranks]
    outer = clocks() - outer
    for rank in ranks:
        rank.close()
    least, most = inner[0] / outer[1], outer[0] / inner[1]
    assert 0.99 * least <= told[0]["cores"] <= 1.01 * most
    assert (told[0]["workers"], told[0]["threads"], told[0]["node"]) == (3, torch.get_num_threads(), 0)
    assert told[0]["memory"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert told[1]["host"] is None, "one rank of a node looks at it"
    host = told[0]["host"]
    assert host["cpu"] * psutil.cpu_count() >= 0.6 * least
    assert host["memory_total"] == pytest.approx(psutil.virtual_memory().total, rel=0.01)


def test_a_run_on_cpus_asks_the_driver_too_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, asked = PlantedDriver(), []

    def nvml() -> PlantedDriver:
        asked.append(threading.current_thread())
        return driver

    monkeypatch.setattr("lockstep.observe.telemetry.has_driver", lambda _: True)
    monkeypatch.setattr("lockstep.observe.telemetry._nvml", nvml)
    ranks = [Telemetry(place_of(rank, 2, head="a:1"), torch.device("cpu")) for rank in range(2)]
    assert asked == [threading.main_thread()], "once on a node, and not in a thread"
    ranks[0].start()
    told = wait_for_a_look(ranks[0])
    ranks[0].close()
    assert not driver.is_open
    (host,) = machine_event([told, ranks[1].take()], ["a", "a"])["hosts"]
    assert [(gpu["name"], gpu["ranks"]) for gpu in host["gpus"]] == [("New GPU", []), ("Old GPU", [])]


def test_without_a_driver_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.observe.telemetry.has_driver", lambda _: False)
    monkeypatch.setattr("lockstep.observe.telemetry._nvml", lambda: pytest.fail("nobody is there to ask"))
    telemetry = Telemetry(place_of(0, 1), torch.device("cpu"))
    telemetry.start()
    told = wait_for_a_look(telemetry)
    telemetry.close()
    assert told["host"]["gpus"] == []


@pytest.mark.parametrize("error", [ImportError, OSError, AttributeError])
def test_a_library_of_the_driver_that_is_broken_is_no_library(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise error("a library that nobody has heard of")

    monkeypatch.setattr("lockstep.observe.telemetry.has_driver", lambda _: True)
    monkeypatch.setattr("lockstep.observe.telemetry._nvml", lambda: SimpleNamespace(nvmlInit=broken))
    telemetry = Telemetry(place_of(0, 1), torch.device("cpu"))
    telemetry.start()
    told = wait_for_a_look(telemetry)
    telemetry.close()
    assert told["host"]["gpus"] == []
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr("builtins.__import__", broken)
    assert _nvml() is None


def wait_for_a_look(telemetry: Telemetry) -> dict[str, Any]:
    """What is told as soon as the thread has looked at the host."""
    told: dict[str, Any] = {}

    def has_looked() -> bool:
        told.update(telemetry.take())
        return told["host"] is not None

    wait_for(has_looked, "a look at the host")
    return told


def test_a_process_forked_while_the_host_is_sampled_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.observe.telemetry.SECONDS_BETWEEN_LOOKS", 0.0001)
    telemetry = Telemetry(place_of(0, 1), torch.device("cpu"))
    telemetry.start()
    for _ in range(20):
        pid = os.fork()
        if pid == 0:  # as a data worker, which may ask the same of the system
            psutil.net_io_counters(pernic=True)
            psutil.disk_io_counters()
            os._exit(0)
        os.waitpid(pid, 0)  # for ever, where the child is stuck
    telemetry.close()
