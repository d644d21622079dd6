"""Which kernels compute scaled_dot_product_attention on a GPU: the fastest for the shapes a model really uses.

torch takes the first kernel that can, in a fixed order; which one is fastest depends on the card, the head size and the
mask. So the calls of one forward are noted, each is timed with every kernel that can do it, and a clear winner is kept
for the whole run. Attention with dropout is left to torch: every kernel draws other masks, and a stopwatch must not
decide which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.follow.forward import following
from lockstep.runtime.comm import Comm

BACKENDS: dict[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MEASURED = ("cudnn", "flash", "efficient")  # math builds the whole score matrix
UNABLE = 1e9
"""The milliseconds of a kernel that cannot do a call."""
CLEARLY = 0.9
"""A kernel wins that takes less than this part of the time of torch's own choice."""


def attend_with(kernels: str | None) -> AbstractContextManager[object]:
    """The context in which attention uses these kernels first, and others only for calls they cannot do."""
    if kernels is None:
        return nullcontext()
    others = [backend for name, backend in BACKENDS.items() if name != kernels]
    return sdpa_kernel([BACKENDS[kernels], *others], set_priority=True)


def fastest_kernels(forward: Callable[[], object], device: torch.device, comm: Comm) -> str | None:
    """Run a forward once and time the attention calls in it; all ranks get one answer, None: as torch chooses."""
    noted: Counter[_Call] = Counter()
    attend = F.scaled_dot_product_attention

    def note(*args: Any, **kwargs: Any) -> torch.Tensor:
        noted[_call(*args, **kwargs)] += 1
        return attend(*args, **kwargs)

    with following(instead={"scaled_dot_product_attention": note}), torch.compiler.set_stance("force_eager"):
        forward()
    calls = list(noted.items())
    dropping = any(dict(call.options)["dropout_p"] > 0 for call, _ in calls)
    if comm.sum([float(dropping)])[0]:
        return None
    candidates = [list(BACKENDS.values()), *([BACKENDS[name]] for name in MEASURED)]
    mine = [_milliseconds(calls, backends, device) for backends in candidates]
    by_torch, *times = comm.sum(mine)
    best, name = min(zip(times, MEASURED, strict=True))
    return name if best < CLEARLY * by_torch else None


@dataclass(frozen=True)
class _Call:
    """The shape of one attention call."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    mask: tuple[tuple[int, ...], torch.dtype] | None
    options: tuple[tuple[str, Any], ...]


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> _Call:
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}
    mask = None if attn_mask is None else (tuple(attn_mask.shape), attn_mask.dtype)
    return _Call(tuple(tuple(t.shape) for t in (query, key, value)), dtype, mask, tuple(sorted(options.items())))


def _milliseconds(calls: Iterable[tuple[_Call, int]], backends: list[SDPBackend], device: torch.device) -> float:
    """Forward and backward of all the calls with some kinds of kernels."""
    return min(UNABLE, sum(count * _time_call(call, backends, device) for call, count in calls))


def _time_call(call: _Call, backends: list[SDPBackend], device: torch.device) -> float:
    query, key, value = (torch.randn(s, dtype=call.dtype, device=device, requires_grad=True) for s in call.shapes)
    mask = None
    if call.mask is not None:
        shape, dtype = call.mask
        if dtype == torch.bool:
            mask = torch.ones(shape, dtype=dtype, device=device)
        else:
            mask = torch.zeros(shape, dtype=call.dtype, device=device)

    def run() -> None:
        out = F.scaled_dot_product_attention(query, key, value, mask, **dict(call.options))
        out.backward(torch.ones_like(out))

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with sdpa_kernel(backends):
        try:
            for _ in range(3):
                run()
        except RuntimeError:  # "No available kernel": it cannot do this shape, type or mask
            return UNABLE
        begin.record()
        for _ in range(10):
            run()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 10
