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
from torch.distributed.tensor import DTensor


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
                _gradient(tie.parameter).add_(_local(copy.grad))
                copy.grad = None
        if tie.group is not None:
            by_group.setdefault(tie.group, []).append(tie)
    for group, members in by_group.items():
        used = torch.tensor([float(tie.parameter.grad is not None) for tie in members])
        gradients = [_gradient(tie.parameter) for tie in members]
        for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in alike])
            dist.all_reduce(flat, group=group)
            for gradient, total in zip(alike, flat.split([one.numel() for one in alike]), strict=True):
                gradient.copy_(total.view_as(gradient))
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
            _local(copy.data).copy_(_local(tie.parameter.data))


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return _local(parameter.grad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
