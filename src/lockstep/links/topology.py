"""A node as a small drawing: what is plugged into which part of it, and how its GPUs reach each other."""

from __future__ import annotations

from lockstep.links.findings import GIGABYTE
from lockstep.runtime.host.node_facts import NodeFacts, Port


def draw(node: NodeFacts) -> list[str]:
    """The lines of the drawing."""
    parts = node.numa or []
    lines = [f"{node.host}: {node.cpus} CPUs, {node.memory / GIGABYTE:.0f} GB"]
    ports = [port for port in node.network if port.is_up]
    groups: list[tuple[str, int | None]] = [
        (f"NUMA {part.number}: CPUs {part.cpus}, {part.memory / GIGABYTE:.0f} GB", part.number) for part in parts
    ]
    known = {number for _, number in groups}
    # Of a single part all there is belongs to it, even where the kernel says nothing.
    only = parts[0].number if len(parts) == 1 else None
    elsewhere = [port for port in ports if port.numa not in known] + [gpu for gpu in node.gpus if gpu.numa not in known]
    if elsewhere and only is None:
        groups.append(("somewhere in it", None))
    for number, (title, numa) in enumerate(groups):
        is_last = number == len(groups) - 1
        lines.append(f"{'└─' if is_last else '├─'} {title}")
        here = [
            f"GPU {gpu.index}: {gpu.name}, {gpu.memory / GIGABYTE:.0f} GB, PCI {gpu.pci}"
            for gpu in node.gpus
            if _belongs(gpu.numa, numa, known, only)
        ]
        here += [_port(port) for port in ports if _belongs(port.numa, numa, known, only)]
        for position, text in enumerate(here):
            lines.append(f"{'   ' if is_last else '│  '}{'└─' if position == len(here) - 1 else '├─'} {text}")
    return lines + _matrix(node)


def _belongs(numa: int | None, here: int | None, known: set[int | None], only: int | None) -> bool:
    return numa == here if numa in known and numa is not None else here == only


def _port(port: Port) -> str:
    what = f"{port.name}{' (InfiniBand)' if port.is_infiniband else ''}"
    return ", ".join(
        [what, *([port.address] if port.address else []), *([f"{port.gbit:g} Gbit/s"] if port.gbit else [])]
    )


def _matrix(node: NodeFacts) -> list[str]:
    """How each GPU reaches each other one; NVLink is what they should have."""
    if len(node.gpus) < 2:
        return []
    names = [f"GPU {gpu.index}" for gpu in node.gpus]
    cells = [
        ["-" if a == b else node.gpu_links.get(f"{min(a, b)}-{max(a, b)}", "unknown") for b in range(len(names))]
        for a in range(len(names))
    ]
    width = 2 + max(len(text) for row in [*cells, names] for text in row)
    lines = ["", "".join(text.ljust(width) for text in ["", *names]).rstrip()]
    return lines + [
        "".join(text.ljust(width) for text in [name, *row]).rstrip() for name, row in zip(names, cells, strict=True)
    ]
