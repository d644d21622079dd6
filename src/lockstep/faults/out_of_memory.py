"""A step that does not fit: one message with the phase, the rank, what takes the memory, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
import torch

from lockstep.config.schema import Format
from lockstep.errors import MemoryFullError
from lockstep.parallel.train_state import TrainState
from lockstep.runtime.dtensors import local_part
from lockstep.runtime.heartbeat import Beat

FULL = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|not enough memory", re.IGNORECASE)


@contextmanager
def memory_explained(state: TrainState, precision: Format, beat: Beat, micro_batch: int) -> Iterator[None]:
    """Turn the many errors of a full memory into one that people can act on."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or FULL.search(str(error))
        if not is_memory or isinstance(error, MemoryFullError):
            raise
        asked = re.search(r"allocate ([\d.]+ ?\w+)", str(error))
        raise MemoryFullError(
            describe(state, precision, beat, micro_batch, asked[1] if asked else ""), micro_batch
        ) from error


def describe(state: TrainState, precision: Format, beat: Beat, micro_batch: int, asked: str) -> str:
    """Who has the memory, the largest first, and the fixes, the cheapest first."""
    where = "the GPU" if state.device.type == "cuda" else "the host"
    consumers = sorted(_consumers(state).items(), key=lambda item: -item[1])
    taken = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in consumers if size)
    more = f" ({asked} more were asked for)" if asked else ""
    fixes = "; ".join(f"{number}. {fix}" for number, fix in enumerate(_fixes(state, precision, micro_batch), 1))
    return (
        f"{where} has no memory left in {beat.phase} of step {beat.step}{more}, with micro_batch = {micro_batch}: "
        f"{taken}; the rest is activations and what libraries keep. What helps, the cheapest first: {fixes}"
    )


def _consumers(state: TrainState) -> dict[str, int]:
    kept = (value for values in state.optimizer.state.values() for value in values.values())
    found = {
        "weights": _bytes(p for _, p in state.cut.trained),
        "gradients": _bytes(p.grad for _, p in state.cut.trained if p.grad is not None),
        "optimizer state": _bytes(value for value in kept if isinstance(value, torch.Tensor)),
    }
    if state.device.type == "cuda":
        found["in use in all"] = torch.cuda.memory_allocated(state.device)
    else:
        found["this process in all"] = psutil.Process().memory_info().rss
    return found


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)


def _fixes(state: TrainState, precision: Format, micro_batch: int) -> list[str]:
    fixes = []
    if micro_batch > 1:
        fixes.append(f"micro_batch = {micro_batch // 2} (--on-oom shrink does it by itself)")
    fixes.append("recompute = true")
    if precision == "fp32" and state.device.type == "cuda":
        fixes.append("precision = bf16")
    if state.cut.layout.fsdp == 1:
        fixes.append("a layout with fsdp, which shares weights and optimizer state out")
    return [*fixes, "more ranks on fsdp, tp or pp"]
