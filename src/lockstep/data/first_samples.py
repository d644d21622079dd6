"""Samples that are looked at before training: the same ones on every rank, and none is consumed.

A dataset is read as the training will read it: by a process where loader processes do that, so that a file which it
opens when it is first read, or what it counts, is not shared by them. A stream is read from a copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from lockstep.data.loader import MicroBatch, Reading, collated, kept_random_state, read_steps, stream_epoch
from lockstep.data.order import Ids, MicroBatchPlan, Order, Position, StepPlan
from lockstep.errors import SampleError, UserError
from lockstep.runtime.seeds import seed_host, seed_of
from lockstep.runtime.torch_private import tree_leaves

FIRST = Position()
SIZES = 32
"""Of so many samples the sizes are looked at, where a collate function may fill the shorter ones up."""

Read = Callable[[int, int], MicroBatch]
"""Gives samples, from one to another, as one micro-batch; each is read once, whatever is done with it."""


def first_micro_batch(dataset: Any, order: Order, reading: Reading) -> MicroBatch:
    """A training's first micro-batch."""
    return first_samples(dataset, order, reading)(0, order.micro_batch)


def first_samples(dataset: Any, order: Order, reading: Reading, position: Position = FIRST) -> Read:
    """The samples of a training's first step, or of the step at another position; a stream has only its first."""
    if isinstance(dataset, IterableDataset):
        stream = stream_epoch(second_of(dataset) or dataset, order.seed, 0)
        return _reader(np.arange(order.global_batch), lambda ids: list(islice(stream, len(ids))), order, reading)
    whole = replace(order, micro_batch=order.global_batch, data_rank=0, data_size=1, equal_counts=False)
    step = next(whole.steps(position))
    ids = step.micro_batches[0].ids
    return _reader(ids, lambda some: _apart(dataset, order, reading, step.epoch, some, _portable), order, reading)


def uneven_samples(dataset: Any, order: Order, reading: Reading, count: int) -> Read | None:
    """So many samples of the most different sizes, the small ones first; None where all have the same."""
    if isinstance(dataset, IterableDataset) or reading.collate is default_collate:  # which takes no uneven ones
        return None
    ids = np.unique(np.linspace(0, order.size - 1, min(SIZES, order.size)).astype(np.int64))
    try:
        sizes = _apart(dataset, order, reading, 0, ids, lambda samples: [_size_of(sample) for sample in samples])
    except (SampleError, UserError):  # whoever trains on it will hear of that
        return None
    if len(set(sizes)) == 1:
        return None
    by_size = ids[np.argsort(sizes, kind="stable")]
    chosen = np.concatenate([by_size[: count // 2], by_size[len(by_size) - (count - count // 2) :]])
    return _reader(chosen, lambda some: _apart(dataset, order, reading, 0, some, _portable), order, reading)


def second_of(stream: Any) -> Any | None:
    """A copy of a stream; itself where there is none and it begins anew whenever it is iterated, else None."""
    try:
        return deepcopy(stream)
    except Exception:  # of open files and generators nobody can make a second one
        return None if iter(stream) is iter(stream) else stream


def _reader(ids: Ids, more: Callable[[Ids], Sequence[Any]], order: Order, reading: Reading) -> Read:
    samples: list[Any] = []

    def read(start: int, end: int) -> MicroBatch:
        with kept_random_state():
            if len(samples) < end:
                samples.extend(more(ids[len(samples) : end]))
            if not samples:
                raise UserError("the stream gave no sample", "check what the iterable dataset reads")
            mine = [_copy_of(sample) for sample in samples[start:end]]
            plan = MicroBatchPlan(0, ids[start : start + len(mine)], first=start)
            seed_host(seed_of(order.seed, "sample", 0, int(plan.ids[-1])))
            return collated(plan, mine, Reading(collate=reading.collate))

    return read


def _apart(
    dataset: Any, order: Order, reading: Reading, epoch: int, ids: Ids, collate: Callable[[list[Any]], Any]
) -> Any:
    """What is made of samples where they are read."""
    if not len(ids):
        return []
    plan = StepPlan(epoch, len(ids), [MicroBatchPlan(0, ids)], Position())
    for workers in {min(1, reading.workers): None, 0: None}:
        [batch] = read_steps(dataset, [plan], order, Reading(workers, collate=collate))
        if batch.micro_batches[0].data is not None:
            break
    return batch.micro_batches[0].data


def _portable(samples: list[Any]) -> list[Any] | None:
    """The samples themselves; None from a process that they could not leave."""
    if get_worker_info() is not None:
        try:
            pickle.dumps(samples)
        except Exception:
            return None
    return samples


def _size_of(sample: Any) -> int:
    """How many numbers or letters a sample has."""
    size = 0
    for leaf in tree_leaves(sample):
        if isinstance(leaf, torch.Tensor):
            size += leaf.numel()
        else:
            size += int(leaf.size) if isinstance(leaf, np.ndarray) else len(leaf) if isinstance(leaf, str) else 1
    return size


def _copy_of(sample: Any) -> Any:
    """Who puts samples together may change them."""
    try:
        return deepcopy(sample)
    except Exception:  # of which nobody can make a second one
        return sample
