"""`digits`: a multi-layer perceptron that reads handwritten digits."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.data.corpora import digits
from lockstep.errors import UserError
from lockstep.recipes.catalog import DigitsSettings
from lockstep.recipes.task import Task

PIXELS = 64
CLASSES = 10


class DigitReader(nn.Module):
    """Pixels [batch, 64] to logits of the ten digits [batch, 10]."""

    def __init__(self, settings: DigitsSettings) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, settings.width)
        self.blocks = nn.ModuleList(Block(settings.width) for _ in range(settings.layers))
        self.head = nn.Linear(settings.width, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.linear(F.relu(x))
        return mixed


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Cross-entropy in nats, summed over the images, and how many they are."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """How many digits are read right, of how many."""
    return (model(batch["x"]).argmax(dim=-1) == batch["y"]).sum(), len(batch["y"])


def task(settings: DigitsSettings, data_path: str | None, seed: int) -> Task:  # noqa: ARG001 (recipes share a signature)
    """Reading the embedded handwritten digits."""
    if data_path is not None:
        raise UserError(f"the recipe digits cannot read {data_path}", "leave data.path out: its data are built in")
    splits = digits()
    return Task(
        build_model=lambda: DigitReader(settings),
        loss=loss,
        train=splits.train,
        validation=splits.validation,
        metrics={"accuracy": accuracy},
        baseline=("uniform guess", math.log(CLASSES)),
    )
