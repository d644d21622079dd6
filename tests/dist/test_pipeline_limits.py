"""What the stages of a pipeline cannot see of each other is refused on every rank, before the first step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from lockstep.errors import UserError
from lockstep.run import Run
from tests.parity.problems import adamw, anew, join
from tests.ranks import Job, RankPool

WIDTH = 8
Batch = dict[str, torch.Tensor]


class Numbers(Dataset[Batch]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Batch:
        draw = torch.Generator().manual_seed(index)
        mask = torch.arange(4) < 1 + index % 4
        return {"x": torch.randn(4, WIDTH, generator=draw), "y": torch.randn(4, WIDTH, generator=draw), "mask": mask}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()  # type: ignore[no-any-return]


class Stack(nn.Module):
    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])


class KeepingLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.square().mean()
        return super().forward(x)


class Keeping(Stack):
    layer = KeepingLayer


def loss_of_kept(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    total, weight = loss(model, batch)
    return total + sum(layer.seen for layer in model.layers), weight


class ListingLayer(Layer):
    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        seen.append(x)
        return super().forward(x)


class Listing(Stack):
    layer = ListingLayer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for layer in self.layers:
            x = layer(x, seen)
        return x + sum(seen)


class ThrowingLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


class Throwing(Stack):
    layer = ThrowingLayer


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


class Reversing(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return x + Doubled.apply(first)  # type: ignore[no-any-return,no-untyped-call]


class Clamping(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.clamp_(0.5, 0.9)
        return super().forward(x) * self.scale  # type: ignore[no-any-return]


class Counting(Stack):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)  # type: ignore[no-any-return]


def loss_by_size(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    total, weight = loss(model, batch)
    return total * (2 if total > 1 else 1), weight


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "kept in an attribute": (Keeping, loss_of_kept, "uses a value that a module of another stage made"),
    "kept in a list": (Listing, loss, "changes a list, dict or object that it is given"),
    "Python's random numbers": (Throwing, loss, "draws from Python's or numpy's random numbers"),
    "a function of autograd": (Reversing, loss, "is an autograd.Function that is applied outside"),
    "a parameter that changes": (Clamping, loss, "changes a parameter in place"),
    "a buffer that changes": (Counting, loss, "the forward changes the buffer count"),
    "a number that is read": (Stack, loss_by_size, "reads a value of the model"),
}


class Returning(Stack):
    """Gives back what an early block made, beside the end."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return x, first


def loss_of_both(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    last, first = model(batch["x"])
    return (last - batch["y"]).square().sum() + first.square().sum(), len(batch["x"])


def loss_where_it_counts(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    mask = batch["mask"]
    return F.mse_loss(model(batch["x"])[mask], batch["y"][mask], reduction="sum"), mask.sum()


class Lazy(Stack):
    """Makes a constant when it needs it first, of the kind of an activation."""

    ones: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.ones is None or self.ones.shape != x.shape:
            self.ones = torch.ones_like(x)
        return x + self.ones


TRAINED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "returns an early value": (Returning, loss_of_both),
    "a mask from the batch": (Stack, loss_where_it_counts),
    "a constant made late": (Lazy, loss),
}


def attempt(run: Run, build: Callable[[], nn.Module], function: Any) -> list[float] | str:
    try:
        engine = anew(run).setup(build, function, optimizer=adamw, clip=1.0)
        loader = run.loader(Numbers(), 8, micro_batch=2, steps=3, workers=0)
        first = next(batches := iter(loader))
    except UserError as error:
        return error.cause
    return [engine.step(batch).loss for batch in (first, *batches)]


def attempts(job: Job, layout: str, names: list[str]) -> dict[str, list[float] | str]:
    found = {}
    for number, name in enumerate(names):
        with join(job, layout, meeting=str(number)) as run:
            build, function = TRAINED[name] if name in TRAINED else REFUSED[name][:2]
            found[name] = attempt(run, build, function)
    return found


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool) -> list[dict[str, list[float] | str]]:
    return ranks.run(attempts, 2, "pp=2", [*REFUSED, *TRAINED], timeout=150)


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_cannot_see_of_each_other_is_refused(outcomes: list[dict[str, Any]], name: str) -> None:
    for rank in outcomes:
        assert REFUSED[name][2] in str(rank[name])


def test_what_only_looks_like_it_trains_with_the_numbers_of_one_process(
    outcomes: list[dict[str, Any]], ranks: RankPool
) -> None:
    (expected,) = ranks.run(attempts, 1, "single", list(TRAINED), timeout=100)
    for rank in outcomes:
        for name in TRAINED:
            assert rank[name] == pytest.approx(expected[name], rel=1e-6), name
