"""The one place that knows the order of cutting: formats, compile, recompute, shard or replicate, materialise.

A block recomputes its compiled forward. The other way round torch would have to compile the recomputation, which it
does for plain blocks only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lockstep.config import Compile, NumericsConfig, ShardConfig
from lockstep.layout import Layout
from lockstep.modelplan import find_blocks
from lockstep.parallel.batchnorm import SyncBatchNorms
from lockstep.parallel.compile import check_compilable, compile_blocks
from lockstep.parallel.formats import accept_rounded, compute_with, store_in
from lockstep.parallel.materialise import build_initial
from lockstep.parallel.recompute import recompute
from lockstep.parallel.replicate import GradientBuckets
from lockstep.parallel.shard import ShardedGradients, shard
from lockstep.parallel.statistics import RunningStatistics
from lockstep.parallel.zero1 import ShardedOptimizer
from lockstep.runtime.comm import Comm


class GradientSync(Protocol):
    """How the gradients of one step come together.

    One that `counts_unused` finds out by itself, in `wait`, whether any rank has parameters without a gradient; else
    the ranks have to tell each other what `unused` says.
    """

    counts_unused: bool

    def rest(self) -> None: ...
    def begin(self) -> None: ...
    def before_backward(self, last: bool) -> None: ...
    def unused(self) -> int: ...
    def wait(self) -> bool: ...
    def finish(self, somebody_has_unused: bool) -> None: ...
    def updated(self) -> None: ...
    def restored(self) -> None: ...


@dataclass(frozen=True)
class ParallelModel:
    """A model that was cut for this rank, and what the engine needs to know of the cut.

    `parameters` is what this rank holds of every parameter: the optimizer works on it, and checkpoints keep it.
    `together` says why every rank has to do every forward and backward, where they have to.
    """

    model: nn.Module
    blocks: list[tuple[str, nn.Module]]
    parameters: list[tuple[str, nn.Parameter]]
    gradients: GradientSync
    statistics: RunningStatistics
    shard_group: dist.ProcessGroup | None
    together: str | None

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer is given."""
        return [(name, parameter) for name, parameter in self.parameters if parameter.requires_grad]


def parallelize(
    build_model: Callable[[], nn.Module],
    layout: Layout,
    comm: Comm,
    device: torch.device,
    *,
    seed: int,
    init_by_name: bool = False,
    recompute_blocks: bool = False,
    compile_: Compile = "off",
    numerics: NumericsConfig | None = None,
    shard_config: ShardConfig | None = None,
    batch_norm: Literal["micro-batch", "sync"] = "micro-batch",
) -> ParallelModel:
    """Build the model as if on one device and cut it for this rank's place on the mesh."""
    numerics, shard_config = numerics or NumericsConfig(), shard_config or ShardConfig()
    fully_sharded = layout.fsdp > 1 and shard_config.level != "zero1"
    blocks: list[tuple[str, nn.Module]] = []
    sharded: list[ShardedGradients] = []
    synchronised: list[SyncBatchNorms] = []

    def cut(model: nn.Module) -> None:
        check_compilable(compile_, model, recompute_blocks)
        store_in(model, numerics)
        blocks.extend(find_blocks(model))
        if batch_norm == "sync" and comm.world_size > 1:
            synchronised.append(SyncBatchNorms(model, comm))
        if (computed_with := numerics.param_dtype or numerics.storage_dtype) != "fp32":
            accept_rounded(model, computed_with, device)
        if numerics.param_dtype is not None and not fully_sharded:  # else shards are gathered in it
            compute_with(model, blocks, numerics.param_dtype)
        if compile_ == "blocks":
            compile_blocks([block for _, block in blocks])
        if recompute_blocks:
            for _, block in blocks or [("", model)]:
                recompute(block)
        if fully_sharded:
            sharded.append(shard(model, [block for _, block in blocks], comm, shard_config, numerics))

    model = build_initial(build_model, cut, comm=comm, device=device, seed=seed, by_name=init_by_name)
    parameters = list(model.named_parameters())
    gradients: GradientSync
    if sharded:
        gradients = sharded[0]
    elif layout.fsdp > 1:
        gradients = optimizer = ShardedOptimizer(model, comm, numerics.reduce_dtype)
        parameters = list(optimizer.rows.items())
    elif (replicas := comm.group("dp")) is not None:
        gradients = GradientBuckets(parameters, replicas, comm, numerics.reduce_dtype)
    else:
        gradients = LocalGradients(model)
    return ParallelModel(
        model,
        blocks,
        parameters,
        gradients,
        RunningStatistics(model, comm, synchronised[0] if synchronised else None),
        comm.group("fsdp"),
        "a sharded layout" if layout.fsdp > 1 else "a synchronised BatchNorm" if synchronised else None,
    )


class LocalGradients:
    """One process: gradients need no synchronisation."""

    counts_unused = True

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

    def wait(self) -> bool:
        """Nothing to wait for."""
        return False

    def finish(self, somebody_has_unused: bool) -> None:
        """They are this step's gradients already."""

    def updated(self) -> None:
        """Nothing to gather."""

    def restored(self) -> None:
        """Nothing to gather."""
