"""Batches on their way to a GPU and numbers on their way back, while the GPU computes."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.runtime.torch_private import tree_map


class Transfers:
    """Copies batches to a device; to a GPU beside its kernels, from page-locked memory without the host waiting.

    The host is ahead of the GPU: when it sends a step's first micro-batch, the GPU is still busy with the step before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, data: Any) -> SentBatch:
        """Start to copy the tensors of a batch."""
        if self._stream is None:
            return SentBatch(data, self._device, None)

        def move(x: Any) -> Any:
            return x.to(self._device, non_blocking=True) if isinstance(x, torch.Tensor) else x

        with torch.cuda.stream(self._stream):
            return SentBatch(tree_map(move, data), self._device, self._stream.record_event())


class SentBatch:
    """A batch that arrives on the device."""

    def __init__(self, data: Any, device: torch.device, arrived: torch.cuda.Event | None) -> None:
        self._data = data
        self._device = device
        self._arrived = arrived

    def take(self) -> Any:
        """The batch, for kernels launched from now on; the host does not wait for its tensors."""
        if self._arrived is None:
            return self._data
        stream = torch.cuda.current_stream()
        self._arrived.wait(stream)

        def receive(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                # Its memory belongs to the side stream, and must not be given away while these kernels read it.
                x.record_stream(stream)
                return x
            # What else knows how to move is moved here: nobody could tell whose its memory is.
            return x.to(self._device) if hasattr(x, "to") else x

        return tree_map(receive, self._data)


class HostCopy:
    """A small tensor on its way to the host, behind the kernels launched so far and not behind later ones."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor.detach()
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers, as soon as they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [float(value) for value in self._host.flatten().tolist()]
