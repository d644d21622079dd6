"""Numbers that are wrong are skipped, taken back or stopped at, by all ranks alike, and what was learnt is not lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint import save as saving
from lockstep.checkpoint.disk.format import read_index, step_folder, steps_on_disk
from lockstep.cli.ckpt import ls_command
from lockstep.engine import Engine, StepResult
from lockstep.errors import NonFiniteError, RecoveryError, SpikeError, UserError
from lockstep.faults.emergency import on_uncaught
from lockstep.faults.recover import MOST_SKIPS
from lockstep.follow.values import is_fake
from lockstep.record.folder import look_back
from lockstep.runtime.tensor_digest import digests_of
from tests.events import Event, read_events
from tests.parity.problems import (
    GLOBAL_BATCH,
    Batch,
    ConvNet,
    Images,
    adamw,
    error_of,
    fingerprint,
    image_loss,
    join,
    text_loss,
    weights,
)
from tests.parity.test_tensor import GPT, Texts
from tests.ranks import Job, RankFailed, RankPool


class Sharp(ConvNet):
    """The gradient is infinite, and the loss finite, where a picture is all zero."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = super().forward(images)
        return scores + (images.flatten(1).sum(1, keepdim=True) * self.out.weight[:1, :1]).abs().sqrt()


def images_with(bad: dict[int, float]) -> Images:
    images = Images()
    for sample, pixel in bad.items():
        images.pixels[sample] = pixel
    return images


NAN, ZERO = float("nan"), 0.0


def state(engine: Engine) -> str:
    """Changes with any bit of weights, buffers and optimizer."""
    found = weights(engine)
    for name, parameter in engine.stored:
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and not hasattr(value, "device_mesh"):
                found[f"optimizer/{name}/{key}"] = value.detach().clone()
    return fingerprint(found)


Seen = list[tuple[StepResult, str]]


def train(
    run: lockstep.Run,
    bad: dict[int, float],
    recover: dict[str, Any],
    *,
    steps: int = 4,
    saved: int = 0,
    build: Callable[[], nn.Module] = ConvNet,
    between: Callable[[int], None] = lambda _: None,
    loss: Any = image_loss,
) -> Seen:
    """Every step's result and the state after it; step `saved` is saved."""
    engine = run.setup(build, loss, optimizer=adamw, recover=recover)
    loader = run.loader(images_with(bad), GLOBAL_BATCH, micro_batch=2, steps=steps, shuffle=False, workers=0)
    seen = []
    for batch in loader:
        seen.append((engine.step(batch), state(engine)))
        if engine.steps_done == saved:
            run.save()
        between(engine.steps_done)
    return seen


def events_of(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_events(folder / "events.jsonl") if event["kind"] == kind]


def warnings_of(folder: Path) -> list[str]:
    return [event["text"] for event in events_of(folder, "message") if event["level"] == "warning"]


# ---- Skip and roll back, the same on one process and on several

Decision = tuple[int, bool]


def train_past(job: Job, layout: str, folder: Path) -> dict[str, tuple[list[Decision], list[str]]]:
    """What was decided at each step, and the state after it, by case: all in one job."""
    told = {}
    for name, (bad, recover, build) in CASES.items():
        with join(job, layout, folder / name, meeting=name) as run:
            seen = train(run, bad, recover, steps=5, saved=2, build=build)
            told[name] = ([(out.step, out.skipped) for out, _ in seen], [print_ for _, print_ in seen])
    return told


CASES: dict[str, tuple[dict[int, float], dict[str, Any], Callable[[], nn.Module]]] = {
    "skip a loss": ({27: NAN}, {"on_nonfinite": "skip"}, ConvNet),
    "skip a gradient": ({27: ZERO}, {"on_nonfinite": "skip"}, Sharp),
    "roll back a loss": ({27: NAN}, {"on_nonfinite": "rollback"}, ConvNet),
    "roll back a gradient": ({27: ZERO}, {"on_nonfinite": "rollback"}, Sharp),
}


