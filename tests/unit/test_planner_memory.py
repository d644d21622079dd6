"""Bytes of a rank, against formulas that others published and against sums by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lockstep.comm.model import Link
from lockstep.config import Schedule
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.parallel.timetable import peak_in_flight, timetable
from lockstep.planner.hardware import Gpu, Machine
from lockstep.planner.job import Job
from lockstep.planner.memory import estimate_memory, fits, in_flight, stage_blocks
from lockstep.planner.model import Shape
from lockstep.planner.stacks import find_stack
from lockstep.planner.transformer import transformer

GPU = Gpu("A100-SXM-80", {"bf16": 312.0}, 0.87, 80.0, 2039.0, 108, 400.0, 50.0, "data sheet")
GPT = Shape(layers=48, hidden=6144, heads=64, ffn=24576, vocab=51200, positions=2048, dropout=True)
"""The 22B model of Korthikanti et al. (arXiv 2205.05198), Table 3."""


def job(shape: Shape = GPT, layout: str = "tp=8", sequence: int = 2048, **changes: Any) -> Job:
    cut = Layout.parse(layout)
    machine = Machine("test", GPU, 8, -(-cut.world_size // 8), Link(1e-5, 1e-11), Link(1e-5, 1e-10))
    usual: dict[str, Any] = {"micro_batch": 4, "global_batch": 4 * cut.data_size, "stack": "megatron", "zero": 0}
    return Job(transformer("test", shape, sequence), machine, cut, **(usual | {"precision": "fp16"} | changes))


def activations_of_a_block(**changes: Any) -> float:
    """The difference that one more block makes."""
    sizes = []
    for layers in (48, 49):
        longer = job(dataclasses.replace(GPT, layers=layers), **changes)
        sizes.append(estimate_memory(longer)[0].activations)
    return sizes[1] - sizes[0]


def test_a_block_of_gpt_keeps_what_korthikanti_says() -> None:
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    small = 0.05 * s * b * h  # statistics of norms and of softmax, which the paper leaves out
    whole = activations_of_a_block(layout="single", flash=False, sequence_parallel=False)
    assert whole == pytest.approx(s * b * h * (34 + 5 * a * s / h), abs=small)
    tensor = activations_of_a_block(flash=False, sequence_parallel=False)
    assert tensor == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)), abs=small)
    sequence = activations_of_a_block(flash=False)
    assert sequence == pytest.approx(s * b * h / t * (34 + 5 * a * s / h), abs=small)
    selective = activations_of_a_block(flash=False, recompute="selective")
    assert selective == pytest.approx(s * b * h / t * 34, abs=small)
    assert activations_of_a_block(recompute="full") == pytest.approx(s * b * h / t * 2)


def test_states_follow_the_level_of_zero() -> None:
    parameters = job().model.parameters
    totals = {}
    for zero in (0, 1, 2, 3):
        memory = estimate_memory(job(layout="fsdp=16", zero=zero, micro_batch=1))[0]
        totals[zero] = memory.parameters + memory.gradients + memory.optimizer
    assert totals[0] == pytest.approx(18 * parameters)
    assert totals[1] == pytest.approx((6 + 12 / 16) * parameters)
    assert totals[2] == pytest.approx((2 + 16 / 16) * parameters)
    assert totals[3] == pytest.approx(18 / 16 * parameters)


def test_lockstep_holds_whole_gradients_while_it_accumulates() -> None:
    once = estimate_memory(job(layout="fsdp=8", zero=3, stack="lockstep", global_batch=32))[0]
    twice = estimate_memory(job(layout="fsdp=8", zero=3, stack="lockstep", global_batch=64))[0]
    assert twice.gradients == pytest.approx(8 * once.gradients)
    assert once.shared > 0, "gradients come into being in the only backward"
    assert twice.shared == 0


def test_a_small_gpt_on_one_cpu_is_what_the_allocator_counted() -> None:
    """189.3 MiB in fp32 and 156.8 MiB in bf16 were counted (benchmarks/planner_memory.py)."""
    shape = Shape(layers=6, hidden=256, heads=8, ffn=1024, vocab=2048, tied=False, positions=256)
    for precision, counted in (("fp32", 189.3), ("bf16", 156.8)):
        memory = estimate_memory(job(shape, "single", 256, stack="lockstep", precision=precision))[0]
        assert memory.allocated / 2**20 == pytest.approx(counted, rel=0.002)


@pytest.mark.parametrize(
    ("schedule", "per_rank", "exact"),
    [
        ("gpipe", 1, True),
        ("1f1b", 1, True),
        ("looped-bfs", 2, True),
        ("interleaved-1f1b", 2, True),
        ("interleaved-1f1b", 4, True),
        ("interleaved-zero-bubble", 2, True),
        ("zbv", 2, False),
        ("dualpipev", 2, True),
    ],
)
def test_micro_batches_in_flight_are_those_of_the_timetable(schedule: Schedule, per_rank: int, exact: bool) -> None:
    for ranks in (2, 4):
        for micro_batches in (2 * ranks, 4 * ranks):
            for rank, actions in enumerate(timetable(schedule, ranks, per_rank, micro_batches)):
                counted = peak_in_flight(actions)
                ours = in_flight(schedule, ranks, per_rank, micro_batches, rank)
                assert ours == counted if exact else ours >= counted


def test_the_first_stage_holds_more_activations_and_the_last_one_the_logits() -> None:
    first, last = estimate_memory(job(layout="pp=8,tp=8", global_batch=64, recompute="full"))
    assert (first.stage, last.stage) == (0, 7)
    assert first.activations > 4 * last.activations
    assert first.logits == 0 < last.logits


def test_stages_cut_by_work_leave_room_for_the_head() -> None:
    """A vocabulary of 131072 at width 2048 is four blocks of work: 16 blocks and it are 10 and 6 + 4."""
    shape = Shape(layers=16, hidden=2048, heads=32, ffn=8192, vocab=131072, gated=True, biases=False, norm="rms")
    cut = job(shape, "pp=2", 4096, global_batch=64, stack="nanotron")
    assert stage_blocks(cut, find_stack("nanotron")) == (10, 6)
    assert stage_blocks(cut, find_stack("megatron")) == (8, 8)


def test_fitting_leaves_room_for_the_error() -> None:
    tight = job(layout="tp=8", micro_batch=1, recompute="full", global_batch=1)
    memories = estimate_memory(tight)
    need = max(memory.total for memory in memories)

    def on(gigabytes: float) -> bool:
        machine = dataclasses.replace(tight.machine, gpu=dataclasses.replace(GPU, memory_gb=gigabytes))
        return fits(dataclasses.replace(tight, machine=machine), memories)

    assert on(need * (1 + memories[0].band) / 1e9 + 0.01)
    assert not on(need / 1e9 + 0.01)


def test_a_save_in_the_background_needs_the_host_for_weights_and_moments() -> None:
    memory = estimate_memory(job(layout="fsdp=8", zero=3, stack="lockstep"))[0]
    assert memory.host == pytest.approx(12 * job().model.parameters / 8)
    assert memory.total == pytest.approx(memory.allocated + memory.slack)


def test_an_unknown_stack_is_refused() -> None:
    with pytest.raises(UserError, match="megatron"):
        estimate_memory(job(stack="megatrn"))
