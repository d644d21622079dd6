"""The parity table of pipelines: every schedule gives the numbers of one process.

A cell is a layout, a schedule and a number of micro-batches: the fewest that the schedule takes on so many ranks, and
three times that. Every cell is trained for 20 steps with clipping, tied embeddings and ragged labels, and compared with
one process that sees the same logical micro-batches. A rank holds only its stages: tensors are compared as the union
over ranks, and ranks that hold the same parameter have to agree on it to the bit. The largest differences of every cell
are printed at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import pytest

from lockstep.config import Format, Schedule
from lockstep.layout import Layout
from lockstep.run import Run
from tests.parity.problems import (
    RaggedTexts,
    TinyGPT,
    adamw,
    disagreeing_gradients,
    join,
    text_loss,
)
from tests.parity.records import Record, Trained, recorded
from tests.ranks import Job, RankPool

STEPS = 20
GLOBAL_BATCH = 24
SIZE = 4 * GLOBAL_BATCH + 13
"""The last step of an epoch has fewer micro-batches than most schedules take, or a smaller one at its end."""
DEPTH = 8
CLIP = 0.3

LOSS = {"fp32": 1e-6, "bf16": 2e-3}
"""Allowed difference of a step's loss, relative to the loss or to 1, whichever is more."""
NORM = 1e-5
"""Allowed difference of the norm of the first gradient, relative."""
WEIGHTS = {"fp32": 3e-5, "bf16": 1e-2}
"""Allowed difference of a parameter after the last step, relative to how far the training moved it, both in norm."""


# ---- The table


@dataclass(frozen=True)
class Cell:
    layout: str
    schedule: Schedule
    micro_batches: int
    """Of a full step, on every data rank."""
    level: str = "zero3"
    precision: Format = "fp32"
    slow: bool = False

    @property
    def micro_batch(self) -> int:
        return GLOBAL_BATCH // (Layout.parse(self.layout).data_size * self.micro_batches)

    @property
    def world_size(self) -> int:
        return Layout.parse(self.layout).world_size

    def __str__(self) -> str:
        level = f"-{self.level}" if "fsdp" in self.layout else ""
        rounded = f"-{self.precision}" if self.precision != "fp32" else ""
        return f"{self.layout}{level}-{self.schedule}-{self.micro_batches}{rounded}"


def fewest(schedule: Schedule, ranks: int) -> int:
    return {"gpipe": 1, "looped-bfs": 1, "dualpipev": 2 * ranks}.get(schedule, ranks)


SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
EVERY_SCHEDULE = [
    Cell(f"pp={ranks}", schedule, times * fewest(schedule, ranks), slow=ranks == 4 or schedule not in ("1f1b", "zbv"))
    for ranks in (2, 4)
    for schedule in SCHEDULES
    for times in (1, 3)
]
# fmt: off
WITH_DATA_AXES = [
    Cell("pp=2,dp=2",          "gpipe",                    3, slow=True),
    Cell("pp=2,dp=2",          "1f1b",                     2, slow=True),
    Cell("pp=2,dp=2",          "1f1b",                     6, slow=True),
    Cell("pp=2,dp=2",          "interleaved-1f1b",         2, slow=True),
    Cell("pp=2,dp=2",          "zbv",                      6),
    Cell("pp=2,fsdp=2",        "1f1b",                     2, "zero1", slow=True),
    Cell("pp=2,fsdp=2",        "1f1b",                     2, "zero2", slow=True),
    Cell("pp=2,fsdp=2",        "1f1b",                     6, "zero3"),
    Cell("pp=2,fsdp=2",        "looped-bfs",               3, "zero3", slow=True),
    Cell("pp=2,fsdp=2",        "interleaved-zero-bubble",  2, "zero1", slow=True),
    Cell("pp=2,fsdp=2",        "interleaved-zero-bubble",  6, "zero2", slow=True),
    Cell("pp=2,fsdp=2",        "interleaved-zero-bubble",  2, "zero3", slow=True),
    Cell("pp=2,fsdp=2",        "dualpipev",                4, "zero3", slow=True),
    Cell("pp=2,dp=2,fsdp=2",   "1f1b",                     2, "zero3", slow=True),
]
ROUNDED = [
    Cell("pp=2",               "1f1b",                     6, precision="bf16"),
    Cell("pp=2",               "zbv",                      2, precision="bf16", slow=True),
    Cell("pp=2,fsdp=2",        "1f1b",                     2, precision="bf16", slow=True),
]
# fmt: on
CELLS = EVERY_SCHEDULE + WITH_DATA_AXES + ROUNDED