@pytest.mark.parametrize(("layout", "rank"), [("single", 0), ("dp=2", 0), ("fsdp=2", 0)])
def test_all_ranks_skip_or_take_back_the_same_steps_to_the_bit(
    ranks: RankPool, tmp_path: Path, layout: str, rank: int
) -> None:
    world_size = 1 if layout == "single" else 2
    everybody = ranks.run(train_past, world_size, layout, tmp_path, timeout=90)
    for told in everybody:
        for name, (decisions, prints) in told.items():
            assert decisions == [(1, False), (2, False), (3, False), (4, True), (5, False)], name
            same_as = 2 if name.startswith("skip") else 1  # step 3 before it, or the checkpoint of step 2
            assert prints[3] == prints[same_as], f"{name}: weights, buffers and optimizer as they were"
            assert len(set(prints)) == 4, "every other step changes something"
    for name in CASES:
        [alarm] = events_of(tmp_path / name, "alarm")
        assert (alarm["step"], alarm["action"]) == (4, "skip" if name.startswith("skip") else "rollback")
        assert 27 in alarm["sample_ids"]
        assert alarm["what"] == name.split()[-1]
        assert alarm["rank"] == (rank if alarm["what"] == "loss" else None)
        where = (
            " on rank 0 (sample ids 26, 27; NaN is in sample ids 27): "
            if alarm["what"] == "loss"
            else " (sample ids 24"
        )
        assert f"at step 4{where}" in alarm["text"]
        taken_back = [text for text in warnings_of(tmp_path / name) if text.startswith("steps 3-4 are taken back")]
        assert len(taken_back) == name.startswith("roll"), "people are told what was lost"
        assert [event["step"] for event in events_of(tmp_path / name, "step")] == [1, 2, 3, 4, 5]


def skip_on(job: Job, layouts: list[str]) -> dict[str, list[bool]]:
    """Which of three steps were skipped, and whether the second, whose loss is NaN, changed a bit anywhere."""
    told = {}
    for number, text in enumerate(layouts):
        layout, _, level = text.partition(" ")
        with join(job, layout, meeting=f"m{number}") as run:

            def loss(model: nn.Module, batch: Batch, run: lockstep.Run = run) -> tuple[torch.Tensor, torch.Tensor]:
                total, weight = text_loss(model, batch)
                return total * (NAN if run.engine and run.engine.steps_done == 1 else 1.0), weight

            shard = {"level": level} if level else None
            engine = run.setup(GPT, loss, optimizer=adamw, recover={"on_nonfinite": "skip"}, shard=shard)
            prints, skipped = [], []
            for batch in run.loader(Texts(), 8, micro_batch=2, steps=3, workers=0):
                skipped.append(engine.step(batch).skipped)
                engine.state.rest()
                prints.append(
                    digests_of(one for model in engine.cut.models for one in model.parameters() if not is_fake(one))
                )
            told[text] = [*skipped, prints[0] == prints[1], prints[1] == prints[2]]
    return told


@pytest.mark.slow
def test_a_step_is_skipped_on_every_layout(ranks: RankPool) -> None:
    for layouts in (["dp=2", "fsdp=2", "fsdp=2 zero1", "tp=2", "cp=2", "pp=2"], ["dp=2,fsdp=2", "pp=2,tp=2"]):
        for told in ranks.run(skip_on, 2 * (1 + (len(layouts) == 2)), layouts, timeout=100):
            assert told == {key: [False, True, False, True, False] for key in layouts}


def test_a_training_that_learns_nothing_any_more_stops_and_says_so(tmp_path: Path) -> None:
    bad = dict.fromkeys(range(8, 37), NAN)

    def refused(name: str, saved: int, **recover: str) -> str:
        error = error_of(lambda: begin(name, saved, recover))
        assert isinstance(error, RecoveryError)
        return str(error)

    def begin(name: str, saved: int, recover: dict[str, str]) -> None:
        with lockstep.init("single", run_dir=tmp_path / name) as run:
            train(run, {**bad, **dict.fromkeys(range(8), NAN)} if not saved else bad, recover, steps=30, saved=saved)

    assert f"the {MOST_SKIPS - 1} steps before it had to be skipped too: nothing is learnt" in refused(
        "skips", 0, on_nonfinite="skip"
    )
    assert len(events_of(tmp_path / "skips", "alarm")) == MOST_SKIPS
    assert "no checkpoint to go back to: save earlier" in refused("nowhere", 0, on_nonfinite="rollback")
    assert "went back to the checkpoint of step 1 2 times" in refused("again", 1, on_nonfinite="rollback")
    assert [alarm["step"] for alarm in events_of(tmp_path / "again", "alarm")] == [2, 3, 4]


