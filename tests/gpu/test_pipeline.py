"""A pipeline whose ranks share a GPU over gloo: the numbers of one GPU, by every schedule."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import pytest
import torch

from lockstep.config.schema import Schedule
from tests.parity.problems import GLOBAL_BATCH, RaggedTexts, TinyGPT, adamw, anew, join, text_loss
from tests.ranks import Job, RankPool

pytestmark = pytest.mark.gpu

SCHEDULES = get_args(Schedule)


def train(job: Job, layout: str, schedules: list[str], dropout: float, **where: Any) -> list[list[float]]:
    """The losses and gradient norms of a training by each schedule, and of one evaluation after it."""
    found = []
    with join(job, layout, **where) as run:
        for schedule in schedules:
            engine = anew(run).setup(
                partial(TinyGPT, True, dropout), text_loss, optimizer=adamw, clip=0.5, pipeline={"schedule": schedule}
            )
            loader = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=1, steps=4, workers=0)
            numbers = []
            for batch in loader:
                out = engine.step(batch)
                numbers += [out.loss, out.grad_norm.item()]
            numbers.append(run.evaluate(RaggedTexts(11))["loss"].value)
            with engine.scoring(), torch.no_grad():
                tokens = RaggedTexts()[0]["x"][None].to(run.device)
                numbers.append(engine.model(tokens).float().norm().item())
            found.append(numbers)
    return found


@pytest.mark.parametrize(("layout", "ranks_", "schedules"), [
    ("pp=2", 2, SCHEDULES),
    ("dp=2,pp=2", 4, ("1f1b", "zbv")),
    ("fsdp=2,pp=2", 4, ("1f1b", "zbv")),
])  # fmt: skip
def test_every_schedule_gives_the_numbers_of_one_gpu(
    ranks: RankPool, layout: str, ranks_: int, schedules: tuple[str, ...]
) -> None:
    on_cuda = {"device": "cuda", "timeout_minutes": 1.5}
    ((expected,),) = ranks.run(train, 1, "single", ["1f1b"], 0.1, timeout=110, **on_cuda)
    for rank in ranks.run(train, ranks_, layout, list(schedules), 0.1, timeout=170, **on_cuda, share_gpu=True):
        for numbers in rank:
            assert numbers == pytest.approx(expected, rel=2e-4)
