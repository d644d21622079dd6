"""Things that scripts do, and that a step made for speed must not break."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.errors import UserError
from tests.events import read_events

Batch = dict[str, torch.Tensor]


class Pairs(Dataset[Batch]):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1)).to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.x[index], "y": self.x[index].sum()}


def squared(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    return (model(batch["x"]).squeeze(-1) - batch["y"]).square().sum(), len(batch["y"])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def begin(folder: Path) -> lockstep.Run:
    return lockstep.init("single", device="cpu", run_dir=folder)


def test_layers_put_into_eval_mode_stay_there_whenever_the_run_saves_or_scores(tmp_path: Path) -> None:
    losses = []
    for name in ("quiet", "busy"):
        with begin(tmp_path / name) as run:
            engine = run.setup(perceptron, squared, optimizer=adamw)
            assert isinstance(engine.model, nn.Sequential)
            engine.model[1].eval()
            engine.model[2].eval()
            seen = []
            for batch in run.loader(Pairs(), 8, micro_batch=4, steps=6, workers=0):
                seen.append(engine.step(batch).loss)
                if name == "busy" and len(seen) == 3:
                    run.save()
                    run.evaluate(Pairs())
            assert not engine.model[1].training
            losses.append(seen)
    assert losses[0] == losses[1]


def test_a_model_left_in_eval_mode_trains(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        engine = run.setup(perceptron, squared, optimizer=adamw)
        for batch in run.loader(Pairs(), 8, micro_batch=4, steps=2, workers=0):
            engine.model.eval()
            engine.step(batch)
            assert engine.model.training


def test_a_deep_copy_keeps_its_own_weights(tmp_path: Path) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.out = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            out: torch.Tensor = self.out(x)
            return out

    with begin(tmp_path / "run") as run:
        engine = run.setup(Blocks, squared, optimizer=adamw, recompute=True)
        average, x = copy.deepcopy(engine.model), Pairs().x
        before = average(x)
        for batch in run.loader(Pairs(), 8, micro_batch=4, steps=3, workers=0):
            engine.step(batch)
        assert torch.equal(average(x), before)
        assert not torch.equal(engine.model(x), before)


def test_a_second_setup_is_refused(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.setup(perceptron, squared, optimizer=adamw)
        with pytest.raises(UserError, match=r"run.setup was called a second time, .* put the networks into one"):
            run.setup(perceptron, squared, optimizer=adamw)


class Branches(nn.Module):
    """Its second half gets its first gradient when the script opens it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)
        self.is_open = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x) + (self.second(x) if self.is_open else 0)
        return out


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_may_get_its_first_gradient_late(tmp_path: Path, momentum: float) -> None:
    with begin(tmp_path / "run") as run:
        engine = run.setup(
            Branches, squared, optimizer=lambda named: torch.optim.SGD(named, lr=1e-2, momentum=momentum), clip=1.0
        )
        for batch in run.loader(Pairs(), 8, micro_batch=8, steps=4, workers=0):
            engine.step(batch)
            engine.model.is_open = engine.steps_done >= 2  # type: ignore[assignment]
        assert engine.model.get_parameter("second.weight").grad is not None


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_model_in_float64_trains_like_plain_pytorch(tmp_path: Path, optimizer: Any) -> None:
    with begin(tmp_path / "run") as run:
        engine = run.setup(
            lambda: nn.Linear(4, 1).double(), squared, optimizer=lambda named: optimizer(named, lr=1e-2), clip=0.5
        )
        plain = copy.deepcopy(engine.model)
        stepper = optimizer(plain.parameters(), lr=1e-2)
        for batch in run.loader(Pairs(torch.float64), 8, micro_batch=8, steps=4, workers=0):
            engine.step(batch)
            stepper.zero_grad()
            total, count = squared(plain, batch.micro_batches[0].data)
            (total / count).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            stepper.step()
        for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_what_is_logged_is_what_it_was_at_that_moment(tmp_path: Path) -> None:
    counter = torch.zeros(())
    with begin(tmp_path / "run") as run:
        for _ in range(200):
            counter += 1
            run.log(value=counter)
            counter.zero_()
    values = [event["values"]["value"] for event in read_events(run.folder.events) if event["kind"] == "metric"]
    assert values == [1.0] * 200


@pytest.mark.parametrize("value", [torch.ones(2), "text", None, True, [1.0]])
def test_what_is_no_number_is_refused_where_it_is_logged_and_nothing_is_left_open(tmp_path: Path, value: Any) -> None:
    def log_it() -> None:
        with begin(tmp_path / "run") as run:
            engine = run.setup(perceptron, squared, optimizer=adamw)
            for batch in run.loader(Pairs(), 8, micro_batch=4, steps=2, workers=0):
                engine.step(batch)
                run.log(value=value)

    with pytest.raises(UserError, match=r"run\.log was given value"):
        log_it()
    assert gc.isenabled()
    begin(tmp_path / "run").leave()  # the folder is free again


def test_the_scripts_own_error_is_the_one_that_is_shown(tmp_path: Path) -> None:
    def fail() -> None:
        with begin(tmp_path / "run") as run:
            run.journal.close()
            raise ValueError("the real one")

    with pytest.raises(ValueError, match="the real one"):
        fail()


def test_a_closed_run_says_so(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    engine = run.setup(perceptron, squared, optimizer=adamw)
    for batch in run.loader(Pairs(), 8, micro_batch=4, steps=2, workers=0):
        result = engine.step(batch)
        result.grad_norm.mul_(0)  # the script may do so: it was read
    run.close()
    assert all(event["grad_norm"] > 0 for event in read_events(run.folder.events) if event["kind"] == "step")
    for too_late in (lambda: run.log(loss=1.0), lambda: engine.step(batch)):
        with pytest.raises(UserError, match="the run is closed"):
            too_late()


@pytest.mark.parametrize(
    ("option", "value"),
    [("compile", "yes"), ("compile", True), ("attention", "flsh"), ("init", "byname"), ("loss_reduction", "avg")],
)
def test_a_misspelt_option_of_setup_is_refused(tmp_path: Path, option: str, value: Any) -> None:
    with begin(tmp_path / "run") as run, pytest.raises(UserError, match=f"unknown {option} '{value}'"):
        run.setup(perceptron, squared, optimizer=adamw, **{option: value})


@pytest.mark.parametrize(
    ("metric", "cause"),
    [
        (lambda model, batch: model(batch["x"]).mean(), "the metric right returned a Tensor"),
        (lambda _model, _batch: (1, 2, 3), "the metric right returned 3 values"),
        (lambda model, batch: (model(batch["x"]).squeeze(), 4), "numbers that are not single ones"),
    ],
    ids=["mean", "three", "vector"],
)
def test_a_metric_that_is_no_sum_and_count_is_refused_by_name(tmp_path: Path, metric: Any, cause: str) -> None:
    with begin(tmp_path / "run") as run:
        run.setup(perceptron, squared, optimizer=adamw)
        with pytest.raises(UserError, match=cause):
            run.evaluate(Pairs(), {"right": metric})
        with pytest.raises(UserError, match="name each"):
            run.evaluate(Pairs(), metric)


def test_an_untrained_model_is_not_tested(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.setup(perceptron, squared, optimizer=adamw)
        with pytest.raises(UserError, match="no step was done"):
            run.test(Pairs())