def test_a_word_that_is_no_policy_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"recover\.on_nonfinite = 'ignore' is not valid"),
        lockstep.init("single", run_dir=tmp_path / "run") as run,
    ):
        run.setup(ConvNet, image_loss, optimizer=adamw, recover={"on_nonfinite": "ignore"})


# ---- Spikes


class Planted:
    """A loss function that multiplies the loss by five from one step on, for so many steps."""

    def __init__(self, at: int, steps: int = 1) -> None:
        self.steps = range(at, at + steps)
        self.run: Any = None

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        total, weight = image_loss(model, batch)
        return total * (5.0 if self.run.engine.steps_done + 1 in self.steps else 1.0), weight


def train_into_a_spike(job: Job, layout: str, folder: Path, at: int, policy: str) -> tuple[list[int], list[str], str]:
    loss = Planted(at)
    with suppress(SpikeError), join(job, layout, folder) as run:
        loss.run = run
        seen: Seen = []
        try:
            seen = train(run, {}, {"on_spike": policy}, steps=60, saved=30, loss=loss)
        finally:
            done = run.engine.steps_done  # type: ignore[union-attr]
        return [out.step for out, _ in seen if out.skipped], [print_ for _, print_ in seen], ""
    return [], [], f"stopped after step {done}"


@pytest.mark.parametrize("policy", ["warn", "skip", "rollback", "stop"])
def test_a_loss_of_five_times_the_level_is_found_at_its_step_by_every_rank(
    ranks: RankPool, tmp_path: Path, policy: str
) -> None:
    at = random.Random(policy).randrange(35, 58)
    [[single]] = [ranks.run(train_into_a_spike, 1, "single", tmp_path / "1", at, policy)]
    for skipped, prints, stopped in [single, *ranks.run(train_into_a_spike, 2, "dp=2", tmp_path / "2", at, policy)]:
        assert skipped == ([at] if policy in ("skip", "rollback") else [])
        assert stopped == (f"stopped after step {at - 1}" if policy == "stop" else "")
        if policy == "skip":
            assert prints[at - 1] == prints[at - 2]
        if policy == "rollback":
            assert prints[at - 1] == prints[29]
    for folder in (tmp_path / "1", tmp_path / "2"):
        [alarm] = events_of(folder, "alarm")
        assert (alarm["what"], alarm["step"], alarm["action"], alarm["rank"]) == ("spike", at, policy, None)
        assert len(alarm["sample_ids"]) in (GLOBAL_BATCH, 5)
        assert steps_on_disk(folder)[-1] == (at - 1 if policy == "stop" else 30)


CLEAN: list[dict[str, Any]] = [
    {"recipe": "digits", "seed": 1},
    {"recipe": "digits", "seed": 2, "global_batch": 4},
    {"recipe": "digits", "seed": 3, "schedule": {"name": "linear", "warmup_steps": 40}, "optimizer": {"lr": 0.01}},
    {"recipe": "linear", "seed": 4},
    {"recipe": "linear", "seed": 5, "global_batch": 4, "micro_batch": 4},
    {"recipe": "digits", "seed": 6, "global_batch": 16},
    {"recipe": "digits", "seed": 7, "optimizer": {"name": "sgd", "lr": 0.1}},
    {"recipe": "lm", "seed": 8, "global_batch": 4, "micro_batch": 4},
    {
        "recipe": "lm",
        "seed": 9,
        "global_batch": 8,
        "micro_batch": 8,
        "schedule": {"name": "cosine", "warmup_steps": 50},
    },
    {"recipe": "digits", "seed": 10, "global_batch": 4, "optimizer": {"lr": 0.003}},
]
SMALL = {"context": 32, "width": 32, "layers": 2, "heads": 2, "validation_samples": 4}


