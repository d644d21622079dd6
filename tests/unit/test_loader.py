"""What a step reads: the same samples and the same random draws on any number of ranks, workers and restarts."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from lockstep.data.loader import (
    Loader,
    MicroBatch,
    Reading,
    StepBatch,
    changed_settings,
    dataset_size,
    evaluation_batches,
    settings_of,
)
from lockstep.data.order import Order, Position
from lockstep.data.workers import naming
from lockstep.errors import SampleError, UserError


def draws() -> list[float]:
    """One number of each random stream that an augmentation may use."""
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


class Augmented(Dataset[torch.Tensor]):
    """Sample i is [i, three random numbers]."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *draws()], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """A stream that shuffles by itself from all three random streams, as streams do."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        left = list(range(self.size))
        while left:
            picked = left.pop(int(sum(draws()) * 1e6) % len(left))
            yield torch.tensor([picked, *draws()], dtype=torch.float64)


def order_of(size: int, global_batch: int = 4, micro_batch: int = 2, **others: Any) -> Order:
    plain = Order(size, global_batch, micro_batch, seed=0, data_rank=0, data_size=1, equal_counts=False)
    return replace(plain, **others)


def loader_of(dataset: Any, workers: int = 0, **others: Any) -> Loader:
    mine = {key: others.pop(key) for key in ("position", "epochs", "steps", "steps_done") if key in others}
    size = 0 if isinstance(dataset, IterableDataset) else len(dataset)
    return Loader(dataset, order_of(size, **others), Reading(workers=workers), **mine)


def plain(batches: Iterable[StepBatch]) -> list[object]:
    return [
        (batch.global_batch, batch.samples, batch.epoch, batch.after, [micro(part) for part in batch.micro_batches])
        for batch in batches
    ]


def micro(part: MicroBatch) -> object:
    return part.index, part.ids, part.filler, part.data.tolist()


def rows(batches: Iterable[StepBatch]) -> dict[tuple[int, int], list[float]]:
    """(epoch, sample) -> its random numbers; every sample has to come once."""
    found: dict[tuple[int, int], list[float]] = {}
    for batch in batches:
        for part in batch.micro_batches:
            if not part.filler:
                for sample, *numbers in part.data.tolist():
                    assert (batch.epoch, int(sample)) not in found
                    found[batch.epoch, int(sample)] = numbers
    return found


def random_state() -> tuple[Any, ...]:
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return (
        torch.random.get_rng_state().tolist(),
        numpy_state["state"]["key"].tolist(),
        numpy_state["state"]["pos"],
        random.getstate(),
    )


# Map-style datasets --------------------------------------------------------------------------------------------------


def test_a_step_comes_as_its_collated_micro_batches() -> None:
    (first, second) = loader_of(Augmented(7), shuffle=False)
    assert [part.ids for part in first.micro_batches] == [[0, 1], [2, 3]]
    assert [part.index for part in first.micro_batches] == [0, 1]
    assert [part.data[:, 0].tolist() for part in first.micro_batches] == [[0, 1], [2, 3]]
    assert (first.global_batch, first.samples, first.after) == (4, 4, Position(0, 4))
    assert [part.ids for part in second.micro_batches] == [[4, 5], [6]]
    assert (second.global_batch, second.samples, second.after) == (4, 3, Position(0, 7))


def test_samples_are_collated_as_the_user_says() -> None:
    reading = Reading(collate=lambda samples: {"rows": len(samples)})
    assert [part.data for batch in Loader(Augmented(3), order_of(3), reading) for part in batch.micro_batches] == [
        {"rows": 2},
        {"rows": 1},
    ]


