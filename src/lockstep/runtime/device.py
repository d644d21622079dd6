"""Which device a rank computes on, and how many there are."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.errors import UserError

if TYPE_CHECKING:
    import torch

    from lockstep.runtime.rank_env import Place

GPU_DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def visible_gpus() -> int:
    """The GPUs this process may use. Without a GPU driver torch is not even imported."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(Path(file).exists() for file in GPU_DRIVER_FILES):
        return 0
    import torch

    return torch.cuda.device_count()


def backend_for(device_type: str, share_gpu: bool) -> Literal["gloo", "nccl"]:
    """What ranks on such devices talk over: NCCL refuses those that share a GPU."""
    return "nccl" if device_type == "cuda" and not share_gpu else "gloo"


def unused_gpus(place: Place, device: torch.device) -> str | None:
    """One line when this node has GPUs that no rank of the run uses, as far as this rank can know."""
    gpus = visible_gpus() if place.launcher in ("python", "torchrun", "explicit") else 0
    used = place.local_world_size if device.type == "cuda" else 0
    if gpus <= used:
        return None
    return (
        f"{gpus} GPUs are visible and {used} {'is' if used == 1 else 'are'} used: "
        f"lockstep run --nproc {gpus} {Path(sys.argv[0]).name} uses all of them"
    )


def choose_device(place: Place, wanted: Literal["auto", "cpu", "cuda"], share_gpu: bool) -> torch.device:
    """The device of this rank: its own GPU, a shared one, or the CPU."""
    import torch

    gpus = visible_gpus() if wanted != "cpu" else 0
    if wanted == "cuda" and gpus == 0:
        raise UserError(
            "device cuda was asked for but no GPU is visible", "use --device cpu, or check CUDA_VISIBLE_DEVICES"
        )
    if gpus == 0:
        return torch.device("cpu")
    if gpus == 1 and place.local_world_size > 1 and place.launcher == "slurm" and not share_gpu:
        return torch.device("cuda", 0)  # srun bound one GPU to each task: every task sees its own as number 0
    if place.local_world_size > gpus and not share_gpu:
        raise UserError(
            f"{place.local_world_size} processes on this node but {gpus} visible GPU{'s' if gpus > 1 else ''}",
            f"use --nproc {gpus}, or --share-gpu to let ranks share them over gloo, or --device cpu",
        )
    return torch.device("cuda", place.local_rank % gpus)
