"""On a GPU a sample costs what it does on a CPU, and a timetable of a pipeline is that of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from lockstep.planner.machine.find_machine import find_gpu
from tests.dist.test_numbers import FLOPS, of_kind, tokens
from tests.events import Event, read_events
from tests.parity.problems import GLOBAL_BATCH, RaggedTexts, TinyGPT, adamw, join, text_loss
from tests.ranks import Job, RankPool

pytestmark = pytest.mark.gpu

STEPS = 8


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    """New processes for every test: one that has computed gradients on a GPU cannot fork one that counts FLOPs."""
    with RankPool() as pool:
        yield pool


def train(job: Job, layout: str, share_gpu: bool, micro_batch: int | None = 2) -> list[Event]:
    with join(job, layout, device="cuda", share_gpu=share_gpu) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw, precision="bf16")
        texts = RaggedTexts(size=STEPS * GLOBAL_BATCH)
        for batch in run.loader(texts, GLOBAL_BATCH, micro_batch=micro_batch, workers=0, tokens=tokens):
            engine.step(batch)
    return list(read_events(run.folder.events))


def test_flops_and_the_peak_of_a_gpu(ranks: RankPool) -> None:
    (flops,) = of_kind("flops", ranks.run(train, 1, "single", False)[0])
    assert flops["by"] == FLOPS
    assert flops["peak"] == find_gpu(torch.cuda.get_device_name()).tflops["bf16"] * 1e12
    assert flops["reason"] == ""


def test_flops_are_known_where_a_run_measures_how_many_samples_fit(ranks: RankPool) -> None:
    (flops,) = of_kind("flops", ranks.run(train, 1, "single", False, None)[0])
    assert (flops["per_sample"] > 0, flops["reason"]) == (True, "")


def test_the_timetable_of_ranks_that_share_a_gpu(ranks: RankPool) -> None:
    events = ranks.run(train, 2, "pp=2", True)[0]
    (flops,) = of_kind("flops", events)
    assert flops["by"] == FLOPS, flops["reason"]
    assert flops["peak"] == find_gpu(torch.cuda.get_device_name()).tflops["bf16"] * 1e12 / 2
    (told,) = of_kind("timetable", events)
    for lane in told["lanes"]:
        assert len(lane) == 2 * GLOBAL_BATCH // 2
        assert all(begin < end for *_, begin, end in lane)
        assert all(before[4] <= after[3] + 1e-4 for before, after in pairwise(lane))
    ends = {tuple(action[:3]): action[4] for lane in told["lanes"] for action in lane}
    for kind, stage, number, begin, _ in told["lanes"][1]:
        if kind == "F":
            assert ends["F", stage - 1, number] <= begin + 1e-4, "nothing is used before it was made"
    step = next(step for step in of_kind("step", events) if step["step"] == told["step"])
    assert told["seconds"] < step["seconds"]
