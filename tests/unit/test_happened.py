"""A timetable of what happened has one clock, also where its places are on hosts that have one each."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.parallel.pipeline import timeline as happened
from lockstep.parallel.pipeline.timeline import Lane

# Two micro-batches through two places, gpipe; a forward takes 1 s, a backward 2 s, and a message 0.1 s.
FIRST: Lane = [("F", 0, 0, 0.0, 1.0), ("F", 0, 1, 1.0, 2.0), ("B", 0, 0, 5.2, 7.2), ("B", 0, 1, 7.2, 9.2)]
SECOND: Lane = [("F", 1, 0, 1.1, 2.1), ("F", 1, 1, 2.1, 3.1), ("B", 1, 0, 3.1, 5.1), ("B", 1, 1, 5.1, 7.1)]


def moved(lane: Lane, by: float) -> Lane:
    return [(kind, stage, number, begin + by, end + by) for kind, stage, number, begin, end in lane]


def timetable_event(lanes: list[Lane], nodes: list[int]) -> dict[str, Any]:
    told = happened.timetable_event(lanes, nodes)
    assert told is not None
    return told


def test_times_begin_with_the_first_action_and_busy_is_the_share_of_what_was_computed() -> None:
    told = timetable_event([moved(FIRST, 50.0), moved(SECOND, 50.0)], [1, 1])
    assert told["seconds"] == 9.2
    assert told["busy"] == [pytest.approx(6 / 9.2, abs=1e-4)] * 2
    assert told["lanes"][0][0] == ["F", 0, 0, 0.0, 1.0]
    assert told["lanes"][1][3] == ["B", 1, 1, 5.1, 7.1]


@pytest.mark.parametrize("ahead", [-1234.5, 0.0, 0.03, 9876.5])
def test_clocks_of_two_hosts_are_aligned_by_what_they_sent_each_other(ahead: float) -> None:
    told = timetable_event([FIRST, moved(SECOND, ahead)], [1, 2])
    # Both ways took 0.1 s, so the middle is exact.
    assert told == timetable_event([FIRST, SECOND], [1, 1])


def test_ways_that_differ_are_off_by_half_of_their_difference() -> None:
    late = [*FIRST[:2], *moved(FIRST[2:], 0.4)]  # gradients took 0.5 s
    told = timetable_event([late, moved(SECOND, 77.0)], [1, 2])
    assert told["lanes"][1][0][3] == pytest.approx(1.1 + 0.2)


def test_stages_before_which_all_is_frozen_are_aligned_by_values_alone() -> None:
    """They wait for no gradients, and their backward may be over before."""
    early: Lane = [*FIRST[:2], ("B", 0, 0, 2.0, 2.1), ("B", 0, 1, 2.1, 2.2)]
    told = timetable_event([early, moved(SECOND, 77.0)], [1, 2])
    assert told["lanes"][1][0][3] == pytest.approx(1.0), "as soon as it could be"


def test_a_third_place_follows_the_second() -> None:
    first: Lane = [("F", 0, 0, 0.0, 1.0), ("I", 0, 0, 7.0, 8.0), ("W", 0, 0, 8.0, 9.0)]
    second: Lane = [("F", 1, 0, 1.0, 2.0), ("I", 1, 0, 6.0, 7.0), ("W", 1, 0, 7.0, 8.0)]
    third: Lane = [("F", 2, 0, 2.0, 3.0), ("B", 2, 0, 3.0, 6.0)]
    lanes = [first, moved(second, 5.0), moved(third, -30.0)]
    told = timetable_event(lanes, [1, 2, 3])
    assert told == timetable_event([first, second, third], [1] * 3)


def test_a_place_without_a_backward_is_aligned_by_what_it_was_sent() -> None:
    told = timetable_event([FIRST, moved(SECOND[:2], 77.0)], [1, 2])
    assert told["lanes"][1][0][3] == pytest.approx(1.0), "as soon as it could be"


def test_without_a_message_between_two_nodes_or_any_time_there_is_no_timetable() -> None:
    assert happened.timetable_event([FIRST, [("F", 5, 0, 77.0, 78.0)]], [1, 2]) is None
    assert happened.timetable_event([FIRST, []], [1, 2]) is None
    assert happened.timetable_event([[], []], [1, 1]) is None
    assert happened.timetable_event([[("F", 0, 0, 1.0, 1.0)]], [1]) is None
    assert happened.timetable_event([FIRST, []], [1, 1]) is not None, "on one node there is one clock"
