"""What is a spike of the loss, and what is not."""

from __future__ import annotations

import math
import random

import pytest

from lockstep.step.spikes import HISTORY, LASTING, LEVEL, SpikeDetector


def losses(steps: int, noise: float, seed: int, fall: float = 50.0) -> list[float]:
    """A loss that falls from 5 to 0.5, with noise that is a factor."""
    draw = random.Random(seed)
    return [(0.5 + 4.5 * math.exp(-step / fall)) * math.exp(draw.gauss(0, noise)) for step in range(steps)]


def spikes_in(numbers: list[float]) -> list[int]:
    detector = SpikeDetector()
    return [step for step, loss in enumerate(numbers, start=1) if detector.see(loss) is not None]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.3, 1.0])
def test_a_noisy_falling_loss_is_no_spike(noise: float) -> None:
    assert [spikes_in(losses(400, noise, seed)) for seed in range(5)] == [[]] * 5


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.2])
def test_a_loss_of_five_times_the_level_is_found_at_once_and_only_it(noise: float) -> None:
    for seed in range(20):
        at = random.Random(seed).randrange(LEVEL + HISTORY, 300)
        numbers = losses(300, noise, seed)
        numbers[at] *= 5
        assert spikes_in(numbers) == [at + 1]


def test_where_losses_are_noisy_a_spike_that_lasts_is_found_within_three_steps() -> None:
    found = 0
    for seed in range(20):
        numbers = losses(200, 0.4, seed)
        numbers[120:123] = [5 * loss for loss in numbers[120:123]]
        found += bool({121, 122, 123} & set(spikes_in(numbers)))
    assert found >= 18


def test_a_spike_does_not_raise_the_level_and_a_lasting_one_does_after_a_while() -> None:
    numbers = [1.0] * 60 + [6.0, 6.0] + [1.0] * 5 + [6.0] * 40 + [30.0]
    alarms = spikes_in(numbers)
    assert alarms[:2] == [61, 62], "the second is measured against the level before the first"
    assert alarms[2:-1] == list(range(68, 68 + LASTING - 1)), "then the new level is taken for what it is"
    assert alarms[-1] == len(numbers), "and what is above it is a spike again"


def test_what_is_found_says_how_high_it_is() -> None:
    detector = SpikeDetector()
    for _ in range(50):
        assert detector.see(2.0) is None
    spike = detector.see(10.0)
    assert spike is not None
    assert (spike.loss, spike.first) == (10.0, True)
    assert (spike.level, spike.factor) == pytest.approx((2.0, 5.0))
    again = detector.see(10.0)
    assert again is not None
    assert not again.first


def test_a_detector_that_was_saved_goes_on_as_if_it_had_not_been_interrupted() -> None:
    numbers = losses(120, 0.1, 3)
    numbers[80] *= 5
    whole, first, second = SpikeDetector(), SpikeDetector(), SpikeDetector()
    expected = [whole.see(loss) for loss in numbers]
    for loss in numbers[:70]:
        first.see(loss)
    second.restore(first.state())
    assert [second.see(loss) for loss in numbers[70:]] == expected[70:]


def test_losses_of_another_kind_pass_unseen() -> None:
    detector = SpikeDetector()
    assert [detector.see(loss) for loss in (0.0, -1.0, math.nan, math.inf)] == [None] * 4
    assert detector.state()["accepted"] == []
