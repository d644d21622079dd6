"""Bytes of a rank, against formulas that others published and against sums by hand."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.stacks import find_stack
from lockstep.config.schema import Schedule
from lockstep.errors import UserError
from lockstep.follow.blocks import _least_worst
from lockstep.layout import Layout
from lockstep.links.collective_cost import Link
from lockstep.parallel.pipeline.timetable import check, peak_in_flight, timetable
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.memory import estimate_memory, in_flight
from lockstep.planner.cost.stages import cut_by_work, stages_of_job
from lockstep.planner.machine.hardware import GpuKind, Machine
from lockstep.planner.model.parts import Shape
from lockstep.planner.model.transformer import transformer
from lockstep.planner.show.paste import settings

GPU = GpuKind("A100-SXM-80", {"bf16": 312.0}, 0.87, 80.0, 2039.0, 108, 400.0, 50.0, "data sheet")
GPT = Shape(layers=48, hidden=6144, heads=64, ffn=24576, vocab=51200, positions=2048, dropout=True)
"""The 22B model of Korthikanti et al. (arXiv 2205.05198), Table 3."""


def job(shape: Shape = GPT, layout: str = "tp=8", sequence: int = 2048, **changes: Any) -> Job:
    cut = Layout.parse(layout)
    machine = Machine("test", GPU, 8, -(-cut.world_size // 8), Link(1e-5, 1e-11), Link(1e-5, 1e-10))
    usual: dict[str, Any] = {"micro_batch": 4, "global_batch": 4 * cut.data_size, "zero": 0, "precision": "fp16"}
    stack = find_stack(changes.pop("stack", "megatron"))
    return Job(transformer("test", shape, sequence), machine, cut, stack=stack, **(usual | changes))


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
        ("interleaved-zero-bubble", 4, True),
        ("zbv", 2, False),
        ("dualpipev", 2, True),
    ],
)
def test_micro_batches_in_flight_are_those_of_the_timetable(schedule: Schedule, per_rank: int, exact: bool) -> None:
    for ranks in (2, 3, 4, 8):
        for micro_batches in range(1, 30):
            with suppress(UserError):
                check(schedule, ranks, per_rank, micro_batches)
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
    by_work, evenly = (job(shape, "pp=2", 4096, global_batch=64, stack=name) for name in ("nanotron", "megatron"))
    assert stages_of_job(by_work).blocks == (10, 6)
    assert stages_of_job(evenly).blocks == (8, 8)


def test_blocks_are_cut_where_the_engine_cuts_them() -> None:
    for blocks in (2, 3, 5, 8, 12, 13, 32):
        for stages in range(1, min(blocks, 12) + 1):
            for head in (0.0, 0.3, 1.0, 1.46, 5.45):
                cuts = [*_least_worst([0.0, *[1.0] * blocks, head], stages), blocks + 2]
                real = [min(end, blocks + 1) - max(start, 1) for start, end in pairwise(cuts)]
                assert cut_by_work(blocks, head, stages) == [max(0, own) for own in real]


def test_a_rank_has_all_its_stages_and_the_fullest_one_is_looked_at() -> None:
    """126 blocks in 16 stages, a head of two thirds of a block: 7, then 14 stages of 8, and 7 with the head."""
    shape = Shape(126, 16384, 128, 53248, 128256, kv_heads=8, gated=True, tied=False, biases=False, norm="rms")
    turning = job(shape, "pp=8,tp=8", global_batch=64, stack="lockstep", schedule="zbv", stages_per_rank=2)
    cut = stages_of_job(turning)
    assert cut.blocks == (14, *[16] * 7)
    assert (cut.head, cut.differing) == (0, (0, 1, 7))
    assert cut.slowest(0.66) == (16, False)
    assert cut.slowest(2.5) == (14, True)
    memories = estimate_memory(turning)
    assert [memory.stage for memory in memories] == [0, 1, 7]
    assert memories[1].parameters > memories[0].parameters - 4 * 2 * 128256 * 16384 / 8


def test_what_splits_its_backward_keeps_the_weights_gathered() -> None:
    two, three = (
        job(layout="pp=4,fsdp=2", global_batch=64, stack="lockstep", schedule="zbv", stages_per_rank=2, zero=zero)
        for zero in (2, 3)
    )
    assert three.effective_zero == 2
    assert estimate_memory(three) == estimate_memory(two)
    assert settings(three)["shard.level"] == "zero2"
    assert dataclasses.replace(three, schedule="1f1b", stages_per_rank=1).effective_zero == 3


def test_dropout_of_attention_writes_scores_down_where_ranks_share_them() -> None:
    """Of 32 bits: softmax and a mask for all ranks; of 16: what is left of the softmax, and masks at residuals."""
    own = 64 * 2048**2 * 4 / 8
    grown = {}
    for dropout in (True, False):
        shape = dataclasses.replace(GPT, dropout=dropout)
        sizes = [
            estimate_memory(job(dataclasses.replace(shape, layers=layers), stack="lockstep"))[0].activations
            for layers in (48, 49)
        ]
        grown[dropout] = sizes[1] - sizes[0]
    masks = 2 * 2048 * 4 * 6144 * 2
    assert grown[True] - grown[False] == pytest.approx(own * (4 + 2 + 4 * 8) + masks)
    assert job(layout="fsdp=8", stack="lockstep").uses_flash
    assert job(stack="megatron").uses_flash


def test_with_cp_keys_and_values_are_whole_and_gradients_stay() -> None:
    shape = dataclasses.replace(GPT, dropout=False)

    def activations(layout: str, layers: int) -> float:
        longer = dataclasses.replace(shape, layers=layers)
        return estimate_memory(job(longer, layout, stack="lockstep", micro_batch=4))[0].activations

    alone, shared = (activations(layout, 49) - activations(layout, 48) for layout in ("single", "cp=4"))
    weights = 2 * (12 * 6144**2 + 13 * 6144)  # rounded, on every rank
    keys = 2 * 6144 * 2048 * 4 * 2
    mixed = 6144 * 2048 * 4 * 2 / 4  # by attention to each of two chunks
    assert shared - weights == pytest.approx((alone - weights) / 4 + keys + mixed)
    assert estimate_memory(job(shape, "cp=4", stack="lockstep"))[0].shared == 0, "in buckets"
    assert estimate_memory(job(shape, "cp=2,fsdp=4", stack="lockstep", zero=3))[0].shared > 0


def test_a_pipeline_has_whole_gradients_also_of_one_micro_batch() -> None:
    alone = job(layout="pp=2,fsdp=2", stack="lockstep", zero=3, global_batch=8, schedule="gpipe")
    assert alone.micro_batches == 1
    first = estimate_memory(alone)[0]
    assert first.gradients == pytest.approx(2 * first.parameters)


@pytest.mark.parametrize(("layout", "rows"), [("pp=4", 1), ("pp=2,tp=8", 8)])
def test_a_stage_holds_the_activations_it_receives_and_those_it_sends(layout: str, rows: int) -> None:
    """Point to point: a whole boundary activation each way, of one micro-batch; cut by tp along the sequence."""
    boundary = 4 * 2048 * 6144 * 2 / rows  # samples, tokens, hidden, bytes of fp16
    piped = job(layout=layout, global_batch=32, sequence_parallel=rows > 1)
    assert [memory.communication for memory in estimate_memory(piped)] == [2 * boundary] * len(estimate_memory(piped))
    assert estimate_memory(job(layout="single"))[0].communication == 0


def test_shards_are_summed_over_cp_in_a_buffer_of_all_of_them() -> None:
    """With short samples nothing else is as large as the gradients at the end."""
    tiny = job(GPT, "cp=2,fsdp=2", 16, stack="lockstep", zero=3, micro_batch=1, global_batch=2)
    memory = estimate_memory(tiny)[0]
    held = memory.activations + memory.logits + memory.communication - memory.shared
    assert held == pytest.approx(memory.gradients)


def test_layouts_that_ran_on_a_gpu_are_what_its_allocator_counted() -> None:
    """MiB of the fullest of the ranks that shared an H200, 219 M parameters (benchmarks/planner_memory.py)."""
    shape = Shape(layers=12, hidden=1024, heads=16, ffn=4096, vocab=32768, tied=False, positions=1024)
    for layout, options, counted in (
        ("single", {}, 7218.8),
        ("single", {"precision": "bf16"}, 6218.8),
        ("fsdp=2", {"zero": 3}, 6271.9),
        ("tp=2", {"sequence_parallel": True}, 4533.1),
        ("tp=2", {"sequence_parallel": True, "precision": "bf16"}, 3945.1),
        ("cp=2", {}, 6212.5),
        ("pp=2", {"global_batch": 16}, 5687.1),
        ("pp=2,fsdp=2", {"zero": 3, "global_batch": 32}, 5212.7),
    ):
        memories = estimate_memory(job(shape, layout, 1024, stack="lockstep", **{"precision": "fp32"} | options))
        assert max(one.allocated for one in memories) / 2**20 == pytest.approx(counted, rel=0.025), layout
        assert {one.band for one in memories} == {0.08}


def test_a_save_in_the_background_needs_the_host_for_weights_and_moments() -> None:
    memory = estimate_memory(job(layout="fsdp=8", zero=3, stack="lockstep"))[0]
    assert memory.host == pytest.approx(12 * job().model.parameters / 8)
    assert memory.total == pytest.approx(memory.allocated + memory.slack)


def test_an_unknown_stack_is_refused() -> None:
    with pytest.raises(UserError, match="megatron"):
        job(stack="megatrn")
