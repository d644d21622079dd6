"""A digest of a sample, whatever a dataset makes of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from lockstep.record.identity import digest_of

DEEPEST = 8
"""How far into a sample its parts are looked at: something in it may hold itself."""


def digest_of_value(value: Any) -> str:
    """A digest of what a dataset returned, whatever that is."""
    return digest_of(_bytes_of(value, 0))


def _bytes_of(value: Any, depth: int) -> bytes:
    """All that tells a value from others, as bytes."""
    kind = type(value).__qualname__.encode()
    if depth > DEEPEST:
        return kind

    def inside(parts: Sequence[Any]) -> bytes:
        return b"".join(digest_of(_bytes_of(part, depth + 1)).encode() for part in parts)

    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            return repr(value).encode()
        plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{value.dtype} {tuple(value.shape)} ".encode() + plain.numpy().tobytes()
    if isinstance(value, np.ndarray):
        items = inside(value.tolist()) if value.dtype.hasobject else value.tobytes()
        return f"{value.dtype} {value.shape} ".encode() + items
    if isinstance(value, bytes | bytearray | memoryview):
        return kind + bytes(value)
    if isinstance(value, str | int | float | complex | None | np.generic | PurePath):
        return kind + repr(value).encode()
    if isinstance(value, Mapping):
        return kind + inside([part for key in sorted(value, key=repr) for part in (key, value[key])])
    if isinstance(value, Set):
        return kind + b"".join(sorted(inside([part]) for part in value))
    if isinstance(value, Sequence):
        return kind + inside(list(value))
    if callable(getattr(value, "tobytes", None)):  # an image of PIL and its like
        shown = repr((getattr(value, "mode", None), getattr(value, "size", None)))
        return kind + shown.encode() + bytes(value.tobytes())
    if is_dataclass(value):
        return kind + inside([getattr(value, field.name) for field in fields(value)])
    return kind + inside([part for item in sorted(getattr(value, "__dict__", {}).items()) for part in item])
