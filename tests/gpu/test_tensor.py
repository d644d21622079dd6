"""Ranks that share matrices or sequences, and a GPU over gloo: the numbers of one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.problems import adamw, anew, error_of, join, text_loss
from tests.parity.test_tensor import GLOBAL_BATCH, GPT, Texts
from tests.ranks import Job, RankPool

pytestmark = pytest.mark.gpu


def train(job: Job, layout: str, trainings: list[dict[str, Any]], **where: Any) -> list[list[float]]:
    """The losses and gradient norms of each training, one evaluation after it, and a call of the model."""
    found = []
    with join(job, layout, **where) as run:
        for options in trainings:
            engine = anew(run).setup(GPT, text_loss, optimizer=adamw, clip=0.5, **options)
            numbers = []
            for batch in run.loader(Texts(), GLOBAL_BATCH, micro_batch=2, steps=4, workers=0):
                out = engine.step(batch)
                numbers += [out.loss, out.grad_norm.item()]
            numbers.append(run.evaluate(Texts(8))["loss"].value)
            with engine.scoring(), torch.no_grad():
                tokens = Texts()[0]["x"][None].to(run.device)
                numbers.append(engine.model(tokens).float().norm().item())
            found.append(numbers)
    return found


@pytest.mark.parametrize(("layout", "count"), [
    ("tp=2", 2), ("cp=2", 2), ("dp=2,tp=2", 4), ("fsdp=2,tp=2", 4), ("cp=2,fsdp=2", 4), ("tp=2,pp=2", 4),
])  # fmt: skip
def test_a_layout_gives_the_numbers_of_one_gpu(ranks: RankPool, layout: str, count: int) -> None:
    on_cuda = {"device": "cuda", "timeout_minutes": 1.5}
    trainings: list[dict[str, Any]] = [{}, {"recompute": True}]
    if layout == "tp=2":
        trainings += [{"tensor": {"sequence": "off"}}]
    expected = ranks.run(train, 1, "single", [{}], timeout=110, **on_cuda)[0][0]
    for rank in ranks.run(train, count, layout, trainings, timeout=170, **on_cuda, share_gpu=True):
        for numbers in rank:
            assert numbers == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("layout", ["tp=2", "cp=2"])
def test_bf16_comes_close(ranks: RankPool, layout: str) -> None:
    on_cuda = {"device": "cuda", "timeout_minutes": 1.5}
    trainings: list[dict[str, Any]] = [{"precision": "bf16"}]
    expected = ranks.run(train, 1, "single", trainings, timeout=110, **on_cuda)[0][0]
    for (numbers,) in ranks.run(train, 2, layout, trainings, timeout=110, **on_cuda, share_gpu=True):
        assert numbers == pytest.approx(expected, rel=3e-2)


def compile_in_vain(job: Job) -> str:
    with join(job, "tp=2", device="cuda", share_gpu=True) as run:
        error = error_of(lambda: run.setup(GPT, text_loss, optimizer=adamw, compile="blocks"))
    return str(error)


def test_compiled_collectives_want_a_gpu_for_every_rank(ranks: RankPool) -> None:
    for sentence in ranks.run(compile_in_vain, 2):
        assert "needs nccl" in sentence
