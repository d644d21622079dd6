"""How much work each part of a model is: its forward and backward, timed on made-up numbers of the right shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.follow.trees import map_tensors, tensors_of
from lockstep.follow.values import Piece, Rehearsal, is_fake
from lockstep.parallel.pipeline.stage import copy_of

TIMES = 4
"""How often a piece is run. The fastest counts: whatever else the machine does only adds to a time."""


def measure_work(rehearsal: Rehearsal, device: torch.device) -> list[float]:
    """Seconds of a forward and backward, for every part with the operations that follow it.

    Pieces that do the same, as the repeated blocks of a model do, are measured once. What cannot be run on made-up
    numbers counts nothing.
    """
    known: dict[Any, float] = {}
    work = [0.0] * len(rehearsal.outputs)
    with _private_random_state(device):
        for piece in rehearsal.pieces:
            key = _kind(piece)
            if key not in known:
                known[key] = _seconds(piece, device)
            work[max(piece.at, 0)] += known[key]
    return work


def _kind(piece: Piece) -> Any:
    """What tells pieces apart that take different times."""
    what = piece.call
    own: Any = what
    if isinstance(what, nn.Module):
        shapes = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in what.named_parameters())
        own = type(what), str(what), shapes

    def simple(value: Any) -> Any:
        return (value.shape, value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else repr(value)[:200]

    given = [simple(tensor) for tensor in tensors_of((piece.args, piece.kwargs))]
    plain = [simple(value) for value in (*piece.args, *piece.kwargs.values()) if isinstance(value, bool | int | str)]
    return own, tuple(given), tuple(plain)


def _seconds(piece: Piece, device: torch.device) -> float:
    call = piece.call
    if isinstance(call, nn.Module):
        call = _with_data(call, device)
    fastest = float("inf")
    for _ in range(TIMES):
        args, kwargs = map_tensors(lambda tensor: _made_up(tensor, device), (piece.args, piece.kwargs))
        try:
            fastest = min(fastest, _time(call, args, kwargs, device))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # an index beyond a table, a write into a leaf: it is small, or it would be a part
            return 0.0
    return fastest


def _time(call: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    output = call(*args, **kwargs)
    derived = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if derived:
        torch.autograd.backward(derived, [torch.ones_like(tensor) for tensor in derived])
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _with_data(module: nn.Module, device: torch.device) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        data = _made_up(parameter, device).detach() * 0.02
        memo[id(parameter)] = nn.Parameter(data.to(parameter.dtype), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.clone()
    return copy_of(module, memo)


def _made_up(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not is_fake(tensor):
        return tensor.detach().requires_grad_(tensor.requires_grad)
    if tensor.is_floating_point():
        made = torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
        return made.requires_grad_(tensor.requires_grad)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


@contextmanager
def _private_random_state(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
