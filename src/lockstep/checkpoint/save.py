"""Writing a checkpoint: staged by all ranks that hold a shard, renamed by rank 0 when all of it is on disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lockstep.checkpoint import format as fmt
from lockstep.checkpoint.format import checkpoints_folder, digest_of, shard_name, step_folder, steps_on_disk
from lockstep.runtime.comm import Comm


def save_checkpoint(
    run_folder: Path,
    tensors: dict[str, torch.Tensor],
    meta: dict[str, Any],
    *,
    comm: Comm,
    shard: int,
    writes: bool,
) -> int:
    """Write the checkpoint of step `meta["step"]`, called by every rank; returns its size in bytes.

    `shard` is this rank's number among those that hold different parts of the model; of the ranks that hold equal
    shards one `writes`. When any rank fails to write, all ranks raise, and what was there before is untouched.
    """
    final = step_folder(run_folder, meta["step"])
    staging = final.with_name(f".{final.name}.writing")
    if comm.once("checkpoint folder", lambda: _make_empty(staging, final)):
        return 0
    entry: dict[str, Any] = {}
    if writes:
        try:
            entry = _write_shard(staging / shard_name(shard), tensors)
        except Exception as error:
            entry = {"error": f"rank {comm.rank} could not write {shard_name(shard)}: {error}"}
    entries = comm.gather(entry)
    errors = [one["error"] for one in entries if "error" in one]
    if errors:
        if comm.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise OSError(f"the checkpoint of step {meta['step']} was not written: {errors[0]}")
    shards = {one.pop("name"): one for one in entries if one}
    comm.once("checkpoint commit", lambda: _commit(staging, final, {"format": fmt.FORMAT, **meta, "shards": shards}))
    return sum(one["bytes"] for one in shards.values())


def mark_best(run_folder: Path, step: int, loss: float) -> None:
    """Name the best checkpoint (rank 0 only)."""
    fmt.write_json(checkpoints_folder(run_folder) / fmt.BEST, {"step": step, "loss": loss})


def prune(run_folder: Path, keep: int, best_step: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the best one (rank 0 only, after a successful save)."""
    for step in steps_on_disk(run_folder)[:-keep]:
        if step != best_step:
            doomed = step_folder(run_folder, step)
            # Renamed first: half a folder must never look like a checkpoint.
            hidden = doomed.with_name(f".{doomed.name}.deleting")
            doomed.rename(hidden)
            shutil.rmtree(hidden)


def _make_empty(staging: Path, final: Path) -> bool:
    """Prepare the staging folder; true when this step is on disk already."""
    if final.exists():
        return True
    shutil.rmtree(staging, ignore_errors=True)  # left by an attempt that was killed while writing
    staging.mkdir(parents=True)
    return False


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"name": path.name, "bytes": path.stat().st_size, "digest": digest_of(path)}


def _commit(staging: Path, final: Path, index: dict[str, Any]) -> None:
    fmt.write_json(staging / fmt.INDEX, index)
    staging.rename(final)
    fmt.sync_folder(final.parent)
