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

from lockstep.checkpoint.disk.code import accepts_changes, check_same_code
from lockstep.config.arguments import check_exports, named
from lockstep.config.schema import LaunchConfig, launch_config
from lockstep.data.loader import kept_random_state
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.prove.recording import VerifySettings
from lockstep.record.folder import (
    RunFolder,
    choose_folder,
    create_folder,
    hold,
    name_after,
    settle_script_config,
    take_back,
    this_attempt,
    with_script,
)
from lockstep.record.identity import LocalCode, check_all_alike, facts_of
from lockstep.run import Beginning, Run
from lockstep.runtime.comm import Comm, meet
from lockstep.runtime.device import backend_for, choose_device
from lockstep.runtime.process import set_threads
from lockstep.runtime.rank_env import LAUNCH, Place, cpus_per_rank, find_place, place_of
from lockstep.runtime.seeds import host_streams, seed_of, seed_streams
from lockstep.sinks.trackers import check_installed

SECONDS_FOR_THE_WATCHDOG = 30.0
"""By how much groups wait longer than the watchdog: its sentence says more than their error."""


@named("lockstep.init")
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
    chosen = _take_device(place, config)
    auto = config.backend == "auto"
    backend_name = backend_for(chosen.type, config.share_gpu) if auto else config.backend
    timeout = datetime.timedelta(seconds=60 * config.timeout_minutes + SECONDS_FOR_THE_WATCHDOG)
    code = LocalCode()
    met = None
    if place.world_size > 1:
        # Before the layout is looked at: ranks that were told different ones would wait for each other's groups.
        met = meet(place, timeout, store)
        check_all_alike(met, place, facts_of(code, config, place, chosen.type, backend_name), timeout)
    resolved = Layout.parse(config.layout).resolve(place.world_size)
    config = config.model_copy(update={"layout": str(resolved)})
    comm = Comm(place, resolved, chosen, backend_name, timeout, store, met)
    if config.log_to:
        comm.once("look for what log_to names", lambda: check_installed(config.log_to))

    if "verify" not in launch:  # which ends before anything is exported
        comm.once("look where the script exports to", lambda: check_exports(Path(sys.argv[0])))

    locks: list[IO[str]] = []
    made: list[Path] = []

    code_may_differ = accepts_changes()

    def choose() -> tuple[str, int, int, str | None]:
        folder = choose_folder(
            name or name_after(Path(sys.argv[0])) or "run", Path(run_dir) if run_dir else None, resume
        )
        changed = check_same_code(folder.path, code.files(), may_differ=code_may_differ)
        made.extend(create_folder(folder, with_script(config)))
        locks.append(hold(folder.path))
        return str(folder.path), folder.attempt, folder.lost, changed

    def count() -> tuple[int, int | None, str | None]:
        number, most = this_attempt(folder.path, launch["attempt"])
        # What was edited while a run lasted is not a reason to leave it lying after a failure.
        may_differ = code_may_differ or number > launch["attempt"]
        return number, most, check_same_code(folder.path, code.files(), may_differ=may_differ)

    if launch:
        folder, resume = RunFolder(Path(launch["run_dir"]), launch["attempt"]), launch["resume"]
        number, launch["most"], changed = comm.once("count the starts", count)
        code_may_differ |= number > launch["attempt"]
        folder = RunFolder(folder.path, number)
        if place.rank == 0:
            settle_script_config(folder.path, config)
    else:
        path, attempt, lost, changed = comm.once("run folder", choose)
        folder = RunFolder(Path(path), attempt, lost)
    verify = VerifySettings(**launch["verify"]) if "verify" in launch else None
    try:
        with kept_random_state():  # some libraries draw when rank 0 opens its log
            start = Beginning(resume, launch, locks, made, verify, code_may_differ)
            run = Run(comm, resolved, chosen, config, folder, code, start)
    except UserError:  # a checkpoint that cannot be gone on from
        if made:
            take_back(folder, made)
        raise
    if changed is not None:
        run.message(changed, "warning")
    _draw_alike(comm, config.seed)
    return run


def _draw_alike(comm: Comm, seed: int) -> None:
    """What a script draws from here on is the same on every rank; what it has seeded itself stays as it is."""
    everybody = comm.gather(host_streams())
    different = [name for name in everybody[0] if any(one[name] != everybody[0][name] for one in everybody)]
    seed_streams(different, seed_of(seed, "script"))


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
        set_threads(min(cpus, int(said)) if said.isdigit() and int(said) > 0 else cpus)
    return device
