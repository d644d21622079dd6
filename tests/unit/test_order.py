"""Which samples a step reads follows from (seed, epoch, position) alone, and every epoch reads each sample once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data.order import AHEAD, Order, Position, StepPlan, deal, sample_ids, share

# A permutation that is none walks for ever.
pytestmark = pytest.mark.limit(20)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sample_order.json").read_text())

SPLITS = [
    # size, global_batch, micro_batch, data_size
    (1, 1, 1, 1),
    (1, 4, 2, 3),
    (7, 3, 1, 2),
    (8, 8, 1, 3),
    (8, 8, 8, 3),
    (21, 8, 3, 4),
    (64, 16, 4, 4),
    (97, 10, 4, 3),
    (97, 97, 5, 2),
    (100, 7, 2, 5),
    (101, 200, 16, 4),
    # past what is worked out at once: many steps of it, a step over its end, and a step that is larger
    (2 * AHEAD + 5, AHEAD // 4, AHEAD // 16, 3),
    (3 * AHEAD, AHEAD // 2 + 7, 100, 2),
    (2 * AHEAD + 904, AHEAD + 952, 250, 4),
]


def order_of(size: int, global_batch: int, micro_batch: int, data_size: int, **others: Any) -> Order:
    plain = Order(size, global_batch, micro_batch, seed=0, data_rank=0, data_size=data_size, equal_counts=False)
    return replace(plain, **others)


def epoch_of(order: Order, epoch: int = 0) -> list[StepPlan]:
    no_more = islice(order.steps(Position(epoch)), order.size + 1)
    return list(takewhile(lambda plan: plan.epoch == epoch, no_more))


def on_every_rank(order: Order) -> Iterator[Order]:
    return (replace(order, data_rank=rank) for rank in range(order.data_size))


def counted(plans: list[StepPlan]) -> list[int]:
    return [i for plan in plans for part in plan.micro_batches if not part.filler for i in part.ids.tolist()]


# The permutation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*range(1, 71), 1000, 4097, 100_003])
def test_an_epoch_holds_every_sample_exactly_once(size: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 3)):
        ids = sample_ids(np.arange(size), size, seed, epoch)
        assert np.array_equal(np.sort(ids), np.arange(size))


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
def test_any_part_of_the_order_can_be_asked_for_alone(size: int) -> None:
    whole = sample_ids(np.arange(size), size, 3, 2)
    assert [int(sample_ids(np.array([at]), size, 3, 2)[0]) for at in range(size)] == whole.tolist()


def test_the_order_depends_on_the_seed_and_on_the_epoch() -> None:
    orders = [tuple(sample_ids(np.arange(50), 50, seed, epoch).tolist()) for seed in range(10) for epoch in range(10)]
    assert len(set(orders)) == 100


def test_the_positions_asked_for_are_left_as_they_were() -> None:
    positions = np.arange(10)
    sample_ids(positions, 10, 0, 0)
    assert np.array_equal(positions, np.arange(10))


@pytest.mark.parametrize("size", [2, 3, 10, 23])
def test_every_sample_comes_first_and_last_about_equally_often(size: int) -> None:
    each, freedom = 40, size - 1
    ends = np.array([0, size - 1])
    drawn = np.array([sample_ids(ends, size, 11, epoch) for epoch in range(each * size)])
    for place in range(2):
        counts = np.bincount(drawn[:, place], minlength=size)
        chi_square = float(((counts - each) ** 2 / each).sum())
        assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_in_the_order_are_not_neighbours_in_the_data() -> None:
    ids = sample_ids(np.arange(10_000), 10_000, 0, 0)
    assert int((np.abs(np.diff(ids)) == 1).sum()) < 20
    assert abs(float(np.corrcoef(ids[:-1], ids[1:])[0, 1])) < 0.05


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['size']}-{case['seed']}-{case['epoch']}")
def test_the_order_of_released_versions_stays_so_that_old_runs_can_go_on(case: dict[str, int | list[int]]) -> None:
    size, seed, epoch, ids = (case[key] for key in ("size", "seed", "epoch", "ids"))
    assert isinstance(size, int)
    assert isinstance(seed, int)
    assert isinstance(epoch, int)
    assert isinstance(ids, list)
    assert sample_ids(np.arange(len(ids)), size, seed, epoch).tolist() == ids


@pytest.mark.parametrize("global_batch", [1, 1000, AHEAD, AHEAD + 1, 3000, 2 * AHEAD + 1, 7000])
def test_steps_of_any_size_read_the_order_of_the_epoch_from_its_beginning_to_its_end(global_batch: int) -> None:
    order = order_of(5000, global_batch, 1000, 1)
    whole = sample_ids(np.arange(5000), 5000, 0, 1)
    plans = epoch_of(order, 1)
    assert counted(plans) == whole.tolist()
    assert [plan.samples for plan in plans[:-1]] == [global_batch] * (order.steps_per_epoch - 1)


# Dealing a step to the data ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "data_size", "shares"),
    [
        (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 4, [[0], [1], [], []]),
        (0, 2, [[], []]),
    ],
)
def test_the_first_ranks_take_one_more_where_it_does_not_divide(
    count: int, data_size: int, shares: list[list[int]]
) -> None:
    assert [list(share(count, rank, data_size)) for rank in range(data_size)] == shares


def test_8_samples_on_3_ranks_are_3_and_3_and_2() -> None:
    step = [next(order.steps(Position())) for order in on_every_rank(order_of(8, 8, 1, 3))]
    assert [sum(len(part.ids) for part in plan.micro_batches) for plan in step] == [3, 3, 2]
    assert [plan.samples for plan in step] == [8, 8, 8]


@pytest.mark.parametrize(("size", "global_batch", "micro_batch", "data_size"), SPLITS)
@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_is_read_once_an_epoch_over_all_ranks(
    size: int, global_batch: int, micro_batch: int, data_size: int, equal_counts: bool, shuffle: bool
) -> None:
    order = order_of(size, global_batch, micro_batch, data_size, equal_counts=equal_counts, shuffle=shuffle)
    for epoch in (0, 1):
        read = [i for on_rank in on_every_rank(order) for i in counted(epoch_of(on_rank, epoch))]
        assert sorted(read) == list(range(size))


@pytest.mark.parametrize(("size", "global_batch", "micro_batch", "data_size"), SPLITS)
def test_the_logical_micro_batches_are_the_same_on_any_number_of_ranks(
    size: int, global_batch: int, micro_batch: int, data_size: int
) -> None:
    def logical(ranks: int) -> list[tuple[int, int, int, tuple[int, ...]]]:
        order = order_of(size, global_batch, micro_batch, ranks)
        return sorted(
            (plan.epoch, step, part.index, tuple(part.ids.tolist()))
            for on_rank in on_every_rank(order)
            for step, plan in enumerate(islice(on_rank.steps(Position()), 2 * order.steps_per_epoch))
            for part in plan.micro_batches
        )

    assert logical(data_size) == logical(1)


@pytest.mark.parametrize(("size", "global_batch", "micro_batch", "data_size"), SPLITS)
def test_equal_counts_fill_up_to_the_busiest_rank_with_what_does_not_count(
    size: int, global_batch: int, micro_batch: int, data_size: int
) -> None:
    order = order_of(size, global_batch, micro_batch, data_size, equal_counts=True)
    for step in zip(*(epoch_of(on_rank) for on_rank in on_every_rank(order)), strict=True):
        counts = {len(plan.micro_batches) for plan in step}
        real = [sum(not part.filler for part in plan.micro_batches) for plan in step]
        assert counts == {max(real)}
        for plan in step:
            for part in plan.micro_batches:
                assert len(part.ids) > 0, "a filler is computed too, so it needs samples"


def test_without_equal_counts_nothing_is_filled_up() -> None:
    for on_rank in on_every_rank(order_of(8, 8, 3, 4)):
        assert not any(part.filler for plan in epoch_of(on_rank) for part in plan.micro_batches)


def test_micro_batches_are_numbered_within_their_step() -> None:
    ids = np.arange(100, 111)
    parts = [part for rank in range(2) for part in deal(ids, 4, rank, 2, equal_counts=False)]
    assert [(part.index, part.ids.tolist()) for part in parts] == [
        (0, [100, 101, 102, 103]),
        (1, [104, 105, 106, 107]),
        (2, [108, 109, 110]),
    ]


# Steps and positions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "global_batch", "samples"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3]), (1, 1, [1])]
)
def test_the_last_batch_of_an_epoch_keeps_what_is_left(size: int, global_batch: int, samples: list[int]) -> None:
    order = order_of(size, global_batch, 2, 1)
    assert [plan.samples for plan in epoch_of(order)] == samples
    assert order.steps_per_epoch == len(samples)


def test_the_position_after_a_step_counts_the_samples_of_all_ranks() -> None:
    for on_rank in on_every_rank(order_of(10, 4, 1, 3)):
        after = [plan.after for plan in islice(on_rank.steps(Position()), 4)]
        assert after == [Position(0, 4), Position(0, 8), Position(0, 10), Position(1, 4)]


@pytest.mark.parametrize(("size", "global_batch", "micro_batch", "data_size"), SPLITS)
def test_going_on_from_any_position_is_the_rest_of_the_whole(
    size: int, global_batch: int, micro_batch: int, data_size: int
) -> None:
    order = order_of(size, global_batch, micro_batch, data_size, equal_counts=True, data_rank=data_size - 1)
    whole = list(islice(order.steps(Position()), 12))
    for done in range(12):
        start = whole[done - 1].after if done else Position()
        rest = list(islice(order.steps(start), 12 - done))
        assert [_plain(plan) for plan in rest] == [_plain(plan) for plan in whole[done:]]


def test_without_shuffling_the_samples_come_in_order() -> None:
    assert counted(epoch_of(order_of(10, 4, 3, 1, shuffle=False))) == list(range(10))


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("size", [1, 5, 21, 97])
@pytest.mark.parametrize("data_size", [1, 2, 3, 4])
def test_an_evaluation_reads_each_sample_once_and_ends_on_all_ranks_alike(
    size: int, data_size: int, equal_counts: bool
) -> None:
    order = order_of(size, size, 4, data_size, equal_counts=equal_counts)
    passes = [list(on_rank.once_through()) for on_rank in on_every_rank(order)]
    assert sorted(i for plans in passes for i in counted(plans)) == list(range(size))
    assert all(len(plan.micro_batches) == 1 for plans in passes for plan in plans)
    if equal_counts:
        assert len({len(plans) for plans in passes}) == 1


def _plain(plan: StepPlan) -> object:
    parts = [(part.index, part.ids.tolist(), part.filler) for part in plan.micro_batches]
    return plan.epoch, plan.samples, parts, plan.after
