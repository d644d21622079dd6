"""Gradients of a model-parallel group (tp, cp: ranks that share one forward), all-reduced once a step.

The optimizer is given what it would get on one device: parameters of their whole shape. Those are DTensors, views of
this rank's parts, so that groups made by shape, norms and clipping mean the same as on one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.layout import Layout
from lockstep.parallel.replicate.gradients import GradientSync
from lockstep.parallel.tensor.cut import Along, put_together
from lockstep.parallel.tensor.modules import Slice
from lockstep.runtime.axis import Axis
from lockstep.runtime.comm import Comm
from lockstep.runtime.dtensors import like, local_part, of_part
from lockstep.runtime.torch_private import foreach_copy, replace_local_part
from lockstep.step.grads import local_gradients


class TeamGradients:
    """Gradients that come together as `inner` says, and are then added up over the ranks of a team.

    `sums` are groups, each with the parameters to be added up over it. `shown` are pairs of what is stored here and
    what the optimizer is given for it.
    """

    def __init__(
        self,
        inner: GradientSync,
        sums: Sequence[tuple[dist.ProcessGroup, Sequence[nn.Parameter]]],
        shown: Sequence[tuple[nn.Parameter, nn.Parameter]],
    ) -> None:
        self._inner = inner
        self._sums = sums
        self._shown = [(stored, given) for stored, given in shown if stored is not given and stored.requires_grad]

    @property
    def counts_unused(self) -> bool:
        """Whether `wait` finds out which parameters got no gradient."""
        return self._inner.counts_unused

    @property
    def path(self) -> int:
        """The order in which this rank gathered its parameters."""
        return self._inner.path

    def rest(self) -> None:
        """Between steps."""
        self._inner.rest()

    def begin(self) -> None:
        """Start a step."""
        self._inner.begin()

    def before_backward(self, last: bool) -> None:
        """Before each backward pass."""
        self._inner.before_backward(last)

    def unused(self) -> int:
        """How many parameters got no gradient on this rank in this step."""
        return self._inner.unused()

    def wait(self) -> bool:
        """Wait for the sums over the data ranks."""
        return self._inner.wait()

    def finish(self, somebody_has_unused: bool) -> None:
        """Add up what the ranks of the team have, and show it to the optimizer."""
        self._inner.finish(somebody_has_unused)
        for group, parameters in self._sums:
            _add_up(local_gradients(parameters), group)
        for stored, given in self._shown:
            if stored.grad is None:
                given.grad = None
            elif given.grad is None:
                given.grad = like(given.data, local_part(stored.grad))
            else:
                replace_local_part(given.grad, local_part(stored.grad))

    def updated(self) -> None:
        """The optimizer has changed what it was given, which is what is stored."""
        self._inner.updated()

    def restored(self) -> None:
        """A checkpoint has."""
        self._inner.restored()


def as_a_team(
    gradients: GradientSync,
    parameters: list[tuple[str, nn.Parameter]],
    slices: dict[str, Slice],
    layout: Layout,
    comm: Comm,
) -> tuple[GradientSync, list[tuple[str, nn.Parameter]], list[nn.Parameter]]:
    """The gradients of ranks that compute together, what the optimizer is given, and what of it counts in the norm."""
    if layout.team == 1:
        return gradients, parameters, [parameter for _, parameter in parameters]
    sums = []
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if (group := comm.group("tp")) is not None:
        sums.append((group, [parameter for name, parameter in trained if name not in slices]))
    if (group := comm.group("cp")) is not None and layout.fsdp > 1:  # else one sum with that over dp
        sums.append((group, [parameter for _, parameter in trained]))
    given = parameters
    if comm.tensor_mesh is not None:
        given = shown_whole(parameters, slices, comm.tensor_mesh)
    pairs = [(stored, shown) for (_, stored), (_, shown) in zip(parameters, given, strict=True)]
    first = layout.coordinate(comm.rank)["tp"] == 0
    counted = [parameter for name, parameter in given if first or name in slices]
    return TeamGradients(gradients, sums, pairs), given, counted


def shown_whole(
    parameters: Sequence[tuple[str, nn.Parameter]], cut: dict[str, Slice], mesh: DeviceMesh
) -> list[tuple[str, nn.Parameter]]:
    """Parameters as the optimizer is given them: of their whole shape, whatever this rank has of them.

    `mesh` has the tp axis outermost of those that cut: a part is sharded, not the other way round.
    """
    return [(name, _shown(parameter, cut.get(name), mesh)) for name, parameter in parameters]


def _shown(parameter: nn.Parameter, how: Slice | None, mesh: DeviceMesh) -> nn.Parameter:
    shape = list(parameter.shape)
    placements: dict[str, Any] = {"tp": Replicate()}
    if how is not None:
        shape[how.dim] = sum(how.parts)
        placements["tp"] = Shard(how.dim)
    if isinstance(parameter.data, DTensor):
        names = parameter.data.device_mesh.mesh_dim_names or ()
        placements |= dict(zip(names, parameter.data.placements, strict=True))
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis in placements)
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    whole = of_part(local_part(parameter.data), mesh[axes], [placements[axis] for axis in axes], shape, stride)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def in_order(full: torch.Tensor, how: Slice | None, tp: int) -> torch.Tensor:
    """A whole parameter as the model was built with it, from one whose parts stand in the order of the ranks."""
    if how is None or len(how.parts) == 1:
        return full
    return put_together(torch.stack(full.chunk(tp, how.dim)), Along(Axis("tp", tp, 0), how.dim, how.parts))


def _add_up(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over a group, all of one format by one collective."""
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in alike])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([gradient.numel() for gradient in alike])
        foreach_copy(alike, [piece.view_as(one) for piece, one in zip(pieces, alike, strict=True)])
