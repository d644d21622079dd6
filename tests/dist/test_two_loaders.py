"""Two loaders of one run: what is found out with the samples of one stays true while the other is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.errors import UserError
from lockstep.runtime.seeds import draw_seed
from tests.ranks import Job, RankPool

BATCH = 4


class Vectors(Dataset[Any]):
    """Those that are noisy want a random number each."""

    def __init__(self, noisy: bool) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(0, 1, 3) + index
        return {"x": x / 8, "noisy": torch.tensor(self.noisy)}


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x = batch["x"]
    if batch["noisy"][0]:
        x = x + torch.randn(x.shape)
    return model(x).pow(2).sum(), len(x)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def test_a_loader_that_draws_nothing_does_not_stop_the_draws_of_another(tmp_path: Path) -> None:
    with lockstep.init("single", device="cpu", run_dir=tmp_path / "run", seed=5) as run:
        engine = run.setup(lambda: nn.Linear(3, 1), loss, optimizer=sgd)
        plain = nn.Linear(3, 1)
        plain.load_state_dict(engine.model.state_dict())
        noisy = run.loader(Vectors(True), BATCH, steps=1, shuffle=False, workers=0)
        quiet = run.loader(Vectors(False), BATCH, steps=1, shuffle=False, workers=0, name="quiet")
        losses = [engine.step(batch).loss for loader in (noisy, quiet) for batch in loader]
    optimizer, expected = sgd(plain.parameters()), []
    for step, data in enumerate((Vectors(True), Vectors(False))):
        total = torch.zeros(())
        for position in range(BATCH):
            torch.manual_seed(draw_seed(5, step, position))
            one = data[position]
            total = total + loss(plain, {"x": one["x"][None], "noisy": one["noisy"][None]})[0]
        expected.append(total.item() / BATCH)
        optimizer.zero_grad()
        (total / BATCH).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert losses == pytest.approx(expected, rel=1e-5)


def over_unlike_groups(job: Job) -> str:
    from tests.parity.problems import join

    with join(job, "dp=2") as run:
        run.setup(normalised, loss, optimizer=sgd)
        run.loader(Vectors(False), BATCH, steps=1, workers=0)
        try:
            run.loader(Vectors(False), BATCH, steps=1, workers=0, name="other", micro_batch=2)
        except UserError as error:
            return str(error)
    return "taken"


def test_batch_norm_over_the_global_batch_of_one_loader_alone_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(over_unlike_groups, 2):
        assert said.startswith("BatchNorm would normalise over the global batch of one loader")
