"""The machine that a name means: GPUs of the catalogue, a cluster profile, or the one that was measured here.

What is known of GPUs, nodes and links stands in catalogue.toml, with its sources.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from typing import Any

from lockstep.config.cluster import Cluster, Node, find_cluster, known_clusters
from lockstep.errors import UserError, nearest, unknown
from lockstep.links.collective_cost import Link
from lockstep.planner.machine.hardware import GpuKind, Machine
from lockstep.planner.machine.here import machine_here

HERE = "here"
COUNTED = (re.compile(r"(?P<count>\d+)\s*x\s*(?P<name>.+)"), re.compile(r"(?P<name>.+?)\s*x\s*(?P<count>\d+)"))
"""8xH100 and H100x8."""


def find_machine(name: str, nodes: int | None = None, gpus: int | None = None) -> Machine:
    """The machine of that name with so many nodes or GPUs; without both, as many as the name says, or one node.

    A name is a GPU of the catalogue (`a100-80`, `64xH100`), a cluster profile (a name or a TOML file), or `here`.
    """
    for what, count in (("nodes", nodes), ("gpus", gpus)):
        if count is not None and count < 1:
            raise UserError(f"a machine cannot have {count} {what}", f"give at least one: --{what} 1")
    if name == HERE:
        return machine_here(_gpu_or_none, nodes, gpus)
    if name.endswith(".toml") or name in known_clusters():
        return _of_cluster(find_cluster(name), nodes, gpus)
    wanted, count = _counted(name)
    if count is not None and gpus is not None and count != gpus:
        raise UserError(f"{name} says {count} GPUs, and --gpus {gpus}", "say it once")
    entry = _entry(wanted)
    if entry is None:
        raise _unknown("cluster", wanted, [*known_clusters(), HERE])
    node = _tables()["gpu"][entry]["node"]
    machine = Machine(
        name=entry,
        gpu=find_gpu(entry),
        gpus_per_node=node["gpus"],
        nodes=1,
        inside=_inside(node["link"], node["link_gb_s"], node.get("reached")),
        outside=network_link(node["network_gb_s"]),
        cards=node["cards"],
    )
    return _sized(machine, nodes, count if gpus is None else gpus)


def find_gpu(name: str) -> GpuKind:
    """The GPU of the catalogue that a name means, upper or lower case; what stands in brackets may be left out."""
    entry = _entry(name)
    if entry is None:
        raise _unknown("GPU", name)
    tables = _tables()
    found = tables["gpu"][entry]
    usable = found["usable_gib"] * 2**30 / 1e9 / found["memory_gb"] if "usable_gib" in found else 1.0
    given = {field.name: found[field.name] for field in fields(GpuKind) if field.name in found}
    usual = {"matmul": tables["matmul"], "flash": tables["flash"], "idle_watts": found["watts"] * tables["idle_share"]}
    return GpuKind(**{**usual, **given, "name": entry, "usable": usable})


def known_gpus() -> list[str]:
    """The names of all GPUs of the catalogue."""
    return list(_tables()["gpu"])


@cache
def _tables() -> dict[str, Any]:
    text = (resources.files("lockstep.planner.machine") / "catalogue.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _names() -> dict[str, str]:
    """What people may type, and the entry that it means."""
    found = {}
    for entry, table in _tables()["gpu"].items():
        for name in (entry.lower(), *table["names"]):
            assert name not in found, name
            found[name] = entry
    return found


def _entry(name: str) -> str | None:
    words = re.sub(r"[\s_]+", "-", name.strip().lower())
    words = words.removeprefix("nvidia-").removeprefix("amd-")
    without = re.sub(r"-?\(.*", "", words)
    return _names().get(words) or _names().get(without)


def _unknown(kind: str, name: str, others: Sequence[str] = ()) -> UserError:
    """Says the nearest of all names, or else one name of each."""
    if close := nearest(name.lower(), [*_names(), *others]):
        return UserError(f"unknown {kind} {name!r}", f"did you mean {_names().get(close, close)!r}?")
    return unknown(kind, name, [*known_gpus(), *others])


def _gpu_or_none(name: str) -> GpuKind | None:
    return None if _entry(name) is None else find_gpu(name)


def _counted(name: str) -> tuple[str, int | None]:
    """A name without the number of GPUs, and that number where it is there."""
    if _entry(name) is None:
        for pattern in COUNTED:
            match = pattern.fullmatch(name.strip().lower())
            if match and int(match["count"]) > 0:
                return match["name"], int(match["count"])
    return name, None


def _inside(kind: str, gb_s: float, reached: float | None = None) -> Link:
    link = _tables()["link"][kind]
    return Link(link["alpha"], 1 / (gb_s * 1e9 * (reached or link["reached"])))


def network_link(gb_s: float) -> Link:
    link = _tables()["link"]["network"]
    return Link(link["alpha"], 1 / (gb_s * 1e9 * link["reached"]))


def _sized(machine: Machine, nodes: int | None, gpus: int | None) -> Machine:
    if gpus is None:
        return replace(machine, nodes=nodes or machine.nodes)
    return machine.with_gpus(gpus, nodes)


# ---- Cluster profiles


def _of_cluster(cluster: Cluster, nodes: int | None, gpus: int | None) -> Machine:
    """The machine that a profile describes; kinds of nodes that differ count as the smallest of each number."""
    if cluster.node == Node():
        raise UserError(
            f"the profile {cluster.name} does not say what its nodes are made of",
            'describe one: [node] with gpus = 4 and gpu = "A100-40", or cpus = 64',
        )
    kinds = [cluster.node, *cluster.nodes]
    machines = [_of_node(cluster.name, kind) for kind in kinds]
    if nodes is None:
        nodes = None if gpus else sum(kind.count or 1 for kind in kinds)
    smallest = machines[0]
    for other in machines[1:]:
        smallest = _smaller(smallest, other)
    if any(_numbers(machine) != _numbers(smallest) for machine in machines):
        described = ", ".join(f"{kind.count or 1} x {kind.gpus or 1} {kind.gpu or 'CPU'}" for kind in kinds)
        note = (
            f"the nodes of {cluster.name} differ ({described}): all count as {smallest.gpus_per_node} x "
            f"{smallest.gpu.name} with {smallest.gpu.memory_gb:g} GB, the least of each"
        )
        smallest = replace(smallest, warnings=(*smallest.warnings, note))
    return _sized(smallest, nodes, gpus)


def _of_node(name: str, node: Node) -> Machine:
    """One node of a kind; what the profile does not say is as in the catalogue."""
    warnings = []
    if node.gpus and not node.gpu:
        raise UserError(f"the profile {name} does not say which GPUs its nodes have", 'set node.gpu, as in "A100-40"')
    gpu = find_gpu(node.gpu or "laptop-cpu")
    usual = _tables()["gpu"][gpu.name]["node"]
    if not node.gpus:
        warnings.append(f"{name} has no GPUs: its nodes count as {gpu.name}, a rough guess; bench measures them")
        if node.memory_gb:
            gpu = replace(gpu, memory_gb=float(node.memory_gb))
    kind = node.gpu_link or usual["link"]
    if kind != usual["link"] and node.gpu_link_gb_s is None:
        raise UserError(
            f"the profile {name} has {gpu.name} with {kind}, which usually have {usual['link']}",
            "set node.gpu_link_gb_s as well",
        )
    network = node.network_gb_s or usual["network_gb_s"]
    if not node.network_gb_s:
        warnings.append(f"the profile {name} has no network_gb_s: {network:g} GB/s a node are assumed")
    # What a ring reaches follows from the GPU rather than from whether there is a switch between them.
    alike = kind == usual["link"] or {kind, usual["link"]} == {"nvlink", "nvswitch"}
    reached = usual.get("reached", _tables()["link"][usual["link"]]["reached"]) if alike else None
    inside = _inside(kind, node.gpu_link_gb_s or usual["link_gb_s"], reached)
    host = float(node.memory_gb) if node.memory_gb and node.gpus else None
    return Machine(name, gpu, node.gpus or 1, 1, inside, network_link(network), warnings=tuple(warnings), host_gb=host)


def _numbers(machine: Machine) -> tuple[object, ...]:
    return (machine.gpu, machine.gpus_per_node, machine.inside, machine.outside)


def _smaller(a: Machine, b: Machine) -> Machine:
    """A node that both kinds of nodes can stand in for."""
    slow, fast = sorted((a, b), key=lambda machine: _speed(machine.gpu))
    gpu = replace(
        slow.gpu,
        memory_gb=min(slow.gpu.memory_gb, fast.gpu.memory_gb),
        usable=min((slow.gpu, fast.gpu), key=lambda gpu: gpu.memory_gb).usable,
        memory_gb_s=min(slow.gpu.memory_gb_s, fast.gpu.memory_gb_s),
    )
    return replace(
        slow,
        gpu=gpu,
        gpus_per_node=min(a.gpus_per_node, b.gpus_per_node),
        inside=max(a.inside, b.inside, key=lambda link: link.beta),
        outside=max(a.outside, b.outside, key=lambda link: link.beta),
        warnings=tuple(dict.fromkeys((*a.warnings, *b.warnings))),
        host_gb=min(a.host_gb, b.host_gb) if a.host_gb and b.host_gb else None,
    )


def _speed(gpu: GpuKind) -> float:
    return gpu.matmul * gpu.tflops.get("bf16", gpu.tflops.get("fp16", 0.0))
