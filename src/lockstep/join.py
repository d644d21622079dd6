"""`lockstep.init()`: how a process joins the others of its run."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch.distributed import Store

from lockstep.config import LaunchConfig, launch_config
from lockstep.errors import UserError
from lockstep.folder import (
    RunFolder,
    choose_folder,
    create_folder,
    hold,
    name_after,
    settle_script_config,
    this_attempt,
)
from lockstep.launch import LAUNCH
from lockstep.layout import Layout
from lockstep.recording import VerifySettings
from lockstep.run import Run
from lockstep.runtime.comm import Comm
from lockstep.runtime.device import backend_for, choose_device
from lockstep.runtime.place import Place, cpus_per_rank, find_place, place_of
from lockstep.sinks.trackers import check_installed

SECONDS_FOR_THE_WATCHDOG = 30.0
"""By how much groups wait longer than the watchdog: its sentence says more than their error."""


def init(
    layout: str | None = None,
    *,
    name: str | None = None,
    run_dir: str | Path | None = None,
    resume: str = "auto",
    seed: int | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    backend: Literal["auto", "gloo", "nccl"] | None = None,
    share_gpu: bool | None = None,
    timeout_minutes: float | None = None,
    profile: str | None = None,
    profile_ranks: str | None = None,
    log_to: list[Literal["wandb", "mlflow"]] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    head: str | None = None,
    store: Store | None = None,
) -> Run:
    """Join the other processes of this run; call it once, first thing.

    Works the same under `lockstep run`, torchrun, srun, mpirun and plain python. Under `torch.multiprocessing.spawn`
    give `rank`, `world_size` and `head="host:port"`, and end with `run.close()`. What the command line says
    (`--layout fsdp=4`) wins over the arguments here, which are the script's defaults.
    """
    launch: dict[str, Any] = json.loads(os.environ.get(LAUNCH, "{}"))
    given: dict[str, Any] = {"layout": layout, "seed": seed, "device": device, "backend": backend}
    given |= {"share_gpu": share_gpu, "timeout_minutes": timeout_minutes, "log_to": log_to}
    given |= {"profile": profile, "profile_ranks": profile_ranks}
    told = {key: value for key, value in given.items() if value is not None}
    config = launch_config(told | launch.get("options", {}))
    place = _find_place(rank, world_size, local_rank, local_world_size, head, store)
    resolved = Layout.parse(config.layout).resolve(place.world_size)
    config = config.model_copy(update={"layout": str(resolved)})
    chosen = _take_device(place, config)
    auto = config.backend == "auto"
    backend_name = backend_for(chosen.type, config.share_gpu) if auto else config.backend
    timeout = datetime.timedelta(seconds=60 * config.timeout_minutes + SECONDS_FOR_THE_WATCHDOG)
    comm = Comm(place, resolved, chosen, backend_name, timeout, store)
    if config.log_to:
        comm.once("look for what log_to names", lambda: check_installed(config.log_to))

    locks: list[IO[str]] = []

    def choose() -> tuple[str, int]:
        folder = choose_folder(
            name or name_after(Path(sys.argv[0])) or "run", Path(run_dir) if run_dir else None, resume
        )
        create_folder(folder, config)
        locks.append(hold(folder.path))
        return str(folder.path), folder.attempt

    if launch:
        run_dir, resume = Path(launch["run_dir"]), launch["resume"]
        number, launch["most"] = comm.once("count the starts", lambda: this_attempt(run_dir, launch["attempt"]))
        folder = RunFolder(run_dir, number)
        if place.rank == 0:
            settle_script_config(folder.path, config)
    else:
        path, attempt = comm.once("run folder", choose)
        folder = RunFolder(Path(path), attempt)
    verify = VerifySettings(**launch["verify"]) if "verify" in launch else None
    return Run(comm, resolved, chosen, config, folder, resume=resume, launch=launch, locks=locks, verify=verify)


def _find_place(
    rank: int | None,
    world_size: int | None,
    local_rank: int | None,
    local_world_size: int | None,
    head: str | None,
    store: Store | None,
) -> Place:
    if (rank is None) != (world_size is None):
        raise UserError("lockstep.init got one of rank and world_size", "give both, or neither")
    if rank is None or world_size is None:
        return find_place()
    if store is not None and head is None:
        head = "store:1"  # never connected to: the ranks meet at the store that was given
    return place_of(rank, world_size, local_rank, local_world_size, head)


def _take_device(place: Place, config: LaunchConfig) -> torch.device:
    device = choose_device(place, config.device, config.share_gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ or place.launcher == "torchrun":
        # torchrun sets 1 for everybody, whatever the machine has; our launcher leaves what the user has set.
        said = os.environ["OMP_NUM_THREADS"] if LAUNCH in os.environ else ""
        cpus = cpus_per_rank(place)
        torch.set_num_threads(min(cpus, int(said)) if said.isdigit() and int(said) > 0 else cpus)
    return device
