"""Which samples a step reads: a function of (seed, epoch, position) and the data coordinate, nothing else.

A step's samples are cut into logical micro-batches first, and those are dealt to the data ranks. So at a given size the
micro-batches, and with them batch statistics, are the same on any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.runtime.seeds import seed_of

Ids = npt.NDArray[np.int64]

ROUNDS = 6
AHEAD = 2048
"""Samples whose order is worked out at once: a call costs more than a sample."""


@dataclass(frozen=True)
class Position:
    """Where the data stands: whole epochs done, and samples consumed of the current one."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class MicroBatchPlan:
    """One forward: the micro-batch's number in its step, and its samples. A filler computes nothing that counts."""

    index: int
    ids: Ids
    filler: bool = False
    first: int = 0
    """The place in the step of the first of them."""


@dataclass(frozen=True)
class StepPlan:
    """What one data rank reads for one step."""

    epoch: int
    samples: int
    micro_batches: list[MicroBatchPlan]
    after: Position


def sample_ids(positions: Ids, size: int, seed: int, epoch: int) -> Ids:
    """The samples at these positions of an epoch's shuffled order.

    A keyed permutation (a Feistel network, walked until it lands inside the range) instead of a stored one: any part
    of the order of any epoch is there at once, without memory, however large the data.
    """
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    keys = [np.uint64(seed_of(seed, "order", epoch, size, number)) for number in range(ROUNDS)]

    def scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> np.uint64(half_bits), values & mask
        for key in keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & mask)
        return (left << np.uint64(half_bits)) | right

    with np.errstate(over="ignore"):
        values = scramble(positions.astype(np.uint64))
        while (outside := values >= size).any():
            values[outside] = scramble(values[outside])
    return values.astype(np.int64)


def share(count: int, data_rank: int, data_size: int) -> range:
    """The micro-batches of a rank: neighbours stay together, the first ranks take one more when it does not divide."""
    base, extra = divmod(count, data_size)
    start = data_rank * base + min(data_rank, extra)
    return range(start, start + base + (data_rank < extra))


def deal(ids: Ids, micro_batch: int, data_rank: int, data_size: int, equal_counts: bool) -> list[MicroBatchPlan]:
    """Cut a step's samples into logical micro-batches and take this rank's.

    With `equal_counts` every rank gets as many as the busiest one, filled up with fillers: a sharded model gathers its
    parameters in every forward, so all ranks have to do the same number of them.
    """
    count = -(-len(ids) // micro_batch)

    def plan(index: int, filler: bool = False) -> MicroBatchPlan:
        first = index * micro_batch
        return MicroBatchPlan(index, ids[first : first + micro_batch], filler, first)

    mine = [plan(index) for index in share(count, data_rank, data_size)]
    if equal_counts:
        mine += [plan(0, filler=True)] * (-(-count // data_size) - len(mine))
    return mine


@dataclass(frozen=True)
class Order:
    """How a map-style dataset is read: everything a step's plan depends on."""

    size: int
    global_batch: int
    micro_batch: int
    seed: int
    data_rank: int
    data_size: int
    equal_counts: bool
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, the last one possibly smaller."""
        return -(-self.size // self.global_batch)

    def steps_left(self, start: Position) -> int:
        """Steps until the end of the epoch a position is in (of the next one, at its very end)."""
        consumed = 0 if start.consumed >= self.size else start.consumed
        return -(-(self.size - consumed) // self.global_batch)

    def steps(self, start: Position) -> Iterator[StepPlan]:
        """The plans of all steps from a position on, without end. The last batch of an epoch keeps what is left."""
        epoch, consumed = start.epoch, start.consumed
        known, first = np.empty(0, dtype=np.int64), 0
        while True:
            if consumed >= self.size:
                epoch, consumed = epoch + 1, 0
                known, first = known[:0], 0
            end = min(consumed + self.global_batch, self.size)
            if end > first + len(known):
                known, first = self._ids(epoch, consumed, max(end, min(consumed + AHEAD, self.size))), consumed
            ids = known[consumed - first : end - first]
            consumed = end
            mine = deal(ids, self.micro_batch, self.data_rank, self.data_size, self.equal_counts)
            yield StepPlan(epoch, len(ids), mine, Position(epoch, consumed))

    def _ids(self, epoch: int, start: int, stop: int) -> Ids:
        positions = np.arange(start, stop, dtype=np.int64)
        return sample_ids(positions, self.size, self.seed, epoch) if self.shuffle else positions

    def once_through(self) -> Iterator[StepPlan]:
        """Every sample once, in order, one micro-batch a plan: for evaluation."""
        ids = np.arange(self.size, dtype=np.int64)
        for plan in deal(ids, self.micro_batch, self.data_rank, self.data_size, self.equal_counts):
            yield StepPlan(0, len(plan.ids), [plan], Position())  # nobody goes on from the middle of one
