"""Batches on their way to a GPU, on a stream of their own, while the GPU computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from lockstep.data.loader import StepBatch


class Transfers:
    """Copies batches to a device; to a GPU beside its kernels, from page-locked memory without the host waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, data: Any) -> Sent:
        """Start to copy every tensor of a batch, and whatever else knows how to move."""
        if self._stream is None:
            return Sent(data, None)
        with torch.cuda.stream(self._stream):
            moved = tree_map(lambda x: x.to(self._device, non_blocking=True) if hasattr(x, "to") else x, data)
            return Sent(moved, self._stream.record_event())


class Sent:
    """A batch that arrives on the device."""

    def __init__(self, data: Any, arrived: torch.cuda.Event | None) -> None:
        self._data = data
        self._arrived = arrived

    def take(self) -> Any:
        """The batch, for kernels launched from now on; the host does not wait."""
        if self._arrived is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._arrived)
            # Its memory belongs to the side stream: it must not be given away before the kernels that read it are done.
            tree_map(
                lambda x: x.record_stream(stream) if isinstance(x, torch.Tensor) and x.is_cuda else None, self._data
            )
        return self._data


def one_step_ahead(batches: Iterable[StepBatch], device: torch.device) -> Iterator[StepBatch]:
    """The same steps, the first micro-batch of each sent to the device while the step before it runs."""
    transfers = Transfers(device)
    waiting: tuple[StepBatch, Sent] | None = None
    for batch in batches:
        sent = transfers.send(batch.micro_batches[0].data) if batch.micro_batches else Sent(None, None)
        if waiting:
            yield _with_first(*waiting)
        waiting = batch, sent
    if waiting:
        yield _with_first(*waiting)


def _with_first(batch: StepBatch, sent: Sent) -> StepBatch:
    if not batch.micro_batches:
        return batch
    first, *others = batch.micro_batches
    return replace(batch, micro_batches=[replace(first, data=sent.take()), *others])