def recipe_run(folder: Path, config: dict[str, Any], steps: int, planted: int | None = None) -> list[Event]:
    """The alarms of a recipe's training, whose loss may be five times what it is for three steps."""
    config = {**config, "steps": steps, "validate_every": "never", "save_every": "never", "data": {"workers": 0}}
    if config["recipe"] == "lm":
        config["model"] = SMALL
    with lockstep.init("single", run_dir=folder, seed=config["seed"], device="cpu") as run:
        trainer = lockstep.Trainer(config, run)
        engine, plain = trainer.engine, trainer.engine.forwards.loss

        def loss(model: nn.Module, batch: Any) -> Any:
            total, weight = plain(model, batch)
            high = planted is not None and planted <= engine.steps_done + 1 < planted + 3
            return total * (5.0 if high else 1.0), weight

        engine.forwards.loss = loss
        for _ in trainer:
            if engine.steps_done == steps - 1:
                break  # what comes after the last step is not looked at here
    return events_of(folder, "alarm")


@pytest.mark.slow
@pytest.mark.limit(600)
def test_ten_clean_trainings_give_no_alarm(tmp_path: Path) -> None:
    for number, config in enumerate(CLEAN):
        assert recipe_run(tmp_path / str(number), config, 250) == [], config


def test_a_noisy_clean_training_gives_no_alarm(tmp_path: Path) -> None:
    assert recipe_run(tmp_path / "run", CLEAN[1], 150) == []


@pytest.mark.slow
@pytest.mark.limit(600)
def test_a_planted_spike_of_a_recipe_is_found_within_three_steps(tmp_path: Path) -> None:
    for number, config in enumerate([CLEAN[0], CLEAN[7], CLEAN[8]]):
        at = random.Random(number).randrange(40, 90)
        alarms = recipe_run(tmp_path / str(number), config, 100, planted=at)
        assert [alarm["step"] in range(at, at + 3) for alarm in alarms] == [True], (config, at, alarms)


# ---- A last checkpoint before the end


def undisturbed(folder: Path, steps: int = 4) -> list[str]:
    with lockstep.init("single", run_dir=folder, seed=5, device="cpu") as run:
        return [print_ for _, print_ in train(run, {}, {}, steps=steps)]


def fail(folder: Path, **options: Any) -> Exception | None:
    def begin() -> None:
        with lockstep.init("single", run_dir=folder, seed=5, device="cpu") as run:
            train(run, options.pop("bad", {}), {}, **options)

    return error_of(begin)


def raise_at(step: int, error: Exception) -> Callable[[int], None]:
    def between(done: int) -> None:
        if done == step:
            raise error

    return between


