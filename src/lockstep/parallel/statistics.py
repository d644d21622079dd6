"""Running statistics of BatchNorm under data parallelism: what one process would have after the same micro-batches.

Each layer keeps r <- (1 - m) r + m s for every micro-batch it sees. One process sees all micro-batches of a step in
order; a rank sees only its own, neighbours among them. The update is linear in r, so the ranks' updates compose.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.errors import UserError
from lockstep.runtime.comm import Comm


class RunningStatistics:
    """Keeps the running statistics of a model equal on all data ranks, step by step."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self._comm = comm
        self._layers = [
            module
            for module in model.modules()
            if isinstance(module, _NormBase) and module.track_running_stats and comm.world_size > 1
        ]
        for layer in self._layers:
            if layer.momentum is None:
                raise UserError(
                    f"{type(layer).__name__} with momentum=None averages over batches in the order a rank sees them",
                    "give it a momentum, such as 0.1",
                )
        self._before = torch.empty(0)

    def begin(self) -> None:
        """Remember the statistics before a step."""
        if self._layers:
            self._before = self._snapshot()

    @torch.no_grad()
    def combine(self) -> None:
        """After a step: apply the updates of all ranks, in rank order, to the statistics before the step."""
        if not self._layers:
            return
        mine = self._snapshot()
        everybody = [torch.empty_like(mine) for _ in range(self._comm.world_size)]
        dist.all_gather(everybody, mine)
        total = self._before
        for theirs in everybody:
            total = self._compose(total, theirs)
        self._restore(total)

    def _compose(self, total: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """What `theirs` did to `before`, done to `total` instead."""
        parts = []
        offset = 0
        for layer in self._layers:
            assert layer.momentum is not None
            size = 2 * layer.num_features
            batches = theirs[offset + size] - self._before[offset + size]
            decay = (1.0 - layer.momentum) ** batches
            part = slice(offset, offset + size)
            parts += [
                theirs[part] + decay * (total[part] - self._before[part]),
                (total[offset + size] + batches)[None],
            ]
            offset += size + 1
        return torch.cat(parts)

    def _snapshot(self) -> torch.Tensor:
        rows = []
        for layer in self._layers:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            assert layer.num_batches_tracked is not None
            rows += [layer.running_mean, layer.running_var, layer.num_batches_tracked[None]]
        return torch.cat([row.double() for row in rows])

    def _restore(self, values: torch.Tensor) -> None:
        offset = 0
        for layer in self._layers:
            for buffer in (layer.running_mean, layer.running_var, layer.num_batches_tracked):
                assert buffer is not None
                buffer.copy_(values[offset : offset + buffer.numel()].view_as(buffer))
                offset += buffer.numel()
