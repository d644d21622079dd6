"""The parity table: every layout gives the numbers of one process.

A row of ROWS is a layout with a logical micro-batch size, a column of COLUMNS what is trained and how. Every cell is
trained for its steps and compared with one process that sees the same logical micro-batches, and, where no dropout mask
and no rounding to bf16 comes in, with a plain PyTorch loop over whole batches. Pipelines have a table of their own, in
test_pipeline.py: their ranks hold different parameters.

The quick cells of a row are chosen so that every column meets replicas and shards; CI trains the others as well.
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

from lockstep.config.schema import Format
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
    anew,
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
    quick: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


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
OPTIONS = ("recompute", "validates", "no blocks")
ROWS = [
    #   layout         micro-batch  forwards by rank  quick
    Row("single",           8,      (1,),             ("plain", "clipped")),
    Row("single",           2,      (4,),             ("recompute", "validates")),
    Row("dp=2",             4,      (1, 1),           ("plain", "dropout", "validates")),
    Row("dp=2",             1,      (4, 4),           ("clipped", "recompute", "bf16")),
    Row("dp=3",             1,      (3, 3, 2)),
    Row("dp=4",             2,      (1, 1, 1, 1),     left_out=OPTIONS),
    Row("fsdp=2",           2,      (2, 2),           ("plain", "dropout", "validates", "bf16")),
    Row("fsdp=3",           1,      (3, 3, 2),        ("clipped", "no blocks")),
    Row("fsdp=4",           2,      (1, 1, 1, 1),     left_out=OPTIONS),
    Row("dp=2,fsdp=2",      2,      (1, 1, 1, 1),     ("clipped", "recompute", "no blocks")),
]

COLUMNS = {
    #                    model         optimizer         steps
    "plain":      Column("untied",     "adamw",          20),
    "clipped":    Column("tied",       "sgd foreach",    12, clip=0.5),
    "dropout":    Column("tied",       "adamw foreach",  12, clip=0.5, dropout=0.2),
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


@dataclass(frozen=True)
class Cell:
    row: Row
    name: str

    @property
    def column(self) -> Column:
        return COLUMNS[self.name]

    @property
    def quick(self) -> bool:
        return self.name in self.row.quick

    def __str__(self) -> str:
        return f"{self.row.layout}-{self.row.micro_batch}-{self.name}"


CELLS = [Cell(row, name) for row in ROWS for name in COLUMNS if name not in row.left_out]
each_cell = pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=[] if cell.quick else [pytest.mark.slow]) for cell in CELLS]
)
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
            engine = anew(run).setup(
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
    """Trains the cells of a row when the first of them is asked for, and the references of a micro-batch likewise.

    The quick ones apart, since most sessions do not ask for the others.
    """

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._cells: dict[Cell, list[Record] | BaseException] = {}
        self._references: dict[tuple[int, Column], Record] = {}
        self._plain: dict[str, Record] = {}

    def records(self, cell: Cell) -> list[Record]:
        """What every rank recorded of one cell."""
        if is_reference(cell):
            return [self.reference(cell)]
        if cell not in self._cells:
            alike = [other for other in CELLS if (other.row, other.quick) == (cell.row, cell.quick)]
            self._cells |= self._train([other for other in alike if not is_reference(other)])
        found = self._cells[cell]
        if isinstance(found, BaseException):
            raise found
        return found

    def reference(self, cell: Cell) -> Record:
        """One process with the same logical micro-batches, without what must make no difference."""
        size = cell.row.micro_batch
        if (size, without_options(cell.column)) not in self._references:
            alike = [other for other in CELLS if (other.row.micro_batch, other.quick) == (size, cell.quick)]
            columns = list(dict.fromkeys(without_options(other.column) for other in alike))
            missing = [column for column in columns if (size, column) not in self._references]
            (found,) = self._ranks.run(train, 1, "single", size, missing, timeout=100)
            self._references |= {(size, column): one for column, one in zip(missing, found, strict=True)}
        return self._references[size, without_options(cell.column)]

    def plain(self, name: str) -> Record:
        """The plain loop, over the samples that the one process of the first row reads."""
        if name not in self._plain:
            ids = self.reference(Cell(ROWS[0], name)).ids
            (self._plain[name],) = self._ranks.run(plain_pytorch, 1, COLUMNS[name], ids)
        return self._plain[name]

    def _train(self, cells: list[Cell]) -> dict[Cell, list[Record] | BaseException]:
        row, columns = cells[0].row, [cell.column for cell in cells]
        size = Layout.parse(row.layout).world_size
        try:
            by_rank = self._ranks.run(train, size, row.layout, row.micro_batch, columns, timeout=100)
        except AssertionError as error:  # once, not again for every test of the cell
            return dict.fromkeys(cells, error)
        return {cell: list(records) for cell, *records in zip(cells, *by_rank, strict=True)}


def is_reference(cell: Cell) -> bool:
    return cell.row.layout == "single" and cell.column == without_options(cell.column)


def without_options(column: Column) -> Column:
    """The column without what must make no difference."""
    return replace(column, recompute=False, validates=False)


@pytest.fixture(scope="module")
def table(ranks: RankPool) -> Table:
    return Table(ranks)


# ---- The promises


@each_cell
def test_every_rank_reports_the_same_steps_and_holds_the_same_weights(table: Table, cell: Cell) -> None:
    first, *others = table.records(cell)
    assert len(first.steps) == cell.column.steps
    assert not any(step["skip"] for step in first.steps)
    for other in others:
        assert other.steps == first.steps
        assert other.norms == first.norms
        assert other.fingerprint == first.fingerprint


@each_cell
def test_the_ranks_together_read_what_one_process_reads(table: Table, cell: Cell) -> None:
    records = table.records(cell)
    together = [[sample for part in step for sample in part] for step in zip(*(r.ids for r in records), strict=True)]
    assert together == table.reference(cell).ids
    assert tuple(rank.forwards[0] for rank in records) == cell.row.forwards


@each_cell
def test_losses_of_all_steps_equal_those_of_one_process(table: Table, cell: Cell) -> None:
    found = table.records(cell)[0]
    for reference in references(table, cell):
        for step, (ours, theirs) in enumerate(zip(found.steps, reference.steps, strict=True)):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=allowed_loss(cell, theirs["loss"])), f"step {step}"
    assert found.steps[-1]["loss"] < found.steps[0]["loss"]


@each_cell
def test_gradients_of_the_first_steps_equal_those_of_one_process(table: Table, cell: Cell) -> None:
    found = table.records(cell)[0]
    for reference in references(table, cell):
        for step, (ours, theirs) in enumerate(zip(found.gradients, reference.gradients, strict=True)):
            # In bf16 only the first step starts from equal weights.
            if step == 0 or cell.column.precision == "fp32":
                assert list(disagreeing_gradients(ours, theirs)) == []
                assert found.norms[step] == pytest.approx(reference.norms[step], rel=1e-5)


@each_cell
def test_final_weights_equal_those_of_one_process(table: Table, cell: Cell) -> None:
    found = table.records(cell)[0]
    for reference in references(table, cell):
        for parameter, start in reference.initial.items():
            ours, theirs = found.final[parameter], reference.final[parameter]
            assert found.initial[parameter].equal(start)
            if not parameter.endswith("key.bias"):  # moved by rounding errors only, and of no influence
                moved = (theirs.double() - start.double()).norm()
                assert (ours.double() - theirs.double()).norm() <= WEIGHTS[cell.column.precision] * moved, parameter


def references(table: Table, cell: Cell) -> Iterator[Record]:
    yield table.reference(cell)
    if cell.name in COMPARED_WITH_PLAIN_PYTORCH:
        yield table.plain(cell.name)


def allowed_loss(cell: Cell, loss: float) -> float:
    return LOSS[cell.column.precision] * max(1.0, abs(loss))


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
    reference = table.reference(next(cell for cell in CELLS if str(cell) == "dp=2-4-plain")).gradients[0]
    averaged = ranks.run(train_by_mean_of_means, 2)[0]
    wrong = {line.partition(":")[0] for line in disagreeing_gradients(averaged, reference)}
    assert wrong >= {name for name in reference if name.endswith("weight")}


def test_every_column_is_quickly_compared_under_replicas_and_under_shards() -> None:
    for axis in ("dp", "fsdp"):
        quick = {cell.name for cell in CELLS if cell.quick and Layout.parse(cell.row.layout).size(axis) > 1}
        assert quick == set(COLUMNS), axis


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
