"""Sharded data parallelism: torch's `fully_shard` per block, with gradients summed, never averaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lockstep.errors import UserError
from lockstep.runtime.comm import Comm

REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""torch 2.13 can let all ranks reduce the same parameters. Before (2.11) each reduced the gradients it had, and where
those differ it adds the gradient of one parameter to another's."""


def shard(model: nn.Module, blocks: Sequence[nn.Module], comm: Comm) -> ShardedGradients:
    """Shard every block and the rest of the model over the mesh's fsdp axis, replicated over dp where there is one."""
    mesh = comm.mesh
    assert mesh is not None
    axes = tuple(axis for axis in ("dp", "fsdp") if axis in (mesh.mesh_dim_names or ()))
    data_mesh = mesh[axes]
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for block in blocks:
        inside = Counter(id(p) for module in block.modules() for p in module.parameters(recurse=False))
        # A weight tied to one outside its block stays with the root: two shard groups cannot own one parameter.
        if all(owners[key] == count for key, count in inside.items()):
            fully_shard(block, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        # Order matters on gloo, which knows no pre-multiplied sum.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)
        if REDUCES_UNUSED:
            unit.set_reduce_scatter_unused_params(True)
    assert isinstance(model, FSDPModule)
    return ShardedGradients(model, units, comm)


class ShardedGradients:
    """When the sharded model's gradients are reduced, in the last backward of a step only, and that it was right."""

    def __init__(self, model: FSDPModule, units: Sequence[FSDPModule], comm: Comm) -> None:
        self._model = model
        self._units = units
        self._comm = comm
        self._watched: dict[str, nn.Parameter] = {}
        self._used: set[str] = set()
        self._views: list[tuple[torch.Tensor, int]] = []
        for unit in units:
            assert isinstance(unit, nn.Module)
            unit.register_forward_hook(self._remember_views)

    def rest(self) -> None:
        """Between steps: only shards. A forward without a backward leaves the root's parameters gathered."""
        self._views.clear()
        for unit in self._units:
            unit.reshard()

    def begin(self) -> None:
        """Start a step: no gradients, no reduction until the last backward."""
        self.rest()
        if not self._watched:
            self._watch()
        self._used.clear()
        assert isinstance(self._model, nn.Module)
        self._model.zero_grad(set_to_none=True)
        self._model.set_requires_gradient_sync(False)

    def before_backward(self, last: bool) -> None:
        """The step's last backward pass reduces what has accumulated.

        torch hangs its hook on a unit's output. When that is a view, changing it in place loses the hook, and the
        backward pass would skip the unit without a word.
        """
        changed = any(tensor._version != version for tensor, version in self._views)
        self._views.clear()
        if changed:
            raise UserError(
                "the output of the model or of a block is changed in place, which breaks sharding",
                "write x = x / 2 rather than x /= 2",
            )
        if last:
            self._model.set_requires_gradient_sync(True)

    def unused(self) -> int:
        """How many parameters got no gradient on this rank in this step."""
        return len(self._watched) - len(self._used)

    def finish(self, somebody_has_unused: bool) -> None:
        """The reduction is over. A parameter used on no rank has no gradient, as in one process."""
        if not somebody_has_unused:
            return
        users = self._comm.sum([float(name in self._used) for name in self._watched])
        for (name, parameter), ranks in zip(self._watched.items(), users, strict=True):
            if ranks == 0:
                parameter.grad = None
            elif ranks < self._comm.world_size and not REDUCES_UNUSED:
                raise UserError(
                    f"the parameter {name} is used on {ranks:.0f} of {self._comm.world_size} ranks in one step",
                    "use a dp layout or a newer torch, or let every forward use it (add its output times 0)",
                )

    def _remember_views(self, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor._is_view():
                self._views.append((tensor, tensor._version))

    def _watch(self) -> None:
        """Note which gathered parameters autograd reaches; they exist from the first gathering on."""
        assert isinstance(self._model, nn.Module)
        self._watched = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        unseen = set(self._watched)
        for unit in self._units:
            unit.unshard()
            for name, parameter in self._model.named_parameters():
                if name in unseen and not isinstance(parameter, DTensor):
                    unseen.remove(name)
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))
            unit.reshard()
