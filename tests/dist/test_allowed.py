"""What people write in losses and models beside `model(x)`: the numbers of a plain PyTorch loop on every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, default_collate

from lockstep.errors import UserError
from lockstep.run import Run
from tests.parity.problems import join
from tests.ranks import Job, RankPool

STEPS, BATCH, WIDTH, LENGTH, WORDS = 4, 8, 8, 8, 12
Batch = dict[str, torch.Tensor]


class Sentences(Dataset[Batch]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Batch:
        draw = torch.Generator().manual_seed(index)
        x, y = torch.randint(0, WORDS, (2, LENGTH), generator=draw)
        return {"x": x, "y": y, "label": y[0] % 4}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A stack of layers over words, with a body that has a method of its own and two heads."""

    layer: Callable[[], nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(4))
        self.head, self.classes = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))  # type: ignore[no-any-return]


def words_of(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def plain(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    return words_of(model(batch["x"]), batch)


def by_method(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    return words_of(model.head(model.encode(batch["x"])), batch)


def by_modules(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    x = model.words(batch["x"])
    for layer in model.layers:
        x = layer(x)
    return words_of(F.linear(x, model.head.weight, model.head.bias), batch)


def both_heads(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    total, weight = plain(model, batch)
    classes = model.classes(model.words(batch["x"]).mean(1))
    return total + F.cross_entropy(classes, batch["label"], reduction="sum"), weight


class Notes:
    """What a script keeps for its log."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.total = 0.0
        self.right = 0


NOTES = Notes()


def noting(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    logits = model(batch["x"])
    total, weight = words_of(logits, batch)
    NOTES.losses.append(total.item() / weight)
    NOTES.total += total.item()
    NOTES.right += int((logits.argmax(-1) == batch["y"]).sum())
    print(f"loss {total / weight:.3f} of {round(float(total), 2)} and {total.item():.2f}")
    return total, weight


class TellingLayer(Layer):
    """Computes with a number that it has read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.norm.weight.mean().item()
        return super().forward(x) * self.scale


class Telling(Model):
    """Notes numbers between its layers, and inside."""

    layer = TellingLayer

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        self.norms = []
        for layer in self.layers:
            x = layer(x)
            self.norms.append(x.norm().item())
        return x


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -0.5 * gradients[0]


reverse = Reversed.apply


class Domains(nn.Module):
    """A layer whose gradient is reversed on the way in, by a function that people keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(reverse(x))  # type: ignore[no-any-return,no-untyped-call]


class Adversarial(Model):
    layer = Domains


class Adapted(Layer):
    """With an update of rank 3, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, 2 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.gelu(self.up(h) + self.second(self.first(h))))  # type: ignore[no-any-return]


class LowRankModel(Model):
    layer = Adapted


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a method": (Model, by_method),
    "modules": (Model, by_modules),
    "the model and a module": (Model, both_heads),
    "notes of numbers": (Telling, noting),
    "an own function": (Adversarial, plain),
    "an update of low rank": (LowRankModel, plain),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def plain_loop_of(build: Callable[[], nn.Module], loss: Any) -> list[float]:
    model, data, losses = build(), Sentences(), []
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        batch = default_collate([data[step * BATCH + sample] for sample in range(BATCH)])
        total, weight = loss(model, batch)
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append(float(total.detach() / weight))
    return losses


def train_with(run: Run, build: Callable[[], nn.Module], loss: Any, **options: Any) -> list[float]:
    engine = run.setup(build, loss, optimizer=sgd)
    loader = run.loader(Sentences(), BATCH, steps=STEPS, shuffle=False, workers=0, **options)
    return [engine.step(batch).loss for batch in loader]


def train(job: Job, layout: str, names: list[str]) -> dict[str, list[float] | str]:
    found: dict[str, list[float] | str] = {}
    for number, name in enumerate(names):
        with join(job, layout, meeting=str(number)) as run:
            try:
                found[name] = train_with(run, *CASES[name])
            except UserError as error:
                found[name] = str(error)
    return found


REFUSED = {("cp=2", "an own function"): "needs whole sequences inside a block of the model: Reversed is an autograd"}


@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2", "pp=2", "cp=2"])
def test_the_numbers_are_those_of_a_plain_loop(layout: str, ranks: RankPool) -> None:
    for rank in ranks.run(train, 2, layout, list(CASES), timeout=150):
        for name, case in CASES.items():
            if (refusal := REFUSED.get((layout, name))) is None:
                assert rank[name] == pytest.approx(plain_loop_of(*case), rel=1e-5), name
            else:
                assert refusal in str(rank[name])
