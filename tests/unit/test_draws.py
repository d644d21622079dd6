"""Random draws of a forward follow the samples, or are one for all of them, as the trial has learnt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from lockstep.runtime.draws import SampleDraws

Forward = Callable[[int], torch.Tensor]


def drawn(draws: SampleDraws, positions: Sequence[int], forward: Forward) -> torch.Tensor:
    """What a forward of these samples of a step draws."""
    torch.manual_seed(7)
    draws.begin(0, positions, lambda position: 100 + position)
    with draws:
        return forward(len(positions))


def learnt(*forwards: Forward) -> SampleDraws:
    """After a trial of five samples, of two and of three."""
    draws = SampleDraws()
    with draws.learning():
        for forward in forwards:
            for count in (5, 2, 3):
                drawn(draws, range(count), forward)
    return draws


def for_each(samples: int) -> torch.Tensor:
    return torch.randn(samples, 10)


def for_all(_: int) -> torch.Tensor:
    return torch.randn(10)


def test_what_is_drawn_for_each_sample_is_the_same_however_a_step_is_cut():
    draws = learnt(for_each)
    parts = [drawn(draws, range(3), for_each), drawn(draws, range(3, 6), for_each)]
    assert torch.equal(drawn(draws, range(6), for_each), torch.cat(parts))


@pytest.mark.parametrize("width", range(1, 7))
def test_what_is_drawn_for_all_is_so_whatever_number_of_samples_it_looks_like(width: int):
    def forward(_: int) -> torch.Tensor:
        return torch.randn(width)

    draws = learnt(forward)
    seen = [drawn(draws, range(count), forward) for count in range(1, 7)]
    assert all(torch.equal(one, seen[0]) for one in seen)


def test_it_counts_while_it_is_learnt_from_the_second_number_of_samples_on():
    draws = SampleDraws()
    with draws.learning():
        for count in (5, 2):
            drawn(draws, range(count), lambda _: torch.randn(5))
        five, three = (drawn(draws, range(count), lambda _: torch.randn(5)) for count in (5, 3))
    assert torch.equal(five, three)


def test_by_a_coin_a_forward_may_draw_for_each_sample_where_it_drew_for_all():
    for draws in (learnt(for_all), learnt(for_all, for_each), learnt(for_each, for_all)):
        parts = [drawn(draws, range(3), for_each), drawn(draws, range(3, 6), for_each)]
        assert torch.equal(drawn(draws, range(6), for_each), torch.cat(parts))
        assert torch.equal(drawn(draws, range(6), for_all), drawn(draws, range(3), for_all))
