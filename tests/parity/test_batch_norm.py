"""BatchNorm over all data ranks: the numbers of a plain loop that forwards their micro-batches together."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from lockstep.data.order import share
from lockstep.engine import Engine
from lockstep.layout import Layout
from lockstep.runtime.seeds import seed_of
from tests.marks import others_slow
from tests.parity.problems import (
    GLOBAL_BATCH,
    SEED,
    Batch,
    Images,
    Tensors,
    adamw,
    disagreeing_gradients,
    error_of,
    fingerprint,
    gradients,
    image_loss,
    join,
    weights,
)
from tests.ranks import Job, RankFailed, RankPool

STEPS = 6
"""The fifth has 5 samples, so that a rank may have fewer than others, or nothing but a filler."""


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


class Normed(nn.Module):
    """Every kind of BatchNorm: usual, without weights, without running statistics, and frozen in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(1)
        self.conv = nn.Conv2d(1, 4, 3)
        self.blocks = nn.ModuleList([Block(momentum=0.3), Block(affine=False)])
        self.flat = nn.BatchNorm1d(4, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(4).eval()
        self.out = nn.Linear(4, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.first(images))
        for block in self.blocks:
            x = block(x)
        return self.out(self.frozen(self.flat(x.mean((2, 3)))))  # type: ignore[no-any-return]


class Shifted(Images):
    """Far from zero, where a variance from plain sums of squares would have no digits left."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = self.pixels + 1000.0


Trained = tuple[list[float], list[Tensors], Tensors, list[list[int]]]


def train(
    job: Job,
    layout: str,
    micro_batch: int,
    options: dict[str, Any],
    data: type[Images] = Images,
    mode: str = "sync",
    steps: int = STEPS,
    **where: Any,
) -> Trained:
    with join(job, layout, **{"timeout_minutes": job.patient(30) / 60, **where}) as run:
        engine: Engine = run.setup(Normed, image_loss, optimizer=adamw, clip=1.0, batch_norm=mode, **options)  # type: ignore[arg-type]
        losses, ids = [], []
        grads: list[Tensors] = []
        for batch in run.loader(data(), GLOBAL_BATCH, micro_batch=micro_batch, steps=steps, workers=0):
            losses.append(engine.step(batch).loss)
            ids.append([sample for part in batch.micro_batches if not part.filler for sample in part.ids])
            if not grads and run.device.type == "cpu":  # later ones differ by what Adam makes of rounding
                grads.append(gradients(engine))
            run.evaluate(Images(8), micro_batch=4)
        # Shards on a GPU cannot be put together over gloo.
        on_gpu = {name: buffer.cpu() for name, buffer in engine.model.named_buffers()}
        return losses, grads, weights(engine) if run.device.type == "cpu" else on_gpu, ids


def plain(_job: Job, steps: list[list[int]], micro_batch: int, ranks: int, data: type[Images] = Images) -> Trained:
    """One process that forwards the first micro-batches of all ranks together, then the second ones, and so on."""
    torch.manual_seed(seed_of(SEED, "init"))
    model, dataset = Normed(), data()
    optimizer = adamw(model.parameters())
    losses: list[float] = []
    grads: list[Tensors] = []
    for ids in steps:
        parts = [ids[start : start + micro_batch] for start in range(0, len(ids), micro_batch)]
        mine = [[parts[number] for number in share(len(parts), rank, ranks)] for rank in range(ranks)]
        optimizer.zero_grad()
        total = 0.0
        for turn in range(max(map(len, mine))):
            together = [sample for rank in mine if turn < len(rank) for sample in rank[turn]]
            batch: Batch = default_collate([dataset[sample] for sample in together])
            loss = image_loss(model, batch)[0]
            (loss / len(ids)).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / len(ids)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
        if not grads:
            grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return losses, grads, {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}, steps


def assert_same(found: list[Trained], expected: Trained) -> None:
    assert len({fingerprint(rank[2]) for rank in found}) == 1, "also the running statistics, on every rank"
    for losses, grads, state, _ in found:
        assert losses == pytest.approx(expected[0], rel=1e-5)
        for ours, theirs in zip(grads, expected[1], strict=True):
            assert list(disagreeing_gradients(ours, theirs)) == []
        for name, value in expected[2].items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)


def steps_of(found: list[Trained]) -> list[list[int]]:
    """What the ranks read together, step by step."""
    return [[sample for part in step for sample in part] for step in zip(*(rank[3] for rank in found), strict=True)]


class Table:
    """Trains without further options on a layout when it is asked for."""

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._found: dict[tuple[str, int], list[Trained]] = {}

    def __call__(self, layout: str, micro_batch: int) -> list[Trained]:
        if (layout, micro_batch) not in self._found:
            size = Layout.parse(layout).world_size
            self._found[layout, micro_batch] = self._ranks.run(train, size, layout, micro_batch, {})
        return self._found[layout, micro_batch]


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> Table:
    return Table(ranks)


@pytest.mark.parametrize(
    ("layout", "micro_batch", "options"),
    [
        ("dp=2", 4, {}),
        ("dp=2", 2, {}),
        ("dp=3", 1, {"recompute": True}),
        ("fsdp=2", 2, {"recompute": True, "shard": {"level": "zero2"}}),
        ("fsdp=2", 2, {"shard": {"level": "zero1"}}),
        ("dp=2,fsdp=2", 2, {}),
        pytest.param("dp=4", 2, {}, marks=pytest.mark.slow),
        pytest.param("fsdp=2", 4, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_normalises_over_the_micro_batches_of_all_ranks(
    ranks: RankPool, trained: Table, layout: str, micro_batch: int, options: dict[str, Any]
) -> None:
    size = Layout.parse(layout).world_size
    found = ranks.run(train, size, layout, micro_batch, options) if options else trained(layout, micro_batch)
    (expected,) = ranks.run(plain, 1, steps_of(found), micro_batch, size)
    assert_same(found, expected)
    assert int(found[0][2]["frozen.num_batches_tracked"]) == 0
    assert found[0][2]["frozen.running_mean"].equal(torch.zeros(4))


@pytest.mark.parametrize(
    ("layout", "micro_batch"),
    others_slow([("dp=2", 4), ("dp=4", 2), ("fsdp=2", 4), ("dp=2,fsdp=2", 2)], [("dp=2", 4), ("dp=2,fsdp=2", 2)]),
)
def test_ranks_with_one_micro_batch_each_are_one_process_with_a_larger_one(
    ranks: RankPool, trained: Table, layout: str, micro_batch: int
) -> None:
    found = trained(layout, micro_batch)
    (alone,) = ranks.run(train, 1, "single", GLOBAL_BATCH, {}, mode="micro-batch")
    assert_same(found, alone)


def test_values_far_from_zero_keep_their_variance(ranks: RankPool) -> None:
    found = ranks.run(train, 2, "dp=2", 4, {}, data=Shifted)
    (expected,) = ranks.run(plain, 1, steps_of(found), 4, 2, data=Shifted)
    assert found[0][0] == pytest.approx(expected[0], rel=1e-3)
    assert found[0][2]["first.running_var"].item() == pytest.approx(expected[2]["first.running_var"].item(), rel=1e-3)


def test_synchronising_makes_a_difference(ranks: RankPool) -> None:
    synchronised = ranks.run(train, 2, "dp=2", 4, {}, steps=2)[0]
    alone = ranks.run(train, 2, "dp=2", 4, {}, mode="micro-batch", steps=2)[0]
    assert list(disagreeing_gradients(synchronised[1][0], alone[1][0])) != []


# ---- What it says


def said(job: Job, layout: str, model: str, mode: str) -> list[str]:
    with join(job, layout) as run:
        build = Normed if model == "normed" else partial(nn.Sequential, nn.Flatten(), nn.Linear(49, 5))
        engine = run.setup(build, image_loss, optimizer=adamw, batch_norm=mode)  # type: ignore[arg-type]
        for batch in run.loader(Images(), GLOBAL_BATCH, micro_batch=4, steps=2, workers=0):
            engine.step(batch)
    events = [json.loads(line) for line in (job.folder / "run" / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "message" and "BatchNorm" in event["text"]]


@pytest.mark.parametrize(
    ("layout", "model", "mode", "lines"),
    [
        (
            "dp=2",
            "normed",
            "micro-batch",
            ["BatchNorm normalises over the 4 samples of a logical micro-batch: the same numbers on any layout"],
        ),
        ("dp=2", "normed", "sync", ["BatchNorm normalises over 2 ranks x 4 samples: numbers change with the layout"]),
        ("dp=2", "linear", "sync", []),
    ],
)
def test_one_line_says_what_is_normalised_over(
    ranks: RankPool, layout: str, model: str, mode: str, lines: list[str]
) -> None:
    assert ranks.run(said, 2, layout, model, mode)[0] == lines


# ---- What it refuses


class Cumulative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1, momentum=None)
        self.out = nn.Linear(49, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(images).flatten(1))  # type: ignore[no-any-return]


def converted() -> nn.Module:
    model: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(Normed())  # type: ignore[no-untyped-call]
    return model


def refusals(job: Job) -> list[str]:
    wanted: list[Any] = [(Cumulative, "sync"), (converted, "sync"), (converted, "micro-batch"), (Normed, "all")]
    with join(job, "dp=2") as run:
        return [
            str(error_of(partial(run.setup, build, image_loss, optimizer=adamw, batch_norm=mode)))
            for build, mode in wanted
        ]


def test_what_it_cannot_synchronise_is_refused_by_name(ranks: RankPool) -> None:
    for cumulative, converted, converted_too, unknown in ranks.run(refusals, 2):
        assert cumulative.startswith("norm averages over batches in the order a rank sees them")
        assert converted.startswith("first is a SyncBatchNorm: use BatchNorm")
        assert 'batch_norm = "sync"' in converted_too
        assert "batch_norm" in unknown
        assert "sync" in unknown


def constant_for_some(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    return image_loss(model, batch) if int(batch["y"][0]) % 2 else (torch.zeros(()), 0)


def leave_forwards_out(job: Job) -> None:
    with join(job, "dp=2", timeout_minutes=job.patient(15) / 60) as run:
        engine = run.setup(Normed, constant_for_some, optimizer=adamw, batch_norm="sync")
        for batch in run.loader(Images(), GLOBAL_BATCH, micro_batch=2, steps=3, workers=0):
            engine.step(batch)


def test_a_rank_cannot_leave_a_forward_out(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="a constant, and a synchronised BatchNorm cannot leave a forward out"):
        ranks.run(leave_forwards_out, 2)
