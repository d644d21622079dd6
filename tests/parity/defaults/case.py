"""What a case of the table is: a plain training script in parts, and what its user should get on each layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from lockstep.engine import LossFunction
from lockstep.step.optim import OptimizerFactory, Schedule

SEED = 11
STEPS = 8
GLOBAL_BATCH = 6
SIZE = 26
"""Samples of a dataset: an epoch has four whole steps and one of two samples."""

LAYOUTS = ("single", "dp=2", "dp=3", "fsdp=2", "tp=2", "pp=2", "cp=2")
WITHOUT_SEQUENCES = LAYOUTS[:-1]
DATA_RANKS = ("dp=2", "dp=3", "fsdp=2")
COUPLED = dict.fromkeys(DATA_RANKS, "micro_batch")
"""Where the loss of a sample depends on its neighbours: refused where data ranks would be idle."""

UNCUT = {"tp=2": "cut nothing"}
"""Models in which tensor parallelism finds no matrix to cut."""
READS = dict.fromkeys(("tp=2", "pp=2"), "reads a value of the model")
"""What looks at numbers while it computes, which a look without data cannot follow."""
SEVERAL = LAYOUTS[1:]
"""Those with more than one process."""

Draws = Literal["none", "sample", "step", "both"]
AfterStep = Callable[[int], None]


def sgd(named: Any, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=lr, **options)


def adamw(named: Any, lr: float = 1e-2, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=lr, **options)


@dataclass(frozen=True)
class Case:
    """One training. The fields are what its script says; the last three what is known of it."""

    name: str
    build: Callable[[], nn.Module]
    loss: LossFunction
    dataset: Dataset[Any]
    optimizer: OptimizerFactory = sgd
    clip: float | None = None
    schedule: Schedule | None = None
    loss_reduction: Literal["sum", "mean"] = "sum"
    global_batch: int = GLOBAL_BATCH
    collate: Callable[[list[Any]], Any] = default_collate
    begin: Callable[[nn.Module, torch.optim.Optimizer], AfterStep] | None = None
    """The script's own code: called before the first step; what it returns is called after each, with its number."""
    draws: Draws = "none"
    """What the random numbers of a forward follow from: the sample, which the plain loop then computes alone; the step;
    or, in dropout layers alone, the sample, although the samples have to be computed together."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """A part of the refusal, by layout, where the training does not work."""
    layouts: tuple[str, ...] = WITHOUT_SEQUENCES
    """Where somebody would try it."""

    @property
    def options(self) -> dict[str, Any]:
        """What `run.setup` is told: nothing that the plain script does not have."""
        given = {"clip": self.clip, "schedule": self.schedule}
        given = {key: value for key, value in given.items() if value is not None}
        return given | ({"loss_reduction": "mean"} if self.loss_reduction == "mean" else {})


class Columns(Dataset[Any]):
    """A sample is one row of every column."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Any:
        return {name: column[index] for name, column in self.columns.items()}


def dice(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(name.encode()))


def everywhere(phrase: str, layouts: Iterable[str] = LAYOUTS) -> dict[str, str]:
    """Refused on all of these, with the same words."""
    return dict.fromkeys(layouts, phrase)


def with_rate(lr: float, **options: Any) -> OptimizerFactory:
    return partial(sgd, lr=lr, **options)
