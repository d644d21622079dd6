"""Models and loops as people write them: the numbers of one process, or a refusal that names the cause."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.faults.requests import Requests
from lockstep.layout import Layout
from lockstep.run import Run
from tests.marks import others_slow
from tests.parity.problems import RaggedTexts, TinyGPT, adamw, anew, error_of, join, sgd, text_loss, weights
from tests.ranks import Job, RankFailed, RankPool

SAMPLES = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))


class Pass(nn.Module):
    """A linear layer behind any other layer."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


class Average(nn.Module):
    """Keeps a running average of its own making."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.1)
        return x


class Instance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(6, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x[..., None].expand(-1, -1, 2))[..., 0]  # type: ignore[no-any-return]


class Twice(nn.Module):
    """Calls its blocks two times over."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(2))
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = x + block(x)
                self.masks.append(block(torch.ones_like(x)) == 0)
        return x


def frozen_batch_norm() -> nn.Module:
    model = Pass(nn.BatchNorm1d(6))
    model.first.eval()
    return model


def recomputed_batch_norm() -> nn.Module:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(6, 1))


def half() -> nn.Module:
    return Pass(nn.Linear(6, 6).bfloat16())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "frozen batch norm": frozen_batch_norm,
    "own running average": lambda: Pass(Average()),
    "instance norm": lambda: Pass(Instance()),
    "sync batch norm": lambda: Pass(nn.SyncBatchNorm(6)),
    "half-precision weights": half,
    "recomputed batch norm": recomputed_batch_norm,
    "plain": lambda: Pass(nn.Linear(6, 6)),
}


