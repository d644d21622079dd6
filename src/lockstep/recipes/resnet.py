"""`cifar10`: ResNet-18 (He et al. 2015) on small images. Like any model here it is written for one device."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.catalog import Cifar10Settings
from lockstep.data.images import CLASSES, ImageDataset, read_cifar10
from lockstep.recipes.task import Task, data_folder
from lockstep.recipes.vision import accuracy, loss

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.around = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        change = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.around(x) + change)


class ResNet18(nn.Module):
    """Images [batch, 3, 32, 32] to logits of the ten classes [batch, 10].

    The stem is the one for small images: one 3 x 3 convolution that keeps all pixels, and no pooling after it.
    """

    def __init__(self, settings: Cifar10Settings) -> None:
        super().__init__()
        width = settings.width
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            BasicBlock(width, width, 1),
            BasicBlock(width, width, 1),
            BasicBlock(width, 2 * width, 2),
            BasicBlock(2 * width, 2 * width, 1),
            BasicBlock(2 * width, 4 * width, 2),
            BasicBlock(4 * width, 4 * width, 1),
            BasicBlock(4 * width, 8 * width, 2),
            BasicBlock(8 * width, 8 * width, 1),
        )
        self.head = nn.Linear(8 * width, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(pixels))))
        logits: Tensor = self.head(x.mean(dim=(-2, -1)))
        return logits


def task(settings: Cifar10Settings, data_path: str | None, seed: int) -> Task:  # noqa: ARG001 (recipes share a signature)
    """Naming what CIFAR-10's images show, from the cache or from the folder `data_path`."""
    splits = read_cifar10(data_folder("cifar10", data_path))
    return Task(
        build_model=lambda: ResNet18(settings),
        loss=loss,
        train=ImageDataset(splits.train, MEAN, STD, augment=True),
        validation=ImageDataset(splits.validation, MEAN, STD),
        test=ImageDataset(splits.test, MEAN, STD),
        metrics={"accuracy": accuracy},
        baseline=("uniform guess", math.log(CLASSES)),
    )
