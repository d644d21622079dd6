"""A number for each tensor that changes with its bits: how ranks find out that they hold the same."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from lockstep.runtime.dtensors import local_part

PRIME = 1_000_003
WIDTHS = (1024, 1021)
"""Numbers are added up by their place in rows of these lengths: when two change places, one sum or the other tells."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests_of(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """A number for each tensor that changes with its bits and their places, computed on its device and read at once."""
    found = [None if tensor is None else _digest(local_part(tensor.detach())) for tensor in tensors]
    numbers = iter(torch.stack(there).tolist() if (there := [digest for digest in found if digest is not None]) else [])
    return [0 if digest is None else next(numbers) for digest in found]


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    flat = (tensor.to_dense() if tensor.is_sparse else tensor).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(BITS[flat.element_size()])
    digest = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for width in WIDTHS:
        whole = bits.numel() // width * width
        # In their own format, where sums just wrap around: to int64 first would take ten times as long.
        columns = bits[:whole].view(-1, width).sum(0, dtype=bits.dtype).long()
        columns[: bits.numel() - whole] += bits[whole:].long() * 3
        digest = digest * PRIME + (columns * _weights(width, tensor.device)).sum()
    return digest


@cache
def _weights(width: int, device: torch.device) -> torch.Tensor:
    """Odd numbers, so that none of them lets a bit vanish."""
    return torch.arange(width, dtype=torch.int64, device=device) * 0x9E3779B97F4A7C2 + 1
