"""What `lockstep plan --trace` cuts and runs: the model that the user named, with inputs that suit it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.catalog import RECIPES
from lockstep.config.layers import Layer, resolve
from lockstep.config.toml import read_toml
from lockstep.errors import UserError
from lockstep.planner.model.find_model import IN_PYTHON

if TYPE_CHECKING:
    from torch import nn

    from lockstep.planner.trace.dry_run import TracedTraining


def training_of(named: str, told: dict[str, Any], sequence: int | None) -> Callable[[], TracedTraining] | None:
    """What builds it, in the process that traces; None where the model is known by its numbers alone."""
    if named in RECIPES or named.endswith(".toml"):
        first = {"recipe": named} if named in RECIPES else read_toml(Path(named))
        config = resolve([Layer(named, first), Layer("--set", told)]).config
        if config.recipe == "lm" and sequence is not None:
            config = config.model_copy(update={"model": {**config.model, "context": sequence}})

        def build_recipe() -> TracedTraining:
            from lockstep.planner.trace.dry_run import training_of_task
            from lockstep.recipes.task import task_of

            return training_of_task(task_of(config))

        return build_recipe
    if match := IN_PYTHON.fullmatch(named):
        where, function = match["where"], match["function"]
        return lambda: _training_of_function(named, where, function, sequence)
    return None


def _training_of_function(named: str, where: str, function: str, sequence: int | None) -> TracedTraining:
    import torch

    from lockstep.planner.model.module import find_function, given_inputs, guess_inputs
    from lockstep.planner.trace.dry_run import training_of_module

    build = find_function(where, function)
    made = build()
    model, inputs = made if isinstance(made, tuple) else (made, None)
    sample = guess_inputs(named, model, sequence) if inputs is None else given_inputs(named, inputs)
    if sample.keywords:
        raise UserError(f"{named} names its inputs", "return them as a tuple, in the order of forward, for --trace")

    def samples(count: int) -> Any:
        return tuple(
            value.new_zeros((count, *value.shape[1:])) if isinstance(value, torch.Tensor) and value.dim() else value
            for value in sample.arguments
        )

    def module() -> nn.Module:
        found = build()
        model: nn.Module = found[0] if isinstance(found, tuple) else found
        return model

    return training_of_module(module, samples)