def fails_in_step_3(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """Raises in the second micro-batch of the third step: BatchNorm has seen the first one by then."""
    (seen,) = {int(one.num_batches_tracked or 0) for one in model.modules() if isinstance(one, nn.BatchNorm2d)}
    if seen == 9:
        raise ZeroDivisionError("planted")
    return image_loss(model, batch)


@pytest.mark.parametrize("cause", ["the loss", "between steps", "a user's mistake", "inside a step"])
def test_what_was_learnt_before_a_failure_is_saved_and_the_run_goes_on_to_the_same_bits(
    tmp_path: Path, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, dict[str, Any]] = {
        "the loss": {"bad": {19: NAN}},
        "between steps": {"between": raise_at(2, ZeroDivisionError("planted"))},
        "a user's mistake": {"between": raise_at(2, UserError("planted", "fix it"))},
        "inside a step": {"loss": fails_in_step_3},
    }
    error = fail(tmp_path / "run", **options[cause])
    expected_error = {"the loss": NonFiniteError, "a user's mistake": UserError}.get(cause, ZeroDivisionError)
    assert isinstance(error, expected_error)
    assert steps_on_disk(tmp_path / "run") == [2]
    training = read_index(step_folder(tmp_path / "run", 2)).training
    assert training is not None
    assert training.emergency is not None
    assert training.emergency.startswith(type(error).__name__)
    assert any("saved an emergency checkpoint of step 2" in text for text in warnings_of(tmp_path / "run"))
    capsys.readouterr()
    ls_command(tmp_path / "run")
    assert "saved in an emergency" in " ".join(capsys.readouterr().out.split())

    expected = undisturbed(tmp_path / "whole")
    assert undisturbed(tmp_path / "run") == expected[2:], "the failed step is done again"


def test_nothing_is_saved_when_there_is_nothing_sound_or_new_to_save(tmp_path: Path) -> None:
    def fail_in_update(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    def half_an_update(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        optimizer.register_step_post_hook(fail_in_update)
        return optimizer

    cases: dict[str, Callable[[Path], Any]] = {
        "nothing since the last save": lambda folder: fail(
            folder, saved=2, between=raise_at(2, ZeroDivisionError("planted"))
        ),
        "half an update": lambda folder: train_with(folder, half_an_update),
        "weights that are not finite": lambda folder: train_with(folder, adamw, poisoned=True),
    }
    for name, case in cases.items():
        folder = tmp_path / name.replace(" ", "-")
        case(folder)
        found = [read_index(step_folder(folder, step)).training for step in steps_on_disk(folder)]
        assert [one.emergency for one in found if one] == ([None] if name.startswith("nothing") else []), name


def train_with(folder: Path, optimizer: Any, poisoned: bool = False) -> None:
    with suppress(ZeroDivisionError), lockstep.init("single", run_dir=folder) as run:
        engine = run.setup(ConvNet, image_loss, optimizer=optimizer)
        for batch in run.loader(Images(), GLOBAL_BATCH, micro_batch=2, steps=3, workers=0):
            engine.step(batch)
            if poisoned:
                engine.stored[0][1].data.fill_(NAN)
                raise ZeroDivisionError("planted")


def test_a_save_that_fails_too_does_not_hide_the_error(tmp_path: Path) -> None:
    with mock.patch.object(saving, "write_shard", side_effect=OSError(5, "Input/output error")):
        error = fail(tmp_path / "run", between=raise_at(2, ZeroDivisionError("planted")))
    assert isinstance(error, ZeroDivisionError)
    assert any("no emergency checkpoint could be saved" in text for text in warnings_of(tmp_path / "run"))
    assert steps_on_disk(tmp_path / "run") == []


def fail_together(job: Job, folder: Path) -> str:
    """All ranks fail at the NaN of step 3."""

    def begin() -> None:
        with join(job, "dp=2", folder, timeout_minutes=job.patient(60) / 60) as run:
            train(run, {19: NAN}, {}, between=lambda _: None)

    return type(error_of(begin)).__name__


def fail_alone(job: Job, folder: Path) -> None:
    """Rank 1 fails after step 2; the watchdog of the other one ends it."""
    with join(job, "dp=2", folder, timeout_minutes=job.patient(6) / 60) as run:
        train(run, {}, {}, between=raise_at(2, ZeroDivisionError("planted")) if job.rank == 1 else lambda _: None)


def test_ranks_that_fail_together_save_together_and_one_alone_cannot(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(fail_together, 2, tmp_path / "together") == ["NonFiniteError"] * 2
    with pytest.raises(RankFailed):
        ranks.run(fail_alone, 2, tmp_path / "alone")
    training = read_index(step_folder(tmp_path / "together", 2)).training
    assert training is not None
    assert training.emergency is not None
    assert "sample ids" in training.emergency
    assert steps_on_disk(tmp_path / "alone") == []


def test_a_hook_that_ends_in_an_exit_code_keeps_nobody_from_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: Any) -> None:
        raise SystemExit(2)

    saved: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", end)
    undo = on_uncaught(saved.append)
    error = UserError("planted", "fix it")
    with pytest.raises(SystemExit, match="2"):
        sys.excepthook(UserError, error, None)
    undo()
    assert saved == [error]


def test_the_steps_before_a_failure_are_in_the_log_before_anybody_judges_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.observe.journal.SECONDS_AT_FIRST", 60.0)
    with lockstep.init("single", run_dir=tmp_path / "run", seed=5, device="cpu") as run:
        train(run, {}, {}, steps=2)
        run._save_in_emergency(SystemExit(3))
        assert look_back(run.folder.path).step == 2


SCRIPT = """
import lockstep
from tests.faults.test_recover import *
run = lockstep.init("single", run_dir="run")
train(run, {}, {}, between=raise_at(2, ZeroDivisionError("planted")))
"""


def test_a_script_without_a_with_statement_is_saved_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ZeroDivisionError: planted" in done.stdout + done.stderr
    assert steps_on_disk(tmp_path / "run") == [2]
