"""The trainer level: a recipe as a loop that code can stand in."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

import lockstep
from lockstep.config.layers import from_toml
from tests.cli.commands import events

LINEAR = {"recipe": "linear", "steps": 12, "validate_every": "5 steps", "save_every": "4 steps", "layout": "single"}


def trainer_in(folder: Path, **config: object) -> lockstep.Trainer:
    return lockstep.Trainer({**LINEAR, **config}, lockstep.init("single", run_dir=folder))


def test_iterating_gives_every_step_and_ends_the_run(tmp_path):
    trainer = trainer_in(tmp_path / "run")
    steps = [out.step for out in trainer]
    assert steps == list(range(1, 13))
    assert [event["step"] for event in events(tmp_path / "run", "validation")] == [5, 10, 12]
    saved = [event["step"] for event in events(tmp_path / "run", "checkpoint")]
    assert saved == [4, 5, 8, 10, 12], "every 4 steps, every new best, and the end"
    assert events(tmp_path / "run")[-1]["kind"] == "end"


def test_only_the_last_checkpoints_and_the_best_stay(tmp_path):
    trainer_in(tmp_path / "run", keep=1, save_every="1 steps", validate_every="never").fit()
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-00000012"]


def test_leaving_the_loop_leaves_an_unfinished_run_that_goes_on(tmp_path):
    uninterrupted = [out.loss for out in trainer_in(tmp_path / "whole")]
    first = trainer_in(tmp_path / "parts")
    before = []
    for out in first:
        before.append(out.loss)
        if out.step == 7:
            first.save()
            break
    first.run.leave()
    after = [out.loss for out in trainer_in(tmp_path / "parts")]
    assert before + after == uninterrupted


def test_a_batch_per_device_is_stored_as_the_global_batch_it_means(tmp_path):
    trainer_in(tmp_path / "run", batch_per_device=24, micro_batch=None).fit()
    stored = from_toml(tmp_path / "run" / "config.toml")
    assert stored.global_batch == 24
    assert stored.batch_per_device is None
    assert stored.micro_batch == 24, "chosen once and recorded"


def test_a_clock_asks_and_the_next_step_boundary_saves(tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count(0, 45).__next__)
    monkeypatch.setattr("lockstep.trainer.time", clock)  # not the module's own, which loader processes wait by
    trainer_in(tmp_path / "run", save_every="1 minutes", validate_every="never").fit()
    saved = [event["step"] for event in events(tmp_path / "run", "checkpoint")]
    assert len(saved) > 3
    assert saved[-1] == 12


def test_a_wrong_key_is_refused_in_a_sentence():
    with pytest.raises(lockstep.UserError, match="did you mean 'global_batch'"):
        lockstep.Trainer({"recipe": "linear", "globl_batch": 3})