def square(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def mixed_up(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """A loss that draws from numpy and `random`, as augmentations do."""
    (x,) = batch
    x = x * float(np.random.rand()) + random.random() * x.flip(0)
    return model(x).square().sum(), len(x)


def constant_on_some(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    if batch[0][0, 0] < 0:
        return torch.zeros(()), 0
    return square(model, batch)


LOSSES: dict[str, Callable[..., Any]] = {"square": square, "mixed up": mixed_up, "constant": constant_on_some}


def train(
    job: Job, layout: str, model: str, loss: str = "square", recompute: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    with join(job, layout) as run:
        engine = run.setup(MODELS[model], LOSSES[loss], optimizer=sgd, recompute=recompute)
        loader = run.loader(TensorDataset(SAMPLES), 8, micro_batch=2, steps=3, shuffle=False, workers=0)
        losses = [engine.step(batch).loss for batch in loader]
        buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
        return losses, weights(engine), buffers


def refusal(job: Job, layout: str, model: str, loss: str = "square") -> str:
    return str(error_of(lambda: train(job, layout, model, loss)))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("own running average", "the forward pass changes the buffer first.seen"),
        ("instance norm", "first.norm keeps running statistics per rank"),
        ("sync batch norm", "first is a SyncBatchNorm"),
        ("half-precision weights", "the parameter first.weight is stored as bfloat16"),
    ],
)
def test_a_model_that_ranks_would_train_apart_is_refused_by_name(ranks: RankPool, model: str, sentence: str) -> None:
    assert all(said.startswith(sentence) for said in ranks.run(refusal, 2, "dp=2", model))


@pytest.mark.parametrize("layout", others_slow(["dp=2", "dp=3", "fsdp=2", "fsdp=3"], ["dp=2", "fsdp=3"]))
@pytest.mark.parametrize(
    ("model", "loss", "recompute"),
    [
        ("frozen batch norm", "square", False),
        ("recomputed batch norm", "square", True),
        ("plain", "mixed up", False),
    ],
)
def test_it_trains_as_on_one_process(ranks: RankPool, layout: str, model: str, loss: str, recompute: bool) -> None:
    expected = ranks.run(train, 1, "single", model, loss)[0]
    for losses, parameters, buffers in ranks.run(
        train, Layout.parse(layout).world_size, layout, model, loss, recompute=recompute
    ):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        for name, value in expected[1].items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-5)
        for name, value in expected[2].items():
            torch.testing.assert_close(buffers[name], value, rtol=1e-4, atol=1e-5)


def test_a_layer_frozen_in_eval_mode_stays_frozen(ranks: RankPool) -> None:
    assert ranks.run(train, 1, "single", "frozen batch norm")[0][2]["first.num_batches_tracked"] == 0


def test_a_sharded_layout_refuses_a_loss_that_leaves_the_model_out(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="the loss function returned a constant, and a sharded layout"):
        ranks.run(train, 2, "fsdp=2", "plain", "constant")


def masks_of_two_calls(job: Job) -> list[torch.Tensor]:
    with join(job, "single") as run:
        model = Twice()
        engine = run.setup(lambda: model, square, optimizer=sgd)
        for batch in run.loader(TensorDataset(SAMPLES), 8, micro_batch=8, steps=1, workers=0):
            model.masks.clear()  # of trials
            engine.step(batch)
        return model.masks


def test_a_block_that_is_called_twice_draws_two_masks(ranks: RankPool) -> None:
    first, _, second, _ = ranks.run(masks_of_two_calls, 1)[0]
    assert not torch.equal(first, second)


def loops(run: Run) -> dict[str, str]:
    engine = anew(run).setup(TinyGPT, text_loss, optimizer=adamw)
    loader = run.loader(RaggedTexts(), 8, micro_batch=4, steps=2, workers=0)
    for batch in loader:
        engine.step(batch)
    return {
        "a loader a second time": str(error_of(lambda: list(loader))),
        "a second loader": str(error_of(lambda: run.loader(RaggedTexts(), 8))),
        "a batch of none": str(error_of(lambda: run.loader(RaggedTexts(), 0, name="other"))),
    }


def test_the_usual_epoch_loop_around_the_loader_is_refused(tmp_path: Path) -> None:
    with lockstep.init("single", run_dir=tmp_path / "run") as run:
        said = loops(run)
    assert said["a loader a second time"].startswith("the loader 'train' has given all its steps")
    assert said["a second loader"].startswith("the loader 'train' of this run exists already")
    assert said["a batch of none"].startswith("global_batch is 0")


def test_numbers_of_numpy_can_be_logged(tmp_path: Path) -> None:
    with lockstep.init("single", run_dir=tmp_path / "run") as run:
        run.log(accuracy=np.float32(0.5), loss=torch.tensor(2.0))
    assert '"values":{"accuracy":0.5,"loss":2.0}' in (tmp_path / "run" / "events.jsonl").read_text()


def test_once_gives_what_json_makes_of_it_on_one_rank_too(tmp_path: Path) -> None:
    with lockstep.init("single", run_dir=tmp_path / "run") as run:
        assert run.once("prepare", lambda: {1: (2, 3)}) == {"1": [2, 3]}


def test_a_run_has_one_writer(tmp_path: Path) -> None:
    with lockstep.init("single", run_dir=tmp_path / "run"):
        refused = error_of(lambda: lockstep.init("single", run_dir=tmp_path / "run"))
    assert "this script has called lockstep.init a second time" in str(refused)


# Going back ----------------------------------------------------------------------------------------------------------


def go(run_dir: Path, steps: int, **options: Any) -> list[int]:
    """Train to a step, saving every second one; returns the samples seen in each step."""
    run = lockstep.init("single", run_dir=run_dir, **options)
    engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
    seen = []
    for batch in run.loader(RaggedTexts(), 8, micro_batch=4, steps=12, workers=0):
        out = engine.step(batch)
        seen.append(sum(part.ids[0] for part in batch.micro_batches))
        if out.step % 2 == 0:
            run.save()
        if out.step == steps:
            break
    run.leave()
    return seen


def steps_in(run_dir: Path) -> list[str]:
    return sorted(path.name.partition(".set-aside")[0] for path in (run_dir / "checkpoints").iterdir())


def test_going_back_to_a_checkpoint_sets_the_later_ones_aside_and_saves_anew(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", 8)
    go(tmp_path / "run", 8)
    again = go(tmp_path / "run", 8, resume=str(tmp_path / "run" / "checkpoints" / "step-00000006"))
    assert again == whole[6:]
    assert steps_in(tmp_path / "run") == [".step-00000008", ".went-back", "step-00000006", "step-00000008"]


def test_a_checkpoint_of_another_run_begins_a_run_and_its_own_ones_continue_it(tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", 12)
    go(tmp_path / "first", 4)
    start = str(tmp_path / "first" / "checkpoints" / "step-00000004")
    assert go(tmp_path / "second", 8, resume=start) == whole[4:8]
    assert go(tmp_path / "second", 12, resume=start) == whole[8:]


def test_another_seed_or_another_batch_does_not_continue_a_run(tmp_path: Path) -> None:
    go(tmp_path / "run", 2)
    other_seed = error_of(lambda: go(tmp_path / "run", 4, seed=9))
    assert "was written with seed 0 and this run has seed 9" in str(other_seed)


# Signals -------------------------------------------------------------------------------------------------------------


def test_repeated_sigterm_is_one_request() -> None:
    requests = Requests()
    requests.listen()
    try:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        requests.agree(requests.votes())
    finally:
        requests.close()
    assert requests.agreed == {"terminate"}
