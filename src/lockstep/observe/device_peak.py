"""What the device of one rank could do in a second: the number that a run's speed is compared with (MFU)."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch

from lockstep.errors import UserError
from lockstep.planner.machine.find_machine import HERE, find_gpu, find_machine
from lockstep.planner.machine.here import newest_bench
from lockstep.runtime.rank_env import Place

MEASURE = "run lockstep bench"
CATALOGUE = "by its data sheet, from the planner's catalogue"


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one rank's device in a number format and where they are from; None, and the `reason`."""

    flops: float | None
    source: str = ""
    reason: str = ""


def find_peak(device: torch.device, kind: str, place: Place, share_gpu: bool) -> Peak:
    """The peak of dense products in `kind` (fp32, tf32, bf16 or fp16) for one rank of those in `place`.

    Of a GPU it is the data sheet's, or where nobody has that, the fastest product that `lockstep bench` has measured;
    of a CPU always the latter. Ranks that share a device have a share of it each.
    """
    try:
        return _of_gpu(device, kind, place, share_gpu) if device.type == "cuda" else _of_cpu(kind, place)
    except UserError as error:
        fix = MEASURE if device.type == "cuda" else f"{MEASURE} --device cpu"
        return Peak(None, reason=f"the peak of this device is not known, because {error.cause}: {fix}")
    except Exception as error:  # a file of bench that somebody edited, say: the run does not depend on this
        return Peak(None, reason=f"the peak of this device is not known: {type(error).__name__}: {error}")


def _of_gpu(device: torch.device, kind: str, place: Place, share_gpu: bool) -> Peak:
    name = torch.cuda.get_device_name(device)
    sharing = 1
    if share_gpu:
        gpus = torch.cuda.device_count()
        sharing = sum(rank % gpus == place.local_rank % gpus for rank in range(place.local_world_size))
    shared = f", shared by {sharing} ranks" if sharing > 1 else ""
    try:
        gpu = find_gpu(name)
    except UserError:
        return Peak(_measured(name, kind) * 1e12 / sharing, f"{name}: lockstep bench, {kind} products{shared}")
    if kind not in gpu.tflops:
        return Peak(None, reason=f"the peak of {name} in {kind} is not known")
    return Peak(gpu.tflops[kind] * 1e12 / sharing, f"{name}: dense {kind} products, {CATALOGUE}{shared}")


def _measured(name: str, kind: str) -> float:
    bench = newest_bench()
    measured = [speed.matmul_tflops.get(kind) for speed in bench.speeds if speed.device == name]
    if not measured or measured[0] is None:
        raise UserError(f"{name} is not in the planner's catalogue, nor measured in {kind}", MEASURE)
    return measured[0]


def _of_cpu(kind: str, place: Place) -> Peak:
    bench = newest_bench()
    if bench.device != "cpu" or socket.gethostname() not in bench.hosts:
        raise UserError(
            f"what lockstep bench has measured last are GPUs, or another host than {socket.gethostname()}",
            MEASURE,
        )
    if kind != "fp32":
        return Peak(None, reason=f"the peak of this CPU in {kind} is not known: lockstep bench measures fp32 there")
    machine = find_machine(HERE, place.nodes, place.world_size)
    return Peak(machine.gpu.tflops[kind] * 1e12, f"{machine.gpu.name}: lockstep bench of {bench.when}, fp32 products")