def test_two_workers_give_the_batches_that_none_gives() -> None:
    alone, helped = (plain(loader_of(Augmented(21), workers=workers, epochs=2)) for workers in (0, 2))
    assert len(alone) == 12
    assert alone == helped


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 2, 6])
def test_workers_that_start_anew_every_epoch_give_the_same_batches(workers: int, done: int) -> None:
    whole = list(loader_of(Augmented(21), epochs=3))
    position = whole[done - 1].after if done else Position()
    anew = loader_of(Augmented(21), workers=workers, epochs=3, position=position, steps_done=done)
    anew.reading = replace(anew.reading, persistent=False)
    assert plain(anew) == plain(whole[done:])


def test_a_step_says_which_loader_it_is_of() -> None:
    for dataset in (Augmented(4), Stream(4)):
        loader = loader_of(dataset, epochs=1)
        loader.name = "second"
        assert [batch.loader for batch in loader] == ["second"]


def test_an_augmentation_follows_the_sample_on_any_number_of_ranks() -> None:
    alone = rows(loader_of(Augmented(21), epochs=2))
    assert set(alone) == {(epoch, sample) for epoch in (0, 1) for sample in range(21)}
    for data_size in (2, 3):
        spread = [loader_of(Augmented(21), epochs=2, data_size=data_size, data_rank=rank) for rank in range(data_size)]
        assert rows(batch for loader in spread for batch in loader) == alone


def test_an_augmentation_is_the_same_whatever_the_batch_it_comes_in() -> None:
    assert rows(loader_of(Augmented(21), global_batch=7, micro_batch=3)) == rows(loader_of(Augmented(21)))


def test_an_augmentation_differs_between_samples_epochs_and_seeds() -> None:
    numbers = [
        *rows(loader_of(Augmented(21), epochs=3)).values(),
        *rows(loader_of(Augmented(21), epochs=3, seed=1)).values(),
    ]
    for stream in range(3):
        assert len({row[stream] for row in numbers}) == len(numbers)


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_the_trainings_random_state_as_it_was(workers: int) -> None:
    before = random_state()
    for _ in loader_of(Augmented(9), workers=workers):
        assert random_state() == before
    assert random_state() == before


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({}, 6),
        ({"epochs": 1}, 6),
        ({"epochs": 3}, 18),
        ({"steps": 4}, 4),
        ({"steps": 20}, 20),
        ({"epochs": 3, "steps_done": 7, "position": Position(1, 4)}, 11),
        ({"steps": 20, "steps_done": 20}, 0),
    ],
)
def test_a_training_ends_after_its_epochs_or_steps_those_before_a_restart_included(
    limits: dict[str, Any], steps: int
) -> None:
    loader = loader_of(Augmented(21), **limits)
    assert loader.steps_per_epoch == 6
    assert loader.total_steps == steps + limits.get("steps_done", 0)
    assert len(list(loader)) == steps
    assert loader.steps_done == loader.total_steps


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restarted_loader_goes_on_as_if_it_had_not_stopped(workers: int) -> None:
    whole = list(loader_of(Augmented(21), epochs=3))
    for done in (1, 6, 8):
        position = whole[done - 1].after
        rest = loader_of(Augmented(21), workers=workers, epochs=3, position=position, steps_done=done)
        assert plain(rest) == plain(whole[done:])


@pytest.mark.parametrize("dataset", [Augmented(10), Stream(10)], ids=["map-style", "stream"])
def test_the_position_counts_the_step_in_hand_so_that_a_save_after_it_does_not_repeat_it(dataset: Any) -> None:
    loader = loader_of(dataset, epochs=2)
    for number, batch in enumerate(loader, start=1):
        assert loader.position == batch.after
        assert loader.steps_done == number


def test_the_position_before_a_step_does_not_count_it_so_that_a_save_at_the_boundary_does_not_miss_it() -> None:
    seen: list[tuple[Position, int]] = []
    loader = loader_of(Augmented(10))
    loader.before_step = lambda _: seen.append((loader.position, loader.steps_done))
    assert len(list(loader)) == 3
    assert seen == [(Position(0, 0), 0), (Position(0, 4), 1), (Position(0, 8), 2), (Position(0, 10), 3)]