each_cell = pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=[pytest.mark.slow] if cell.slow else []) for cell in CELLS]
)


# ---- What runs in a rank


def train(job: Job, layout: str, cells: list[Cell]) -> list[Record]:
    """One training for each cell, one after another in the same processes."""
    with join(job, layout) as run:
        return [train_one(run, cell) for cell in cells]


def train_one(run: Run, cell: Cell) -> Record:
    engine = run.setup(
        partial(TinyGPT, depth=DEPTH),
        text_loss,
        optimizer=partial(adamw, foreach=True),
        clip=CLIP,
        precision=cell.precision,
        shard={"level": cell.level},
        pipeline={"schedule": cell.schedule},
    )
    loader = run.loader(RaggedTexts(SIZE), GLOBAL_BATCH, micro_batch=cell.micro_batch, steps=STEPS, workers=0)
    return recorded(engine, loader)


def train_references(job: Job, cells: list[Cell]) -> dict[Cell, Record]:
    """Every rank trains some of them in a run of its own, in one process."""
    alone = replace(job, rank=0, world_size=1, folder=job.folder / str(job.rank))
    with join(alone, "single") as run:
        return {cell: train_one(run, cell) for cell in cells[job.rank :: job.world_size]}


# ---- Each training once


class Table:
    """Trains the cells of a layout and schedule when the first of them is asked for, and the references likewise.

    The slow ones apart, since most sessions do not ask for them.
    """

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._cells: dict[Cell, list[Record] | BaseException] = {}
        self._references: dict[Cell, Record] = {}

    def __getitem__(self, cell: Cell) -> Trained:
        if cell not in self._cells:
            alike = [other for other in CELLS if (other.layout, other.schedule) == (cell.layout, cell.schedule)]
            self._cells |= self._train([other for other in alike if other.slow == cell.slow])
        found = self._cells[cell]
        if isinstance(found, BaseException):
            raise found
        return Trained(found, self.reference(cell), "key.bias")

    def reference(self, cell: Cell) -> Record:
        """One process with the same logical micro-batches."""
        if in_one_process(cell) not in self._references:
            wanted = {in_one_process(other) for other in CELLS if other.slow == cell.slow} - self._references.keys()
            by_size = sorted(wanted, key=lambda one: one.micro_batch)
            for some in self._ranks.run(train_references, 2, by_size, timeout=100):
                self._references |= some
        return self._references[in_one_process(cell)]

    def trained(self) -> list[Cell]:
        return [cell for cell in CELLS if isinstance(self._cells.get(cell), list)]

    def _train(self, cells: list[Cell]) -> dict[Cell, list[Record] | BaseException]:
        try:
            by_rank = self._ranks.run(train, cells[0].world_size, cells[0].layout, cells, timeout=100)
        except AssertionError as error:  # once, not again for every test of the cell
            return dict.fromkeys(cells, error)
        return {cell: list(records) for cell, *records in zip(cells, *by_rank, strict=True)}


