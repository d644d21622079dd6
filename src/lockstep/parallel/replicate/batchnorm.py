"""BatchNorm over the micro-batches of all data ranks.

torch's SyncBatchNorm knows no CPU, and no rank whose micro-batch must not count. One collective each way: every rank
sends the count, the sum and the sum of squares of each channel, in float64, so that nothing cancels that fp32 can tell
apart.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from lockstep.follow.around import Forward, replace_forward
from lockstep.runtime.comm import Comm
from lockstep.runtime.torch_private import AnyBatchNorm, check_dims


class SyncBatchNorms:
    """Lets every BatchNorm of a model normalise over all data ranks in training steps, where that is switched on.

    Running statistics are equal on every rank then, and count one batch for each forward the ranks did together.
    """

    def __init__(self, model: nn.Module, comm: Comm, is_on: bool) -> None:
        self.is_on = is_on
        self.is_in_step = False
        # A group of its own: gradients are being summed while the backward still asks for statistics.
        self._group = comm.data_group()
        self._counts = True
        for layer in model.modules():
            if isinstance(layer, AnyBatchNorm):
                replace_forward(layer, self._synchronised)

    def begin(self) -> None:
        """Start a step: the samples of this rank count."""
        self._counts = self.is_in_step = True

    def fillers_from_here(self) -> None:
        """From here on this rank takes part without its samples, to the end of the step.

        Not for one forward only: a recomputed block asks again in the backward. Fillers come last in a step.
        """
        self._counts = False

    def _synchronised(self, alone: Forward) -> Forward:
        def forward(layer: AnyBatchNorm, x: torch.Tensor) -> Any:
            if not (layer.training and self.is_on and self.is_in_step):
                return alone(layer, x)
            check_dims(layer, x)
            out: torch.Tensor
            out, mean, variance = _Normalise.apply(x, layer.weight, layer.bias, layer.eps, self._counts, self._group)
            if layer.track_running_stats:
                assert layer.running_mean is not None
                assert layer.running_var is not None
                assert layer.num_batches_tracked is not None
                assert layer.momentum is not None
                layer.num_batches_tracked.add_(1)
                layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), layer.momentum)
                layer.running_var.lerp_(variance.to(layer.running_var.dtype), layer.momentum)
            return out

        return forward


class _Normalise(torch.autograd.Function):
    """The output, and the mean and unbiased variance of what all ranks put in."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        counts: bool,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        channels = x.shape[1]
        exact = torch.promote_types(x.dtype, torch.float32)
        sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        count = x.numel() // channels
        if counts and count:
            variance, mean = torch.var_mean(x.to(exact), _all_but_channels(x), correction=0)
            variance, mean = variance.double(), mean.double()
            sums[:channels] = count * mean
            sums[channels:-1] = count * (variance + mean.square())
            sums[-1] = count
        dist.all_reduce(sums, group=group)
        total = sums[-1]
        mean = sums[:channels] / total
        variance = (sums[channels:-1] / total - mean.square()).clamp(min=0)
        unbiased = variance * total / (total - 1).clamp(min=1)
        ctx.save_for_backward(x, weight, mean.to(exact), (variance + eps).rsqrt().to(exact), total)
        ctx.counts, ctx.group = counts, group
        ctx.mark_non_differentiable(mean, unbiased)
        out = F.batch_norm(x, mean.to(exact), variance.to(exact), weight, bias, False, 0.0, eps)
        return out, mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        channels = (1, -1, *(1 for _ in x.shape[2:]))
        exact = gradient.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(channels)) * inverse.view(channels)
        own = torch.stack([part.sum(_all_but_channels(x)) for part in (exact, exact * normal)])
        everybody = own.double()
        dist.all_reduce(everybody, group=ctx.group)
        if ctx.counts:  # else the statistics do not depend on these samples
            by_mean, by_deviation = (everybody / total).to(mean.dtype)
            exact = exact - by_mean.view(channels) - normal * by_deviation.view(channels)
        scale = inverse if weight is None else inverse * weight
        of_bias, of_weight = (None, None) if weight is None else own.to(weight.dtype)
        return (exact * scale.view(channels)).to(x.dtype), of_weight, of_bias, None, None, None


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
