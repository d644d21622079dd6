"""The global gradient norm and the one factor that turns gradient sums into clipped gradients of the mean loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def local_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's part of every gradient there is, as plain tensors."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def global_norm(
    grads: Sequence[torch.Tensor], shard_group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """The 2-norm over all gradients of the model, equal on every rank."""
    norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros((), device=device)
    if shard_group is None:
        return norm
    square = norm.square()
    dist.all_reduce(square, group=shard_group)
    return square.sqrt()


def scale_and_clip(
    grads: Sequence[torch.Tensor], norm: torch.Tensor, factor: float, clip: float | None
) -> torch.Tensor:
    """Multiply the gradients by `factor`, then shorten them to the norm `clip`; returns the norm before clipping.

    Both happen in one multiplication, on the device, without reading a number back.
    """
    norm = norm * factor
    scale = torch.full_like(norm, factor)
    if clip is not None:
        scale = scale * torch.clamp(clip / (norm + 1e-6), max=1.0)
    if grads and (clip is not None or factor != 1.0):
        torch._foreach_mul_(list(grads), scale)
    return norm