def test_a_loop_that_was_left_goes_on_with_the_next_step() -> None:
    loader = loader_of(Augmented(21))
    for batch in loader:
        if batch.after.consumed >= 8:
            break
    assert plain(loader) == plain(loader_of(Augmented(21)))[2:]


@pytest.mark.parametrize("kind", [Augmented, Stream], ids=["map-style", "stream"])
@pytest.mark.parametrize("size", [1, 5, 9, 21])
def test_with_equal_counts_all_ranks_have_the_same_number_of_micro_batches_in_every_step(kind: Any, size: int) -> None:
    ranks = [
        list(loader_of(kind(size), epochs=2, data_size=3, data_rank=rank, equal_counts=True, micro_batch=1))
        for rank in range(3)
    ]
    for step in zip(*ranks, strict=True):
        assert len({len(batch.micro_batches) for batch in step}) == 1
    assert len(rows(batch for rank in ranks for batch in rank)) == 2 * size


# Streams -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_streams_samples_are_each_used_once_over_all_ranks(workers: int) -> None:
    alone = rows(loader_of(Stream(21), epochs=2))
    assert set(alone) == {(epoch, sample) for epoch in (0, 1) for sample in range(21)}
    for data_size in (2, 3):
        spread = [
            loader_of(Stream(21), workers=workers, epochs=2, data_size=data_size, data_rank=rank)
            for rank in range(data_size)
        ]
        assert rows(batch for loader in spread for batch in loader) == alone


def test_a_stream_gives_every_rank_the_same_order_even_when_they_draw_numbers_in_between() -> None:
    alone = rows(loader_of(Stream(21), epochs=2))
    found = []
    for rank in range(2):
        random.seed(rank)
        for batch in loader_of(Stream(21), epochs=2, data_size=2, data_rank=rank):
            found.append(batch)
            for _ in range(rank + 1):
                draws()
    assert rows(found) == alone


def test_a_stream_leaves_the_trainings_random_state_as_it_was() -> None:
    before = random_state()
    for _ in loader_of(Stream(9), epochs=2):
        assert random_state() == before
    assert random_state() == before


def test_a_stream_is_told_the_epoch_and_gives_another_order_in_each() -> None:
    stream = Stream(10)
    orders: dict[int, list[int]] = {}
    for batch in loader_of(stream, epochs=3, position=Position(1, 0)):
        samples = [int(row[0]) for part in batch.micro_batches for row in part.data.tolist()]
        orders.setdefault(batch.epoch, []).extend(samples)
    assert stream.epochs == [1, 2]
    assert orders[1] != orders[2]
    assert sorted(orders[1]) == sorted(orders[2]) == list(range(10))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_restarted_stream_skips_what_was_consumed(workers: int) -> None:
    whole = list(loader_of(Stream(10), epochs=3))
    assert [batch.samples for batch in whole] == [4, 4, 2] * 3
    for done in (1, 3, 4, 6, 8):
        position = whole[done - 1].after
        rest = loader_of(Stream(10), workers=workers, epochs=3, position=position, steps_done=done)
        assert plain(rest) == plain(whole[done:])


@pytest.mark.parametrize(
    ("limits", "steps"), [({"epochs": 2}, 6), ({"steps": 7}, 7), ({"steps": 7, "steps_done": 5}, 2)]
)
def test_a_stream_ends_after_its_epochs_or_steps(limits: dict[str, int], steps: int) -> None:
    loader = loader_of(Stream(10), **limits)
    assert loader.steps_per_epoch is None
    assert loader.total_steps == limits.get("steps")
    assert len(list(loader)) == steps


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_without_samples_is_refused(workers: int) -> None:
    with pytest.raises(UserError, match=r"^the stream gave no sample: check what the iterable dataset reads$"):
        list(loader_of(Stream(0), workers=workers, epochs=1))


