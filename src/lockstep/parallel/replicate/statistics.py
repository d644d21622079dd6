"""Running statistics of BatchNorm and other buffers of a forward: what one process would have after the step.

BatchNorm keeps r <- (1 - m) r + m s for every micro-batch it sees. One process sees all micro-batches of a step in
order; a rank sees only its own, neighbours among them. The update is linear in r, so the ranks' updates compose. Of no
other buffer can that be known, so one that follows the samples is refused; what comes to the same is for buffers.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from lockstep.data.order import Order
from lockstep.errors import UserError
from lockstep.parallel.replicate.batchnorm import SyncBatchNorms
from lockstep.runtime.comm import Comm
from lockstep.runtime.torch_private import AnyBatchNorm, AnyInstanceNorm, version_of
from lockstep.text.units import how_many


class RunningStatistics:
    """Keeps the running statistics of a model equal on all data ranks, step by step.

    `group` is theirs, None: of all ranks. Where BatchNorm is synchronised it has done so itself.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        comm: Comm,
        group: dist.ProcessGroup | None = None,
        sync: SyncBatchNorms | None = None,
    ) -> None:
        modules = list(modules)
        self._ranks = comm.data_size
        self._group = group
        self._sync = sync
        self._all_layers: list[AnyBatchNorm] = []
        self._others: dict[str, tuple[nn.Module, str]] = {}
        self._others_before: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._before = torch.empty(0)
        if comm.data_size == 1:
            return
        for name, module in modules:
            _refuse_unknown_statistics(name, module)
        layers = [layer for _, layer in modules if keeps_statistics(layer)]
        known = {id(buffer) for layer in layers for buffer in layer.buffers()}
        self._all_layers = layers
        self._others = {
            f"{name}.{leaf}".lstrip("."): (module, leaf)
            for name, module in modules
            for leaf, buffer in module.named_buffers(recurse=False)
            if id(buffer) not in known
        }

    @property
    def _layers(self) -> list[AnyBatchNorm]:
        """The layers whose statistics are put together here."""
        return [] if self.is_synchronised else self._all_layers

    @property
    def is_synchronised(self) -> bool:
        """Whether BatchNorm normalises over the samples of all data ranks."""
        return self._sync is not None and self._sync.is_on

    @property
    def can_synchronise(self) -> bool:
        """Whether there is a BatchNorm that was made for it."""
        return self._sync is not None

    def synchronise(self, is_on: bool) -> None:
        """Let BatchNorm normalise over the samples of all data ranks, or over those of a micro-batch."""
        if self._sync is not None:
            self._sync.is_on = is_on

    def leave(self, names: Collection[str]) -> None:
        """These buffers are somebody else's matter."""
        self._others = {name: home for name, home in self._others.items() if name not in names}
        self._others_before = {name: seen for name, seen in self._others_before.items() if name not in names}

    def begin(self) -> None:
        """Remember the statistics before a step."""
        if self._sync:
            self._sync.begin()
        if self._layers:
            self._before = self._snapshot()
        for name in self._others:
            if not self._is_as_seen(name):
                self._others_before[name] = _seen(self._other(name))

    def end(self) -> None:
        """A step is over, however: the forwards of a script between steps are each rank's own."""
        if self._sync:
            self._sync.is_in_step = False

    def not_counting(self) -> AbstractContextManager[None]:
        """For a forward that must not count."""
        if self._sync:
            self._sync.fillers_from_here()
        return not_counting(self._layers)

    @torch.no_grad()
    def combine(self) -> None:
        """After a step: apply the updates of all ranks, in rank order, to the statistics before the step."""
        self._check_others()
        if not self._layers:
            return
        mine = self._snapshot()
        everybody = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(everybody, mine, group=self._group)
        total = self._before
        for theirs in everybody:
            total = self._compose(total, theirs)
        self._restore(total)

    def _check_others(self) -> None:
        """After a step: a buffer that a forward changed has another value on every rank."""
        for name, (copy, _, _) in self._others_before.items():
            now = self._other(name)
            if not self._is_as_seen(name) and (now.shape != copy.shape or not torch.equal(now, copy)):
                raise changed_by_each(name)

    def _is_as_seen(self, name: str) -> bool:
        """Whether nobody has touched a buffer since it was seen."""
        now = self._other(name)
        _, buffer, version = self._others_before.get(name, (None, None, -1))
        return now is buffer and version_of(now) == version

    def _other(self, name: str) -> torch.Tensor:
        module, leaf = self._others[name]
        return module.get_buffer(leaf)

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
            parts += [theirs[part] + decay * (total[part] - self._before[part]), (total[offset + size] + batches)[None]]
            offset += size + 1
        return torch.cat(parts)

    def _snapshot(self) -> torch.Tensor:
        return torch.cat([buffer.detach().double().reshape(-1) for buffer in self._buffers()])

    @torch.no_grad()
    def _restore(self, values: torch.Tensor) -> None:
        offset = 0
        for buffer in self._buffers():
            buffer.copy_(values[offset : offset + buffer.numel()].view_as(buffer))
            offset += buffer.numel()

    def _buffers(self) -> Iterator[torch.Tensor]:
        for layer in self._layers:
            for buffer in (layer.running_mean, layer.running_var, layer.num_batches_tracked):
                assert buffer is not None
                yield buffer


