"""What real ranks tell of their machine, of their settings, and of the parts of their steps."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch import nn

import lockstep
from lockstep.config.toml import read_toml
from lockstep.observe.telemetry import Telemetry
from tests.events import Event, read_events
from tests.parity.problems import RaggedTexts, TinyGPT, adamw, join, text_loss
from tests.ranks import Job, RankPool

STEPS = 14
NAP = 0.04
BURN = 0.05
EARLY = 0.02


class SleepyAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        time.sleep(NAP)
        return super().step(closure)


def burn(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


@dataclass
class Told:
    """What the clocks say when a rank measures itself: before the first step, and for every `machine` event."""

    wall: float
    """Since it did so before."""
    cpu: float


def listening(told: list[Told]) -> Any:
    measure = Telemetry._measure

    def measured(telemetry: Telemetry) -> dict[str, Any]:
        told.append(Told(time.perf_counter() - telemetry._since, time.process_time()))
        return measure(telemetry)

    return mock.patch.object(Telemetry, "_measure", measured)


def train(job: Job, layout: str) -> tuple[list[Event], list[Told]]:
    """Both ranks sleep before a step and in the optimizer; after it rank 0 burns CPU and rank 1 sleeps. And what the
    clocks say."""
    telling: list[Told] = []
    with listening(telling), join(job, layout) as run:
        engine = run.setup(
            TinyGPT, text_loss, optimizer=lambda named: SleepyAdamW([p for _, p in named], lr=1e-3), clip=1.0
        )
        for batch in run.loader(RaggedTexts(), 4 * job.world_size, micro_batch=4, steps=STEPS, workers=0):
            time.sleep(EARLY)
            engine.step(batch)
            if job.rank == 0:
                burn(BURN)
            else:
                time.sleep(BURN / 2)
            if engine.steps_done == STEPS - 1:
                run.reduce(1.0, "sum")  # rank 1 waits for rank 0: that is no work of its script
    return list(read_events(run.folder.events)), telling


def of_kind(kind: str, events: list[Event]) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def test_what_ranks_do_is_told_where_it_was_done(ranks: RankPool) -> None:
    told = ranks.run(train, 2, "dp=2")
    events = told[0][0]
    parts, machines = of_kind("ranks", events), of_kind("machine", events)
    assert [event["step"] for event in parts] == [event["step"] for event in machines]
    kinds = [event["kind"] for event in events]
    assert kinds[kinds.index("ranks") + 1] == "machine"
    for event in parts:
        for rank, between in enumerate((BURN, BURN / 2)):
            assert NAP <= event["optimizer"][rank] < event["compute"][rank], "both are part of compute"
            share = (event["steps"] - 1) / event["steps"]  # the code after a report belongs to no step
            assert event["between"][rank] >= EARLY + share * between, "before and after the engine's step"
            assert event["between"][rank] + event["optimizer"][rank] <= event["compute"][rank] * 1.001

    event = machines[-1]
    (host,) = event["hosts"]
    assert host["host"] == parts[0]["hosts"][0]
    assert host["cores"] == len(os.sched_getaffinity(0)), "no control group has a say here"
    assert 0 < host["cpu"] <= 1
    assert 0 < host["memory"] < host["memory_total"] == pytest.approx(psutil.virtual_memory().total, rel=0.01)
    assert [gpu["ranks"] for gpu in host["gpus"]] == [[] for _ in host["gpus"]], "all of it is done on CPUs"
    used = event["ranks"]
    for rank in range(2):
        telling = told[rank][1]
        cpu = telling[-1].cpu - telling[-2].cpu
        assert used["cores"][rank] == pytest.approx(cpu / telling[-1].wall, rel=0.2, abs=0.05)
    assert used["cores"][0] > used["cores"][1], "sleeping keeps no core busy"
    assert sum(used["cores"]) <= host["cores"] * 1.05
    assert used["workers"] == [0, 0]
    assert min(used["threads"]) >= 1
    assert min(used["memory"]) > 1 << 24


class Burning(RaggedTexts):
    def __getitem__(self, index: int) -> Any:
        burn(0.02)
        return super().__getitem__(index)


def read_in_workers(job: Job) -> tuple[list[Event], float, list[Told]]:
    telling: list[Told] = []
    with listening(telling), join(job, "single", run_dir=job.folder / "run") as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        own = 0.0
        for batch in run.loader(Burning(), 4, micro_batch=4, steps=10, workers=1):
            own = own or time.process_time()
            engine.step(batch)
        own = time.process_time() - own
    return list(read_events(run.folder.events)), own, telling


def test_data_workers_keep_cores_busy_too_and_a_script_tells_its_settings(ranks: RankPool) -> None:
    ((events, own, (_, *telling)),) = ranks.run(read_in_workers, 1)
    machines = of_kind("machine", events)
    used = sum(event["ranks"]["cores"][0] * one.wall for event, one in zip(machines, telling, strict=True))
    assert used > own + 5 * 4 * 0.02, "the worker burns 0.08 s a step, and may be four steps ahead"
    assert machines[-1]["ranks"]["workers"] == [1]
    (settings,) = of_kind("settings", events)
    assert 'precision = "fp32"' in settings["text"]
    assert "global_batch = 4" in settings["text"]
    assert not any(name in settings["text"] for name in ("HOME", os.environ.get("HOME", "/root") + "/"))


def train_a_recipe(job: Job) -> None:
    """Twice, so that there is a second attempt."""
    for _ in range(2):
        config = {"recipe": "digits", "steps": 30, "save_every": "10 steps", "validate_every": "never", "device": "cpu"}
        run = lockstep.init("single", run_dir=job.folder / "run", device="cpu", rank=0, world_size=1)
        trainer = lockstep.Trainer(config, run)
        for step, _ in enumerate(trainer):
            if step == 15 and run.folder.attempt == 1:
                run.leave()
                break
        texts = [event["text"] for event in of_kind("settings", list(read_events(run.folder.events)))]
        stored = run.folder.path / "config.toml"
        assert len(texts) == run.folder.attempt
        assert texts[-1] == stored.read_text()
        assert read_toml(stored)["recipe"] == "digits"


def test_the_settings_of_every_attempt_are_its_config_file(ranks: RankPool) -> None:
    ranks.run(train_a_recipe, 1)


def end_early(job: Job) -> tuple[set[str], Path]:
    import threading

    run = join(job, "single")
    running = {thread.name for thread in threading.enumerate()}
    assert "lockstep-telemetry" in running
    run.setup(lambda: nn.Linear(2, 1), text_loss, optimizer=adamw)
    run.leave()
    return {thread.name for thread in threading.enumerate()}, run.folder.path


def test_the_thread_that_looks_at_the_host_ends_with_the_run(ranks: RankPool) -> None:
    ((running, _),) = ranks.run(end_early, 1)
    assert "lockstep-telemetry" not in running
