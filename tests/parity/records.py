"""The tables of layouts: each training once, what it wrote down, and how far that is from one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from torch.distributed.tensor import DTensor

from lockstep.data.loader import Loader
from lockstep.engine import Engine
from lockstep.layout import Layout
from lockstep.run import Run
from tests.parity.problems import Tensors, disagreeing_gradients, gradients, join
from tests.ranks import Job, RankPool

# ---- One training


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


# ---- Beside that of one process


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


# ---- Each training once


class Cell(Protocol):
    """What is trained, where: one row of a table."""

    @property
    def layout(self) -> str: ...

    @property
    def schedule(self) -> str: ...

    @property
    def micro_batch(self) -> int: ...

    @property
    def micro_batches(self) -> int:
        """Of a full step, on every data rank."""

    @property
    def slow(self) -> bool: ...


AnyCell = TypeVar("AnyCell", bound=Cell)


def train(job: Job, train_one: Callable[[Run, AnyCell], Record], cells: Sequence[AnyCell]) -> list[Record]:
    """One training for each cell, one after another in the same processes."""
    with join(job, cells[0].layout) as run:
        return [train_one(run, cell) for cell in cells]


def train_references(
    job: Job, train_one: Callable[[Run, AnyCell], Record], cells: Sequence[AnyCell]
) -> dict[AnyCell, Record]:
    """Every rank trains some of them in a run of its own, in one process."""
    alone = replace(job, rank=0, world_size=1, folder=job.folder / str(job.rank))
    with join(alone, "single") as run:
        return {cell: train_one(run, cell) for cell in cells[job.rank :: job.world_size]}


@dataclass
class Table(Generic[AnyCell]):
    """Trains the cells of a layout and schedule when the first of them is asked for, and the references likewise.

    The slow ones apart, since most sessions do not ask for them.
    """

    ranks: RankPool
    cells: Sequence[AnyCell]
    train_one: Callable[[Run, AnyCell], Record]
    in_one_process: Callable[[AnyCell], AnyCell]
    """The same logical micro-batches, without what must make no difference."""
    ignored: str = " "

    def __post_init__(self) -> None:
        self._trained: dict[AnyCell, list[Record] | BaseException] = {}
        self._references: dict[AnyCell, Record] = {}

    def __getitem__(self, cell: AnyCell) -> Trained:
        if cell not in self._trained:
            self._train([other for other in self.cells if together_with(other) == together_with(cell)])
        found = self._trained[cell]
        if isinstance(found, BaseException):
            raise found
        return Trained(found, self.reference(cell), self.ignored)

    def reference(self, cell: AnyCell) -> Record:
        if self.in_one_process(cell) not in self._references:
            wanted = {self.in_one_process(other) for other in (cell, *self.cells) if other.slow == cell.slow}
            by_work = sorted(wanted - self._references.keys(), key=lambda one: (one.micro_batch, str(one)))
            for some in self.ranks.run(train_references, 2, self.train_one, by_work, timeout=100):
                self._references |= some
        return self._references[self.in_one_process(cell)]

    def trained(self) -> list[AnyCell]:
        return [cell for cell in self.cells if isinstance(self._trained.get(cell), list)]

    def _train(self, cells: list[AnyCell]) -> None:
        size = Layout.parse(cells[0].layout).world_size
        try:
            by_rank = self.ranks.run(train, size, self.train_one, cells, timeout=100 if size <= 8 else 280)
        except AssertionError as error:
            if len(cells) == 1:  # once, not again for every test of the cell
                self._trained[cells[0]] = error
            else:  # the others are not to blame
                for cell in cells:
                    self._train([cell])
        else:
            self._trained |= {cell: list(records) for cell, *records in zip(cells, *by_rank, strict=True)}


def together_with(cell: Cell) -> tuple[str, str, bool]:
    return cell.layout, cell.schedule, cell.slow


# ---- What both tables promise


def assert_same_steps(trained: Trained, loss: float, norm: float, clip: float) -> None:
    """All ranks report the steps of one process, within `loss` of its losses, relative or to 1, whichever is more."""
    ours, theirs = trained.ranks[0].steps, trained.reference.steps
    assert all(other.steps == ours for other in trained.ranks)
    assert [step["weight"] for step in ours] == [step["weight"] for step in theirs]
    assert [step["lr"] for step in ours] == [step["lr"] for step in theirs]
    assert not any(step["skip"] for step in ours)
    for number, (step, expected) in enumerate(zip(ours, theirs, strict=True)):
        allowed = loss * max(1.0, abs(expected["loss"]))
        assert step["loss"] == pytest.approx(expected["loss"], abs=allowed), f"step {number}"
    assert ours[0]["norm"] == pytest.approx(theirs[0]["norm"], rel=norm)
    assert min(step["norm"] for step in ours) > clip, "clipping acts"
    assert ours[-1]["loss"] < ours[0]["loss"]


def assert_same_samples(trained: Trained, cell: Cell) -> None:
    """The data ranks together read what one process reads, and those that share a batch read the same."""
    layout = Layout.parse(cell.layout)
    readers: dict[int, Record] = {}
    for rank, record in enumerate(trained.ranks):
        same = readers.setdefault(layout.data_rank(rank), record)
        assert (record.ids, record.forwards) == (same.ids, same.forwards)
    by_step = zip(*(readers[number].ids for number in range(layout.data_size)), strict=True)
    assert [[sample for part in step for sample in part] for step in by_step] == trained.reference.ids
    assert {record.forwards[0] for record in trained.ranks} == {cell.micro_batches}


def assert_same_gradients(trained: Trained) -> None:
    assert list(disagreeing_gradients(trained.gradients, trained.reference.gradients)) == []


def assert_same_weights(trained: Trained, allowed: float) -> None:
    """They begin with the same bits, and are moved as one process moves them."""
    assert trained.initial.keys() == trained.final.keys() == trained.reference.initial.keys()
    for name, start in trained.reference.initial.items():
        assert trained.initial[name].equal(start), name
    assert {name: far for name, far in trained.moved_apart().items() if far > allowed} == {}
