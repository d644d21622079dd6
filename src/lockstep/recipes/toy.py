"""`linear`: the smallest training there is, a linear map learnt from random samples.

The loss is the squared error. Cross-entropy, which tutorials like to use here, is identically zero over a
single output: the softmax of one number is always 1, so nothing would be learnt.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.catalog import LinearSettings
from lockstep.data.corpora import PairDataset
from lockstep.errors import UserError
from lockstep.recipes.task import Task

VALIDATION_SAMPLES = 256


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Squared error, summed over the samples, and how many they are."""
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()


def task(settings: LinearSettings, data_path: str | None, seed: int) -> Task:
    """Samples of y = Wx + b, where W, b and x are drawn from the seed."""
    if data_path is not None:
        raise UserError(f"the recipe linear cannot read {data_path}", "leave data.path out: its data are drawn")
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(settings.features, 1, generator=generator)
    bias = torch.randn(1, generator=generator)
    x = torch.randn(settings.samples + VALIDATION_SAMPLES, settings.features, generator=generator)
    y = x @ weight + bias
    train, held_out = slice(settings.samples), slice(settings.samples, None)
    return Task(
        build_model=lambda: nn.Linear(settings.features, 1),
        loss=loss,
        train=PairDataset(x[train], y[train]),
        validation=PairDataset(x[held_out], y[held_out]),
        baseline=("always the mean", y[held_out].var(correction=0).item()),
    )
