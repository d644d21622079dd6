"""What a run has learnt, for use: its model on one device, and text that a language model makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint.disk.files import reading
from lockstep.checkpoint.disk.format import DamageError, Whole, is_checkpoint
from lockstep.checkpoint.disk.load import read_whole
from lockstep.checkpoint.disk.pick import pick
from lockstep.checkpoint.state import sources_in
from lockstep.config.layers import from_toml
from lockstep.config.schema import Config
from lockstep.config.toml import read_toml
from lockstep.errors import UserError
from lockstep.parallel.build.materialise import named_tensors
from lockstep.parallel.build.names import state_dict_names
from lockstep.recipes.task import task_of
from lockstep.record.folder import CONFIG


def load(run: str | Path, build_model: Callable[[], nn.Module] | None = None, *, step: str | int = "best") -> nn.Module:
    """The model of a run as plain PyTorch on the CPU, in eval mode, whatever layout trained it.

    `run` is a run folder or one of its checkpoints. Of a run's checkpoints it is the best one, or the last where
    nothing was validated; `step` may be "best", "last" or a number. A run of a recipe knows how to build its model; for
    one of your own script give the function that the script gave to `run.setup`.
    """
    checkpoint = pick(Path(run), step)
    if build_model is None:
        build_model = task_of(recipe_config(Path(run))).build_model
    model = build_model()
    fill_model(model, checkpoint)
    return model.eval()


def fill_model(model: nn.Module, checkpoint: Whole) -> None:
    """Put the weights of a checkpoint into a model of one device, in the number formats they were stored in."""
    index = checkpoint.index
    tensors = dict(named_tensors(model))
    names = state_dict_names(model)
    sources = sources_in(index, names, tensors)
    try:
        with reading(checkpoint) as reader, torch.no_grad():
            for name in dict.fromkeys(names.values()):
                target, stored = tensors[name], index.tensors[sources[f"model/{name}"]]
                if tuple(stored.shape) != tuple(target.shape):
                    raise UserError(
                        f"{name} has the shape {stored.shape} in the checkpoint and {list(target.shape)} in the model",
                        "build the model the checkpoint was written with",
                    )
                target.data = read_whole(reader, stored)
    except DamageError as error:
        raise UserError(f"the checkpoint {checkpoint.folder} is damaged", f"{error}; give another one") from None


def generate(
    run: str | Path,
    prompt: str,
    *,
    length: int = 200,
    temperature: float = 0.7,
    seed: int = 0,
    step: str | int = "best",
) -> str:
    """What the language model of a run makes of a prompt."""
    task = task_of(recipe_config(Path(run)))
    if task.generate is None:
        raise UserError(
            f"the recipe of {run} is no language model that can go on from a text", "use one of the recipe lm"
        )
    if not prompt:
        raise UserError("the text is empty", "give the model something to go on from")
    if length < 1 or temperature <= 0:
        raise UserError("length and temperature have to be above 0", "leave them out, or give larger ones")
    if not 0 <= seed < 2**64:
        raise UserError(f"seed = {seed} is not valid", "give one from 0 to 2**64 - 1")
    return task.generate(load(run, task.build_model, step=step), prompt, length, temperature, seed)


def recipe_config(run: Path) -> Config:
    """The config of a run that trained a recipe."""
    folder = run.parent.parent if is_checkpoint(run) else run
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder (it has no {CONFIG})", "give a folder such as runs/lm")
    if "recipe" not in read_toml(folder / CONFIG):
        raise UserError(
            f"{folder} is a run of a script, which alone knows how to build its model",
            "in Python: lockstep.load(RUN, build_model)",
        )
    return from_toml(folder / CONFIG)
