"""Curves and grids: as few points as asked for, and every extreme still there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.page.reading.series import MOST_COLUMNS, Grid, Series, curve_of, ratio_curve, rounded
from lockstep.page.reading.steps import FIELDS, Steps, pack


def test_few_points_are_shown_as_they_are() -> None:
    series = Series(8)
    for step in range(1, 9):
        series.add(step, step / 2)
    curve = series.curve("loss")
    assert curve.x == [1, 2, 3, 4, 5, 6, 7, 8]
    assert curve.y == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert curve.low is None


def test_many_points_merge_in_pairs_and_keep_mean_lowest_and_highest() -> None:
    series = Series(8)
    for step in range(1, 10):
        series.add(step, {3: 100.0, 6: -100.0}.get(step, 1.0))
    curve = series.curve("loss")
    assert curve.x == [1, 3, 5, 7, 9]
    assert curve.y == [1, 50.5, -49.5, 1, 1]
    assert curve.low == [1, 1, -100, 1, 1]
    assert curve.high == [1, 100, 1, 1, 1]


@pytest.mark.parametrize("count", [1, 7, 1000, 12_345])
def test_a_series_is_bounded_and_loses_no_extreme(count: int) -> None:
    series = Series(100)
    for step in range(1, count + 1):
        series.add(step, 1e6 if step == count // 2 + 1 else math.sin(step))
    curve = series.curve("loss")
    assert len(curve.x) <= 100
    assert curve.x == sorted(set(curve.x))
    assert max(value for value in curve.high or curve.y if value is not None) == 1e6


def test_a_step_that_comes_again_replaces_what_came_after_it() -> None:
    series = Series(100)
    for step in (1, 2, 3, 4, 5):
        series.add(step, 1.0)
    for step in (3, 4):
        series.add(step, 2.0)
    curve = series.curve("loss")
    assert (curve.x, curve.y) == ([1, 2, 3, 4], [1, 1, 2, 2])


def test_what_is_not_finite_is_counted_and_in_no_mean() -> None:
    series = Series(4)
    for step, value in enumerate([1.0, math.nan, 3.0, math.inf, math.nan, math.nan], start=1):
        series.add(step, value)
    assert series.not_finite == 4
    assert series.curve("loss").y == [1, 3, None]


def test_arrays_are_thinned_the_same_way() -> None:
    steps = np.arange(1, 100_001, dtype=float)
    losses = np.ones(100_000)
    losses[77_777], losses[5] = 50.0, np.nan
    curve = curve_of("loss", steps, losses, most=100)
    assert len(curve.x) == 100
    assert curve.high is not None
    assert max(value for value in curve.high if value is not None) == 50
    assert None not in curve.y
    nothing = curve_of("loss", steps[:0], losses[:0])
    assert (nothing.x, nothing.y) == ([], [])


def test_a_rate_of_merged_steps_is_the_sum_of_items_over_the_sum_of_seconds() -> None:
    curve = ratio_curve("rate", np.array([1.0, 2]), np.array([10.0, 10]), np.array([1.0, 4]), most=1)
    assert (curve.y, curve.low, curve.high) == ([4], [2.5], [10])


def test_numbers_have_seven_digits_so_that_four_come_out_right() -> None:
    assert rounded(2.4314656) == 2.431466, "five would be 2.4315, which is written as 2.432"
    assert rounded(12345678.0) == 12345680
    assert rounded(math.nan) is None
    assert isinstance(rounded(3.0), int)


def test_a_grid_is_bounded_and_keeps_the_highest_of_each_row() -> None:
    grid = Grid()
    at = grid.places_of([("busy", "GPU 0"), ("busy", "GPU 1")])
    for look in range(10 * MOST_COLUMNS):
        grid.add(look, at, np.array([99.0 if look == 777 else 1.0, np.nan]))
    assert grid.mean().shape == (2, len(grid.at))
    assert len(grid.at) <= MOST_COLUMNS
    assert grid.high()[0].max() == 99
    assert grid.low()[0].min() == 1
    assert np.isnan(grid.high()[1]).all()
    assert grid.at[-1] == 10 * MOST_COLUMNS - 1


def test_a_grid_goes_back_and_takes_in_new_rows() -> None:
    grid = Grid()
    for step in (10, 20, 30):
        grid.add(step, grid.places_of([("wait", "0")]), np.array([float(step)]))
    grid.go_back(16)
    grid.add(25, grid.places_of([("wait", "0"), ("wait", "1")]), np.array([7.0, 8.0]))
    assert grid.at.tolist() == [10, 25]
    np.testing.assert_array_equal(grid.mean(), [[10, 7], [np.nan, 8]])


def test_of_steps_done_again_the_later_line_counts() -> None:
    steps = Steps()
    for attempt, step in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (2, 5)]:
        steps.add(attempt, pack(*[float(step) if name == "step" else float(attempt) for name in FIELDS]))
    columns = steps.columns()
    kept = columns.where(columns.kept)
    assert kept.step.tolist() == [1, 2, 3, 4, 5]
    assert kept.attempt.tolist() == [1, 1, 2, 2, 2]
    assert Steps().columns().kept.tolist() == []
