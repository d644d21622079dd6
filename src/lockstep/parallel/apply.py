"""The one place that knows the order of cutting: recompute, then shard or replicate, then materialise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from lockstep.layout import Layout
from lockstep.modelplan import find_blocks
from lockstep.parallel.materialise import build_initial
from lockstep.parallel.recompute import recompute
from lockstep.parallel.replicate import GradientBuckets
from lockstep.parallel.shard import ShardedGradients, shard
from lockstep.runtime.comm import Comm


class GradientSync(Protocol):
    """How the gradients of one step come together."""

    def rest(self) -> None: ...
    def begin(self) -> None: ...
    def before_backward(self, last: bool) -> None: ...
    def unused(self) -> int: ...
    def finish(self, somebody_has_unused: bool) -> None: ...


@dataclass(frozen=True)
class ParallelModel:
    """A model that was cut for this rank, and what the engine needs to know of the cut."""

    model: nn.Module
    blocks: list[tuple[str, nn.Module]]
    gradients: GradientSync
    shard_group: dist.ProcessGroup | None


def parallelize(
    build_model: Callable[[], nn.Module],
    layout: Layout,
    comm: Comm,
    device: torch.device,
    *,
    seed: int,
    init_by_name: bool = False,
    recompute_blocks: bool = False,
) -> ParallelModel:
    """Build the model as if on one device and cut it for this rank's place on the mesh."""
    blocks: list[tuple[str, nn.Module]] = []
    sharded: list[ShardedGradients] = []

    def cut(model: nn.Module) -> None:
        blocks.extend(find_blocks(model))
        if recompute_blocks:
            for _, block in blocks or [("", model)]:
                recompute(block)
        if layout.fsdp > 1:
            sharded.append(shard(model, [block for _, block in blocks], comm))

    model = build_initial(build_model, cut, comm=comm, device=device, seed=seed, by_name=init_by_name)
    gradients: GradientSync
    if sharded:
        gradients = sharded[0]
    elif (replicas := comm.group("dp")) is not None:
        gradients = GradientBuckets(list(model.named_parameters()), replicas, comm)
    else:
        gradients = LocalGradients(model)
    return ParallelModel(model, blocks, gradients, comm.group("fsdp"))


class LocalGradients:
    """One process: gradients need no synchronisation."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def rest(self) -> None:
        """Nothing to give back."""

    def begin(self) -> None:
        """Start a step: no gradients."""
        self._model.zero_grad(set_to_none=True)

    def before_backward(self, last: bool) -> None:
        """Nothing to prepare."""

    def unused(self) -> int:
        """Nothing to agree on."""
        return 0

    def finish(self, somebody_has_unused: bool) -> None:
        """Nothing to wait for."""
