"""What a rank holds of every parameter and buffer of the whole model: the one place that knows which axes cut.

tp cuts matrices along one dim, fsdp cuts what is left by rows (ZeRO, sharding), pp gives whole tensors to stages. Who
gathers a tensor (all-gather), saves it, compares replicas or shows it to a script asks here. A new axis that cuts
parameters is one more `Along` in `describe_parts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.parallel.boxes import Box, cut_boxes, whole_box
from lockstep.parallel.tensor.cut import Along, gather, take
from lockstep.runtime.comm import Comm
from lockstep.runtime.dtensors import dtensor_of, local_part


@dataclass(frozen=True)
class Held:
    """What this rank holds of one tensor of the whole model, or of something that is cut like it.

    `stored` is this rank's part, None where only other stages of a pipeline have one; a DTensor has the whole's shape.
    `shape` is the whole's. `cuts` say along which dims it is cut over which axes, each a part of what the one before
    leaves. `places` are the places in the pipeline that have it, the first stage's first, and `place` is this rank's.
    """

    name: str
    stored: torch.Tensor | None
    shape: tuple[int, ...]
    cuts: tuple[Along, ...] = ()
    places: tuple[int, ...] = (0,)
    place: int = 0

    @property
    def part(self) -> torch.Tensor:
        """This rank's part, as a plain tensor."""
        assert self.stored is not None, f"{self.name} is another stage's"
        return local_part(self.stored.detach())

    @property
    def is_first(self) -> bool:
        """Whether of the stages that have it the first is one of this rank's."""
        return self.places[0] == self.place

    @property
    def bytes(self) -> int:
        """The size of the whole."""
        return self.part.element_size() * math.prod(self.shape)

    @property
    def boxes(self) -> list[Box]:
        """Where this rank's part stands in the whole: for checkpoints, which any layout can read."""
        boxes = whole_box(self.shape)
        for cut in self.cuts:
            boxes = cut_boxes(boxes, cut.dim, cut.parts, cut.axis.rank, cut.axis.size)
        return boxes

    def is_cut_over(self, axis: str) -> bool:
        """Whether ranks along a mesh axis hold different parts of it."""
        return any(cut.axis.name == axis for cut in self.cuts)

    @property
    def replicas(self) -> str:
        """Names the ranks that hold the same part: all that have this text for it."""
        places = [f"{cut.axis.name} {cut.axis.rank}" for cut in self.cuts]
        return ", ".join([*places, f"pp {sorted(set(self.places))}"])


def describe_parts(
    whole: nn.Module, matrices: Mapping[str, Along], places: Mapping[str, Sequence[int]], comm: Comm, place: int
) -> dict[str, Held]:
    """What each rank is to hold of a model, before anything is stored.

    `matrices` says how tp cuts parameters, `places` where in a pipeline a tensor is, unless everywhere.
    """
    shards = comm.cut_axis("fsdp")
    found: dict[str, Held] = {}
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        shape = tuple(tensor.shape)
        cuts = [matrices[name]] if name in matrices else []
        if shards is not None and shape and isinstance(tensor, nn.Parameter):
            rows = cuts[0].own if cuts and cuts[0].dim == 0 else shape[0]
            cuts.append(Along(shards, 0, (rows,)))
        found[name] = Held(name, None, shape, tuple(cuts), tuple(places.get(name, (place,))), place)
    return found


def hold_value(held: Held, value: torch.Tensor, name: str | None = None) -> Held:
    """What this rank holds of another tensor of a parameter: its gradient, state of its optimizer, the model's own."""
    cuts = _cuts_of(held, value)
    return replace(
        held, name=name or held.name, stored=value, shape=held.shape if cuts else tuple(value.shape), cuts=cuts
    )


@torch.no_grad()
def gather_whole(held: Held, tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter or of a tensor cut like it, as one device has it (all-gather).

    Every rank that holds a part calls it. What is whole already is no copy.
    """
    part = local_part(tensor)
    for cut in reversed(_cuts_of(held, tensor) if 0 not in held.shape else ()):
        part = gather(part, cut)
    return part


def take_part(held: Held, whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, for a target that is stored like the parameter."""
    for cut in _cuts_of(held, target) if 0 not in held.shape else ():
        whole = take(whole, cut)
    return whole


def show_whole(part: torch.Tensor, shape: Sequence[int], cuts: Sequence[Along], mesh: DeviceMesh) -> DTensor:
    """A DTensor of a whole shape that has this rank's part as its data; axes of the mesh that do not cut replicate."""
    dims = {cut.axis.name: cut.dim for cut in cuts}
    placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis in mesh.mesh_dim_names or ()]
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return dtensor_of(part, mesh, placements, shape, stride)


def _cuts_of(held: Held, tensor: torch.Tensor) -> tuple[Along, ...]:
    """Which of a parameter's cuts a tensor has. The model's own may have fewer than what is stored (zero1), and what
    an optimizer keeps besides, a count say, has none.
    """
    shape, shapes = list(held.shape), [held.shape]
    for cut in held.cuts:
        shape[cut.dim] = cut.own
        shapes.append(tuple(shape))
    cut_before = next((number for number, one in enumerate(shapes) if one == tuple(tensor.shape)), 0)
    axes = tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()
    return tuple(cut for number, cut in enumerate(held.cuts) if number < cut_before or cut.axis.name in axes)
