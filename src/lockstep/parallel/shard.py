"""Sharded data parallelism: torch's `fully_shard` per block, with gradients summed, never averaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard(model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> ShardedGradients:
    """Shard every block and the rest of the model over the mesh's fsdp axis, replicated over dp where there is one."""
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
    assert isinstance(model, FSDPModule)
    return ShardedGradients(model, units)


class ShardedGradients:
    """When the sharded model's gradients are reduced: in the last backward of a step only."""

    def __init__(self, model: FSDPModule, units: Sequence[FSDPModule]) -> None:
        self._model = model
        self._units = units

    def rest(self) -> None:
        """Between steps: only shards. A forward without a backward leaves the root's parameters gathered."""
        for unit in self._units:
            unit.reshard()

    def begin(self) -> None:
        """Start a step: no gradients, no reduction until the last backward."""
        self.rest()
        assert isinstance(self._model, nn.Module)
        self._model.zero_grad(set_to_none=True)
        self._model.set_requires_gradient_sync(False)

    def last_backward(self) -> None:
        """The next backward pass reduces what has accumulated."""
        self._model.set_requires_gradient_sync(True)

    def unused(self) -> int:
        """Parameters that got no gradient have none after the reduction either: nothing to agree on."""
        return 0

    def finish(self, somebody_has_unused: bool) -> None:
        """The reduction ended with the backward pass."""
