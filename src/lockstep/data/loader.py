"""From plans to tensors: reads the samples of each step, in worker processes where asked, and collates them."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, islice
from operator import index
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from lockstep.data.digest import digest_of_value
from lockstep.data.order import Ids, MicroBatchPlan, Order, Position, StepPlan, deal
from lockstep.data.workers import Workers, as_value, delivered, naming
from lockstep.errors import UserError, some_samples
from lockstep.runtime.seeds import seed_host, seed_of
from lockstep.runtime.torch_private import tree_map

Collate = Callable[[list[Any]], Any]
Tokens = Callable[[Any], int | tuple[int, int]]
"""How many tokens a collated batch has; or that, and how many of them only fill rows up."""

END_OF_STREAM = object()
MOST_SETTINGS = 200
"""Of a dataset, that are looked at between steps."""

SOCKET_PATH = 107
LONGEST_TMPDIR = SOCKET_PATH - len("/pymp-12345678/listener-12345678")
"""Beyond it the loader's processes cannot make their sockets, and the training would wait for samples for ever."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward sees, and its logical coordinate: its number in the step."""

    index: int
    ids: list[int]
    data: Any
    filler: bool = False
    tokens: Any = None
    """What was counted in it, and of that what only fills rows up; None where nobody counts tokens."""
    first: int = 0

    @property
    def positions(self) -> range:
        """The places of its samples in the step."""
        return range(self.first, self.first + len(self.ids))


@dataclass(frozen=True)
class StepBatch:
    """What one `engine.step` consumes on this rank. `samples` counts the whole step over all ranks."""

    micro_batches: list[MicroBatch]
    global_batch: int
    samples: int
    epoch: int
    after: Position
    loader: str = "train"
    first_samples: str | None = None
    """A digest, at the first step of a stream: every rank reads all of it, so it is the same on all of them."""

    @property
    def ids(self) -> list[int]:
        """The samples that count on this rank, in order."""
        return [sample for part in self.micro_batches if not part.filler for sample in part.ids]

    @property
    def items(self) -> tuple[int, int]:
        """The tokens that this rank computes and how many of them only fill rows up, or its samples and 0."""
        counted = [_checked_count(part) for part in self.micro_batches if not part.filler]
        return sum(items for items, _ in counted), sum(padding for _, padding in counted)

    def __getitem__(self, key: Any) -> Any:
        raise UserError(
            f"batch[{key!r}] was asked of a step, which has its samples in micro-batches",
            "give the whole of it to engine.step, whose loss function gets them; batch.micro_batches has their data",
        )

    def pin_memory(self) -> StepBatch:
        """For the DataLoader: page-locked copies that travel to a GPU without waiting."""

        def pin(value: Any) -> Any:
            return value.pin_memory() if isinstance(value, torch.Tensor) else value

        return replace(self, micro_batches=[replace(mb, data=tree_map(pin, mb.data)) for mb in self.micro_batches])


@dataclass(frozen=True)
class Reading:
    """How samples are read, apart from which: the keys of `[data]` that do not change the numbers."""

    workers: int = 0
    prefetch: int = 2
    persistent: bool = True
    pin: bool = False
    collate: Collate = default_collate
    tokens: Tokens | None = None
    """Counts tokens, where throughput is to be in these rather than in samples."""

    def __post_init__(self) -> None:
        if self.workers and len(tempfile.gettempdir()) > LONGEST_TMPDIR:
            raise UserError(
                f"loader processes hand samples over through sockets in {tempfile.gettempdir()}, and a socket's path "
                f"ends after {SOCKET_PATH} characters",
                f"set TMPDIR to a folder of at most {LONGEST_TMPDIR} characters, or workers = 0",
            )


