"""What is wrong with the nodes of a training, found in what they told of themselves: pure functions from facts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.runtime.host.gpus import DriverGpu
from lockstep.runtime.host.node_facts import TORCHRUNS_PORT, NodeFacts

Level = Literal["ok", "note", "slow", "broken"]
"""`slow` and `broken` are what a training would suffer from: then the command exits with 1."""

MEGABYTE, GIGABYTE = 10**6, 10**9

LEAST_FILES = 4096
SHM_OF_A_RANK = 64 * MEGABYTE
"""What the batches that a rank's loader has in flight, and NCCL's buffers, take at least."""
MEMORY_OF_A_RANK = GIGABYTE
LEAST_PORTS = 1000


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was seen, and what to do about it where it is not right."""

    check: str
    level: Level
    where: str
    evidence: str
    fix: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether a training would break or be slow."""
        return self.level in ("slow", "broken")


@dataclass(frozen=True)
class Plan:
    """What is to be trained on these nodes."""

    processes: list[int]
    """Of every node."""
    device: Literal["cpu", "cuda"]
    workers: int | None
    """Loader processes of each rank; None: as many as a training would take."""


Judged = Iterator[tuple[Level, str, str]]
"""What a rule has seen of a node: how bad it is, the evidence, and what to do about it."""


def judge_nodes(nodes: Sequence[NodeFacts], plan: Plan) -> list[Finding]:
    """Everything that can be seen without sending a byte."""
    findings = [*versions(nodes), *variables(nodes)]
    for node, processes in zip(nodes, plan.processes, strict=True):
        for check, rule in RULES.items():
            findings += [Finding(check, level, node.host, *told) for level, *told in rule(node, processes, plan)]
    return findings


def versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Programs that have to be the same everywhere."""
    together = dict.fromkeys(name for node in nodes for name in node.versions)
    said = ", ".join(f"{name} {nodes[0].versions.get(name, '-')}" for name in together)
    differs = False
    for name in together:
        by_version: dict[str, list[str]] = defaultdict(list)
        for node in nodes:
            by_version[node.versions.get(name, "not there")].append(node.host)
        if len(by_version) == 1:
            continue
        level: Level = "note" if name == "kernel" else "broken"
        differs |= level == "broken"
        evidence = "; ".join(f"{version} on {_some(hosts)}" for version, hosts in by_version.items())
        common = max(by_version, key=lambda version: len(by_version[version]))
        odd = _some([host for version, hosts in by_version.items() if version != common for host in hosts])
        yield Finding(
            "versions", level, odd, f"{name} is {evidence}", f"use one environment on all nodes: {name} {common}"
        )
    if not differs:
        everywhere = f", the same on {len(nodes)} nodes" if len(nodes) > 1 else ""
        yield Finding("versions", "ok", _where(nodes), said + everywhere)


