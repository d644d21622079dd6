"""What a recipe hands to the trainer: a model, a loss, data, and what to say about them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config.catalog import find_recipe
from lockstep.config.schema import Config
from lockstep.data import sets
from lockstep.data.loader import Tokens
from lockstep.errors import UserError


@dataclass(frozen=True)
class Task:
    """One training problem, written for a single device."""

    build_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], tuple[Tensor, int | Tensor]]
    """(model, batch) -> the SUM of the loss, and how many items it sums over."""
    train: Dataset[Any]
    validation: Dataset[Any] | None = None
    test: Dataset[Any] | None = None
    """Scored once, at the end, by the best checkpoint."""
    metrics: Mapping[str, Callable[[nn.Module, Any], tuple[Tensor | float, int]]] = field(default_factory=dict)
    """By name: (model, batch) -> a sum and its count, which validation and test show as their ratio."""
    perplexity: bool = False
    """Whether exp(mean loss) is shown beside the loss: for a loss in nats per word."""
    tokens: Tokens | None = None
    """How many tokens a batch has, and how many of them only fill rows up: what throughput counts, else samples."""
    baseline: tuple[str, float] | None = None
    """What a trivial model scores on the validation loss: (its name, its loss)."""
    prompt: str = ""
    """What a trained language model is shown to go on from, at the end of a run."""
    generate: Callable[[nn.Module, str, int, float, int], str] | None = None
    """(model, prompt, length, temperature, seed) -> how a language model goes on.

    All ranks call it together. It draws from a generator of its own, so that all do the same forwards.
    """


def task_of(config: Config) -> Task:
    """The model, loss and data of the recipe a config names."""
    recipe = find_recipe(config.recipe)
    module = importlib.import_module(recipe.module)
    make_task = getattr(module, recipe.function)
    task = make_task(recipe.model_settings(**config.model), config.data.path, config.seed)
    assert isinstance(task, Task)
    return task


def data_folder(name: str, data_path: str | None) -> Path:
    """Where a public set is read from: the user's own folder, else the cache that `lockstep fetch` fills."""
    if data_path is None:
        return sets.find(sets.find_set(name), sets.cache_folder())
    if not data_path:
        raise UserError("data.path is empty", "name a folder, or leave it out")
    return Path(data_path).expanduser()
