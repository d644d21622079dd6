"""Gradients of a model-parallel group (tp, cp: ranks that share one forward), all-reduced once a step.

The optimizer is given what it would get on one device: parameters of their whole shape. Those are DTensors, views of
this rank's parts, so that groups made by shape, norms and clipping mean the same as on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.parallel.held import Held, show_whole
from lockstep.parallel.replicate.gradient_sync import GradientSync, sum_together
from lockstep.runtime.comm import Comm
from lockstep.runtime.dtensors import dtensor_like, local_part
from lockstep.runtime.torch_private import replace_local_part
from lockstep.step.grads import local_gradients

Named = list[tuple[str, nn.Parameter]]


class TeamGradients(GradientSync):
    """Gradients that come together as `inner` says, and are then added up over the ranks of a team (all-reduce).

    `sums` are groups, each with the parameters to be added up over it. `shown` are pairs of what is stored here and
    what the optimizer is given for it.
    """

    def __init__(
        self,
        inner: GradientSync,
        sums: Sequence[tuple[dist.ProcessGroup, Sequence[nn.Parameter]]],
        shown: Sequence[tuple[nn.Parameter, nn.Parameter]],
    ) -> None:
        super().__init__([inner])
        self._sums = sums
        self._shown = [(stored, given) for stored, given in shown if stored is not given and stored.requires_grad]

    def finish(self, somebody_has_unused: bool) -> None:
        """Add up what the ranks of the team have, and show it to the optimizer."""
        super().finish(somebody_has_unused)
        for group, parameters in self._sums:
            sum_together(local_gradients(parameters), group)
        for stored, given in self._shown:
            if stored.grad is None:
                given.grad = None
            elif given.grad is None:
                given.grad = dtensor_like(given.data, local_part(stored.grad))
            else:
                replace_local_part(given.grad, local_part(stored.grad))


def team_gradients(
    gradients: GradientSync, parameters: Named, held: Mapping[str, Held], comm: Comm
) -> tuple[GradientSync, Named]:
    """The gradients of ranks that compute together (tp, cp), and what the optimizer is given."""
    team = comm.group("tp"), comm.group("cp")
    if team == (None, None):
        return gradients, parameters
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    sums = []
    if team[0] is not None:
        sums.append((team[0], [parameter for name, parameter in trained if not held[name].is_cut_over("tp")]))
    if team[1] is not None and comm.group("fsdp") is not None:  # else one sum with that over dp
        sums.append((team[1], [parameter for _, parameter in trained]))
    given = parameters
    if comm.tensor_mesh is not None:
        given = [(name, _shown_whole(parameter, held[name], comm.tensor_mesh)) for name, parameter in parameters]
    pairs = [(stored, shown) for (_, stored), (_, shown) in zip(parameters, given, strict=True)]
    return TeamGradients(gradients, sums, pairs), given


def _shown_whole(parameter: nn.Parameter, held: Held, mesh: DeviceMesh) -> nn.Parameter:
    """A parameter as the optimizer is given it: of its whole shape, whatever this rank has of it.

    `mesh` has the tp axis outermost of those that cut: a part is sharded, not the other way round.
    """
    data = parameter.data
    known = {"tp", *((data.device_mesh.mesh_dim_names or ()) if isinstance(data, DTensor) else ())}
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis in known)
    whole = show_whole(local_part(data), held.shape, held.cuts, mesh[axes])
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