HARMFUL: dict[str, tuple[str, str]] = {
    # name: (the value that does harm, why)
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the one before"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node talk through the host's memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks of a node talk through sockets"),
    "NCCL_IB_DISABLE": ("1", "nodes talk through sockets instead of InfiniBand"),
    "NCCL_DEBUG": ("TRACE", "NCCL writes a line for everything it does"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by two more"),
    "TORCH_CPP_LOG_LEVEL": ("INFO", "torch writes a line for everything it does"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor asks the driver for memory"),
}
ALIKE = ("NCCL_", "TORCH_", "GLOO_", "PYTORCH_")
LEFT_BEHIND = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def variables(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Variables that slow down, mislead, or differ from node to node."""
    bad = False
    for node in nodes:
        for name, value in node.variables.items():
            harm, why = HARMFUL.get(name, (None, ""))
            if value == harm and (name != "NCCL_IB_DISABLE" or any(port.is_infiniband for port in node.network)):
                bad = True
                yield Finding("environment", "slow", node.host, f"{name}={value}: {why}", f"unset {name}")
        if left := [name for name in LEFT_BEHIND if name in node.variables]:
            bad = True
            said = ", ".join(f"{name}={node.variables[name]}" for name in left)
            yield Finding(
                "environment",
                "broken",
                node.host,
                f"{said} is set, and a script started here would wait for other ranks",
                f"unset {' '.join(left)}",
            )
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            wanted = node.variables.get(name, "").lstrip("=")
            known = {port.name for port in node.network} | {"lo"}
            if (
                wanted
                and not wanted.startswith("^")
                and not any(one.startswith(part) for part in wanted.split(",") for one in known)
            ):
                bad = True
                there = ", ".join(sorted(known))
                fix = f"name one of {there}, or unset it: Lockstep finds the interface"
                yield Finding(
                    "environment", "broken", node.host, f"{name}={wanted}, and there is no such interface", fix
                )
    for name in sorted({name for node in nodes for name in node.variables}):
        values_of = {node.variables.get(name, "unset") for node in nodes}
        # Interfaces may have other names on other nodes.
        if len(values_of) > 1 and name.startswith(ALIKE) and not name.endswith("_IFNAME"):
            bad = True
            evidence = "; ".join(f"{node.variables.get(name, 'unset')} on {node.host}" for node in nodes)
            yield Finding("environment", "broken", _where(nodes), f"{name} is {evidence}", "set it alike on all nodes")
    if not bad:
        told = sorted({name for node in nodes for name in node.variables})
        what = f"nothing that does harm among {len(told)} variables" if told else "no variables that change anything"
        yield Finding("environment", "ok", _where(nodes), what)


def gpus(node: NodeFacts, processes: int, plan: Plan) -> Judged:
    """GPUs that are ill, busy with something else, or used by no rank."""
    if node.gpu_trouble:
        yield (
            "broken",
            f"the GPU driver does not answer for all GPUs: {node.gpu_trouble}",
            "see nvidia-smi and dmesg, and have the node drained where it says the same",
        )
    if not node.gpus:
        if node.gpu_driver and not node.gpu_trouble:
            yield "note", "there is a GPU driver, and nothing tells more about its GPUs", "pip install nvidia-ml-py"
        return
    ills: list[tuple[Level, str, str]] = []
    seen, visible = _visible(node)
    for gpu in seen:
        name = f"GPU {gpu.index} ({gpu.name})"
        if gpu.ecc_errors:
            evidence = f"{name}: {gpu.ecc_errors} uncorrected memory errors"
            ills.append(("broken", evidence, "reset it, or have the node drained"))
        if gpu.rows_pending:
            evidence = f"{name}: bad memory that waits for a reset"
            ills.append(("broken", evidence, "have the node drained and the GPU reset"))
        if gpu.slowed_by:
            hot = f" at {gpu.temperature} degrees" if gpu.temperature else ""
            evidence = f"{name}: slowed down by {' and '.join(gpu.slowed_by)}{hot}"
            ills.append(("slow", evidence, "have its cooling looked at"))
        if gpu.processes:
            held = f"{gpu.memory_used / GIGABYTE:.1f} of {gpu.memory / GIGABYTE:.0f} GB"
            pids = ", ".join(map(str, gpu.processes[:4]))
            evidence = f"{name}: another process is on it (pid {pids}; {held} taken)"
            ills.append(("slow", evidence, f"end it: kill {pids}"))
    used = min(processes, visible) if plan.device == "cuda" else 0
    if node.gpus_given is not None and node.gpus_given > visible:
        evidence = f"Slurm gave {node.gpus_given} GPUs and {visible} are visible"
        ills.append(("slow", evidence, "leave CUDA_VISIBLE_DEVICES as Slurm sets it"))
    if used < visible:
        fix = f"--nproc {visible} uses all" if plan.device == "cuda" else "leave --device cpu out, or give them back"
        ills.append(("slow", f"{visible} GPUs are visible and {used or 'none'} used by a rank", fix))
    names_of = ", ".join(sorted({gpu.name for gpu in seen}))
    yield from ills or [("ok", f"{visible} x {names_of}, healthy, {used} used", "")]


def _visible(node: NodeFacts) -> tuple[list[DriverGpu], int]:
    """The GPUs that ranks can use, and how many devices those are; on a shared node the others are somebody else's."""
    asked = node.variables.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return node.gpus, len(node.gpus)
    names = [name.strip() for name in asked.split(",") if name.strip()]
    if any(name.startswith("MIG-") for name in names):  # parts of GPUs, and the name does not tell of which
        return node.gpus, len(names)
    seen = [gpu for gpu in node.gpus if any(name == str(gpu.index) or _is_uuid_of(name, gpu) for name in names)]
    return seen, len(seen)


def _is_uuid_of(name: str, gpu: DriverGpu) -> bool:
    return name.startswith("GPU-") and gpu.uuid.startswith(name)


def cpus(node: NodeFacts, processes: int, plan: Plan) -> Judged:
    """Cores for the ranks and for the processes that read their data."""
    workers = plan.workers
    allowed = node.cpus if node.cpu_quota is None else min(node.cpus, node.cpu_quota)
    threads = node.variables.get("OMP_NUM_THREADS", "")
    used = processes * int(threads) if threads.isdigit() else node.cpus
    if node.cpu_quota is not None and node.cpu_quota < min(node.cpus, used):
        yield (
            "slow",
            f"{node.cpus} CPUs are seen, and the control group gives the time of {node.cpu_quota:g}",
            f"raise the container's or job's CPUs, or set OMP_NUM_THREADS={max(1, int(allowed // max(1, processes)))}",
        )
    if allowed < processes:
        yield (
            "slow",
            f"{allowed:g} CPUs for {processes} ranks",
            f"give the job {processes} CPUs or more (--cpus-per-task), or start fewer ranks",
        )
    elif workers and processes * (workers + 1) > allowed:
        fitting = int(allowed // processes) - 1
        yield (
            "slow",
            f"{processes} ranks with {workers} workers each are {processes * (workers + 1)} processes "
            f"on {allowed:g} CPUs",
            f"use data.workers={max(0, fitting)}, or more CPUs",
        )
    else:
        share = "" if processes < 2 else f", {allowed / processes:g} for each of {processes} ranks"
        yield "ok", f"{allowed:g} CPUs{share}", ""
    if threads.isdigit() and used > allowed >= processes:
        yield (
            "slow",
            f"OMP_NUM_THREADS={threads} in {processes} ranks is more than {allowed:g} CPUs",
            "unset it: Lockstep shares the cores out",
        )


def memory(node: NodeFacts, processes: int, _: Plan) -> Judged:
    """Memory of the host."""
    free, needed = node.memory_free, processes * MEMORY_OF_A_RANK
    said = f"{free / GIGABYTE:.1f} of {node.memory / GIGABYTE:.0f} GB free"
    if free < needed:
        fix = f"free some, or start fewer ranks: each of {processes} takes about 1 GB before it has a model"
        yield "broken", said, fix
    else:
        yield "ok", said, ""


def shared_memory(node: NodeFacts, processes: int, _: Plan) -> Judged:
    """The memory through which loader processes hand over batches."""
    needed = processes * SHM_OF_A_RANK
    said = f"/dev/shm has {node.shm_free / MEGABYTE:,.0f} of {node.shm_size / MEGABYTE:,.0f} MB free"
    if node.shm_free < needed:
        yield (
            "broken",
            f"{said}, and {processes} rank{'s' if processes > 1 else ''} hand their batches through it",
            f"give it {needed / MEGABYTE:,.0f} MB or more (docker run --shm-size=8g, or --ipc=host), "
            "or use data.workers=0",
        )
    else:
        yield "ok", said, ""


def limits(node: NodeFacts, _: int, plan: Plan) -> Judged:
    """What the system allows one process."""
    bad = False
    files, most = node.limits.get("nofile"), node.limits.get("nofile at most")
    if most is not None and most < LEAST_FILES:
        bad = True
        yield (
            "broken",
            f"{most} open files for a process at most, and loaders and sockets need more",
            f"have the limit raised to {LEAST_FILES} (limits.conf; in a container --ulimit nofile={LEAST_FILES})",
        )
    locked = node.limits.get("memlock")
    if locked is not None and any(port.is_infiniband for port in node.network) and plan.device == "cuda":
        bad = True
        yield (
            "broken",
            f"{locked / MEGABYTE:.0f} MB may be locked, and InfiniBand pins its buffers",
            "ulimit -l unlimited (in a container --ulimit memlock=-1)",
        )
    if not bad:
        raised = ", which Lockstep raises for its ranks" if files is not None and files < LEAST_FILES else ""
        yield "ok", f"{'unlimited' if files is None else files} open files{raised}", ""


def offline(node: NodeFacts, _: int, __: Plan) -> Judged:
    """Nodes without a way out, on which libraries would wait for one. Nothing is sent to find out."""
    if node.has_default_route:
        said = "there is a default route; whether it leads to the internet was not tried"
        yield "ok", said, ""
        return
    is_told = any(
        node.variables.get(name) in ("1", "true", "True", "ON") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    )
    if is_told:
        yield "ok", "no way out, and libraries are told so (HF_HUB_OFFLINE)", ""
    else:
        yield (
            "note",
            "no way out: libraries that look for updates would wait",
            "export HF_HUB_OFFLINE=1, and `lockstep fetch` data on the login node",
        )


def names(node: NodeFacts, _: int, plan: Plan) -> Judged:
    """Whether the node's own name leads somewhere."""
    loopback = [address for address in node.addresses if address.startswith("127.") or address == "::1"]
    if not node.addresses:
        level: Level = "note" if len(plan.processes) == 1 else "slow"
        yield (
            level,
            f"its own name {node.host} resolves to nothing",
            f"add {node.host} to /etc/hosts or the DNS (Lockstep does without, other programs wait for it)",
        )
    elif loopback and len(plan.processes) > 1:
        yield (
            "note",
            f"its own name {node.host} is {', '.join(loopback)}, which others cannot reach",
            "nothing: Lockstep takes the interface that reaches the peers; torchrun needs --local-addr",
        )
    else:
        yield "ok", f"{node.host} is {', '.join(node.addresses)}", ""


def ports(node: NodeFacts, _: int, __: Plan) -> Judged:
    """Ports for the connections between ranks."""
    if node.port_range < LEAST_PORTS:
        yield (
            "broken",
            f"{node.port_range} ports for outgoing connections",
            "widen net.ipv4.ip_local_port_range to 32768 60999",
        )
    elif not node.torchruns_port_is_free:
        yield (
            "note",
            f"port {TORCHRUNS_PORT} is taken: a script started by hand with MASTER_PORT={TORCHRUNS_PORT} would fail",
            "leave the port to lockstep run, or choose another one",
        )
    else:
        yield "ok", f"{node.port_range:,} ports for connections", ""


RULES: dict[str, Callable[[NodeFacts, int, Plan], Judged]] = {
    "GPUs": gpus,
    "CPUs": cpus,
    "memory": memory,
    "shared memory": shared_memory,
    "limits": limits,
    "internet": offline,
    "names": names,
    "ports": ports,
}
"""What is looked at on every node."""


def _where(nodes: Sequence[NodeFacts]) -> str:
    return nodes[0].host if len(nodes) == 1 else f"{len(nodes)} nodes"


def _some(hosts: Sequence[str], most: int = 4) -> str:
    return ", ".join(hosts[:most]) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")
