"""Who is slow, from where the time of each rank's steps went: the slow rank is named, not those that wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lockstep.faults.stragglers import Straggler, StragglerWatch, find_straggler, ranks_event
from lockstep.layout import Layout
from tests.events import Event


def ranks(
    compute: Sequence[float],
    input: Sequence[float] | None = None,
    step: float | None = None,
    samples: Sequence[int] | None = None,
) -> Event:
    """Steps that take as long as their slowest rank, or longer: all the others wait for it."""
    reads = input or [0.001] * len(compute)
    whole = step or max(map(sum, zip(compute, reads, strict=True))) + 0.004
    return {
        "steps": 20,
        "seconds": whole,
        "input": list(reads),
        "compute": list(compute),
        "wait": [whole - one - other for one, other in zip(compute, reads, strict=True)],
        "samples": samples or [8] * len(compute),
        "memory": [1] * len(compute),
        "hosts": [f"node{rank // 2}" for rank in range(len(compute))],
    }


def found(event: Event, layout: str) -> Straggler:
    straggler = find_straggler(event, Layout.parse(layout))
    assert straggler is not None
    return straggler


def test_a_rank_that_computes_longer_is_named_with_evidence_and_fix() -> None:
    slow = found(ranks([0.110, 0.312]), "dp=2")
    assert (slow.rank, slow.host, slow.cause, slow.seconds, slow.others) == (1, "node0", "compute", 0.312, 0.110)
    assert slow.text == (
        "rank 1 (node0) is slow: its compute takes 0.312 s of a step and that of the others 0.110 s, so that they wait "
        "0.202 s for it: look at its device (lockstep doctor), or at what only this rank does"
    )


def test_a_rank_whose_data_are_late_is_named() -> None:
    slow = found(ranks([0.1, 0.1, 0.1, 0.1], input=[0.001, 0.001, 0.201, 0.002]), "fsdp=4")
    assert (slow.rank, slow.host, slow.cause) == (2, "node1", "input")
    assert "its data take 0.201 s of a step and those of the others 0.001 s" in slow.text
    assert "more data.workers" in slow.text


def test_of_two_reasons_the_larger_is_named() -> None:
    assert found(ranks([0.1, 0.2], input=[0.3, 0.001]), "dp=2").cause == "input"
    assert found(ranks([0.1, 0.5], input=[0.3, 0.001]), "dp=2").cause == "compute"


def test_several_slow_ranks_are_counted() -> None:
    slow = found(ranks([0.1, 0.1, 0.1, 0.1, 0.1, 0.29, 0.3, 0.28]), "dp=8")
    assert slow.text.startswith("rank 6 (node3), the slowest of 3 is slow")
    assert slow.others == 0.1


@pytest.mark.parametrize(
    "event",
    [
        ranks([0.100, 0.112]),
        ranks([0.020, 0.0235, 0.019, 0.021]),
        ranks([0.0001, 0.0095]),  # much longer, but nobody would notice
        ranks([0.1, 0.1], input=[0.001, 0.012]),
        ranks([0.06, 0.06], step=0.1),
    ],
    ids=["a tenth", "small steps", "tiny steps", "data a little late", "less than half of it waiting"],
)
def test_nobody_is_named_for_what_comes_and_goes(event: Event) -> None:
    assert find_straggler(event, Layout(dp=len(event["hosts"]))) is None


def test_ranks_that_all_wait_are_held_up_by_the_network() -> None:
    slow = found(ranks([0.1, 0.11], step=0.5), "dp=2")
    assert (slow.rank, slow.host, slow.cause, slow.others) == (None, None, "communication", None)
    assert slow.seconds == pytest.approx(0.394)
    assert "none is slow by itself: lockstep bench finds the slow link" in slow.text


def test_ranks_that_all_wait_for_data_are_held_up_by_them_also_when_there_is_only_one() -> None:
    slow = found(ranks([0.1], input=[0.3]), "single")
    assert (slow.rank, slow.cause) == (None, "input")
    assert "waits 0.300 s of a step of 0.404 s for its data: use more data.workers" in slow.text


def test_in_a_pipeline_ranks_are_compared_with_those_of_the_same_place() -> None:
    """Ranks 0 and 1 have the first half of the model, 2 and 3 the second."""
    slow = found(ranks([0.1, 0.1, 0.14, 0.34]), "pp=2,dp=2")
    assert (slow.rank, slow.others) == (3, 0.14)


def test_places_of_a_pipeline_that_differ_are_unequal_cuts() -> None:
    slow = found(ranks([0.1, 0.3]), "pp=2")
    assert slow.rank == 1
    assert slow.text.startswith("place 1 of the pipeline (rank 1 on node0) computes 0.300 s of a step and the others")
    assert "pipeline.cuts" in slow.text
    assert find_straggler(ranks([0.1, 0.11]), Layout.parse("pp=2")) is None


def test_a_pipeline_that_mostly_waits_wants_more_micro_batches() -> None:
    assert "pipeline.micro_batches" in found(ranks([0.1, 0.11], step=0.5), "pp=2").text


def test_it_is_said_once_it_was_seen_twice_and_again_only_when_it_changes() -> None:
    watch = StragglerWatch(Layout.parse("dp=2"))
    healthy, first, second = ranks([0.1, 0.1]), ranks([0.3, 0.1]), ranks([0.1, 0.3])
    seen = [healthy, first, healthy, first, first, first, second, second, second, first, first]
    said = [slow.rank if (slow := watch.look(event)) else None for event in seen]
    assert said == [None, None, None, None, 0, None, None, 1, None, None, 0]


def test_the_few_last_steps_of_a_run_say_nothing_unless_they_are_long() -> None:
    for steps, seconds, said in ((2, 0.3, False), (2, 3.0, True), (5, 0.3, True)):
        watch = StragglerWatch(Layout.parse("dp=2"))
        event: Event = {**ranks([0.1, seconds]), "steps": steps}
        assert (watch.look(event), watch.look(event) is not None) == (None, said)


def test_a_rank_with_more_samples_may_take_longer_and_no_longer_than_that() -> None:
    """A batch that does not divide gives one rank more."""
    assert find_straggler(ranks([0.2, 0.1], samples=[16, 8]), Layout.parse("dp=2")) is None
    assert found(ranks([0.4, 0.1], samples=[16, 8]), "dp=2").rank == 0


def test_what_the_ranks_tell_becomes_seconds_of_a_mean_step() -> None:
    alike = {"steps": 4, "seconds": 2.0, "optimizer": 0.2, "between": 0.0, "samples": 8}
    told = [
        {**alike, "input": 0.4, "wait": 1.2, "memory": 5, "host": "a"},
        {**alike, "input": 0.0, "wait": 0.4, "memory": 6, "host": "b"},
    ]
    event = ranks_event(told)
    assert event["seconds"] == 0.5
    assert event["input"] == [0.1, 0.0]
    assert event["wait"] == [0.3, 0.1]
    assert event["compute"] == pytest.approx([0.1, 0.4])
    assert event["optimizer"] == [0.05, 0.05]
    assert (event["memory"], event["hosts"]) == ([5, 6], ["a", "b"])
