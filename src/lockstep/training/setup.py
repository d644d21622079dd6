"""What is trained, as `run.setup` was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from lockstep.config.schema import SetupConfig
from lockstep.step.optim import OptimizerFactory, Schedule

Weight = int | float | torch.Tensor
LossFunction = Callable[[nn.Module, Any], tuple[torch.Tensor, Weight]]


@dataclass(frozen=True)
class Setup:
    """The functions and settings of a training."""

    build_model: Callable[[], nn.Module]
    loss: LossFunction
    optimizer: OptimizerFactory
    schedule: Schedule | None = None
    loss_reduction: Literal["sum", "mean"] = "sum"
    settings: SetupConfig = field(default_factory=SetupConfig)
    seed: int = 0