def changed_by_each(name: str) -> UserError:
    """A buffer that follows the samples of a forward, where every rank has its own."""
    return UserError(
        f"the forward pass changes the buffer {name}, and every rank would change it in its own way",
        "update it between steps, or train this model on one process (--layout single)",
    )


def _seen(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A copy of a buffer, and what tells whether it was touched since."""
    return buffer.clone(), buffer, version_of(buffer)


def batch_norm_line(model: nn.Module, how: str, order: Order, given: bool) -> str | None:
    """What the BatchNorm layers of a model normalise over, for people; None where nothing is normalised."""
    if not any(isinstance(layer, AnyBatchNorm) and layer.training for layer in model.modules()):
        return None
    if how == "sync":
        across = f"{how_many(order.data_size, 'rank')} x {how_many(order.micro_batch, 'sample')}"
        return f"BatchNorm normalises over {across}: numbers change with the layout"
    if not given:
        return f"BatchNorm normalises over the global batch of {order.global_batch}: the same numbers on any layout"
    samples = how_many(order.micro_batch, "sample")
    return f"BatchNorm normalises over the {samples} of a logical micro-batch: the same numbers on any layout"


def batch_norms(module: nn.Module) -> list[AnyBatchNorm]:
    """The layers below a module that keep running statistics."""
    return [layer for layer in module.modules() if keeps_statistics(layer)]


def keeps_statistics(layer: nn.Module) -> TypeGuard[AnyBatchNorm]:
    """Whether a layer is a BatchNorm with running statistics."""
    return isinstance(layer, AnyBatchNorm) and layer.track_running_stats


@contextmanager
def not_counting(layers: Sequence[AnyBatchNorm]) -> Iterator[None]:
    """A forward that normalises as usual and leaves the running statistics alone.

    By a momentum of 0, not by switching the tracking off: a recomputed forward has to save the same tensors again.
    """
    before = [
        (layer.momentum, layer.num_batches_tracked.clone()) for layer in layers if layer.num_batches_tracked is not None
    ]
    for layer in layers:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, (momentum, batches) in zip(layers, before, strict=True):
            layer.momentum = momentum
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_(batches)


def _refuse_unknown_statistics(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.SyncBatchNorm):
        raise UserError(
            f"{name} is a SyncBatchNorm",
            'use BatchNorm, which sees the same logical micro-batches on any layout, or with batch_norm = "sync" those '
            "of all ranks",
        )
    if isinstance(module, AnyInstanceNorm) and module.track_running_stats:
        raise UserError(f"{name} keeps running statistics per rank", "build it with track_running_stats=False")
    if isinstance(module, AnyBatchNorm) and module.track_running_stats and module.momentum is None:
        raise UserError(
            f"{name} averages over batches in the order a rank sees them", "give it a momentum, such as 0.1"
        )
