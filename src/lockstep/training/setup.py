"""What is trained, as `run.setup` was told, and what a loss function may return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.config.arguments import check_is_tensor
from lockstep.config.schema import Format, SetupConfig
from lockstep.errors import UserError
from lockstep.parallel.replicate.shard import read_elsewhere
from lockstep.step.attention import attend_with
from lockstep.step.optim import OptimizerFactory, Schedule
from lockstep.step.precision import compute_in

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


@contextmanager
def computing(precision: Format, device: torch.device, attention: str | None) -> Iterator[None]:
    """In these number formats (autocast) and with these attention kernels."""
    with compute_in(precision, device), attend_with(attention):
        yield


def checked_loss(
    returned: Any, reduction: Literal["sum", "mean"], together: str | None, device: torch.device
) -> tuple[torch.Tensor, Weight]:
    """Sum and weight of what a loss function returned. `together` says why no rank can leave a forward out."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        what = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        raise UserError(
            f"the loss function returned {what}",
            "return (sum of the losses, how many of them count), as the README's own script does",
        )
    value, weight = returned
    check_is_tensor(value)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise UserError("the loss function returned a loss that is not one number", 'use reduction="sum"')
    if isinstance(value, DTensor):
        raise read_elsewhere()
    if isinstance(weight, torch.Tensor) and weight.requires_grad:
        raise UserError(
            "the weight that the loss function returns depends on the model's parameters, and a weight counts only",
            "detach it where it is a count; where it belongs to the loss, divide by it there, and return that mean "
            'and a count, with loss_reduction="mean"',
        )
    if reduction == "sum":
        return value.float().reshape(()), weight
    # A mean over nothing is NaN, and its gradient too: such a micro-batch is left out, not multiplied by zero.
    if float(weight) > 0:
        return value.float().reshape(()) * weight, weight
    if together is not None:
        raise UserError(
            f"a micro-batch of weight 0 has no mean loss, and {together} cannot leave it out",
            'return the sum (reduction="sum") and drop loss_reduction="mean"',
        )
    return torch.zeros((), device=device), 0
