"""Buffers that a forward changes: as in a plain loop, whose steps have one forward, whatever the micro-batch is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import lockstep
from lockstep.errors import UserError
from tests.parity.problems import join
from tests.ranks import Job, RankPool

STEPS, BATCH = 4, 6


class Vectors(Dataset[Any]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(5, generator=torch.Generator().manual_seed(index))


def old_spectral_norm() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 2))


class Counting(nn.Module):
    """The first forwards count less."""

    forwards: torch.Tensor

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Linear(5, 2)
        self.register_buffer("forwards", torch.zeros(()))
        self.again = again

    def weighted(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.body(x) * self.forwards.clone()  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.weighted, x, use_reentrant=False) if self.again else self.weighted(x)


class Following(Counting):
    """A mean of what it has seen, which the next forward uses, assigned anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x - self.forwards)
        self.forwards = 0.5 * self.forwards + 0.5 * x.detach().mean()
        return out  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Uses a buffer, which autograd then needs as it was, and assigns it anew."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x).tanh() * self.scale
        self.scale = 0.7 * self.scale + 0.1
        return out  # type: ignore[no-any-return]


def scaled() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(Scaled(), Scaled(), nn.Linear(5, 2))


class Averaging(Scaled):
    """The same with a mean of what it has seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x) * self.scale
        self.scale = 0.5 * self.scale + 0.5 * out.detach().mean()
        return out  # type: ignore[no-any-return]


def averaging() -> nn.Module:
    torch.manual_seed(4)
    return Averaging()


class Picky(Scaled):
    """Fails where it sees few samples, when the buffer is another one already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if len(x) < BATCH - 1:
            raise ValueError("too few samples")
        return out


def picky() -> nn.Module:
    torch.manual_seed(4)
    return Picky()


class Swapping(Counting):
    """Buffers that change places."""

    other: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("other", torch.full((), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards, self.other = self.other, self.forwards
        return self.body(x) * (1 + self.forwards)  # type: ignore[no-any-return]


class Assigning(Counting):
    def weighted(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards = self.forwards + 1
        return self.body(x) * self.forwards  # type: ignore[no-any-return]


def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).pow(2).sum(), len(x)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def plain(build: Callable[[], nn.Module]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, data, losses = build(), Vectors(), []
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        total, weight = loss(model, torch.stack([data[step * BATCH + i] for i in range(BATCH)]))
        losses.append(total.item() / weight)
        optimizer.zero_grad()
        (total / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return losses, dict(model.named_buffers())


def trained(
    folder: Path, build: Callable[[], nn.Module], micro_batch: int | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    with lockstep.init("single", device="cpu", run_dir=folder / "run") as run:
        engine = run.setup(build, loss, optimizer=sgd)
        loader = run.loader(Vectors(), BATCH, steps=STEPS, shuffle=False, workers=0, micro_batch=micro_batch)
        return [engine.step(batch).loss for batch in loader], dict(engine.buffers)


@pytest.mark.parametrize(
    ("build", "micro_batch"),
    [
        (old_spectral_norm, 2),
        (Counting, 2),
        (Following, None),
        (scaled, None),
        (scaled, 2),
        (averaging, None),
        (picky, None),
        (Swapping, 2),
    ],
)
def test_they_are_those_of_a_plain_loop(
    tmp_path: Path, build: Callable[[], nn.Module], micro_batch: int | None
) -> None:
    losses, buffers = trained(tmp_path, build, micro_batch)
    expected, after = plain(build)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, after[name])


@pytest.mark.parametrize("build", [Counting, Assigning])
def test_one_that_is_counted_again_in_the_backward_pass_is_refused(tmp_path: Path, build: type[Counting]) -> None:
    with pytest.raises(UserError, match="the buffer forwards changes once more when a forward is computed again"):
        trained(tmp_path, lambda: build(again=True), None)


def test_what_a_script_assigns_between_steps_counts(tmp_path: Path) -> None:
    with lockstep.init("single", device="cpu", run_dir=tmp_path / "run") as run:
        engine = run.setup(Assigning, loss, optimizer=sgd)
        for batch in run.loader(Vectors(), BATCH, steps=STEPS, shuffle=False, workers=0, micro_batch=2):
            engine.model.forwards = torch.full((), 10.0)
            engine.step(batch)
            assert dict(engine.buffers)["forwards"] == 11
            assert engine.model.forwards is dict(engine.buffers)["forwards"], "that which checkpoints know"


def test_a_step_that_fails_leaves_the_tensors_that_checkpoints_know(tmp_path: Path) -> None:
    def stopping(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        total, weight = loss(model, x)
        if fails:
            raise RuntimeError("no more")
        return total, weight

    fails = False
    with lockstep.init("single", device="cpu", run_dir=tmp_path / "run") as run:
        engine = run.setup(Following, stopping, optimizer=sgd)
        for batch in run.loader(Vectors(), BATCH, steps=STEPS, shuffle=False, workers=0):
            before, fails = dict(engine.buffers)["forwards"].clone(), engine.steps_done == 1
            if fails:
                with pytest.raises(RuntimeError, match="no more"):
                    engine.step(batch)
                assert engine.model.forwards is dict(engine.buffers)["forwards"]
                assert engine.model.forwards == before
                break
            engine.step(batch)


def trained_on(job: Job, layout: str, micro_batch: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    with join(job, layout) as run:
        engine = run.setup(scaled, loss, optimizer=sgd)
        loader = run.loader(Vectors(), BATCH, steps=STEPS, shuffle=False, workers=0, micro_batch=micro_batch)
        return [engine.step(batch).loss for batch in loader], dict(engine.buffers)


@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "pp=2"])
def test_those_that_are_assigned_anew_are_those_of_a_plain_loop(
    ranks: RankPool, layout: str, micro_batch: int | None
) -> None:
    expected, after = plain(scaled)
    found = set()
    for losses, buffers in ranks.run(trained_on, 2, layout, micro_batch):
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, buffer in buffers.items():
            torch.testing.assert_close(buffer, after[name])
        found |= set(buffers)
    assert found == set(after)
