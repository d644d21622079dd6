"""The parity table: every layout gives the numbers of one process.

A row of ROWS is a layout with a logical micro-batch size, a column of COLUMNS what is trained and how. Every cell is
trained for its steps and compared with one process that sees the same logical micro-batches, and, where no dropout mask
and no rounding to bf16 comes in, with a plain PyTorch loop over whole batches. Pipelines have a table of their own, in
test_pipeline.py: their ranks hold different parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from lockstep.config import Format
from lockstep.engine import Engine
from lockstep.errors import UserError
from lockstep.layout import AXES, Layout
from lockstep.runtime.seeds import seed_of
from tests.parity.problems import (
    GLOBAL_BATCH,
    IGNORED,
    SEED,
    Batch,
    Perceptron,
    RaggedTexts,
    Tensors,
    TinyGPT,
    adamw,
    disagreeing_gradients,
    fingerprint,
    gradients,
    join,
    sgd,
    text_loss,
    weights,
)
from tests.parity.test_pipeline import CELLS as PIPELINES
from tests.parity.test_tensor import CELLS as TEAMS
from tests.ranks import Job, RankPool

# ---- The table


@dataclass(frozen=True)
class Row:
    layout: str
    micro_batch: int
    forwards: tuple[int, ...]
    """How many of a full step's 8 samples / micro_batch forwards each data rank does: the accumulation."""


@dataclass(frozen=True)
class Column:
    model: Literal["tied", "untied", "perceptron"] = "tied"
    optimizer: Literal["adamw", "adamw foreach", "sgd foreach"] = "adamw foreach"
    steps: int = 20
    clip: float | None = None
    dropout: float = 0.0
    precision: Format = "fp32"
    recompute: bool = False
    validates: bool = False


# fmt: off
ROWS = [
    #   layout         micro-batch  forwards by rank
    Row("single",           8,      (1,)),
    Row("single",           2,      (4,)),
    Row("dp=2",             4,      (1, 1)),
    Row("dp=2",             1,      (4, 4)),
    Row("dp=3",             1,      (3, 3, 2)),
    Row("dp=4",             2,      (1, 1, 1, 1)),
    Row("fsdp=2",           4,      (1, 1)),
    Row("fsdp=2",           2,      (2, 2)),
    Row("fsdp=3",           1,      (3, 3, 2)),
    Row("fsdp=4",           2,      (1, 1, 1, 1)),
    Row("dp=2,fsdp=2",      2,      (1, 1, 1, 1)),
]

COLUMNS = {
    #                    model         optimizer         steps
    "plain":      Column("untied",     "adamw",          20),
    "clipped":    Column("tied",       "sgd foreach",    20, clip=0.5),
    "dropout":    Column("tied",       "adamw foreach",  20, clip=0.5, dropout=0.2),
    "recompute":  Column("tied",       "adamw foreach",   6, clip=0.5, dropout=0.2, recompute=True),
    "validates":  Column("tied",       "adamw foreach",   6, clip=0.5, dropout=0.2, validates=True),
    "no blocks":  Column("perceptron", "adamw foreach",  12, clip=0.5, dropout=0.2),
    "bf16":       Column("tied",       "adamw foreach",  12, clip=0.5, dropout=0.2, precision="bf16"),
}
# fmt: on

GRADIENTS_OF = (0, 1)
"""The first step, and the one in which a whole rank may have nothing that counts."""

LOSS = {"fp32": 1e-6, "bf16": 5e-4}
"""Allowed difference of a step's loss, relative to the loss or to 1, whichever is more.

In bf16 both sides round alike as long as their weights are equal, for autocast is the same in every layout. From the
second step on weights differ in the last bit of fp32, which may round an activation to its neighbour, 2^-8 away: a loss
over some forty tokens feels that in the fourth digit.
"""

WEIGHTS = {"fp32": 3e-5, "bf16": 1e-2}
"""Allowed difference of a parameter after the last step, relative to how far the training moved it, both in norm.

AdamW divides a gradient by its own size. Elements with a gradient near rounding error move by that error's sign.
"""

Cell = tuple[Row, str]
CELLS = [
    pytest.param(
        (row, name),
        id=f"{row.layout}-{row.micro_batch}-{name}",
        marks=[pytest.mark.slow] if row.layout in ("dp=3", "dp=4", "fsdp=4") else [],
    )
    for row in ROWS
    for name in COLUMNS
]
COMPARED_WITH_PLAIN_PYTORCH = [name for name, c in COLUMNS.items() if c.dropout == 0 and c.precision == "fp32"]


# ---- What runs in a rank


@dataclass
class Record:
    """What one rank saw of one training; the tensors are whole ones."""

    steps: list[dict[str, Any]]
    ids: list[list[int]]
    forwards: list[int]
    norms: list[float]
    gradients: list[Tensors]
    initial: Tensors
    final: Tensors
    fingerprint: str


