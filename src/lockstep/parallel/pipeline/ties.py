"""Parameters that several stages of a pipeline use: each has its own copy, and they stay one parameter.

A tied embedding is the usual case. After a step's backward passes the gradients of the copies are added up, so that
every stage's optimizer makes the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lockstep.parallel.replicate.gradient_sync import sum_together
from lockstep.runtime.dtensors import local_part


@dataclass(frozen=True)
class Tie:
    """One parameter on one rank: the copy the optimizer has, and those of other stages of the same rank."""

    name: str
    parameter: nn.Parameter
    copies: list[nn.Parameter]
    group: dist.ProcessGroup | None
    """The ranks that have it, if they are several."""


@torch.no_grad()
def add_up(ties: Sequence[Tie]) -> None:
    """Make the gradient of every copy the sum over all of them."""
    by_group: dict[dist.ProcessGroup, list[Tie]] = {}
    for tie in ties:
        for copy in tie.copies:
            if copy.grad is not None:
                _gradient(tie.parameter).add_(local_part(copy.grad))
                copy.grad = None
        if tie.group is not None:
            by_group.setdefault(tie.group, []).append(tie)
    for group, members in by_group.items():
        used = torch.tensor([float(tie.parameter.grad is not None) for tie in members])
        gradients = [_gradient(tie.parameter) for tie in members]
        sum_together(gradients, group)
        used = used.to(gradients[0].device)
        dist.all_reduce(used, group=group)
        for tie, stages in zip(members, used.tolist(), strict=True):
            if not stages:
                tie.parameter.grad = None


@torch.no_grad()
def copy_to_all(ties: Sequence[Tie]) -> None:
    """Give the other stages of this rank what the optimizer made of a parameter."""
    for tie in ties:
        for copy in tie.copies:
            local_part(copy.data).copy_(local_part(tie.parameter.data))


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)
