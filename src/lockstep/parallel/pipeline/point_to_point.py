"""How pipeline stages send boundary activations and gradients: one queue for each pair of ranks and direction.

A rank sends in the order of its timetable, which every rank knows. So a receiver knows what comes next from whom and
gets its memory ready before it is needed, and no two ranks can wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.follow.values import Value

AHEAD = 2
"""How many messages of a sender are expected at once: the next one travels while this one is used."""

Key = tuple[str, int, int]
"""A message: "F" (values) or "B" (gradients), the stage it is for, the micro-batch."""


class Links:
    """The other ranks of a pipeline, seen from one of them.

    `peers` are their global ranks by their place in the pipeline, `groups` what a pair of places, in this direction,
    talks through.
    """

    def __init__(
        self, rank: int, peers: Sequence[int], groups: dict[tuple[int, int], dist.ProcessGroup], device: torch.device
    ) -> None:
        self._rank = rank
        self._peers = peers
        self._groups = groups
        self._device = device
        # gloo sends from the memory of the host.
        backends = {dist.get_backend(group) for group in groups.values()}
        self._through = torch.device("cpu") if "gloo" in backends else device
        # A receive over NCCL occupies the GPU until it is served: there the next one waits until it is needed.
        self._ahead = AHEAD if "gloo" in backends else 0
        self._coming: dict[int, deque[tuple[Key, list[Value]]]] = {}
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._expected: dict[Key, tuple[list[torch.Tensor], list[Any]]] = {}
        self._sources: dict[Key, int] = {}
        self._numbers: dict[tuple[int, int], int] = {}

    def expect(self, messages: dict[int, list[tuple[Key, list[Value]]]]) -> None:
        """What the other ranks will send, by rank, in their order."""
        self._numbers.clear()
        self._coming = {source: deque(queue) for source, queue in messages.items()}
        self._sources = {key: source for source, queue in messages.items() for key, _ in queue}
        for source in self._coming:
            self._make_ready(source, self._ahead)

    def send(self, to: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send a message; it may still be on its way when this returns."""
        group, number = self._next(self._rank, to)
        self._sent = [(work, data) for work, data in self._sent if not work.is_completed()]
        for slot, tensor in enumerate(tensors):
            data = tensor.detach().to(self._through).contiguous()
            work = dist.isend(data, dst=self._peers[to], group=group, tag=_tag(number, slot))
            self._sent.append((work, data))

    def receive(self, key: Key) -> list[torch.Tensor]:
        """The tensors of a message, as soon as they are there."""
        source = self._sources[key]
        while key not in self._expected:
            self._make_ready(source, 1)
        tensors, works = self._expected.pop(key)
        self._make_ready(source, min(1, self._ahead))
        for work in works:
            work.wait()
        return [tensor.to(self._device) for tensor in tensors]

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        assert not self._expected, "a message was sent that nobody took"
        assert not any(self._coming.values()), "a message was announced that nobody took"

    def _make_ready(self, source: int, count: int) -> None:
        queue = self._coming[source]
        for _ in range(min(count, len(queue))):
            key, values = queue.popleft()
            group, number = self._next(source, self._rank)
            tensors = [torch.empty(value.shape, dtype=value.dtype, device=self._through) for value in values]
            works = [
                dist.irecv(tensor, src=self._peers[source], group=group, tag=_tag(number, slot))
                for slot, tensor in enumerate(tensors)
            ]
            self._expected[key] = tensors, works

    def _next(self, source: int, to: int) -> tuple[dist.ProcessGroup, int]:
        number = self._numbers.get((source, to), 0)
        self._numbers[source, to] = number + 1
        return self._groups[source, to], number


def _tag(number: int, slot: int) -> int:
    return number * 1024 + slot