def build(column: Column) -> nn.Module:
    if column.model == "perceptron":
        return Perceptron(column.dropout)
    return TinyGPT(column.model == "tied", column.dropout)


def optimizer(column: Column, parameters: Any) -> torch.optim.Optimizer:
    return (
        sgd(parameters)
        if column.optimizer == "sgd foreach"
        else adamw(parameters, foreach="foreach" in column.optimizer)
    )


def train(job: Job, layout: str, micro_batch: int, columns: list[Column]) -> list[Record]:
    """One training for each column, one after another in the same processes."""
    with join(job, layout) as run:
        records = []
        for column in columns:
            engine = run.setup(
                partial(build, column),
                text_loss,
                optimizer=partial(optimizer, column),
                clip=column.clip,
                precision=column.precision,
                recompute=column.recompute,
            )
            loader = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=micro_batch, steps=column.steps, workers=0)
            validate = (lambda: run.evaluate(RaggedTexts(11))) if column.validates else lambda: None
            records.append(record(job, engine, loader, validate))
    return records


def record(job: Job, engine: Engine, loader: Any, validate: Callable[[], object]) -> Record:
    seen = Record([], [], [], [], [], weights(engine), {}, "")
    for number, batch in enumerate(loader):
        out = engine.step(batch)
        seen.steps.append({"step": out.step, "loss": out.loss, "weight": out.weight, "lr": out.lr, "skip": out.skipped})
        seen.norms.append(out.grad_norm.item())
        counting = [part for part in batch.micro_batches if not part.filler]
        seen.ids.append([sample for part in counting for sample in part.ids])
        seen.forwards.append(len(counting))
        if number in GRADIENTS_OF:
            seen.gradients.append(gradients(engine))
        if number % 3 == 0:
            validate()
    seen.final = weights(engine)
    seen.fingerprint = fingerprint(seen.final)
    if job.rank != 0:  # the tensors are compared once, and by fingerprint
        seen.gradients, seen.initial, seen.final = [], {}, {}
    return seen


def plain_pytorch(_job: Job, column: Column, batches: list[list[int]]) -> Record:
    """The same training in nobody's framework: one process, whole batches, the mean over the labels that count."""
    torch.manual_seed(seed_of(SEED, "init"))
    model = build(column)
    stepper = optimizer(column, model.parameters())
    texts = RaggedTexts()
    seen = Record([], batches, [], [], [], {name: p.detach().clone() for name, p in model.named_parameters()}, {}, "")
    for number, ids in enumerate(batches):
        batch: Batch = default_collate([texts[index] for index in ids])
        stepper.zero_grad()
        loss = F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"], ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), column.clip or float("inf"))
        stepper.step()
        seen.steps.append({"loss": loss.item()})
        seen.norms.append(norm.item())
        if number in GRADIENTS_OF:
            seen.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    seen.final = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return seen


# ---- Each training once


class Table:
    """Trains a row when its first cell is asked for, and the one-process references of a micro-batch size likewise."""

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._rows: dict[tuple[str, int], list[dict[str, Record]] | BaseException] = {}
        self._references: dict[tuple[int, Column], Record] = {}
        self._plain: dict[str, Record] = {}

    def records(self, row: Row, name: str) -> list[Record]:
        """What every rank recorded of one cell."""
        if row.layout == "single" and COLUMNS[name] == without_options(COLUMNS[name]):
            return [self.reference(row, name)]
        key = row.layout, row.micro_batch
        if key not in self._rows:
            self._rows[key] = self._train_row(row)
        trained = self._rows[key]
        if isinstance(trained, BaseException):
            raise trained
        return [rank[name] for rank in trained]

    def reference(self, row: Row, name: str) -> Record:
        """One process with the same logical micro-batches, without what must make no difference."""
        wanted = row.micro_batch, without_options(COLUMNS[name])
        if wanted not in self._references:
            columns = list(dict.fromkeys(map(without_options, COLUMNS.values())))
            (found,) = self._ranks.run(train, 1, "single", row.micro_batch, columns, timeout=100)
            self._references |= {(row.micro_batch, column): one for column, one in zip(columns, found, strict=True)}
        return self._references[wanted]

    def plain(self, name: str) -> Record:
        """The plain loop, over the samples that the one process of the first row reads."""
        if name not in self._plain:
            ids = self.reference(ROWS[0], name).ids
            (self._plain[name],) = self._ranks.run(plain_pytorch, 1, COLUMNS[name], ids)
        return self._plain[name]

    def _train_row(self, row: Row) -> list[dict[str, Record]] | BaseException:
        world_size = Layout.parse(row.layout).world_size
        columns = {name: c for name, c in COLUMNS.items() if row.layout != "single" or c != without_options(c)}
        try:
            found = self._ranks.run(train, world_size, row.layout, row.micro_batch, list(columns.values()), timeout=100)
        except AssertionError as error:  # once, not again for every cell of the row
            return error
        return [dict(zip(columns, rank, strict=True)) for rank in found]


