"""The global gradient norm, and the one factor that turns gradient sums into clipped gradients of the mean loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lockstep.runtime.dtensors import local_part
from lockstep.runtime.torch_private import foreach_multiply, foreach_norm, values_of_sparse
from lockstep.step.optim import multiplies_gradients


def local_gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's part of every gradient there is, as plain tensors of real numbers that share its memory."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            found.append(values_of_sparse(parameter.grad))
        else:
            part = local_part(parameter.grad)
            found.append(torch.view_as_real(part) if part.is_complex() else part)
    return found


def global_norm(
    grads: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> torch.Tensor:
    """The 2-norm over all gradients of the model, equal on every rank: `groups` together have each gradient once."""
    norm = torch.zeros((), device=device)
    if grads:
        # Of gradients in half precision too in fp32: what they are multiplied by is made of it.
        exact = max((grad.dtype for grad in grads), key=lambda dtype: dtype.itemsize)
        norms = foreach_norm(list(grads), 2.0, dtype=torch.promote_types(exact, torch.float32))
        norm = torch.linalg.vector_norm(torch.stack(norms))
    if not groups:
        return norm
    square = norm.double().square()  # in one format on all ranks, whatever their parameters are stored in
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt().to(norm.dtype)


def gradient_scale(norm: torch.Tensor, factor: float, clip: float | None) -> torch.Tensor | None:
    """What gradients whose mean has the given norm are multiplied by, to be means and no longer than `clip`.

    One number on the device, that is never read back; None where nothing is to be done.
    """
    scale = torch.full_like(norm, factor)
    if clip is not None:
        return scale * torch.clamp(clip / (norm + 1e-6), max=1.0)
    return scale if factor != 1.0 else None


def scale_gradients(
    grads: Sequence[torch.Tensor], scale: torch.Tensor | None, optimizer: torch.optim.Optimizer
) -> None:
    """Multiply the gradients, in the optimizer's own kernel where it has one that does: they are read once less."""
    in_kernel = multiplies_gradients(optimizer)
    if in_kernel or getattr(optimizer, "grad_scale", None) is not None:
        optimizer.grad_scale = scale.reciprocal() if in_kernel and scale is not None else None  # type: ignore[attr-defined]
    if not in_kernel and grads and scale is not None:
        foreach_multiply(list(grads), scale)