def in_one_process(cell: Cell) -> Cell:
    return Cell("single", "1f1b", GLOBAL_BATCH // cell.micro_batch, precision=cell.precision)


@pytest.fixture(scope="module")
def table(ranks: RankPool) -> Table:
    return Table(ranks)


# ---- The promises


@each_cell
def test_every_rank_reports_the_steps_of_one_process(table: Table, cell: Cell) -> None:
    trained = table[cell]
    ours, theirs = trained.ranks[0].steps, trained.reference.steps
    assert all(other.steps == ours for other in trained.ranks)
    assert [step["weight"] for step in ours] == [step["weight"] for step in theirs]
    assert [step["lr"] for step in ours] == [step["lr"] for step in theirs]
    assert not any(step["skip"] for step in ours)
    for number, (step, expected) in enumerate(zip(ours, theirs, strict=True)):
        allowed = LOSS[cell.precision] * max(1.0, abs(expected["loss"]))
        assert step["loss"] == pytest.approx(expected["loss"], abs=allowed), f"step {number}"
    assert ours[0]["norm"] == pytest.approx(theirs[0]["norm"], rel=NORM)
    assert min(step["norm"] for step in ours) > CLIP, "clipping acts"
    assert ours[-1]["loss"] < ours[0]["loss"]


@each_cell
def test_the_data_ranks_together_read_what_one_process_reads(table: Table, cell: Cell) -> None:
    trained, layout = table[cell], Layout.parse(cell.layout)
    readers: dict[int, Record] = {}
    for rank, record in enumerate(trained.ranks):
        same = readers.setdefault(layout.data_rank(rank), record)
        assert (record.ids, record.forwards) == (same.ids, same.forwards)
    by_step = zip(*(readers[number].ids for number in range(layout.data_size)), strict=True)
    assert [[sample for part in step for sample in part] for step in by_step] == trained.reference.ids
    assert {record.forwards[0] for record in trained.ranks} == {cell.micro_batches}


@each_cell
def test_first_gradients_equal_those_of_one_process(table: Table, cell: Cell) -> None:
    trained = table[cell]
    assert list(disagreeing_gradients(trained.gradients, trained.reference.gradients)) == []


@each_cell
def test_final_weights_equal_those_of_one_process(table: Table, cell: Cell) -> None:
    trained = table[cell]
    assert trained.initial.keys() == trained.final.keys() == trained.reference.initial.keys()
    for name, start in trained.reference.initial.items():
        assert trained.initial[name].equal(start), name
    apart = trained.moved_apart()
    assert {name: far for name, far in apart.items() if far > WEIGHTS[cell.precision]} == {}


@each_cell
def test_each_parameter_is_held_by_one_stage_but_the_tied_one(table: Table, cell: Cell) -> None:
    holders: dict[str, set[int]] = {}
    layout = Layout.parse(cell.layout)
    for rank, record in enumerate(table[cell].ranks):
        for name in record.final:
            holders.setdefault(name, set()).add(layout.coordinate(rank)["pp"])
    v_shaped = cell.schedule in ("zbv", "dualpipev")  # the first and the last stage are on one rank
    tied = {0} if v_shaped else {0, layout.pp - 1}
    assert {name: ranks for name, ranks in holders.items() if len(ranks) > 1 or name == "embedding.weight"} == {
        "embedding.weight": tied
    }


def test_the_largest_differences_are_shown(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    cells = table.trained()
    with capsys.disabled():
        print(f"\n\n{'largest differences from one process':<52}{'loss':>9}{'gradient':>10}{'norm':>9}{'weights':>9}")
        for cell in cells:
            found = table[cell].difference
            numbers = f"{found.loss:9.0e}{found.gradient:10.0e}{found.norm:9.0e}{found.weights:9.0e}"
            layout = f"{cell.layout} {cell.level if 'fsdp' in cell.layout else ''}"
            rounded = f"  {cell.precision}" if cell.precision != "fp32" else ""
            print(f"{layout:<24}{cell.schedule:<25}{cell.micro_batches:>3}{numbers}{rounded}")


def test_the_table_has_every_schedule_on_two_and_four_ranks() -> None:
    alone = {(cell.layout, cell.schedule) for cell in CELLS}
    assert alone >= {(layout, schedule) for layout in ("pp=2", "pp=4") for schedule in SCHEDULES}
