"""ZeRO-1: only the optimizer's state is sharded; a rank updates its rows of each parameter, gathers the rest.

The optimizer is given what it would get of `fully_shard`, DTensors cut along dim 0. Here they are views: of the whole
parameters, and of the gradients that all data ranks have summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from lockstep.config.schema import Format
from lockstep.parallel.replicate.buckets import GradientBuckets, fill_buckets
from lockstep.parallel.replicate.shard import data_mesh, refuse_unshardable
from lockstep.runtime.comm import Comm, gather_into
from lockstep.runtime.dtensors import of_part
from lockstep.runtime.torch_private import foreach_copy


class ShardedOptimizer(GradientBuckets):
    """Gradients summed over all data ranks, and the rows of parameters that this rank's optimizer works on."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], comm: Comm, reduce_dtype: Format) -> None:
        refuse_unshardable(named)
        shards = comm.group("fsdp")
        assert shards is not None
        whole = dict(named)
        everybody = shards if comm.group("dp") is None else comm.data_group()
        super().__init__(list(whole.items()), everybody, comm, reduce_dtype)
        self._mesh = data_mesh(comm)
        self._shards = shards
        self.rows = {name: self._own_rows(parameter) for name, parameter in whole.items()}
        # Views like the parameters' own: the buckets keep their place, so these are made once.
        views = {p: view for bucket in self._buckets for p, view in zip(bucket.members, bucket.views, strict=True)}
        self._gradients = [
            (parameter, self.rows[name], self._own_part(views[parameter]))
            for name, parameter in whole.items()
            if parameter.requires_grad
        ]
        frozen = [parameter for parameter in whole.values() if not parameter.requires_grad]
        self._trained, self._frozen = (
            [_Rows(members, shards) for members in fill_buckets([one for one in some if one.dim() > 0])]
            for some in (views, frozen)
        )

    def finish(self, somebody_has_unused: bool) -> None:
        """Hand this rank's part of the sums to the optimizer."""
        super().finish(somebody_has_unused)
        for parameter, rows, gradient in self._gradients:
            has_gradient = parameter.grad is not None
            # Only the rows of this rank will be scaled and clipped: nobody should read the whole of it.
            parameter.grad = None
            rows.grad = gradient if has_gradient else None

    def updated(self) -> None:
        """The optimizer has changed this rank's rows: get those of the others."""
        for bucket in self._trained:
            bucket.gather()

    def restored(self) -> None:
        """A checkpoint has filled this rank's rows, of frozen parameters too."""
        for bucket in (*self._trained, *self._frozen):
            bucket.gather()

    def _own_rows(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dim() == 0:  # a single number has no rows: every rank updates it
            return parameter
        return nn.Parameter(self._own_part(parameter.data), requires_grad=parameter.requires_grad)

    def _own_part(self, whole: torch.Tensor) -> torch.Tensor:
        if whole.dim() == 0:
            return whole
        placements = [Replicate()] * (self._mesh.ndim - 1) + [Shard(0)]
        mine = chunk_of(whole, self._shards.rank(), self._shards.size())
        return of_part(mine, self._mesh, placements, whole.shape, whole.stride())


class _Rows:
    """Parameters whose rows are gathered by one collective: each rank sends its rows of all, padded to equal sizes."""

    def __init__(self, members: Sequence[nn.Parameter], shards: dist.ProcessGroup) -> None:
        self._shards = shards
        self._whole = [parameter.data.view(-1) for parameter in members]
        self._own = [chunk_of(p.data, shards.rank(), shards.size()).view(-1) for p in members]
        # The first chunk is a largest one.
        self._padded = [chunk_of(p.data, 0, shards.size()).numel() for p in members]

    @torch.no_grad()
    def gather(self) -> None:
        """Make the parameters whole again."""
        size = sum(self._padded)
        mine = self._whole[0].new_empty(size)
        foreach_copy(
            [slot[: own.numel()] for slot, own in zip(mine.split(self._padded), self._own, strict=True)], self._own
        )
        everybody = mine.new_empty(self._shards.size(), size)
        gather_into(everybody.view(-1), mine, group=self._shards)
        targets, sources = [], []
        for whole, table in zip(self._whole, everybody.split(self._padded, dim=1), strict=True):
            # Rows stand in the order of the ranks: some ranks have all a slot can hold, one a rest, others nothing.
            full, rest = divmod(whole.numel(), table.shape[1])
            targets += [whole[: full * table.shape[1]].view(full, -1), whole[whole.numel() - rest :]]
            sources += [table[:full], table[min(full, len(table) - 1), :rest]]
        foreach_copy(targets, sources)


def chunk_of(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows of one rank, none where there are fewer rows than ranks: what `fully_shard` would give it."""
    chunks = whole.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else whole[:0]
