"""The schedule of a pipeline: which stage and micro-batch every rank computes when, forward or backward.

The orders of the schedules with several stages per rank are torch's; running them is ours. Names and checks work
without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast, get_args

from lockstep.config.schema import PipelineConfig, Schedule
from lockstep.errors import UserError, unknown
from lockstep.layout import Layout

Kind = Literal["F", "B", "I", "W"]

ONE_STAGE = ("gpipe", "1f1b")
V_SHAPED = ("zbv", "dualpipev")
"""Two stages on each rank: down the ranks and up again, so that the first rank has the first and the last stage."""
IN_ROUNDS = ("interleaved-1f1b", "interleaved-zero-bubble")
"""The micro-batches go through a rank's stages in rounds of equal size, at least one micro-batch per rank in each."""

SPLITS_BACKWARD = ("interleaved-zero-bubble", "zbv", "dualpipev")
"""Schedules that do the gradients of the weights later than those of the inputs."""


class Action(NamedTuple):
    """One piece of work of a rank.

    `F` is the forward pass of a stage, `B` its whole backward pass; `I` and `W` are the two halves of a backward pass,
    first the gradients of the stage's inputs, which the stage before waits for, later those of its weights.
    """

    kind: Kind
    stage: int
    micro_batch: int


def stages_of(schedule: Schedule, ranks: int, per_rank: int) -> list[list[int]]:
    """The stages of every rank, first to last."""
    _check_stages(schedule, per_rank)
    if schedule in V_SHAPED:
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    return [list(range(rank, ranks * per_rank, ranks)) for rank in range(ranks)]


@cache
def timetable(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int) -> list[list[Action]]:
    """What every rank does in one step, in order; not to be changed, since every caller gets the same lists.

    A number of micro-batches that `check` refuses is taken all the same, because the last batch of an epoch may be a
    small one: the stages stay where they are, and every rank does all its forward passes, then all its backward passes.
    """
    assert micro_batches > 0
    stages = stages_of(schedule, ranks, per_rank)
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, ranks - rank, micro_batches) for rank in range(ranks)]
    if schedule == "gpipe" or not _fits(schedule, ranks, micro_batches):
        return [_all_forward_then_all_backward(own, micro_batches) for own in stages]
    return _torch_order(schedule, ranks, per_rank, micro_batches)


def check(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int) -> None:
    """Refuse a number of stages per rank or of micro-batches that the schedule cannot take."""
    _check_stages(schedule, per_rank)
    if _fits(schedule, ranks, micro_batches):
        return
    if micro_batches < (least := _least(schedule, ranks)):
        others = {"dualpipev": "zbv", "1f1b": "gpipe"}
        raise UserError(
            f"schedule {schedule} on {ranks} ranks needs at least {least} micro-batches in a step, not {micro_batches}",
            f"give {least} or more (a smaller micro_batch, or a larger global_batch), or use schedule "
            f"{others.get(schedule, 'looped-bfs')}",
        )
    near = sorted(range(1, micro_batches + ranks + 1), key=lambda number: (abs(number - micro_batches), number))
    fitting = sorted([number for number in near if _fits(schedule, ranks, number)][:3])
    raise UserError(
        f"schedule {schedule} on {ranks} ranks cannot take {micro_batches} micro-batches, which are not "
        f"{micro_batches // ranks} rounds of equal size",
        f"give {_either(fitting)} micro-batches, or use schedule looped-bfs",
    )


