"""What the doctor says of machines: each planted fault is named, and a sound machine is not blamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.checkup.reach import DoorKnock, Folder, calls, folders
from lockstep.links.findings import Finding, Plan, judge_nodes
from lockstep.links.topology import draw
from lockstep.runtime.host.gpus import DriverGpu
from lockstep.runtime.host.node_facts import NodeFacts, Numa, Port, look_around

GIGABYTE = 10**9


def node(**changes: Any) -> NodeFacts:
    sound: dict[str, Any] = {
        "host": "node1",
        "addresses": ["10.0.0.1"],
        "versions": {"lockstep": "1.0", "torch": "2.13.0", "kernel": "6.1"},
        "variables": {},
        "cpus": 16,
        "cpu_quota": None,
        "memory": 64 * GIGABYTE,
        "memory_free": 60 * GIGABYTE,
        "limits": {"nofile": 65536, "nofile at most": None, "memlock": None},
        "shm_size": 32 * GIGABYTE,
        "shm_free": 32 * GIGABYTE,
        "port_range": 28232,
        "torchruns_port_is_free": True,
        "has_default_route": True,
        "numa": [Numa(number=0, cpus="0-15", memory=64 * GIGABYTE)],
        "network": [port("eth0", address="10.0.0.1")],
        "gpus": [],
        "gpu_links": {},
        "gpus_given": None,
        "gpu_driver": False,
        "gpu_trouble": "",
    }
    return NodeFacts(**{**sound, **changes})


def port(name: str, **changes: Any) -> Port:
    plain = {"address": "", "numa": None, "gbit": 25.0, "is_up": True, "is_infiniband": False}
    return Port(name=name, **{**plain, **changes})


def gpu(index: int = 0, **changes: Any) -> DriverGpu:
    plain: dict[str, Any] = {"name": "H200", "uuid": "", "pci": "0000:18:00.0", "numa": 0, "memory": 141 * GIGABYTE}
    plain |= {"memory_used": 0, "ecc_errors": 0, "rows_pending": False, "slowed_by": [], "temperature": 40}
    plain["processes"] = []
    return DriverGpu(index=index, **{**plain, **changes})


def bad(nodes: list[NodeFacts], nproc: int = 2, device: Any = "cpu", workers: int | None = None) -> list[Finding]:
    found = judge_nodes(nodes, Plan([nproc] * len(nodes), device, workers))
    for finding in found:
        assert finding.evidence
        assert finding.fix or finding.level == "ok", "every trouble comes with what to do about it"
    return [finding for finding in found if finding.is_bad]


def test_a_sound_machine_is_fit() -> None:
    assert bad([node()]) == []
    assert bad([node(), node(host="node2", addresses=["127.0.1.1"])]) == []
    assert bad([node(variables={"HF_HOME": "", "CUDA_VISIBLE_DEVICES": ""})]) == []
    assert bad([node(limits={"nofile": 1024, "nofile at most": 65536})]) == [], "the launcher raises that"
    assert bad([node(cpu_quota=4.0, variables={"OMP_NUM_THREADS": "2"})]) == [], "the ranks keep within their time"
    interfaces = [{"GLOO_SOCKET_IFNAME": name} for name in ("eth0", "lo")]
    assert bad([node(variables=one) for one in interfaces]) == [], "cards may have other names on other nodes"
    assert bad([node(gpus=[gpu(0), gpu(1)], gpu_driver=True)], 2, "cuda") == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shm_free": 8 * 10**6, "shm_size": 8 * 10**6}, "/dev/shm has 8 of 8 MB free"),
        ({"limits": {"nofile": 1024, "nofile at most": 1024}}, "1024 open files"),
        ({"cpus": 1}, "1 CPUs for 2 ranks"),
        ({"cpu_quota": 4.0}, "16 CPUs are seen, and the control group gives the time of 4"),
        ({"memory_free": GIGABYTE}, "1.0 of 64 GB free"),
        ({"port_range": 12}, "12 ports"),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "every kernel waits"),
        ({"variables": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        ({"variables": {"RANK": "0", "WORLD_SIZE": "8"}}, "RANK=0, WORLD_SIZE=8 is set"),
        ({"variables": {"GLOO_SOCKET_IFNAME": "ib0"}}, "GLOO_SOCKET_IFNAME=ib0, and there is no such interface"),
        ({"variables": {"OMP_NUM_THREADS": "16"}}, "OMP_NUM_THREADS=16 in 2 ranks"),
    ],
)
def test_a_planted_fault_is_the_only_one_named(changes: dict[str, Any], says: str) -> None:
    (finding,) = bad([node(**changes)])
    assert says in finding.evidence


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ecc_errors": 3}, "GPU 0 (H200): 3 uncorrected memory errors"),
        ({"rows_pending": True}, "waits for a reset"),
        ({"slowed_by": ["heat (hardware)"], "temperature": 91}, "slowed down by heat (hardware) at 91 degrees"),
        (
            {"processes": [4711], "memory_used": 70 * GIGABYTE},
            "another process is on it (pid 4711; 70.0 of 141 GB taken)",
        ),
    ],
)
def test_a_gpu_that_is_ill_or_busy_is_named(changes: dict[str, Any], says: str) -> None:
    (finding,) = bad([node(gpus=[gpu(**changes), gpu(1)], gpu_driver=True)], 2, "cuda")
    assert says in finding.evidence


def test_a_driver_that_has_lost_a_gpu_is_no_missing_package() -> None:
    (finding,) = bad([node(gpu_driver=True, gpu_trouble="GPU 3: GPU is lost")])
    assert finding.evidence == "the GPU driver does not answer for all GPUs: GPU 3: GPU is lost"


def test_parts_of_a_gpu_are_devices_too() -> None:
    parts = node(gpus=[gpu()], gpus_given=1, variables={"CUDA_VISIBLE_DEVICES": "MIG-1234"})
    assert bad([parts], 1, "cuda") == []


def test_gpus_that_no_rank_uses_are_counted() -> None:
    machine = node(gpus=[gpu(number) for number in range(4)], gpu_driver=True, gpus_given=4)
    assert [finding.evidence for finding in bad([machine], 2, "cuda")] == ["4 GPUs are visible and 2 used by a rank"]
    assert [finding.evidence for finding in bad([machine], 2)] == ["4 GPUs are visible and none used by a rank"]
    hidden = machine.model_copy(update={"variables": {"CUDA_VISIBLE_DEVICES": "0,1"}})
    assert [finding.evidence for finding in bad([hidden], 2, "cuda")] == ["Slurm gave 4 GPUs and 2 are visible"]


def test_what_runs_on_the_gpus_of_others_is_not_our_concern() -> None:
    busy = [gpu(0), gpu(1, processes=[4711], uuid="GPU-abc")]
    assert bad([node(gpus=busy, variables={"CUDA_VISIBLE_DEVICES": "0"})], 1, "cuda") == []
    (finding,) = bad([node(gpus=busy, variables={"CUDA_VISIBLE_DEVICES": "GPU-abc"})], 1, "cuda")
    assert "pid 4711" in finding.evidence


def test_workers_are_counted_with_the_ranks() -> None:
    (finding,) = bad([node(cpus=4)], 4, workers=8)
    assert finding.evidence == "4 ranks with 8 workers each are 36 processes on 4 CPUs"
    assert finding.fix.startswith("use data.workers=0")
    assert bad([node()], 4, workers=3) == []


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    others = [node(host=f"node{number}") for number in (1, 2, 3)]
    odd = node(host="node4", versions={"lockstep": "1.0", "torch": "2.11.0", "kernel": "5.4"})
    (finding,) = bad([*others, odd])
    assert finding.where == "node4"
    assert finding.evidence == "torch is 2.13.0 on node1, node2, node3; 2.11.0 on node4"
    assert "torch 2.13.0" in finding.fix


def test_variables_that_differ_between_nodes_are_named() -> None:
    (finding,) = bad([node(), node(host="node2", variables={"NCCL_ALGO": "Ring"})])
    assert finding.evidence == "NCCL_ALGO is unset on node1; Ring on node2"


def test_infiniband_wants_locked_memory_and_is_not_to_be_switched_off() -> None:
    fast = [port("eth0"), port("mlx5_0", is_infiniband=True, gbit=400.0)]
    limited = node(
        network=fast,
        limits={"nofile": 65536, "nofile at most": None, "memlock": 8 * 10**6},
        gpus=[gpu()],
        gpu_driver=True,
    )
    assert ["InfiniBand pins its buffers" in finding.evidence for finding in bad([limited], 1, "cuda")] == [True]
    off = {"NCCL_IB_DISABLE": "1"}
    assert len(bad([node(network=fast, variables=off)])) == 1
    assert bad([node(variables=off)]) == [], "without such a card there is nothing to switch off"


def test_a_name_that_leads_nowhere_slows_many_nodes_and_is_a_note_on_one() -> None:
    nameless = node(host="node2", addresses=[])
    (finding,) = bad([node(), nameless])
    assert (finding.check, finding.level, finding.where) == ("names", "slow", "node2")
    assert finding.evidence == "its own name node2 resolves to nothing"
    assert bad([nameless]) == [], "nobody else has to find it"
    assert [one.level for one in judge_nodes([nameless], Plan([2], "cpu", None)) if one.check == "names"] == ["note"]


def test_a_node_without_a_way_out_is_told_how_to_work_offline() -> None:
    found = judge_nodes([node(has_default_route=False)], Plan([1], "cpu", None))
    (finding,) = [one for one in found if one.check == "internet"]
    assert (finding.level, "HF_HUB_OFFLINE=1" in finding.fix) == ("note", True)


def test_a_default_route_is_not_called_the_internet() -> None:
    found = judge_nodes([node()], Plan([1], "cpu", None))
    (finding,) = [one for one in found if one.check == "internet"]
    assert (finding.level, "was not tried" in finding.evidence) == ("ok", True)


def call(caller: int, called: int, **changes: Any) -> DoorKnock:
    plain = {
        "address": f"10.0.0.{called}",
        "interface": "eth0",
        "seconds": 0.001,
        "skew": 0.0,
        "trouble": "",
        "name": "10.0.0.1",
    }
    return DoorKnock(caller, called, **{**plain, **changes})


def test_a_peer_that_is_not_reached_is_named_with_the_way_there() -> None:
    made = [call(0, 1), call(1, 0), call(0, 2), call(2, 0), call(1, 2, trouble="timed out"), call(2, 1)]
    (finding,) = [one for one in calls(["a", "b", "c"], made) if one.is_bad]
    assert finding.evidence == "b does not reach c at 10.0.0.2 through eth0 (timed out)"


def test_the_clock_that_is_off_is_named() -> None:
    made = [call(0, 1, skew=0.01), call(0, 2, skew=-7.2), call(1, 2, skew=-7.2), call(1, 0, skew=-0.01)]
    (finding,) = [one for one in calls(["a", "b", "c"], made) if one.is_bad]
    assert finding.evidence == "the clock of c is 7.2 s behind the others"
    (finding,) = [one for one in calls(["a", "b"], [call(0, 1, skew=3.0), call(1, 0, skew=-3.0)]) if one.is_bad]
    assert finding.evidence == "the clock of b is 3.0 s ahead of that of a"
    assert [one for one in calls(["a", "b"], [call(0, 1, skew=0.2), call(1, 0, skew=-0.2)]) if one.is_bad] == []


def test_a_name_that_a_peer_does_not_know_is_a_note() -> None:
    found = list(calls(["a", "b"], [call(0, 1, name=""), call(1, 0)]))
    assert [one.evidence for one in found if one.level == "note"] == ["a does not know the name b"]
    assert not any(one.is_bad for one in found)


def folder(**changes: Any) -> Folder:
    plain: dict[str, Any] = {"path": "/runs", "free": 10**12, "bytes_per_second": 5e8, "is_shared": True, "trouble": ""}
    return Folder(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"is_shared": False}, "b does not see in /runs what a wrote there"),
        ({"free": 10**9}, "1.0 GB free in /runs"),
        ({"bytes_per_second": 10e6}, "takes 10 MB/s: a checkpoint of 10 GB would take 17 minutes"),
        ({"trouble": "cannot be written (permission denied)"}, "/runs cannot be written (permission denied)"),
    ],
)
def test_a_run_folder_that_will_not_do_is_named(changes: dict[str, Any], says: str) -> None:
    (finding,) = [one for one in folders(["a", "b"], [folder(), folder(**changes)]) if one.is_bad]
    assert (finding.where, says in finding.evidence) == ("b", True), finding


def test_secrets_do_not_travel() -> None:
    here = look_around(
        env={"HF_TOKEN": "hf_abc", "NCCL_DEBUG": "INFO", "https_proxy": "http://me:pw@proxy", "HOME": "/root"}
    )
    assert here.variables == {"HF_TOKEN": "set", "NCCL_DEBUG": "INFO", "https_proxy": "set"}


def test_a_planted_machine_is_read_from_its_files(tmp_path: Path) -> None:
    for file, text in {
        "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n",
        "proc/net/route": "Iface Destination Gateway\n",
        "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
        "sys/fs/cgroup/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/memory.max": "16000000000\n",
        "sys/fs/cgroup/memory.current": "1000000000\n",
        "sys/devices/system/node/node0/cpulist": "0-7\n",
        "sys/devices/system/node/node1/cpulist": "8-15\n",
        "sys/class/net/ib0/operstate": "up\n",
        "sys/class/net/ib0/speed": "200000\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/device/numa_node": "1\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    here = look_around(tmp_path, {})
    assert (here.memory, here.memory_free, here.cpu_quota) == (16 * GIGABYTE, 15 * GIGABYTE, 4.0)
    assert (here.has_default_route, here.port_range, here.shm_size) == (False, 28232, 0)
    ports = {one.name: (one.gbit, one.is_up, one.is_infiniband, one.numa) for one in here.network}
    assert ports == {"ib0": (200.0, True, False, None), "mlx5_0": (400.0, True, True, 1)}
    assert draw(here)[1:] == [
        "├─ NUMA 0: CPUs 0-7, 0 GB",
        "├─ NUMA 1: CPUs 8-15, 0 GB",
        "│  └─ mlx5_0 (InfiniBand), 400 Gbit/s",
        "└─ somewhere in it",
        "   └─ ib0, 200 Gbit/s",
    ]


def test_gpus_are_drawn_with_their_links() -> None:
    drawn = draw(node(gpus=[gpu(0), gpu(1, numa=None)], gpu_links={"0-1": "NVLink"}))
    assert "   ├─ GPU 0: H200, 141 GB, PCI 0000:18:00.0" in drawn
    assert drawn[-3:] == ["        GPU 0   GPU 1", "GPU 0   -       NVLink", "GPU 1   NVLink  -"]
