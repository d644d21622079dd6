"""DTensors made of parts that are here, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dtensor_of(
    part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """A tensor of a whole shape, of which this rank has a part; nobody is asked."""
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def dtensor_like(given: torch.Tensor, part: torch.Tensor) -> DTensor:
    """A tensor that is shared out like another one."""
    assert isinstance(given, DTensor)
    return dtensor_of(part, given.device_mesh, given.placements, given.shape, given.stride())
