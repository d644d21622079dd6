"""ZeRO-1: only the optimizer's state is sharded; a rank updates its rows of each parameter, gathers the rest.

The optimizer is given what it would get of `fully_shard`, DTensors cut along dim 0. Here they are views: of the whole
parameters, and of the gradients that all data ranks have summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lockstep.config.schema import Format
from lockstep.parallel.held import Held, show_whole
from lockstep.parallel.replicate.buckets import GradientBuckets, fill_buckets
from lockstep.parallel.replicate.shard import data_mesh, refuse_unshardable
from lockstep.parallel.tensor.cut import Along
from lockstep.runtime.comm import Comm, gather_into
from lockstep.runtime.torch_private import foreach_copy


class ShardedOptimizer(GradientBuckets):
    """Gradients summed over all data ranks, and the rows of parameters that this rank's optimizer works on."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], held: Mapping[str, Held], comm: Comm, reduce_dtype: Format
    ) -> None:
        refuse_unshardable(named)
        shards = comm.group("fsdp")
        assert shards is not None
        whole = dict(named)
        everybody = shards if comm.group("dp") is None else comm.data_group()
        super().__init__(list(whole.items()), everybody, comm, reduce_dtype)
        self._mesh = data_mesh(comm)
        cuts = {name: held[name].cuts[-1] for name, parameter in whole.items() if parameter.dim() > 0}
        self.rows = {name: self._own_rows(parameter, cuts.get(name)) for name, parameter in whole.items()}
        # Views like the parameters' own: the buckets keep their place, so these are made once.
        views = {p: view for bucket in self._buckets for p, view in zip(bucket.members, bucket.views, strict=True)}
        self._gradients = [
            (parameter, self.rows[name], self._own_part(views[parameter], cuts.get(name)))
            for name, parameter in whole.items()
            if parameter.requires_grad
        ]
        frozen = [parameter for parameter in whole.values() if not parameter.requires_grad]
        by_parameter = {whole[name]: cut for name, cut in cuts.items()}
        self._trained, self._frozen = (
            [
                _Rows([(parameter, by_parameter[parameter]) for parameter in members], shards)
                for members in fill_buckets([one for one in some if one.dim() > 0])
            ]
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

    def _own_rows(self, parameter: nn.Parameter, cut: Along | None) -> nn.Parameter:
        if cut is None:  # a single number has no rows: every rank updates it
            return parameter
        return nn.Parameter(self._own_part(parameter.data, cut), requires_grad=parameter.requires_grad)

    def _own_part(self, whole: torch.Tensor, cut: Along | None) -> torch.Tensor:
        return whole if cut is None else show_whole(_rows_of(whole, cut), whole.shape, [cut], self._mesh)


class _Rows:
    """Parameters whose rows are gathered by one collective: each rank sends its rows of all, padded to equal sizes."""

    def __init__(self, members: Sequence[tuple[nn.Parameter, Along]], shards: dist.ProcessGroup) -> None:
        self._shards = shards
        self._whole = [parameter.data.view(-1) for parameter, _ in members]
        self._own = [_rows_of(parameter.data, cut).view(-1) for parameter, cut in members]
        # The first part is a largest one.
        self._padded = [_rows_of(parameter.data, cut, 0).numel() for parameter, cut in members]

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


def _rows_of(whole: torch.Tensor, cut: Along, rank: int | None = None) -> torch.Tensor:
    """A view of the rows of a rank, none where there are fewer rows than ranks: what `fully_shard` would give it."""
    rows = cut.rows_of(cut.axis.rank if rank is None else rank)
    return whole.narrow(0, rows.start, len(rows))
