"""Planted problems in real runs: from the events they write to the right sentence in "what to change"."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lockstep.page.advice.choose import advise
from lockstep.page.panels import Advice
from lockstep.page.reading.reader import RunReader
from tests.cli.commands import lockstep
from tests.dist.test_stragglers import SlowBackward, SlowTexts
from tests.parity.problems import RaggedTexts, TinyGPT, adamw, join, text_loss
from tests.ranks import Job, RankPool

LATE = 0.15
STEPS = 12


def advice_on(folder: Path) -> list[Advice]:
    reader = RunReader(folder)
    assert reader.read()
    return advise(reader.summary(time.time()))


def train_with_a_slow_rank(job: Job, slow: str, rank: int) -> list[Advice]:
    late = {"compute": 0.0, "input": 0.0}
    if job.rank == rank:
        late[slow] = job.patient(LATE)
    with join(job, f"dp={job.world_size}") as run:
        engine = run.setup(lambda: SlowBackward(late["compute"]), text_loss, optimizer=adamw)
        batches = run.loader(SlowTexts(late["input"]), 4 * job.world_size, micro_batch=4, steps=STEPS, workers=0)
        for batch in batches:
            engine.step(batch)
    return advice_on(run.folder.path) if job.rank == 0 else []


def test_slow_input_of_rank_2_is_told_first(ranks: RankPool) -> None:
    first, *_ = ranks.run(train_with_a_slow_rank, 4, "input", 2)[0]
    assert first.text.startswith("Rank 2 (")
    assert "waits for its data, and all others wait for it: " in first.text
    assert "its data" in first.text.rpartition(": ")[2], "more workers for them, or prepare them: the cores may be busy"


def test_slow_compute_of_rank_1_is_told_first(ranks: RankPool) -> None:
    first, *_ = ranks.run(train_with_a_slow_rank, 2, "compute", 1)[0]
    assert first.text.startswith("Rank 1 (")
    assert "computes longer than the others, which wait for it: look at its device" in first.text


def train_with_a_slow_disk(job: Job, seconds: float) -> list[Advice]:
    """Saves every second step and waits for it; the disk takes so long for each file."""
    on_disk = os.fsync

    def slow_sync(file: Any) -> None:
        time.sleep(seconds)
        on_disk(file)

    with join(job, "single") as run, mock.patch("os.fsync", slow_sync):
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(size=48), 8, micro_batch=4, steps=10, workers=0):
            engine.step(batch)
            time.sleep(0.02)
            if engine.steps_done % 2 == 0:
                run.save(wait=True)
    return advice_on(run.folder.path)


def test_checkpoint_stalls_are_told_first(ranks: RankPool) -> None:
    first, *_ = ranks.run(train_with_a_slow_disk, 1, 0.05)[0]
    assert first.text.startswith("The training stands still while it saves: save in the background")
    assert "5 checkpoints stalled it for" in first.evidence


class Busy(TinyGPT):
    """A model that keeps all threads there are at work for a while."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        until = time.perf_counter() + 0.1
        matrix = torch.ones(256, 256)
        while time.perf_counter() < until:
            matrix @ matrix
        return super().forward(tokens)


def train_with_too_many_threads(job: Job, threads: int) -> list[Advice]:
    before = torch.get_num_threads()
    try:
        with join(job, "dp=2") as run:
            torch.set_num_threads(threads)
            engine = run.setup(Busy, text_loss, optimizer=adamw)
            for batch in run.loader(RaggedTexts(size=200), 8, micro_batch=4, steps=25, workers=0):
                engine.step(batch)
    finally:
        torch.set_num_threads(before)
    return advice_on(run.folder.path) if job.rank == 0 else []


@pytest.mark.slow
def test_oversubscribed_cpus_are_told_with_the_arithmetic(ranks: RankPool) -> None:
    cores = len(os.sched_getaffinity(0))
    said = ranks.run(train_with_too_many_threads, 2, 2 * cores)[0]
    (found,) = [advice for advice in said if "are oversubscribed" in advice.text]
    assert f"OMP_NUM_THREADS={max(1, cores // 2)}" in found.text
    assert f"2 ranks with {2 * cores} threads each want {4 * cores} cores" in found.evidence


LOOP = """
import torch, lockstep
from torch import nn

run = lockstep.init()
engine = run.setup(lambda: nn.Linear(6, 1), lambda model, x: (model(x).square().sum(), len(x)),
                   optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
for batch in run.loader([torch.ones(6)] * 40, global_batch=4, micro_batch=2, steps=9, workers=0):
    if engine.steps_done == 3:
        raise ValueError("the label 17 is none of the 10 there are")
    engine.step(batch)
"""


@pytest.mark.slow
def test_a_restart_loop_through_the_launcher_is_told_first(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = lockstep(tmp_path, "run", "--nproc", "1", "--restarts", "2", "--device", "cpu", "loop.py")
    assert done.returncode == 1, done.stderr
    first, *_ = advice_on(tmp_path / "runs" / "loop")
    assert first.text.startswith("Attempts 1 and 2 failed alike and none got further than the first of them")
    assert "the label 17 is none of the 10 there are" in first.text
    assert "none got beyond step 3" in first.evidence


def train_undisturbed(job: Job) -> list[Advice]:
    with join(job, "dp=2") as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(size=48), 8, micro_batch=4, steps=STEPS, workers=0):
            engine.step(batch)
    return advice_on(run.folder.path) if job.rank == 0 else []


def test_a_short_run_without_a_problem_is_told_nothing(ranks: RankPool) -> None:
    assert ranks.run(train_undisturbed, 2)[0] == []