# Evaluation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("kind", [Augmented, Stream], ids=["map-style", "stream"])
@pytest.mark.parametrize("size", [1, 5, 21, 97])
@pytest.mark.parametrize("data_size", [1, 2, 3, 4])
def test_an_evaluation_reads_each_sample_once_and_all_ranks_do_as_many_forwards_where_they_must(
    kind: Any, size: int, data_size: int, equal_counts: bool
) -> None:
    order = order_of(size, size, 4, data_size=data_size, equal_counts=equal_counts, shuffle=False)
    ranks = [
        list(evaluation_batches(kind(size), replace(order, data_rank=rank), Reading())) for rank in range(data_size)
    ]
    counted = [part for parts in ranks for part in parts if not part.filler]
    assert sorted(int(row[0]) for part in counted for row in part.data.tolist()) == list(range(size))
    assert sorted(i for part in counted for i in part.ids) == list(range(size))
    if equal_counts:
        assert len({len(parts) for parts in ranks}) == 1
    else:
        assert sum(len(parts) for parts in ranks) == len(counted)


@pytest.mark.parametrize("kind", [Augmented, Stream], ids=["map-style", "stream"])
def test_an_evaluation_sees_the_same_numbers_every_time_on_any_number_of_ranks(kind: Any) -> None:
    def seen(data_size: int) -> list[list[float]]:
        order = order_of(10, 10, 3, data_size=data_size, shuffle=False)
        return sorted(
            row
            for rank in range(data_size)
            for part in evaluation_batches(kind(10), replace(order, data_rank=rank), Reading())
            for row in part.data.tolist()
        )

    assert seen(1) == seen(1) == seen(2) == seen(3)


@pytest.mark.parametrize("dataset", [Augmented(9), Stream(9)], ids=["map-style", "stream"])
def test_an_evaluation_leaves_the_trainings_random_state_as_it_was(dataset: Any) -> None:
    before = random_state()
    for _ in evaluation_batches(dataset, order_of(9, 9, 4, shuffle=False), Reading()):
        assert random_state() == before
    assert random_state() == before


# What is no dataset --------------------------------------------------------------------------------------------------


def test_the_size_of_a_dataset_is_its_length_and_a_stream_has_none() -> None:
    assert dataset_size(Augmented(5), "training") == 5
    assert dataset_size([1, 2, 3], "training") == 3
    assert dataset_size(Stream(5), "training") == 0


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ([], "the training dataset is empty: check the path and the filter that produce it"),
        (Augmented(0), "the training dataset is empty: check the path and the filter that produce it"),
        *(
            (
                thing,
                f"the training dataset is a {type(thing).__name__}: "
                "give an object with __len__ and __getitem__, or a torch IterableDataset",
            )
            for thing in (iter([1]), {1, 2}, 3, None)
        ),
    ],
)
def test_what_cannot_be_read_is_refused(dataset: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        dataset_size(dataset, "training")
    assert str(refusal.value) == sentence


def test_a_folder_for_temporary_files_too_long_for_the_workers_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    Reading(workers=0)
    with pytest.raises(UserError, match=r"sockets in .*xxx, .*set TMPDIR to a folder of at most 75 characters"):
        Reading(workers=1)


def test_an_error_of_several_lines_becomes_one_sentence() -> None:
    with (
        pytest.raises(SampleError, match="sample 3 could not be read: ValueError: a pixel is bad"),
        naming("sample 3"),
    ):
        raise ValueError("a pixel\n  is bad")


def test_settings_of_a_dataset_that_were_changed_are_found_beside_those_that_change_by_themselves() -> None:
    class Noisy(Dataset[Any]):
        def __init__(self) -> None:
            self.reads, self.missing, self.inner = 0, float("nan"), SimpleNamespace(level=0.1)

    data = Noisy()
    before = settings_of(data)
    assert changed_settings(before, settings_of(data)) == [], "NaN is what it was"
    data.reads += 1
    data.inner.level = 0.2
    assert changed_settings(before, settings_of(data)) == ["reads", "inner.level"]
