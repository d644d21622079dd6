"""Which layouts can be, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.planner.cost.checks import capacity, check_job, host_remarks, settle_layout, verdict
from lockstep.planner.cost.estimate import Memory
from lockstep.planner.cost.job import Job
from lockstep.planner.machine.find_machine import find_machine
from lockstep.planner.model.find_model import find_model
from lockstep.planner.model.parts import Matmul, Model, ModelPart


def job(model: str = "gpt2", layout: str = "dp=8", cluster: str = "H100", **more: object) -> Job:
    cut = Layout.parse(layout)
    machine = find_machine(cluster, gpus=cut.world_size)
    return replace(Job(find_model(model), machine, cut, global_batch=64, micro_batch=1), **more)  # type: ignore[arg-type]


def test_tp_has_to_divide_the_heads() -> None:
    with pytest.raises(UserError, match=r"tp=8 does not divide the 12 heads of gpt2: use tp=4, tp=6 or tp=12"):
        check_job(job(layout="tp=8"))
    with pytest.raises(
        UserError, match=r"tp=16 does not divide the 8 key and value heads of llama-3-8b: use tp=4 or tp=8"
    ):
        check_job(job("llama-3-8b", "tp=16"))


def test_tp_has_to_divide_the_widths_of_a_traced_model_too_and_needs_something_to_cut() -> None:
    up, down = Matmul(1, 30, 90, "columns"), Matmul(1, 90, 30, "inner")
    parts = (ModelPart("block", 4, 5400, 5400, (up, down)), ModelPart("out", 1, 100, 0, (Matmul(1, 30, 7),)))
    traced = Model("mine.py:build", parts, sequence=1)
    with pytest.raises(UserError, match=r"tp=4 does not divide the 90 rows of a matrix of mine.py:build: use tp=2, "):
        check_job(replace(job(layout="dp=2,tp=4"), model=traced))
    whole = Model("mine.py:build", (ModelPart("conv", 4, 10, 0, (Matmul(1, 3, 3),)),), sequence=1)
    with pytest.raises(UserError, match=r"nothing that tp=2 could cut was found in mine.py:build: use dp"):
        check_job(replace(job(layout="dp=4,tp=2"), model=whole))


def test_a_vocabulary_may_be_uneven_but_every_rank_needs_a_part_of_it() -> None:
    assert check_job(job(layout="dp=4,tp=2")) == [
        "a vocabulary of 50,257 is dealt out unevenly over tp=2: padded to 50,258 it is even"
    ]
    with pytest.raises(UserError, match=r"a vocabulary of 9 is too small for tp=4, .*: use tp=1"):
        check_job(job("layers=2,hidden=64,heads=8,vocab=9", "dp=2,tp=4"))


def test_a_pipeline_needs_a_block_for_every_stage_and_may_be_uneven() -> None:
    with pytest.raises(UserError, match=r"pp=16 needs 16 blocks at least, and gpt2 has 12: use pp=8"):
        check_job(job(layout="pp=16"))
    with pytest.raises(
        UserError, match=r"pp=8 with 2 stages a rank needs 16 blocks at least.*use pp=4 or fewer stages"
    ):
        check_job(job(layout="pp=8", schedule="interleaved-1f1b", stages_per_rank=2))
    (remark,) = check_job(job(layout="pp=8"))
    assert remark.startswith(
        "12 blocks over 8 stages: some have 2, others 1, and the fullest is counted; pp=4 or pp=6 would be even"
    )


def test_a_schedule_refuses_micro_batches_that_it_cannot_take() -> None:
    with pytest.raises(UserError, match=r"schedule 1f1b on 4 ranks needs at least 4 micro-batches in a step, not 2"):
        check_job(job(layout="pp=4,dp=2", global_batch=4))


def test_every_data_rank_needs_a_sample() -> None:
    with pytest.raises(
        UserError,
        match=r"a global batch of 6 leaves 2 of 8 data ranks .dp=8. without a sample: use --global-batch 8 or more",
    ):
        check_job(job(global_batch=6))
    with pytest.raises(UserError, match=r"makes 4 micro-batches of 16, and there are 8 data ranks.*--micro-batch 8 or"):
        check_job(job(micro_batch=16))


def test_an_uneven_batch_is_allowed_and_remarked() -> None:
    (remark,) = check_job(job(global_batch=63))
    assert remark == (
        "63 samples over 8 data ranks: some have 8, and the others wait for them; a global batch of 56 or 64 is even"
    )
    (remark,) = check_job(job(micro_batch=3))
    assert remark == "the last micro-batch of a rank has 2 samples, not 3"


def test_cp_shares_sequences_out_in_two_chunks_a_rank_and_does_not_go_with_pp() -> None:
    with pytest.raises(UserError, match=r"cp=3 cannot share 1,024 tokens out, .*: use cp=1, cp=2 or cp=4"):
        check_job(job(layout="cp=3"))
    with pytest.raises(UserError, match=r"cp=2 cuts sequences, and the samples of resnet18 are none"):
        check_job(job("resnet18", "cp=2"))
    with pytest.raises(UserError, match=r"both cp and pp"):
        settle_layout("cp=2,pp=2", 4)


def test_a_layout_of_another_size_names_layouts_and_gpus_that_work() -> None:
    with pytest.raises(UserError, match=r"needs 2 x 4 = 8 GPUs but there are 16: use --gpus 8, or layout dp="):
        settle_layout("dp=2,tp=4", 16)


def test_tp_that_leaves_the_node_is_remarked() -> None:
    told = check_job(job("layers=4,hidden=1024,heads=32,vocab=1024", "tp=16"))
    assert told == [
        "tp=16 is larger than a node of 8 GPUs, so that every block waits for the network: tp=8 stays inside"
    ]


def test_a_format_that_the_gpu_has_no_products_of_is_refused() -> None:
    with pytest.raises(UserError, match=r"V100-SXM2-32 has no bf16 products: use --precision fp16 or fp32"):
        check_job(job(cluster="V100"))


def test_a_verdict_is_on_the_side_of_caution() -> None:
    gpu = find_machine("H100").gpu

    def says(share: float) -> str:
        return verdict(Memory(0, share * capacity(gpu), 0, 0, 0, 0, 0, 0, band=0.1), gpu)

    assert [says(share) for share in (0.9, 0.92, 1.1, 1.12)] == [
        "fits",
        "too close to say",
        "too close to say",
        "does not fit",
    ]


def test_what_a_background_save_takes_of_the_host_is_compared_with_what_it_has() -> None:
    memory = Memory(0, 0, 0, 0, 0, 0, 0, 0, 0, host=60e9)
    roomy, cramped = (replace(find_machine("H100"), host_gb=size) for size in (500.0, 470.0))
    # Eight ranks of 60 GB each.
    assert host_remarks(job(machine=roomy), memory) == []
    assert host_remarks(job(), memory) == [], "the catalogue does not know it"
    (remark,) = host_remarks(job(machine=cramped), memory)
    assert "takes 480 GB of a node's memory, and it has 470 GB: the training will wait" in remark
