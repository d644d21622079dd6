"""What the tables of layouts write down of a training, and how far it is from that of one process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lockstep.data.loader import Loader
from lockstep.engine import Engine
from tests.parity.problems import Tensors, gradients


@dataclass
class Record:
    """What one rank saw of one training; the tensors are whole ones, of the parameters that the rank holds."""

    steps: list[dict[str, Any]]
    ids: list[list[int]]
    forwards: list[int]
    gradients: Tensors
    initial: Tensors
    final: Tensors
    stored: dict[str, int]
    """How many numbers of each parameter this rank has in memory."""
    seconds: float = 0.0


def recorded(engine: Engine, loader: Loader) -> Record:
    """Train to the end of a loader and write down what this rank sees."""
    started = time.monotonic()
    seen = Record([], [], [], {}, held(engine), {}, stored(engine))
    for batch in loader:
        out = engine.step(batch)
        seen.steps.append(
            {"loss": out.loss, "weight": out.weight, "norm": out.grad_norm.item(), "lr": out.lr, "skip": out.skipped}
        )
        counting = [part for part in batch.micro_batches if not part.filler]
        seen.ids.append([sample for part in counting for sample in part.ids])
        seen.forwards.append(len(counting))
        if out.step == 1:
            seen.gradients = gradients(engine)
    seen.final = held(engine)
    seen.seconds = time.monotonic() - started
    return seen


def held(engine: Engine) -> Tensors:
    return {name: engine.whole(name, parameter).detach().clone() for name, parameter in engine.stored}


def stored(engine: Engine) -> dict[str, int]:
    data = {name: parameter.data for name, parameter in engine.stored}
    return {name: (one.to_local() if isinstance(one, DTensor) else one).numel() for name, one in data.items()}


@dataclass(frozen=True)
class Difference:
    """The largest differences between a cell and one process."""

    loss: float
    gradient: float
    norm: float
    weights: float


@dataclass(frozen=True)
class Trained:
    """A cell's records of all ranks, beside that of one process."""

    ranks: list[Record]
    reference: Record
    ignored: str = " "
    """How names of parameters end that only rounding errors move."""

    @cached_property
    def gradients(self) -> Tensors:
        return union([record.gradients for record in self.ranks])

    @cached_property
    def initial(self) -> Tensors:
        return union([record.initial for record in self.ranks])

    @cached_property
    def final(self) -> Tensors:
        return union([record.final for record in self.ranks])

    @property
    def difference(self) -> Difference:
        pairs = list(zip(self.ranks[0].steps, self.reference.steps, strict=True))
        return Difference(
            loss=max(abs(a["loss"] - b["loss"]) / max(1.0, abs(b["loss"])) for a, b in pairs),
            gradient=max(self.gradients_apart().values()),
            norm=max(abs(a["norm"] / b["norm"] - 1) for a, b in pairs),
            weights=max(self.moved_apart().values()),
        )

    def gradients_apart(self) -> dict[str, float]:
        """How far each gradient is from that of one process, in units of its norm; those that carry a signal."""
        theirs = self.reference.gradients
        whole = torch.stack([grad.norm() for grad in theirs.values()]).norm()
        with_signal = [name for name, grad in theirs.items() if grad.norm() > 1e-6 * whole]
        return {name: relative(self.gradients[name], theirs[name], theirs[name].norm()) for name in with_signal}

    def moved_apart(self) -> dict[str, float]:
        """How far each parameter is from where one process moved it, in units of that move."""
        found = {}
        for name, start in self.reference.initial.items():
            if name.endswith(self.ignored):
                continue
            ours, theirs = self.final[name], self.reference.final[name]
            move = (theirs.double() - start.double()).norm()
            found[name] = 0.0 if ours.equal(theirs) else relative(ours, theirs, move)
        return found


def relative(ours: torch.Tensor, theirs: torch.Tensor, unit: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / unit.double())


def union(parts: list[Tensors]) -> Tensors:
    """The tensors of all ranks; those that several of them hold have to be the same."""
    whole: Tensors = {}
    for part in parts:
        for name, tensor in part.items():
            assert whole.setdefault(name, tensor).equal(tensor), f"ranks differ in {name}"
    return whole
