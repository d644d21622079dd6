"""From measured times to two numbers, and to times between measured sizes."""

from __future__ import annotations

import random

import pytest

from lockstep.links.collective_cost import Link
from lockstep.links.fit import TimeCurve, fit_link, worst_miss

SIZES = [1e3 * 4**power for power in range(9)]
LINK = Link(alpha=40e-6, beta=1 / 2e9)


def measured(link: Link, noise: float, seed: int = 0) -> list[tuple[float, float]]:
    generator = random.Random(seed)
    return [(size, link.seconds(size) * (1 + generator.uniform(-noise, noise))) for size in SIZES]


def test_exact_times_give_back_the_two_numbers() -> None:
    found = fit_link(measured(LINK, noise=0))
    assert found.alpha == pytest.approx(LINK.alpha, rel=1e-6)
    assert found.beta == pytest.approx(LINK.beta, rel=1e-6)
    assert worst_miss(found, measured(LINK, noise=0)) < 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_noisy_times_give_them_back_within_the_noise(seed: int) -> None:
    found = fit_link(measured(LINK, noise=0.1, seed=seed))
    assert found.alpha == pytest.approx(LINK.alpha, rel=0.1)
    assert found.beta == pytest.approx(LINK.beta, rel=0.1)


def test_one_disturbed_point_does_not_carry_the_rest_away() -> None:
    points = measured(LINK, noise=0.02)
    points[2] = (points[2][0], points[2][1] * 20)
    found = fit_link(points)
    assert found.alpha == pytest.approx(LINK.alpha, rel=0.1)
    assert found.beta == pytest.approx(LINK.beta, rel=0.1)


def test_neither_number_is_ever_below_zero() -> None:
    assert fit_link([(1e3, 1e-3), (1e6, 5e-4)]).beta == 0
    assert fit_link([(1e3, 1e-6), (1e6, 1e-2)]).alpha == 0
    assert fit_link([(1e6, 2e-3)]) == Link(2e-3, 0)


def test_a_curve_follows_a_bend_that_two_numbers_miss() -> None:
    bent = [(size, LINK.seconds(size) * (3 if size > 3e6 else 1)) for size in SIZES]
    curve = TimeCurve.through(bent)
    for size, seconds in bent:
        assert curve.seconds(size) == pytest.approx(seconds)
    assert worst_miss(fit_link(bent), bent) > 0.15


@pytest.mark.parametrize("factor", [1.5, 2, 3])
def test_a_curve_predicts_sizes_between_the_measured_ones(factor: float) -> None:
    curve = TimeCurve.through(measured(LINK, noise=0))
    for size in SIZES[:-1]:
        assert curve.seconds(size * factor) == pytest.approx(LINK.seconds(size * factor))


def test_beyond_the_measured_sizes_the_last_known_holds() -> None:
    curve = TimeCurve.through([(1e3, 1e-4), (1e6, 1e-3)])
    assert curve.seconds(1) == pytest.approx(1e-4)
    assert curve.seconds(1e7) == pytest.approx(1e-2)


def test_no_time_is_below_that_of_a_smaller_size() -> None:
    curve = TimeCurve.through([(1e6, 1e-3), (1e3, 4e-4), (4e3, 1e-4), (1.6e4, 2e-4)])
    times = [curve.seconds(10 ** (power / 10)) for power in range(20, 80)]
    assert times == sorted(times)
    assert curve.seconds(1e3) == pytest.approx(2e-4), "the geometric mean of 4e-4 and 1e-4"
