"""What is tried out before step 1, and after some steps: what samples see of each other, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import lockstep
from lockstep.data.order import sample_ids
from lockstep.errors import UserError
from lockstep.runtime.seeds import seed_of
from tests.parity.problems import SEED, join
from tests.ranks import Job, RankPool

BATCH, WIDTH = 8, 6
STEPS = 6
LATE = int(sample_ids(np.arange(4 * BATCH, 5 * BATCH), 64, SEED, 0)[3])
"""A sample that is in step 5, before which samples are tried out again."""
X = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index]


class NoisyRows(IterableDataset[Any]):
    """Draws from a generator of its own, which nobody seeds."""

    def __iter__(self) -> Iterator[Any]:
        for row in X:
            yield row + torch.from_numpy(np.random.default_rng().normal(size=WIDTH)).float()


class Queue(IterableDataset[Any]):
    """A stream that is its own iterator."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> torch.Tensor:
        if self.next == len(X):
            raise StopIteration
        self.next += 1
        return X[self.next - 1]


class Once(IterableDataset[Any]):
    """A stream of which nobody can make a copy."""

    def __init__(self) -> None:
        self.rows = iter(row for row in X)

    def __iter__(self) -> Iterator[Any]:
        return self.rows


def apart(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).pow(2).sum(), len(x)


def contrastive(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(5 * z @ z.T, torch.arange(len(z)), reduction="sum"), len(z)


class Waking:
    """A term over the batch that the script switches on after a step."""

    is_on = False

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        total, weight = apart(model, x)
        return (total + weight * model(x).std(0).sum() if self.is_on else total), weight


def mean_of_positive(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A mean over fewer samples than it says, where one of them is far below zero."""
    counts = x[:, 0] > -50
    return model(x)[counts].pow(2).mean() * len(x), len(x)


class OneIsNegative(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index] - 100.0 * (index == LATE)


class Curriculum(Rows):
    """What a sample is follows a level that the script sets."""

    def __init__(self) -> None:
        self.level = 1.0

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index] * self.level


def train(run: lockstep.Run, data: Any, loss: Any) -> list[float]:
    engine = run.setup(lambda: nn.Linear(WIDTH, 4), loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
    losses = []
    for batch in run.loader(data, BATCH, steps=STEPS, workers=0):
        losses.append(engine.step(batch).loss)
        if isinstance(loss, Waking):
            loss.is_on = engine.steps_done >= loss.after
    return losses


CASES = {
    "own generator, contrastive": (NoisyRows, contrastive),
    "its own iterator, contrastive": (Queue, contrastive),
    "read once, contrastive": (Once, contrastive),
    "its own iterator": (Queue, apart),
    "a term that wakes": (Rows, Waking(3)),
    "a term that wakes late": (Rows, Waking(STEPS - 1)),
    "a sample that shows it": (OneIsNegative, mean_of_positive),
}


def on_two_ranks(job: Job) -> dict[str, str | list[float]]:
    found: dict[str, str | list[float]] = {}
    for name, (data, loss) in CASES.items():
        try:
            with join(job, "dp=2", meeting=name, run_dir=job.folder / name.replace(" ", "-")) as run:
                found[name] = train(run, data(), loss)
        except UserError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def two(ranks: RankPool) -> dict[str, str | list[float]]:
    return ranks.run(on_two_ranks, 2)[0]


def one_process(folder: Path, name: str) -> list[float]:
    data, loss = CASES[name]
    with lockstep.init("single", device="cpu", run_dir=folder, seed=SEED) as run:
        return train(run, data(), loss)


@pytest.mark.parametrize("name", ["own generator, contrastive", "its own iterator, contrastive"])
def test_losses_over_a_batch_are_found_in_any_data(two: dict[str, str | list[float]], name: str) -> None:
    assert "depend on those who share its forward" in two[name]


def test_a_stream_that_can_be_read_only_once_counts_as_such(two: dict[str, str | list[float]], tmp_path: Path) -> None:
    assert "the stream Once can be read only once" in two["read once, contrastive"]
    assert len(one_process(tmp_path / "run", "read once, contrastive")) == STEPS


def test_a_stream_that_is_its_own_iterator_loses_no_sample(two: dict[str, str | list[float]], tmp_path: Path) -> None:
    assert two["its own iterator"] == pytest.approx(one_process(tmp_path / "run", "its own iterator"), rel=1e-5)


def test_a_term_that_wakes_in_mid_run_is_refused_when_it_is_looked_at_next(two: dict[str, str | list[float]]) -> None:
    assert str(two["a term that wakes"]).startswith("after step 4 the loss function makes the loss of a sample depend")
    assert str(two["a term that wakes late"]).startswith(f"after step {STEPS} the loss function"), "at the end, too"


def test_samples_that_come_later_show_what_the_first_did_not(two: dict[str, str | list[float]]) -> None:
    assert str(two["a sample that shows it"]).startswith("after step 4 the loss function")


def with_a_curriculum(folder: Path, workers: int) -> list[float]:
    data = Curriculum()
    with lockstep.init("single", device="cpu", run_dir=folder, seed=SEED) as run:
        engine = run.setup(lambda: nn.Linear(WIDTH, 4), apart, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
        losses = []
        for batch in run.loader(data, BATCH, steps=STEPS, workers=workers):
            losses.append(engine.step(batch).loss)
            data.level = 1.0 + engine.steps_done
    return losses


def test_a_dataset_that_is_changed_between_steps_is_read_so_or_refused(tmp_path: Path) -> None:
    torch.manual_seed(seed_of(SEED, "init"))
    model = nn.Linear(WIDTH, 4)
    optimizer, plain = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        ids = sample_ids(np.arange(step * BATCH, (step + 1) * BATCH), len(X), SEED, 0)
        total, weight = apart(model, X[ids] * (1.0 + step))
        optimizer.zero_grad()
        torch.autograd.backward(total / weight)
        optimizer.step()
        plain.append(total.item() / weight)
    assert with_a_curriculum(tmp_path / "read here", 0) == pytest.approx(plain, rel=1e-5)
    with pytest.raises(UserError, match=r"dataset's level was changed from 1\.0 to 2\.0 between steps.*workers=0"):
        with_a_curriculum(tmp_path / "read by a process", 1)
