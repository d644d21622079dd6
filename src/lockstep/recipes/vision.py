"""`digits` and `mnist`: multi-layer perceptrons that read handwritten digits."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.catalog import DigitsSettings, MnistSettings
from lockstep.data.corpora import digits
from lockstep.data.images import CLASSES, MNIST_SIDE, ImageDataset, read_mnist
from lockstep.errors import UserError
from lockstep.recipes.task import Task, data_folder

PIXELS = 64
MNIST_MEAN, MNIST_STD = [0.1307], [0.3081]


class DigitReader(nn.Module):
    """Pixels [batch, 64] to logits of the ten digits [batch, 10]."""

    def __init__(self, settings: DigitsSettings) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, settings.width)
        self.blocks = nn.ModuleList(HiddenLayer(settings.width) for _ in range(settings.layers))
        self.head = nn.Linear(settings.width, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class HiddenLayer(nn.Module):
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


def mnist_model(settings: MnistSettings) -> nn.Module:
    """Pixels [batch, 1, 28, 28] to logits of the ten digits [batch, 10]."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(MNIST_SIDE * MNIST_SIDE, settings.width), nn.ReLU(), nn.Linear(settings.width, CLASSES)
    )


def mnist_task(settings: MnistSettings, data_path: str | None, seed: int) -> Task:  # noqa: ARG001 (as above)
    """Reading the digits of MNIST, from the cache or from the folder or .npz file `data_path`."""
    splits = read_mnist(data_folder("mnist", data_path))
    return Task(
        build_model=lambda: mnist_model(settings),
        loss=loss,
        train=ImageDataset(splits.train, MNIST_MEAN, MNIST_STD),
        validation=ImageDataset(splits.validation, MNIST_MEAN, MNIST_STD),
        test=ImageDataset(splits.test, MNIST_MEAN, MNIST_STD),
        metrics={"accuracy": accuracy},
        baseline=("uniform guess", math.log(CLASSES)),
    )
