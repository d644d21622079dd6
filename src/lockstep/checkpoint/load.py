"""Reading a checkpoint: the newest one whose files verify, the shard of this rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lockstep.checkpoint import format as fmt
from lockstep.checkpoint.format import checkpoints_folder, damage, read_index, step_folder, steps_on_disk
from lockstep.config import PipelineConfig
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.parallel.timetable import stages_of


def latest_checkpoint(run_folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of a run that is whole; `say` is told of every damaged one that is passed over."""
    for step in reversed(steps_on_disk(run_folder)):
        folder = step_folder(run_folder, step)
        try:
            problem = damage(folder, read_index(folder))
        except UserError as error:
            problem = str(error)
        if problem is None:
            return folder
        say(f"the checkpoint of step {step} is damaged ({problem}): going back to the one before it")
    return None


def best_checkpoint(run_folder: Path) -> tuple[int, float] | None:
    """Step and validation loss of the best checkpoint, if there is one."""
    path = checkpoints_folder(run_folder) / fmt.BEST
    if not path.exists():
        return None
    best = json.loads(path.read_text(encoding="utf-8"))
    return best["step"], best["loss"]


def check_layout(folder: Path, layout: Layout) -> None:
    """Refuse a checkpoint that another number of shards wrote."""
    saved = Layout.parse(read_index(folder)["layout"])
    if (saved.pp, saved.fsdp, saved.tp) != (layout.pp, layout.fsdp, layout.tp):
        axes = " and ".join(f"{axis}={saved.size(axis)}" for axis in ("pp", "fsdp", "tp"))
        raise UserError(
            f"the checkpoint {folder.name} was written with layout {saved} and cannot be cut for {layout}",
            f"use a layout with {axes}, or start anew with --resume never",
        )


def cut_as_before(config: PipelineConfig, ranks: int, index: dict[str, Any]) -> PipelineConfig:
    """The pipeline that wrote a checkpoint, whose shards hold its stages; another one is refused.

    Work is measured anew at every start: left alone, the same model might be cut elsewhere.
    """
    saved = index["pipeline"]
    if stages_of(config.schedule, ranks, config.per_rank) != saved["stages"]:
        raise UserError(
            f"the checkpoint was written by {saved['schedule']}, and schedule {config.schedule} has other stages",
            f"use {saved['schedule']} with {len(saved['stages'][0])} per rank, or start anew with --resume never",
        )
    if config.cuts is not None and config.cuts != saved["cuts"]:
        raise UserError(
            f"the checkpoint was cut at {', '.join(saved['cuts'])}, and pipeline.cuts is {', '.join(config.cuts)}",
            "leave pipeline.cuts as it was, or start anew with --resume never",
        )
    return config.model_copy(update={"cuts": saved["cuts"]})


def load_shard(folder: Path, shard: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of one shard and the JSON part of a checkpoint."""
    return load_file(folder / fmt.shard_name(shard)), read_index(folder)
