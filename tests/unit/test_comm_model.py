"""What the alpha-beta model says of collectives, checked against what can be counted by hand."""

from __future__ import annotations

import pytest

from lockstep.errors import UserError
from lockstep.links.collective_cost import ALGORITHMS, Link, bus_factor, check_algorithm, predict

MEGABYTE_A_SECOND = Link(alpha=0.0, beta=1e-6)


def test_five_megabytes_reach_seven_friends_in_35_seconds_one_by_one_and_in_15_by_a_tree() -> None:
    assert predict("broadcast", "naive", 8, 5e6, MEGABYTE_A_SECOND) == pytest.approx(35)
    assert predict("broadcast", "tree", 8, 5e6, MEGABYTE_A_SECOND) == pytest.approx(15)


def test_a_ring_sends_almost_twice_the_buffer_however_many_ranks_there_are() -> None:
    assert predict("all-reduce", "ring", 2, 1e6, MEGABYTE_A_SECOND) == pytest.approx(1)
    assert predict("all-reduce", "ring", 100, 1e6, MEGABYTE_A_SECOND) == pytest.approx(2 * 0.99)


def test_an_all_reduce_costs_as_much_as_its_two_halves() -> None:
    link = Link(alpha=3e-6, beta=1e-9)
    for algorithm in ("ring", "halving-doubling"):
        halves = [predict(half, algorithm, 8, 1e6, link) for half in ("reduce-scatter", "all-gather")]
        assert predict("all-reduce", algorithm, 8, 1e6, link) == pytest.approx(sum(halves))


def test_short_messages_cost_their_number_and_long_ones_their_bytes() -> None:
    link = Link(alpha=1e-3, beta=1e-9)
    few = {algorithm: predict("all-reduce", algorithm, 8, 8, link) for algorithm in ALGORITHMS["all-reduce"]}
    assert min(few, key=few.__getitem__) in ("tree", "halving-doubling")
    many = {algorithm: predict("all-reduce", algorithm, 8, 8e12, link) for algorithm in ALGORITHMS["all-reduce"]}
    assert many["ring"] == pytest.approx(many["halving-doubling"], rel=1e-3)
    assert many["ring"] < many["tree"] < many["naive"]


def test_pairs_that_all_talk_at_once_are_as_many_times_faster_as_there_are_ranks() -> None:
    ring, naive = (predict("all-to-all", algorithm, 8, 1e6, MEGABYTE_A_SECOND) for algorithm in ("ring", "naive"))
    assert naive == pytest.approx(8 * ring)


def test_one_rank_has_nobody_to_send_to() -> None:
    assert predict("all-reduce", "ring", 1, 1e9, MEGABYTE_A_SECOND) == 0


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all-reduce", 8) == 2 * 7 / 8
    assert {bus_factor(name, 8) for name in ("all-gather", "reduce-scatter", "all-to-all")} == {7 / 8}
    assert {bus_factor(name, 8) for name in ("broadcast", "reduce", "send-recv")} == {1.0}


def test_an_algorithm_that_cannot_be_is_refused_with_one_that_can() -> None:
    with pytest.raises(UserError, match="6 is not a power of two: use 4 or 8 ranks, or the ring"):
        check_algorithm("all-reduce", "halving-doubling", 6)
    with pytest.raises(UserError, match="no ring algorithm for broadcast: use tree or naive"):
        check_algorithm("broadcast", "ring", 4)
    with pytest.raises(UserError, match="unknown algorithm 'rong': did you mean 'ring'"):
        check_algorithm("all-reduce", "rong", 4)  # type: ignore[arg-type]
