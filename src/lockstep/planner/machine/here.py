"""`here`: this machine, as the newest result of `lockstep bench` has measured it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.data.sets import cache_folder
from lockstep.errors import UserError
from lockstep.links.collective_cost import Link, bus_factor
from lockstep.links.measured import Bench, medians, read_bench
from lockstep.planner.machine.hardware import GpuKind, Machine
from lockstep.runtime.host.gpus import gpus_here
from lockstep.runtime.host.node_facts import memory_here


def machine_here(known: Callable[[str], GpuKind | None], nodes: int | None = None, gpus: int | None = None) -> Machine:
    """The ranks of the newest result, with what they reached; `known` gives the GPU of the catalogue with a name.

    Fewer GPUs than were measured are a part of them. CPU ranks share the cores and the memory of their node, so that
    any number of them can be planned for.
    """
    bench = newest_bench()
    measured, ranks = len(set(bench.nodes)), bench.nodes.count(0)
    each = ranks if gpus is None else gpus // measured
    few = bench.device == "cuda" and each > ranks
    if (nodes or measured) != measured or few or (gpus or measured) % measured:
        asked = f"{nodes} nodes" if nodes not in (None, measured) else f"{gpus} ranks"
        raise UserError(
            f"{asked} were asked for, and lockstep bench measured {ranks} a node on {measured} here",
            "measure as many with lockstep bench --nodes and --nproc, or name a GPU of the catalogue",
        )
    machine = Machine(
        name="here",
        gpu=_gpu(bench, ranks, known),
        gpus_per_node=ranks,
        nodes=measured,
        inside=_inside(bench),
        outside=_outside(bench, ranks),
        warnings=_warnings(bench),
        host_gb=memory_here(Path("/"))[0] / 1e9 if bench.device == "cuda" else None,
    )
    if bench.device == "cpu":
        return replace(machine, gpu=shared_cpu(machine.gpu, ranks / each), gpus_per_node=each)
    whole = replace(machine, nodes=1) if each < ranks else None
    return replace(machine, gpus_per_node=each, whole=whole)


def _warnings(bench: Bench) -> tuple[str, ...]:
    found = []
    if not bench.complete:
        found.append("lockstep bench was interrupted: some links may be missing")
    if socket.gethostname() not in bench.hosts:
        found.append(f"lockstep bench measured {bench.hosts[0]}, and this is {socket.gethostname()}")
    return tuple(found)


def newest_bench() -> Bench:
    """The latest result that `lockstep bench` has kept; a UserError where there is none."""
    found = []
    for path in sorted((cache_folder() / "bench").glob("*.json")):
        try:
            found.append(read_bench(path))
        except UserError:
            continue  # of another version, or not ours: bench itself writes over it
    found = [bench for bench in found if bench.speeds]
    if not found:
        raise UserError("nothing has been measured on this machine", "run lockstep bench first, then plan for here")
    return max(found, key=lambda bench: bench.when)


def _gpu(bench: Bench, ranks: int, known: Callable[[str], GpuKind | None]) -> GpuKind:
    """The device of a rank: the slowest of each measured number, as ranks wait for the last."""
    speeds = bench.speeds
    measured = {kind: min(speed.matmul_tflops[kind] for speed in speeds) for kind in speeds[0].matmul_tflops}
    copy = min(speed.copy_gb_s for speed in speeds)
    name, source = speeds[0].device, f"lockstep bench, {bench.when}"
    if bench.device == "cpu":
        memory, _ = memory_here(Path("/"))
        usual = known("laptop-cpu")
        assert usual is not None
        return GpuKind(
            name=name,
            tflops=dict.fromkeys(("fp32", "tf32", "fp16", "bf16"), measured["fp32"]),
            matmul=1.0,
            memory_gb=memory / ranks / 1e9,
            memory_gb_s=copy,
            multiprocessors=1,
            watts=0.0,
            idle_watts=0.0,
            source=f"{source}; fp32, and other formats taken to be as fast",
            usable=usual.usable,
            is_cpu=True,
        )
    found = known(name)
    if found is None:
        gpus = gpus_here(Path("/"))[0]
        if not gpus:
            raise UserError(
                f"the memory of {name} is not known: it is not in the catalogue, and there is no driver to ask",
                "plan on the machine that was measured, with nvidia-ml-py installed",
            )
        peaks = {**measured, "fp16": measured["bf16"]}
        memory_gb = min(gpu.memory for gpu in gpus) / 1e9
        return GpuKind(name, peaks, 1.0, memory_gb, copy, 1, 0.0, 0.0, source)
    share = measured["bf16"] / found.tflops["bf16"] if "bf16" in found.tflops else found.matmul
    return replace(found, matmul=min(1.0, share), memory_gb_s=copy, source=f"{source}; {found.source}")


def shared_cpu(gpu: GpuKind, share: float) -> GpuKind:
    """A CPU rank that has so many times the cores and the memory: the ranks of a node share them."""
    tflops = {kind: speed * share for kind, speed in gpu.tflops.items()}
    return replace(gpu, tflops=tflops, memory_gb=gpu.memory_gb * share, memory_gb_s=gpu.memory_gb_s * share)


def _inside(bench: Bench) -> Link:
    """Between two ranks of a node: from its largest all-reduce as a ring; with several nodes, from pairs."""
    fits = [fit for fit in bench.fits if fit.collective == "all-reduce" and fit.beta > 0]
    if fits and len(set(bench.nodes)) == 1:
        widest = max(fits, key=lambda fit: fit.ranks)
        return Link(widest.alpha / (2 * (widest.ranks - 1)), widest.beta / bus_factor("all-reduce", widest.ranks))
    pairs = medians(bench.pairs, bench.nodes).get(True)
    return Link(pairs[1], 1e-9 / pairs[0]) if pairs else Link(0.0, 0.0)


def _outside(bench: Bench, ranks: int) -> Link:
    """Between nodes: all ranks of a node sent at the same time, each to one of another node."""
    pairs = medians(bench.pairs, bench.nodes).get(False)
    return Link(pairs[1], 1e-9 / (pairs[0] * ranks)) if pairs else Link(0.0, 0.0)
