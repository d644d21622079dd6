"""On a real GPU: the numbers of one process, also when several ranks share the card over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lockstep
from tests.cli.commands import events
from tests.cli.commands import lockstep as command
from tests.parity.problems import RaggedTexts, TinyGPT, text_loss

pytestmark = pytest.mark.gpu

STEPS = "30"


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder / "runs" / "lm", "step")]


def train(folder: Path, *options: str) -> list[float]:
    done = command(folder, "train", "lm", "--steps", STEPS, "--set", "schedule.warmup_steps=5", "--json", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == int(STEPS)
    return losses(folder)


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("one"), "--nproc", "1")


def test_one_gpu_gives_the_numbers_of_the_cpu(one_gpu, tmp_path):
    on_cpu = train(tmp_path, "--nproc", "1", "--device", "cpu")
    assert one_gpu[:3] == pytest.approx(on_cpu[:3], rel=1e-4)


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "dp=2,fsdp=2"])
def test_ranks_that_share_a_gpu_give_the_numbers_of_one(one_gpu, tmp_path, layout):
    ranks = "4" if "," in layout else "2"
    shared = train(tmp_path, "--nproc", ranks, "--layout", layout, "--share-gpu")
    assert shared[:5] == pytest.approx(one_gpu[:5], rel=1e-5)
    assert shared == pytest.approx(one_gpu, rel=1e-2)


def test_dropout_masks_on_the_gpu_are_those_of_one_rank(tmp_path):
    dropout = ("--set", "model.dropout=0.2")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = train(tmp_path / "a", "--nproc", "1", *dropout)
    two = train(tmp_path / "b", "--nproc", "2", "--share-gpu", *dropout)
    assert two[:5] == pytest.approx(one[:5], rel=1e-5)


def test_bf16_on_the_gpu_trains(tmp_path):
    assert train(tmp_path, "--nproc", "1", "--set", "precision=bf16")[-1] < 4.0


def test_two_ranks_on_one_gpu_are_refused_without_share_gpu(tmp_path):
    done = command(tmp_path, "train", "--nproc", "64")
    assert done.returncode == 2
    assert "--share-gpu" in done.stderr


def steps_with_a_fused_optimizer(folder: Path, until: int) -> list[float]:
    run = lockstep.init("single", run_dir=folder)
    engine = run.setup(
        TinyGPT, text_loss, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    )
    losses = []
    for batch in run.loader(RaggedTexts(), 8, micro_batch=4, steps=8, workers=2):
        losses.append(engine.step(batch).loss)
        if engine.steps_done == until:
            run.save()
            break
    run.leave()
    return losses


def test_a_fused_optimizer_goes_on_where_it_stopped(tmp_path):
    whole = steps_with_a_fused_optimizer(tmp_path / "whole", 8)
    first = steps_with_a_fused_optimizer(tmp_path / "parts", 5)
    assert first + steps_with_a_fused_optimizer(tmp_path / "parts", 8) == whole


class OneInfinity(RaggedTexts):
    """Texts of which one makes the loss infinite."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "bad": torch.tensor(float("inf") if index == 5 else 1.0)}


def weighted(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    total, weight = text_loss(model, batch)
    return total * batch["bad"].max(), weight


def test_an_infinite_loss_stops_before_the_weights_change(tmp_path):
    run = lockstep.init("single", run_dir=tmp_path / "run")
    engine = run.setup(TinyGPT, weighted, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    batch = next(iter(run.loader(OneInfinity(), 8, micro_batch=4, shuffle=False, workers=0)))
    with pytest.raises(lockstep.NonFiniteError) as stopped:
        engine.step(batch)
    run.leave()
    assert stopped.value.step == 1
    assert 5 in stopped.value.sample_ids
    assert all(parameter.isfinite().all() for parameter in engine.model.parameters())
