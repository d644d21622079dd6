"""What one node is: read from the system, without changing anything, and without asking anybody outside.

Everything is read below `root`, so that a test can plant a machine; what cannot be read is left out, never guessed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from lockstep import __version__
from lockstep.runtime.host.gpus import DriverGpu, ToldFacts, gpus_here, numa_of

WATCHED = re.compile(
    r"^(NCCL_|GLOO_|TORCH_|PYTORCH_|CUDA_|OMP_|MKL_|MASTER_|HF_|TRANSFORMERS_|HSA_|ROCR_|UCX_|FI_|LOCKSTEP_|KMP_)"
    r"|^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|http_proxy|https_proxy|no_proxy)$"
)
"""Variables that change how ranks meet, talk or compute."""
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|AUTH|proxy", re.I)
"""Variables whose values nobody else should see in a report."""


TORCHRUNS_PORT = 29500


class Port(ToldFacts):
    """A network interface or InfiniBand port."""

    name: str
    address: str
    numa: int | None
    gbit: float | None
    is_up: bool
    is_infiniband: bool


class Numa(ToldFacts):
    """A part of the machine with memory of its own."""

    number: int
    cpus: str
    memory: int


class NodeFacts(ToldFacts):
    """All that is known of a node."""

    host: str
    addresses: list[str]
    """What its own name resolves to there."""
    versions: dict[str, str]
    variables: dict[str, str]
    cpus: int
    cpu_quota: float | None
    """How many CPUs the control group allows, where it allows fewer."""
    memory: int
    memory_free: int
    limits: dict[str, int | None]
    """None: unlimited."""
    shm_size: int
    shm_free: int
    port_range: int
    """How many ports there are for outgoing connections."""
    torchruns_port_is_free: bool
    has_default_route: bool
    numa: list[Numa]
    network: list[Port]
    gpus: list[DriverGpu]
    gpu_links: dict[str, str]
    """How two GPUs reach each other, by `0-1`."""
    gpus_given: int | None
    """How many GPUs Slurm has given on this node."""
    gpu_driver: bool
    gpu_trouble: str
    """What the driver says instead of telling of its GPUs."""


def look_around(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> NodeFacts:
    """What this node is."""
    env = os.environ if env is None else env
    gpus, links, driver, trouble = gpus_here(root)
    shm = _disk(root / "dev/shm")
    memory, free = memory_here(root)
    given = env.get("SLURM_GPUS_ON_NODE", "")
    return NodeFacts(
        host=socket.gethostname(),
        addresses=_resolve(socket.gethostname()),
        versions=_versions() | driver,
        variables=_variables(env),
        cpus=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(root),
        memory=memory,
        memory_free=free,
        limits=_limits(),
        shm_size=shm[0],
        shm_free=shm[1],
        port_range=_ephemeral_ports(root),
        torchruns_port_is_free=_is_free(TORCHRUNS_PORT),
        has_default_route=_has_default_route(root),
        numa=_numa(root),
        network=network_ports(root),
        gpus=gpus,
        gpu_links=links,
        gpus_given=int(given) if given.isdigit() else None,
        gpu_driver=any((root / file).exists() for file in ("dev/nvidiactl", "dev/kfd", "dev/dxg")),
        gpu_trouble=trouble,
    )


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    watched = {name: value for name, value in sorted(env.items()) if WATCHED.search(name)}
    return {name: "set" if SECRET.search(name) else value for name, value in watched.items()}


def _versions() -> dict[str, str]:
    import torch

    found = {
        "lockstep": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "kernel": platform.release(),
    }
    for package in ("numpy", "safetensors"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not there"
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _limits() -> dict[str, int | None]:
    files, locked = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = {"nofile": files[0], "nofile at most": files[1], "memlock": locked[0]}
    return {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in found.items()}


def _resolve(host: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError:
        return []


def _disk(path: Path) -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def text_of(path: Path) -> str:
    """What a file of the system says; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number_of(path: Path) -> int | None:
    """The number that a file of the system holds."""
    text = text_of(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def memory_here(root: Path) -> tuple[int, int]:
    """All memory and what is available, in bytes, as the control group allows it."""
    text = text_of(root / "proc/meminfo")
    found = [re.search(rf"^{name}:\s+(\d+) kB", text, re.M) for name in ("MemTotal", "MemAvailable")]
    total, free = (int(kb[1]) * 1024 if kb else 0 for kb in found)
    allowed = number_of(root / "sys/fs/cgroup/memory.max")
    if allowed is not None and allowed < total:
        used = number_of(root / "sys/fs/cgroup/memory.current") or 0
        return allowed, min(free, max(0, allowed - used))
    return total, free


def cpu_quota(root: Path) -> float | None:
    """How many CPUs the control group allows; None where it sets no limit."""
    match = re.fullmatch(r"(\d+) (\d+)", text_of(root / "sys/fs/cgroup/cpu.max"))
    return int(match[1]) / int(match[2]) if match else None


def _ephemeral_ports(root: Path) -> int:
    match = re.fullmatch(r"(\d+)\s+(\d+)", text_of(root / "proc/sys/net/ipv4/ip_local_port_range"))
    return int(match[2]) - int(match[1]) + 1 if match else 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _has_default_route(root: Path) -> bool:
    rows = [line.split() for line in text_of(root / "proc/net/route").splitlines()[1:]]
    six = [line.split() for line in text_of(root / "proc/net/ipv6_route").splitlines()]
    return any(row[1] == "00000000" for row in rows if len(row) > 1) or any(
        row[0] == "0" * 32 and row[1] == "00" and row[-1] != "lo" for row in six if len(row) > 1
    )


def _numa(root: Path) -> list[Numa]:
    found = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        match = re.search(r"MemTotal:\s+(\d+) kB", text_of(folder / "meminfo"))
        memory = int(match[1]) * 1024 if match else 0
        found.append(Numa(number=int(folder.name[4:]), cpus=text_of(folder / "cpulist"), memory=memory))
    return found


def network_ports(root: Path) -> list[Port]:
    """The interfaces and InfiniBand ports of this node, up or not."""
    import psutil

    addresses = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    found = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        speed = number_of(folder / "speed")
        is_up = text_of(folder / "operstate") in ("up", "unknown")
        if folder.name == "lo" or not (folder / "operstate").exists():
            continue
        found.append(
            Port(
                name=folder.name,
                address=", ".join(addresses.get(folder.name, [])),
                numa=numa_of(folder / "device"),
                gbit=speed / 1000 if speed and speed > 0 else None,
                is_up=is_up,
                is_infiniband=False,
            )
        )
    for folder in sorted((root / "sys/class/infiniband").glob("*")):
        for port in sorted((folder / "ports").glob("*")):
            rate = re.match(r"([\d.]+) Gb/sec", text_of(port / "rate"))
            found.append(
                Port(
                    name=folder.name,
                    address="",
                    numa=numa_of(folder / "device"),
                    gbit=float(rate[1]) if rate else None,
                    is_up="ACTIVE" in text_of(port / "state"),
                    is_infiniband=True,
                )
            )
    return found
