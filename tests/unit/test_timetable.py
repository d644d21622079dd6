"""Timetables of a pipeline: everything is done once, nobody waits for ever, and what cannot work is refused."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import get_args

import pytest

from lockstep.config.schema import PipelineConfig, Schedule
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.parallel.pipeline.timetable import (
    Action,
    check,
    check_micro_batches,
    choose_micro_batch,
    peak_in_flight,
    stages_of,
    timetable,
)

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
PER_RANK: dict[Schedule, tuple[int, ...]] = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved-1f1b": (2, 3),
    "looped-bfs": (2, 3),
    "interleaved-zero-bubble": (2, 3),
    "zbv": (2,),
    "dualpipev": (2,),
}
PIPELINES = [
    pytest.param(schedule, ranks, per_rank, id=f"{schedule}-{ranks}x{per_rank}")
    for schedule in SCHEDULES
    for ranks in (1, 2, 3, 4, 8)
    for per_rank in PER_RANK[schedule]
]
MICRO_BATCHES = range(1, 18)

each_pipeline = pytest.mark.parametrize(("schedule", "ranks", "per_rank"), PIPELINES)


@each_pipeline
def test_every_rank_has_its_stages(schedule: Schedule, ranks: int, per_rank: int) -> None:
    stages = stages_of(schedule, ranks, per_rank)
    assert sorted(stage for own in stages for stage in own) == list(range(ranks * per_rank))
    for number in MICRO_BATCHES:
        actions = timetable(schedule, ranks, per_rank, number)
        assert [sorted({action.stage for action in own}) for own in actions] == stages


def test_stages_go_round_the_ranks_or_down_and_up() -> None:
    assert stages_of("1f1b", 3, 1) == [[0], [1], [2]]
    assert stages_of("interleaved-1f1b", 3, 2) == [[0, 3], [1, 4], [2, 5]]
    assert stages_of("zbv", 3, 2) == [[0, 5], [1, 4], [2, 3]]


@each_pipeline
def test_each_stage_does_each_micro_batch_once(schedule: Schedule, ranks: int, per_rank: int) -> None:
    for number in MICRO_BATCHES:
        for actions in timetable(schedule, ranks, per_rank, number):
            done: dict[tuple[int, int], str] = {}
            for kind, stage, micro_batch in actions:
                done[stage, micro_batch] = done.get((stage, micro_batch), "") + kind
            assert len(done) == per_rank * number
            assert set(done.values()) <= {"FB", "FIW"}


@each_pipeline
def test_a_stage_sees_the_micro_batches_in_order(schedule: Schedule, ranks: int, per_rank: int) -> None:
    """Running statistics, as of BatchNorm, depend on it."""
    for number in MICRO_BATCHES:
        for own, actions in zip(
            stages_of(schedule, ranks, per_rank), timetable(schedule, ranks, per_rank, number), strict=True
        ):
            for stage in own:
                forward = [action.micro_batch for action in actions if (action.kind, action.stage) == ("F", stage)]
                assert forward == list(range(number))


@each_pipeline
def test_no_rank_waits_for_ever(schedule: Schedule, ranks: int, per_rank: int) -> None:
    owner = {stage: rank for rank, own in enumerate(stages_of(schedule, ranks, per_rank)) for stage in own}
    for number in MICRO_BATCHES:
        assert not stuck(timetable(schedule, ranks, per_rank, number), owner)


def test_a_rank_that_waits_for_ever_is_found() -> None:
    first, last = timetable("gpipe", 2, 1, 2)
    late = [Action("F", 1, 1), Action("F", 1, 0), *last[2:]]
    assert not stuck([first, late], {0: 0, 1: 1})
    early = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    assert stuck([early, late], {0: 0, 1: 1}) == {0: Action("B", 0, 0), 1: Action("F", 1, 1)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_what_a_rank_holds(ranks: int) -> None:
    for number in MICRO_BATCHES:
        assert [peak_in_flight(actions) for actions in timetable("gpipe", ranks, 1, number)] == [number] * ranks
        assert [peak_in_flight(actions) for actions in timetable("1f1b", ranks, 1, number)] == [
            min(number, ranks - rank) for rank in range(ranks)
        ]


def test_activations_are_held_until_the_gradients_of_the_weights_are_there() -> None:
    first, second = ([Action("F", 0, number), Action("I", 0, number)] for number in (0, 1))
    weights = [Action("W", 0, 0), Action("W", 0, 1)]
    assert peak_in_flight([*first, *second, *weights]) == 2
    assert peak_in_flight([*first, weights[0], *second, weights[1]]) == 1


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        ("gpipe", ["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"]),
        ("1f1b", ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]),
    ],
)
def test_the_orders_of_one_stage_per_rank(schedule: Schedule, order: list[str]) -> None:
    actions = timetable(schedule, 2, 1, 3)
    assert [" ".join(f"{kind}{micro_batch}" for kind, _, micro_batch in own) for own in actions] == order


@each_pipeline
def test_a_number_that_is_refused_runs_all_the_same(schedule: Schedule, ranks: int, per_rank: int) -> None:
    """All forwards first; 1f1b has an order of its own for any number."""
    for number in MICRO_BATCHES:
        if refusal(schedule, ranks, per_rank, number) and schedule != "1f1b":
            for actions in timetable(schedule, ranks, per_rank, number):
                assert "".join(action.kind for action in actions) == "F" * per_rank * number + "B" * per_rank * number


@pytest.mark.parametrize("schedule", ["gpipe", "looped-bfs"])
def test_schedules_that_do_all_forwards_first_take_any_number(schedule: Schedule) -> None:
    for number in MICRO_BATCHES:
        check(schedule, 4, PER_RANK[schedule][0], number)


@pytest.mark.parametrize(("schedule", "least"), [("1f1b", 4), ("zbv", 4), ("dualpipev", 8)])
def test_others_take_any_number_from_their_least(schedule: Schedule, least: int) -> None:
    for number in MICRO_BATCHES:
        assert bool(refusal(schedule, 4, PER_RANK[schedule][0], number)) == (number < least)


@pytest.mark.parametrize(
    ("schedule", "ranks", "per_rank", "micro_batches", "message"),
    [
        ("gpipe", 2, 2, 4, "schedule gpipe needs exactly 1 stage per rank, not 2: give 1 stage per rank, or use "
         "schedule looped-bfs"),
        ("1f1b", 2, 3, 4, "schedule 1f1b needs exactly 1 stage per rank, not 3: give 1 stage per rank, or use "
         "schedule interleaved-1f1b"),
        ("interleaved-1f1b", 2, 1, 4, "schedule interleaved-1f1b needs at least 2 stages per rank, not 1: give 2 or "
         "more stages per rank, or use schedule 1f1b"),
        ("looped-bfs", 2, 1, 4, "schedule looped-bfs needs at least 2 stages per rank, not 1: give 2 or more stages "
         "per rank, or use schedule gpipe"),
        ("interleaved-zero-bubble", 2, 1, 4, "schedule interleaved-zero-bubble needs at least 2 stages per rank, not "
         "1: give 2 or more stages per rank, or use schedule 1f1b"),
        ("zbv", 2, 1, 4, "schedule zbv needs exactly 2 stages per rank, not 1: give 2 stages per rank, or use schedule "
         "1f1b"),
        ("dualpipev", 2, 3, 4, "schedule dualpipev needs exactly 2 stages per rank, not 3: give 2 stages per rank, or "
         "use schedule interleaved-zero-bubble"),
        ("1f1b", 4, 1, 3, "schedule 1f1b on 4 ranks needs at least 4 micro-batches in a step, not 3: give 4 or more (a "
         "smaller micro_batch, or a larger global_batch), or use schedule gpipe"),
        ("zbv", 4, 2, 3, "schedule zbv on 4 ranks needs at least 4 micro-batches in a step, not 3: give 4 or more (a "
         "smaller micro_batch, or a larger global_batch), or use schedule looped-bfs"),
        ("dualpipev", 4, 2, 7, "schedule dualpipev on 4 ranks needs at least 8 micro-batches in a step, not 7: give 8 "
         "or more (a smaller micro_batch, or a larger global_batch), or use schedule zbv"),
        ("interleaved-1f1b", 4, 2, 9, "schedule interleaved-1f1b on 4 ranks cannot take 9 micro-batches, which are not "
         "2 rounds of equal size: give 7, 8 or 10 micro-batches, or use schedule looped-bfs"),
        ("interleaved-zero-bubble", 2, 2, 5, "schedule interleaved-zero-bubble on 2 ranks cannot take 5 micro-batches, "
         "which are not 2 rounds of equal size: give 3, 4 or 6 micro-batches, or use schedule looped-bfs"),
        ("1f1n", 2, 1, 4, "unknown schedule '1f1n': did you mean '1f1b'?"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_what_would(
    schedule: Schedule, ranks: int, per_rank: int, micro_batches: int, message: str
) -> None:
    with pytest.raises(UserError) as refused:
        check(schedule, ranks, per_rank, micro_batches)
    assert str(refused.value) == message


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zero-bubble"])
def test_the_numbers_a_refusal_names_are_taken(schedule: Schedule) -> None:
    for ranks in (2, 3, 4, 8):
        for number in range(1, 60):
            refused = refusal(schedule, ranks, 2, number)
            for named in [int(word.strip(",")) for word in refused.split() if word.strip(",").isdigit()]:
                check(schedule, ranks, 2, named)


def counts(schedule: Schedule, ranks: int, per_rank: int, data_size: int, global_batch: int) -> set[int]:
    """The numbers of micro-batches that the schedule takes, and that some size of micro-batch makes of a batch."""
    found = set()
    for micro_batch in range(1, global_batch + 1):
        fewest, more = divmod(-(-global_batch // micro_batch), data_size)
        if fewest and not any(refusal(schedule, ranks, per_rank, number) for number in {fewest, fewest + bool(more)}):
            found.add(fewest)
    return found


BATCHES = [(data_size, global_batch) for data_size in (1, 2, 3) for global_batch in (24, 48, 50, 63)]


@each_pipeline
def test_a_micro_batch_that_is_chosen_suits_the_schedule(schedule: Schedule, ranks: int, per_rank: int) -> None:
    config = PipelineConfig(schedule=schedule, stages_per_rank=per_rank)
    for data_size, global_batch in BATCHES:
        if counts(schedule, ranks, per_rank, data_size, global_batch):
            micro_batch = choose_micro_batch(config, ranks, global_batch, data_size)
            check_micro_batches(config, Layout(pp=ranks, dp=data_size), global_batch, micro_batch, None)


@each_pipeline
def test_a_number_of_micro_batches_is_obeyed_or_refused_with_some_that_work(
    schedule: Schedule, ranks: int, per_rank: int
) -> None:
    for data_size, global_batch in BATCHES:
        possible = counts(schedule, ranks, per_rank, data_size, global_batch)
        for number in range(1, 40):
            config = PipelineConfig(schedule=schedule, stages_per_rank=per_rank, micro_batches=number)
            if number in possible:
                micro_batch = choose_micro_batch(config, ranks, global_batch, data_size)
                check_micro_batches(config, Layout(pp=ranks, dp=data_size), global_batch, micro_batch, None)
                assert -(-global_batch // micro_batch) // data_size == number
            else:
                named = re.findall(r"\d+", fix_of(choose_micro_batch, config, ranks, global_batch, data_size))
                assert {int(other) for other in named} <= possible


def test_names_and_checks_leave_torch_out_and_torch_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import sys; from lockstep.parallel.pipeline.timetable import check, stages_of; "
        "check('zbv', 2, 2, 4); stages_of('zbv', 2, 2); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with caplog.at_level(logging.WARNING):
        for schedule in SCHEDULES:
            timetable.__wrapped__(schedule, 4, PER_RANK[schedule][0], 8)
    assert not caplog.records


def refusal(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int) -> str:
    """The fix a refusal gives; empty when the number is taken."""
    return fix_of(check, schedule, ranks, per_rank, micro_batches)


def fix_of(function: Callable[..., object], *args: object) -> str:
    try:
        function(*args)
    except UserError as error:
        return error.fix
    return ""


def stuck(actions: list[list[Action]], owner: dict[int, int]) -> dict[int, Action]:
    """Let the ranks do their actions in order until none can go on: what each is left with.

    What goes from one rank to another arrives in the order it was sent in; the receiver puts aside what it does not
    need yet.
    """
    links: dict[tuple[int, int], deque[Action]] = {(a, b): deque() for a in owner.values() for b in owner.values()}
    here: list[set[Action]] = [set() for _ in actions]
    left = [deque(own) for own in actions]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(left):
            while own and ready(rank, own[0], owner, links, here[rank]):
                action = own.popleft()
                here[rank].add(action)
                kind, stage, micro_batch = action
                if kind != "W" and (taker := owner.get(stage + (1 if kind == "F" else -1))) is not None:
                    links[rank, taker].append(Action("F" if kind == "F" else "B", stage, micro_batch))
                moved = True
    return {rank: own[0] for rank, own in enumerate(left) if own}


def ready(
    rank: int,
    action: Action,
    owner: dict[int, int],
    links: dict[tuple[int, int], deque[Action]],
    here: set[Action],
) -> bool:
    """Whether all that an action needs has been done here or can be received, and receive it."""
    for needed in needs(action, len(owner)):
        arriving = links[owner[needed.stage], rank]
        while needed not in here and arriving:
            here.add(arriving.popleft())
        if needed not in here:
            return False
    return True


def needs(action: Action, stages: int) -> Iterator[Action]:
    """What has to be done before an action. A gradient that arrives counts as B, however the sender made it."""
    kind, stage, micro_batch = action
    if kind == "W":
        yield Action("I", stage, micro_batch)
        return
    if kind == "F" and stage > 0:
        yield Action("F", stage - 1, micro_batch)
    if kind != "F":
        yield Action("F", stage, micro_batch)
        if stage < stages - 1:
            yield Action("B", stage + 1, micro_batch)
