"""The parity table on a GPU: one rank, one rank of NCCL, and two ranks that share the card over gloo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lockstep.config.schema import NumericsConfig, RecoverConfig, SetupConfig, ShardConfig
from lockstep.data.loader import Reading, read_steps
from lockstep.data.order import Order, Position
from lockstep.engine import Engine
from lockstep.faults.recover import Recovery
from lockstep.faults.requests import Requests
from lockstep.follow.blocks import find_blocks, seed_points
from lockstep.layout import Layout
from lockstep.parallel.build.materialise import named_tensors
from lockstep.parallel.cut_model import CutModel
from lockstep.parallel.held import describe_parts
from lockstep.parallel.replicate.buckets import GradientBuckets
from lockstep.parallel.replicate.gradients import LocalGradients
from lockstep.parallel.replicate.shard import shard
from lockstep.parallel.replicate.statistics import RunningStatistics
from lockstep.runtime.comm import Comm
from lockstep.runtime.rank_env import Place
from lockstep.step.grads import local_gradients
from lockstep.training.engine_parts import Around
from lockstep.training.setup import Setup
from tests.parity.problems import (
    GLOBAL_BATCH,
    SEED,
    RaggedTexts,
    Tensors,
    TinyGPT,
    adamw,
    anew,
    disagreeing_gradients,
    fingerprint,
    join,
    text_loss,
)
from tests.ranks import Job, RankPool

pytestmark = pytest.mark.gpu

STEPS = 8
MICRO_BATCH = 2

COLUMNS: dict[str, dict[str, Any]] = {
    "plain": {"dropout": 0.0},
    "clipped": {"dropout": 0.0, "clip": 0.5},
    "dropout": {"clip": 0.5},
    "recompute": {"clip": 0.5, "recompute": True},
    "tf32": {"numerics": {"tf32": True}},
    "bf16": {"precision": "bf16"},
    "bf16 sums": {"precision": "bf16", "numerics": {"reduce_dtype": "bf16"}},
    "fp16": {"precision": "fp16"},
    "compiled blocks": {"dropout": 0.0, "compile": "blocks"},
}
ROWS = [("dp=2", "zero3"), ("fsdp=2", "zero1"), ("fsdp=2", "zero2"), ("fsdp=2", "zero3")]
ROUNDING = {"fp32": 1e-5, "tf32": 1e-4, "bf16": 2.0**-7, "fp16": 2.0**-10}


@dataclass
class Record:
    losses: list[float]
    skipped: list[bool]
    scales: list[float]
    gradients: Tensors
    fingerprint: str


def train(job: Job, layout: str, level: str) -> dict[str, Record]:
    records = {}
    with join(job, layout, device="cuda", share_gpu=job.world_size > 1) as run:
        for name, column in COLUMNS.items():
            options = {key: value for key, value in column.items() if key != "dropout"}
            build = partial(TinyGPT, True, column.get("dropout", 0.2))
            engine = anew(run).setup(build, text_loss, optimizer=adamw, shard={"level": level}, **options)
            seen = records[name] = Record([], [], [], {}, "")
            batches = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=STEPS, workers=0)
            for batch in batches:
                out = engine.step(batch)
                seen.losses.append(out.loss)
                seen.skipped.append(out.skipped)
                seen.scales.append(out.loss_scale)
                if not seen.gradients and not out.skipped:
                    seen.gradients = own_gradients(engine)
            if layout in ("single", "dp=2"):
                seen.fingerprint = fingerprint({name: p.detach().cpu() for name, p in engine.model.named_parameters()})
    return records


def own_gradients(engine: Engine) -> Tensors:
    """What this rank has of every gradient. Not `full_tensor`: over gloo it dies on a GPU (torch 2.11)."""
    names = [name for name, _ in engine.model.named_parameters()]
    return {
        name: grad.to("cpu", copy=True)
        for name, grad in zip(names, local_gradients([one for _, one in engine.cut.trained]), strict=True)
    }


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool) -> dict[str, Record]:
    (found,) = ranks.run(train, 1, "single", "zero3", timeout=300)
    return found


@pytest.mark.limit(400)
@pytest.mark.parametrize(("layout", "level"), ROWS)
def test_two_ranks_on_one_gpu_give_the_numbers_of_one(
    ranks: RankPool, one_rank: dict[str, Record], layout: str, level: str
) -> None:
    both = ranks.run(train, 2, layout, level, timeout=300)
    for name, column in COLUMNS.items():
        ours, theirs = both[0][name], one_rank[name]
        precision = "tf32" if name == "tf32" else column.get("precision", "fp32")
        assert both[1][name].fingerprint == ours.fingerprint, name
        assert both[1][name].losses == ours.losses, name
        assert (ours.skipped, ours.scales) == (theirs.skipped, theirs.scales), name
        assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-6), name
        assert ours.losses == pytest.approx(theirs.losses, rel=ROUNDING[precision]), name
        for rank, record in enumerate(both):
            if precision == "fp32":
                parts = {key: part_of(grad, rank, layout) for key, grad in theirs.gradients.items()}
                assert list(disagreeing_gradients(record[name].gradients, parts)) == [], (name, rank)


def part_of(whole: torch.Tensor, rank: int, layout: str) -> torch.Tensor:
    return whole if layout == "dp=2" else whole.chunk(2)[rank]


def train_on_nccl(job: Job) -> dict[str, list[float]]:
    """Steps without a group, and the same with buckets and with shards over a group of one rank of NCCL."""
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "nccl", store=dist.FileStore(str(job.folder / "nccl.store"), 1), rank=0, world_size=1, device_id=device
    )
    alone = Place(0, 1, 0, 1, node_rank=0, nodes=1, head=None, launcher="explicit")
    comm = Comm(alone, Layout(), device, "nccl", timedelta(minutes=1))
    comm.mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",))
    group = comm.mesh.get_group("fsdp")
    order = Order(len(RaggedTexts()), GLOBAL_BATCH, MICRO_BATCH, SEED, 0, 1, False)
    losses: dict[str, list[float]] = {}
    for kind in ("alone", "buckets", "shards"):
        torch.default_generator.manual_seed(SEED)
        model = TinyGPT(True, 0.2).to(device)
        blocks = find_blocks(model)
        seeded = seed_points(model, [block for _, block in blocks])
        sync: Any = LocalGradients(list(model.parameters()))
        if kind == "buckets":
            sync = GradientBuckets(list(model.named_parameters()), group, comm)
        elif kind == "shards":
            sync = shard(model, [block for _, block in blocks], comm, ShardConfig(), NumericsConfig())
        held = describe_parts(model, {}, {}, comm, 0)
        tensors = dict(named_tensors(model))
        parallel = CutModel(
            layout=Layout(),
            rank=0,
            models=[model],
            blocks=[name for name, _ in blocks],
            seeded=[seeded],
            held={name: replace(one, stored=tensors[name]) for name, one in held.items()},
            gradients=sync,
            statistics=RunningStatistics(model.named_modules(), comm),
            counted=list(model.parameters()),
            norm_groups=[group] if kind == "shards" else [],
            together=None,
        )
        setup = Setup(partial(TinyGPT), text_loss, adamw, settings=SetupConfig(clip=0.5), seed=SEED)
        recovery = Recovery(RecoverConfig())
        engine = Engine(setup, comm, Layout(), device, requests=Requests(), recovery=recovery, around=Around())
        engine.take(parallel)
        plans = order.steps(Position())
        batches = read_steps(RaggedTexts(), (next(plans) for _ in range(STEPS)), order, Reading())
        losses[kind] = [engine.step(batch).loss for batch in batches]
    dist.destroy_process_group()
    return losses


def test_one_rank_of_nccl_gives_the_numbers_of_no_group_at_all(ranks: RankPool) -> None:
    (losses,) = ranks.run(train_on_nccl, 1, timeout=120)
    assert losses["buckets"] == pytest.approx(losses["alone"], rel=1e-6)
    assert losses["shards"] == pytest.approx(losses["alone"], rel=1e-6)


def test_one_gpu_gives_the_numbers_of_a_cpu(ranks: RankPool, one_rank: dict[str, Record]) -> None:
    (on_cpu,) = ranks.run(train_on_cpu, 1)
    assert one_rank["plain"].losses[:4] == pytest.approx(on_cpu[:4], rel=1e-4)
    assert one_rank["compiled blocks"].losses[:4] == pytest.approx(on_cpu[:4], rel=1e-4)


def train_on_cpu(job: Job) -> list[float]:
    with join(job, "single") as run:
        engine = run.setup(partial(TinyGPT, True, 0.0), text_loss, optimizer=adamw)
        batches = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=STEPS, workers=0)
        return [engine.step(batch).loss for batch in batches]
