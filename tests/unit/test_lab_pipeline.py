"""The pipeline lab: times follow from who waits for whom, and the picture shows the timetable that pipelines run by."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from collections import Counter
from typing import get_args

import pytest

from lockstep.config.schema import Schedule
from lockstep.lab.draw_pipeline import as_svg, in_terminal
from lockstep.lab.play_schedule import UNITS, Played, play
from lockstep.parallel.pipeline.timetable import ONE_STAGE, Action, peak_in_flight, timetable

SIZES = [(2, 4), (4, 8), (3, 6)]
ALL = [(schedule, *size) for schedule in get_args(Schedule) for size in SIZES]


def played(schedule: Schedule, ranks: int, micro_batches: int) -> Played:
    return play(schedule, ranks, 1 if schedule in ONE_STAGE else 2, micro_batches)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 8), (4, 16), (8, 8)])
def test_the_bubble_is_the_one_of_the_text_books(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    found = played(schedule, ranks, micro_batches)
    assert found.whole_bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def test_a_pipeline_of_one_rank_has_no_bubble() -> None:
    assert played("gpipe", 1, 3).whole_bubble == 0
    assert played("gpipe", 1, 3).length == 3 * (UNITS["F"] + UNITS["B"])


def test_gpipe_holds_every_micro_batch_and_1f1b_one_for_each_stage_that_follows() -> None:
    assert [played("gpipe", 4, 8).in_flight(rank) for rank in range(4)] == [8, 8, 8, 8]
    assert [played("1f1b", 4, 8).in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]


def test_more_stages_a_rank_and_halved_backward_passes_leave_less_of_a_bubble() -> None:
    plain, interleaved, halved = (
        played(schedule, 4, 8).whole_bubble for schedule in ("1f1b", "interleaved-1f1b", "interleaved-zero-bubble")
    )
    assert plain > interleaved > halved


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches"), ALL)
def test_nothing_is_done_before_what_it_needs(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    found = played(schedule, ranks, micro_batches)
    times = {piece.action: piece for lane in found.lanes for piece in lane}
    stages = ranks * len(found.stages[0])

    def gradient_of_inputs(stage: int, number: int) -> int:
        whole, half = Action("B", stage, number), Action("I", stage, number)
        return (times.get(whole) or times[half]).end

    for (kind, stage, number), piece in times.items():
        assert piece.end - piece.start == UNITS[kind]
        if kind == "F" and stage > 0:
            assert piece.start >= times[Action("F", stage - 1, number)].end
        if kind in "BI":
            assert piece.start >= times[Action("F", stage, number)].end
            if stage + 1 < stages:
                assert piece.start >= gradient_of_inputs(stage + 1, number)
        if kind == "W":
            assert piece.start >= times[Action("I", stage, number)].end
    for lane in found.lanes:
        assert all(one.end <= other.start for one, other in itertools.pairwise(lane))


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches"), ALL)
def test_the_drawn_boxes_are_the_timetable(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    found = played(schedule, ranks, micro_batches)
    per_rank = len(found.stages[0])
    root = ET.fromstring(as_svg(found))
    drawn: dict[int, list[tuple[float, Action]]] = {rank: [] for rank in range(ranks)}
    for box in root.iter("{http://www.w3.org/2000/svg}g"):
        data = {key.removeprefix("data-"): value for key, value in box.attrib.items()}
        action = Action(data["kind"], int(data["stage"]), int(data["micro-batch"]))  # type: ignore[arg-type]
        (rect,) = box.iter("{http://www.w3.org/2000/svg}rect")
        (text,) = box.iter("{http://www.w3.org/2000/svg}text")
        assert text.text == str(action.micro_batch)
        drawn[int(data["rank"])].append((float(rect.attrib["x"]), action))
    order = [[action for _, action in sorted(drawn[rank])] for rank in range(ranks)]
    assert order == timetable(schedule, ranks, per_rank, micro_batches)
    assert [found.in_flight(rank) for rank in range(ranks)] == [peak_in_flight(lane) for lane in order]

    # Every micro-batch once per stage and kind, the backward pass whole or in two halves.
    counted = Counter((action.stage, action.micro_batch, action.kind) for lane in order for action in lane)
    assert set(counted.values()) == {1}
    for stage in range(ranks * per_rank):
        for number in range(micro_batches):
            kinds = {kind for at, which, kind in counted if (at, which) == (stage, number)}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_the_terminal_shows_the_same_order(schedule: Schedule) -> None:
    found = played(schedule, 2, 4)
    lines = [text.plain.split() for text in in_terminal(found, columns=80, coloured=False)]
    for rank, lane in enumerate(found.lanes):
        (shown,) = (line[2:] for line in lines if line[:2] == ["rank", str(rank)])
        assert [word for word in shown if word != "·"] == [f"{p.action.kind}{p.action.micro_batch}" for p in lane]
        assert shown.count("·") == found.length - sum(piece.end - piece.start for piece in lane)
