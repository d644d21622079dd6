"""Parameters whose rows do not divide by the ranks that share them: sharding gives the weights of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.parity.problems import Tensors, join, sgd, weights
from tests.ranks import Job, RankPool

ROWS = [1, 2, 3, 4, 5, 6, 7, 9, 13]
"""On four ranks 5 rows are 2, 2, 1 and 0: the last but one has the rest. 9 are 3, 3, 3 and 0."""


class Columns(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3, generator=torch.Generator().manual_seed(index))


class Uneven(nn.Module):
    """A layer for each number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, rows) for rows in ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).square().sum(-1) for layer in self.layers], -1)


def summed(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).sum(), len(x)


def train(job: Job, layout: str, level: str) -> Tensors:
    options: dict[str, Any] = {} if layout == "single" else {"shard": {"level": level}}
    with join(job, layout) as run:
        engine = run.setup(Uneven, summed, optimizer=sgd, **options)
        for batch in run.loader(Columns(), 8, micro_batch=2, steps=3, workers=0):
            engine.step(batch)
        return weights(engine)


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> Tensors:
    return ranks.run(train, 1, "single", "")[0]


@pytest.mark.parametrize("level", ["zero1", "zero3"])
def test_four_ranks_have_the_weights_of_one_process(ranks: RankPool, one_process: Tensors, level: str) -> None:
    for held in ranks.run(train, 4, "fsdp=4", level):
        for name, expected in one_process.items():
            torch.testing.assert_close(held[name], expected, rtol=1e-5, atol=1e-6, msg=name)