def choose_micro_batch(config: PipelineConfig, ranks: int, global_batch: int, data_size: int) -> int:
    """The size of a micro-batch that gives a pipeline as many as it was asked to take, or as suit it."""
    sizes: dict[int, int] = {}  # by the number of micro-batches that the data rank with the fewest gets
    for size in range(global_batch, 0, -1):
        fewest, more = divmod(-(-global_batch // size), data_size)
        if fewest and all(_fits(config.schedule, ranks, number) for number in {fewest, fewest + bool(more)}):
            sizes[fewest] = size
    if config.micro_batches is None:
        # More of them leave less of a step idle, fewer keep the device busier.
        return sizes[min(sizes, key=lambda number: abs(number - 4 * ranks))] if sizes else 1
    wanted = config.micro_batches
    if wanted in sizes:
        return sizes[wanted]
    near = sorted(sorted(sizes, key=lambda number: abs(number - wanted))[:3])
    raise UserError(
        f"pipeline.micro_batches is {wanted}, which schedule {config.schedule} on {ranks} ranks and a global batch of "
        f"{global_batch} over {data_size} data rank{'' if data_size == 1 else 's'} do not allow",
        f"give {_either(near)}, or another global_batch" if near else "use a larger global_batch, or schedule gpipe",
    )


def check_micro_batches(
    config: PipelineConfig, layout: Layout, global_batch: int, micro_batch: int, told: int | None
) -> None:
    """Refuse a number of micro-batches of a step that the schedule cannot take; `told` is the size a user gave."""
    fewest, more = divmod(-(-global_batch // micro_batch), layout.data_size)
    if told is not None and config.micro_batches not in (None, fewest):
        raise UserError(
            f"pipeline.micro_batches is {config.micro_batches}, and micro_batch {told} makes {fewest} of a step",
            "say one of them",
        )
    most = fewest + bool(more)
    for number in {most} if layout.fsdp > 1 else {fewest, most}:  # shards do the same number, with fillers
        check(config.schedule, layout.pp, config.per_rank, number)


def peak_in_flight(actions: Iterable[Action]) -> int:
    """The most activations a rank holds at once: micro-batches of its stages that wait for the end of their backward.

    They are held until `W` where the backward pass is in two halves.
    """
    held = peak = 0
    for action in actions:
        held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        peak = max(peak, held)
    return peak


def _check_stages(schedule: Schedule, per_rank: int) -> None:
    if schedule not in get_args(Schedule):
        raise unknown("schedule", schedule, get_args(Schedule))
    if schedule in ONE_STAGE and per_rank != 1:
        needs, fix = "exactly 1 stage", f"give 1 stage per rank, or use schedule {_for_many_stages(schedule)}"
    elif schedule in V_SHAPED and per_rank != 2:
        other = "1f1b" if per_rank < 2 else "interleaved-zero-bubble"
        needs, fix = "exactly 2 stages", f"give 2 stages per rank, or use schedule {other}"
    elif schedule not in (*ONE_STAGE, *V_SHAPED) and per_rank < 2:
        needs, fix = "at least 2 stages", f"give 2 or more stages per rank, or use schedule {_for_one_stage(schedule)}"
    else:
        return
    raise UserError(f"schedule {schedule} needs {needs} per rank, not {per_rank}", fix)


def _for_many_stages(schedule: Schedule) -> Schedule:
    return "looped-bfs" if schedule == "gpipe" else "interleaved-1f1b"


def _for_one_stage(schedule: Schedule) -> Schedule:
    return "gpipe" if schedule == "looped-bfs" else "1f1b"


def _fits(schedule: Schedule, ranks: int, micro_batches: int) -> bool:
    if micro_batches < _least(schedule, ranks):
        return False
    return schedule not in IN_ROUNDS or micro_batches % max(1, micro_batches // ranks) == 0


def _least(schedule: Schedule, ranks: int) -> int:
    """With fewer micro-batches than ranks only the schedules that do all forwards first make sense."""
    return {"gpipe": 1, "looped-bfs": 1, "dualpipev": 2 * ranks}.get(schedule, ranks)


def _either(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _all_forward_then_all_backward(stages: list[int], micro_batches: int) -> list[Action]:
    forward = [Action("F", stage, number) for stage in stages for number in range(micro_batches)]
    return forward + [Action("B", stage, number) for stage in reversed(stages) for number in range(micro_batches)]


def _one_forward_one_backward(stage: int, ahead: int, micro_batches: int) -> list[Action]:
    """`ahead` forward passes at most are not followed by their backward pass yet."""
    actions = []
    for number in range(micro_batches + ahead - 1):
        if number < micro_batches:
            actions.append(Action("F", stage, number))
        if number >= ahead - 1:
            actions.append(Action("B", stage, number - ahead + 1))
    return actions


def _torch_order(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int) -> list[list[Action]]:
    """The order of one of torch's schedules, whose runtime is not used.

    Private in torch 2.11 to 2.13: what a schedule reads of its stages, `pipeline_order`, and the fields of its actions.
    """
    from torch.distributed.pipelining import schedules

    classes = {
        "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
        "looped-bfs": schedules.ScheduleLoopedBFS,
        "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }
    stage = SimpleNamespace(num_stages=ranks * per_rank, group_size=ranks, group_rank=0, submod=None)
    order = classes[schedule](cast(Any, [stage] * per_rank), micro_batches).pipeline_order
    return [
        [
            Action(cast(Kind, part.computation_type.value), part.stage_index, cast(int, part.microbatch_index))
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)  # dualpipev pairs a forward with a backward
        ]
        for rank in range(ranks)
    ]