def without_options(column: Column) -> Column:
    """The column without what must make no difference."""
    return replace(column, recompute=False, validates=False)


@pytest.fixture(scope="module")
def table(ranks: RankPool) -> Table:
    return Table(ranks)


# ---- The promises


@pytest.mark.parametrize("cell", CELLS)
def test_every_rank_reports_the_same_steps_and_holds_the_same_weights(table: Table, cell: Cell) -> None:
    first, *others = table.records(*cell)
    assert len(first.steps) == COLUMNS[cell[1]].steps
    assert not any(step["skip"] for step in first.steps)
    for other in others:
        assert other.steps == first.steps
        assert other.norms == first.norms
        assert other.fingerprint == first.fingerprint


@pytest.mark.parametrize("cell", CELLS)
def test_the_ranks_together_read_what_one_process_reads(table: Table, cell: Cell) -> None:
    row, name = cell
    records = table.records(row, name)
    together = [[sample for part in step for sample in part] for step in zip(*(r.ids for r in records), strict=True)]
    assert together == table.reference(row, name).ids
    assert tuple(rank.forwards[0] for rank in records) == row.forwards


@pytest.mark.parametrize("cell", CELLS)
def test_losses_of_all_steps_equal_those_of_one_process(table: Table, cell: Cell) -> None:
    row, name = cell
    found = table.records(row, name)[0]
    for reference in references(table, row, name):
        for step, (ours, theirs) in enumerate(zip(found.steps, reference.steps, strict=True)):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=allowed_loss(name, theirs["loss"])), f"step {step}"
    assert found.steps[-1]["loss"] < found.steps[0]["loss"]


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_of_the_first_steps_equal_those_of_one_process(table: Table, cell: Cell) -> None:
    row, name = cell
    found = table.records(row, name)[0]
    for reference in references(table, row, name):
        for step, (ours, theirs) in enumerate(zip(found.gradients, reference.gradients, strict=True)):
            # In bf16 only the first step starts from equal weights.
            if step == 0 or COLUMNS[name].precision == "fp32":
                assert list(disagreeing_gradients(ours, theirs)) == []
                assert found.norms[step] == pytest.approx(reference.norms[step], rel=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_final_weights_equal_those_of_one_process(table: Table, cell: Cell) -> None:
    row, name = cell
    found = table.records(row, name)[0]
    for reference in references(table, row, name):
        for parameter, start in reference.initial.items():
            ours, theirs = found.final[parameter], reference.final[parameter]
            assert found.initial[parameter].equal(start)
            if not parameter.endswith("key.bias"):  # moved by rounding errors only, and of no influence
                moved = (theirs.double() - start.double()).norm()
                assert (ours.double() - theirs.double()).norm() <= WEIGHTS[COLUMNS[name].precision] * moved, parameter


def references(table: Table, row: Row, name: str) -> Iterator[Record]:
    yield table.reference(row, name)
    if name in COMPARED_WITH_PLAIN_PYTORCH:
        yield table.plain(name)


def allowed_loss(name: str, loss: float) -> float:
    return LOSS[COLUMNS[name].precision] * max(1.0, abs(loss))


# ---- The table itself


def mean_of_means(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """The mistake that averaging gradients over ranks makes: every micro-batch counts as much as any other."""
    total, count = text_loss(model, batch)
    return total / count.clamp(min=1), 1


def train_by_mean_of_means(job: Job) -> Tensors:
    column = COLUMNS["plain"]
    with join(job, "dp=2") as run:
        engine = run.setup(partial(build, column), mean_of_means, optimizer=partial(optimizer, column))
        engine.step(next(iter(run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=4, steps=1, workers=0))))
        return gradients(engine)


def test_averaging_over_ranks_would_be_noticed(table: Table, ranks: RankPool) -> None:
    reference = table.reference(Row("dp=2", 4, (1, 1)), "plain").gradients[0]
    averaged = ranks.run(train_by_mean_of_means, 2)[0]
    wrong = {line.partition(":")[0] for line in disagreeing_gradients(averaged, reference)}
    assert wrong >= {name for name in reference if name.endswith("weight")}


def test_every_product_of_axes_is_in_a_table_or_refused() -> None:
    layouts = [row.layout for row in ROWS] + [cell.layout for cell in PIPELINES] + [cell.layout for cell in TEAMS]
    cut = {tuple(axis for axis in AXES if Layout.parse(layout).size(axis) > 1) for layout in layouts}
    for count in range(len(AXES) + 1):
        for axes in itertools.combinations(AXES, count):
            if "pp" in axes and "cp" in axes:
                layout = Layout(**dict.fromkeys(axes, 2))  # type: ignore[arg-type]
                with pytest.raises(UserError, match="both cp and pp"):
                    layout.resolve(layout.world_size)
            else:
                assert axes in cut, f"{axes} is neither tested nor refused"