@dataclass
class Loader:
    """The steps of a training, each as this rank's collated micro-batches. `position` counts the step in hand."""

    dataset: Dataset[Any]
    order: Order
    reading: Reading
    position: Position = field(default_factory=Position)
    epochs: int | None = None
    steps: int | None = None
    name: str = "train"
    before_step: Callable[[StepBatch | None], None] = field(default=lambda _: None)
    """Called before a step is given out, and after the last one."""
    reading_samples: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while the next samples are waited for."""
    steps_done: int = 0
    micro_batch_given: bool = False
    """Whether the size of micro-batches was said, and not chosen."""
    is_coupled: bool = False
    """Whether that size decides numbers, because samples see those who share their forward."""
    changes_itself: Collection[str] = ()
    """Which settings of the dataset are others after it was read."""
    is_read: bool = False
    """Whether it was iterated to its end."""

    @property
    def workers(self) -> int:
        """How many processes read ahead; a stream is read by one at most."""
        return min(1, self.reading.workers) if isinstance(self.dataset, IterableDataset) else self.reading.workers

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of one epoch; None for a stream, whose length shows at its end."""
        return None if isinstance(self.dataset, IterableDataset) else self.order.steps_per_epoch

    @property
    def total_steps(self) -> int | None:
        """All steps of the training, those before a restart included."""
        if self.steps is not None:
            return self.steps
        per_epoch = self.steps_per_epoch
        return None if per_epoch is None else per_epoch * (self.epochs or 1)

    def __iter__(self) -> Iterator[StepBatch]:
        if self.is_read:
            raise UserError(
                f"the loader {self.name!r} has given all its steps", "make it with the epochs or steps you need"
            )
        batches = iter(self._stream() if isinstance(self.dataset, IterableDataset) else self._planned())
        while (batch := self._next(batches)) is not None:
            batch = replace(batch, loader=self.name)
            self.before_step(batch)
            self.position = batch.after
            self.steps_done += 1
            self.is_read = self.steps_done == self.total_steps
            yield batch
        self.is_read = True
        self.before_step(None)

    def _next(self, batches: Iterator[StepBatch]) -> StepBatch | None:
        with self.reading_samples():
            return next(batches, None)

    def _planned(self) -> Iterator[StepBatch]:
        assert self.total_steps is not None
        remaining, start = self.total_steps - self.steps_done, self.position
        while remaining > 0:
            left = self.order.steps_left(start)
            count = remaining if self.reading.persistent else min(remaining, left)
            steps = read_steps(self.dataset, _Plans(self.order, start, count), self.order, self.reading)
            yield from self._unchanged(steps) if self.workers else steps
            remaining, start = remaining - count, Position(start.epoch + 1 + (start.consumed >= self.order.size), 0)

    def _unchanged(self, steps: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """The steps that processes read, as long as the script leaves the dataset alone, of which they have copies."""
        before = settings_of(self.dataset)
        for step in steps:
            now = settings_of(self.dataset)
            name = next((name for name in changed_settings(before, now) if name not in self.changes_itself), None)
            if name is not None:
                raise UserError(
                    f"the dataset's {name} was changed from {before[name]!r} to {now[name]!r} between steps, and its "
                    f"{self.workers} loader process{'es' * (self.workers > 1)} read with copies of before",
                    "give workers=0 to run.loader (config: data.workers), where it counts from the next step on, or "
                    "make it a function of the sample",
                )
            yield step

    def _stream(self) -> Iterator[StepBatch]:
        stream = _StreamSteps(self.dataset, self.order, self.position, self.epochs, self.reading)
        limit = None if self.steps is None else max(0, self.steps - self.steps_done)
        return islice(_batches(stream, self.reading, self.workers), limit)


def evaluation_batches(dataset: Dataset[Any], order: Order, reading: Reading) -> Iterator[MicroBatch]:
    """This rank's share of a dataset, every sample of it read once over all ranks, in logical micro-batches."""
    if isinstance(dataset, IterableDataset):
        yield from _stream_evaluation(dataset, order, reading)
        return
    for batch in read_steps(dataset, list(order.once_through()), order, reading):
        yield from batch.micro_batches


def settings_of(dataset: Any, prefix: str = "", depth: int = 3) -> dict[str, Any]:
    """Numbers and texts among the attributes of a dataset and of what it is made of: a noise level, a transform's p."""
    found: dict[str, Any] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if len(found) >= MOST_SETTINGS:
            break
        if isinstance(value, bool | int | float | str):
            found[prefix + name] = value
        elif depth > 1 and hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | torch.Tensor):
            found |= settings_of(value, f"{prefix}{name}.", depth - 1)
    return found


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings of a dataset that have another value; one that was left alone is the same object, NaN too."""
    there = [name for name in before if name in now]
    return [name for name in there if now[name] is not before[name] and now[name] != before[name]]


def dataset_size(dataset: Any, what: str) -> int:
    """The number of samples of a map-style dataset (0 for a stream); an empty one is refused."""
    if isinstance(dataset, IterableDataset):
        return 0
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"the {what} dataset is a {type(dataset).__name__}",
            "give an object with __len__ and __getitem__, or a torch IterableDataset",
        )
    if len(dataset) == 0:
        raise UserError(f"the {what} dataset is empty", "check the path and the filter that produce it")
    return len(dataset)


@dataclass(frozen=True)
class _Plans:
    """The sampler of the DataLoader: plans from a position on, as many as there are steps left."""

    order: Order
    start: Position
    count: int

    def __iter__(self) -> Iterator[StepPlan]:
        return islice(self.order.steps(self.start), self.count)

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class _StepReader(Dataset[StepBatch]):
    """Reads whole steps, so that a worker process does all of one."""

    dataset: Any
    order: Order
    reading: Reading
    workers: Workers | None = None

    def __getitem__(self, plan: StepPlan) -> StepBatch:
        step: StepBatch = as_value(lambda: self._step(plan))
        return step

    def _step(self, plan: StepPlan) -> StepBatch:
        # A worker process draws for nobody else.
        with nullcontext() if get_worker_info() else kept_random_state():
            micro_batches = [self._read(plan.epoch, part) for part in plan.micro_batches]
        self._at(-1)
        return StepBatch(micro_batches, self.order.global_batch, plan.samples, plan.epoch, plan.after)

    def _read(self, epoch: int, part: MicroBatchPlan) -> MicroBatch:
        return collated(part, [self.sample(epoch, sample_id) for sample_id in part.ids.tolist()], self.reading)

    def sample(self, epoch: int, sample_id: int) -> Any:
        """One sample of an epoch."""
        self._at(sample_id)
        # Augmentation follows the sample, not the worker or the rank that happens to read it.
        seed_host(seed_of(self.order.seed, "sample", epoch, sample_id))
        with naming(f"sample {sample_id}"):
            return self.dataset[sample_id]

    def _at(self, sample_id: int) -> None:
        if self.workers is not None:
            self.workers.at(sample_id)


def in_groups(micro_batches: Iterable[MicroBatch], size: int) -> Iterator[list[MicroBatch]]:
    """Neighbours in groups of a size, the last one possibly smaller."""
    following = iter(micro_batches)
    while group := list(islice(following, size)):
        yield group


def read_steps(dataset: Any, plans: Iterable[StepPlan], order: Order, reading: Reading) -> Iterator[StepBatch]:
    """The collated samples of the plans, read ahead by worker processes where there are any."""
    return _batches(_StepReader(dataset, order, reading), reading, reading.workers, sampler=plans)


def _batches(
    steps: _StepReader | _StreamSteps, reading: Reading, workers: int, sampler: Iterable[StepPlan] | None = None
) -> Iterator[StepBatch]:
    def make(processes: Workers | None) -> DataLoader[StepBatch]:
        return DataLoader(
            replace(steps, workers=processes),
            sampler=sampler,
            batch_size=None,
            collate_fn=_same,
            num_workers=workers,
            prefetch_factor=reading.prefetch if workers else None,
            multiprocessing_context=processes,
            worker_init_fn=processes.begin if processes else None,
            pin_memory=reading.pin,
            generator=torch.Generator(),  # else it draws its workers' seed from the training's stream
        )

    return delivered(make, workers)


@dataclass(frozen=True)
class _StreamSteps(IterableDataset[StepBatch]):
    """Steps of a stream. Every rank reads all of it and keeps its own micro-batches: each sample is used once."""

    dataset: Any
    order: Order
    start: Position
    epochs: int | None
    reading: Reading
    workers: Workers | None = None

    def __iter__(self) -> Iterator[Any]:
        steps = self._steps()
        while (step := as_value(lambda: next(steps, None))) is not None:
            yield step

    def _steps(self) -> Iterator[StepBatch]:
        epoch, skip, is_first = self.start.epoch, self.start.consumed, True
        while self.epochs is None or epoch < self.epochs:
            samples = stream_epoch(self.dataset, self.order.seed, epoch, self.workers)
            consumed = sum(1 for _ in islice(samples, skip))
            while step := list(islice(samples, self.order.global_batch)):
                ids = np.arange(consumed, consumed + len(step), dtype=np.int64)
                consumed += len(step)
                mine = self._take(step, ids)
                first = digest_of_value([step[0], step[-1]]) if is_first else None
                after = Position(epoch, consumed)
                yield StepBatch(mine, self.order.global_batch, len(step), epoch, after, first_samples=first)
                is_first = False
            if consumed == 0:
                raise UserError("the stream gave no sample", "check what the iterable dataset reads")
            epoch, skip = epoch + 1, 0

    def _take(self, step: list[Any], ids: Ids) -> list[MicroBatch]:
        order, first = self.order, int(ids[0])
        plans = deal(ids, order.micro_batch, order.data_rank, order.data_size, order.equal_counts)
        return [collated(plan, [step[i - first] for i in plan.ids.tolist()], self.reading) for plan in plans]


def _stream_evaluation(dataset: Any, order: Order, reading: Reading) -> Iterator[MicroBatch]:
    samples = stream_epoch(dataset, order.seed, 0)
    count, first = 0, None
    while step := list(islice(samples, order.micro_batch)):
        start = count * order.micro_batch
        plan = MicroBatchPlan(count, np.arange(start, start + len(step), dtype=np.int64), first=start)
        first = first or (plan, step)
        if count % order.data_size == order.data_rank:
            yield collated(plan, step, reading)
        count += 1
    if first is None:
        raise UserError("the evaluation stream gave no sample", "check what the iterable dataset reads")
    if order.equal_counts and count % order.data_size and order.data_rank >= count % order.data_size:
        yield collated(replace(first[0], filler=True), first[1], reading)


def collated(plan: MicroBatchPlan, samples: list[Any], reading: Reading) -> MicroBatch:
    """Samples as one micro-batch."""
    with naming(some_samples(plan.ids.tolist())):
        data = reading.collate(samples)
        tokens = None if reading.tokens is None else count_tokens(reading.tokens, data)
    return MicroBatch(plan.index, plan.ids.tolist(), data, plan.filler, tokens, plan.first)


def count_tokens(tokens: Tokens, data: Any) -> Any:
    """Tokens and padding of a batch, in the memory of the host; a mask with a number for each token says the second."""
    counted = tokens(data)
    if isinstance(counted, tuple):
        return counted
    mask = data.get("attention_mask") if isinstance(data, Mapping) else None
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.numel() == counted:
        return counted, int((mask == 0).sum())
    return counted, 0


def _checked_count(part: MicroBatch) -> tuple[int, int]:
    if part.tokens is None:
        return len(part.ids), 0
    try:
        tokens, padding = map(index, part.tokens)
    except (TypeError, ValueError):
        tokens, padding = 0, -1
    if not 0 <= padding <= tokens:
        raise UserError(
            f"the function that counts tokens returned {part.tokens!r}"[:200],
            "return how many tokens the batch has, or (tokens, how many of these only fill rows up)",
        )
    return tokens, padding


def stream_epoch(dataset: Any, seed: int, epoch: int, workers: Workers | None = None) -> Iterator[Any]:
    """One pass over a stream; `set_epoch` is called where the dataset has one.

    The stream draws from a random state of its own, the same on every rank: drawing from the training's would make
    the ranks disagree about the order.
    """
    with kept_random_state():
        seed_host(seed_of(seed, "stream", epoch))
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        with naming("sample 0 of the stream"):
            iterator = iter(dataset)
        state = _random_state()
    for number in count():
        if workers is not None:
            workers.at(number)
        with kept_random_state():
            _set_random_state(state)
            with naming(f"sample {number} of the stream"):
                sample = next(iterator, END_OF_STREAM)
            if sample is END_OF_STREAM:
                return
            state = _random_state()
        yield sample


def _random_state() -> tuple[Any, Any, Any]:
    return torch.random.get_rng_state(), np.random.get_state(), random.getstate()


def _set_random_state(state: tuple[Any, Any, Any]) -> None:
    torch.random.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Reading must leave the training's random streams as they were."""
    state = _random_state()
    try:
        yield
    finally:
        _set_random_state(state)


def _same(batch: Any) -> Any:
    return batch
