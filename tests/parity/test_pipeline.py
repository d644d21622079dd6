"""The parity table of pipelines: every schedule gives the numbers of one process.

A cell is a layout, a schedule and a number of micro-batches: the fewest that the schedule takes on so many ranks, and
three times that. Every cell is trained for 12 steps, over the ends of two epochs, with clipping, tied embeddings and
ragged labels, and compared with one process that sees the same logical micro-batches. A rank holds only its stages:
tensors are compared as the union over ranks, and ranks that hold the same parameter have to agree on it to the bit. The
largest differences of every cell are printed at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import pytest

from lockstep.config.schema import Format, Schedule
from lockstep.layout import Layout
from lockstep.run import Run
from tests.parity.problems import RaggedTexts, TinyGPT, adamw, anew, text_loss
from tests.parity.records import (
    Record,
    Table,
    assert_same_gradients,
    assert_same_samples,
    assert_same_steps,
    assert_same_weights,
    recorded,
)
from tests.ranks import RankPool

STEPS = 12
GLOBAL_BATCH = 24
SIZE = 4 * GLOBAL_BATCH + 13
"""The last step of an epoch has fewer micro-batches than most schedules take, or a smaller one at its end."""
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
    depth: int = 4
    """A block for every stage: schedules have one or two stages on a rank."""
    slow: bool = field(default=False, compare=False)

    @property
    def micro_batch(self) -> int:
        return GLOBAL_BATCH // (Layout.parse(self.layout).data_size * self.micro_batches)

    def __str__(self) -> str:
        level = f"-{self.level}" if "fsdp" in self.layout else ""
        rounded = f"-{self.precision}" if self.precision != "fp32" else ""
        return f"{self.layout}{level}-{self.schedule}-{self.micro_batches}{rounded}"


def fewest(schedule: Schedule, ranks: int) -> int:
    return {"gpipe": 1, "looped-bfs": 1, "dualpipev": 2 * ranks}.get(schedule, ranks)


SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
QUICK = [("pp=2", "1f1b", 3), ("pp=2", "zbv", 1)]
EVERY_SCHEDULE = [
    Cell(
        f"pp={ranks}",
        schedule,
        times * fewest(schedule, ranks),
        depth=2 * ranks,
        slow=(f"pp={ranks}", schedule, times) not in QUICK,
    )
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


def marks_of(cell: Cell) -> list[pytest.MarkDecorator]:
    """CI leaves out the longest: four stages with many micro-batches, and eight ranks."""
    is_long = (cell.micro_batches > 4 and "pp=4" in cell.layout) or Layout.parse(cell.layout).world_size > 4
    return [pytest.mark.slow] * cell.slow + [pytest.mark.soak] * is_long


each_cell = pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=marks_of(cell)) for cell in CELLS])


# ---- What runs in a rank


def train_one(run: Run, cell: Cell) -> Record:
    engine = anew(run).setup(
        partial(TinyGPT, depth=cell.depth),
        text_loss,
        optimizer=partial(adamw, foreach=True),
        clip=CLIP,
        precision=cell.precision,
        shard={"level": cell.level},
        pipeline={"schedule": cell.schedule},
    )
    loader = run.loader(RaggedTexts(SIZE), GLOBAL_BATCH, micro_batch=cell.micro_batch, steps=STEPS, workers=0)
    return recorded(engine, loader)


def in_one_process(cell: Cell) -> Cell:
    return Cell("single", "1f1b", GLOBAL_BATCH // cell.micro_batch, precision=cell.precision, depth=cell.depth)


@pytest.fixture(scope="module")
def table(ranks: RankPool) -> Table[Cell]:
    return Table(ranks, CELLS, train_one, in_one_process, ignored="key.bias")


# ---- The promises


@each_cell
def test_every_rank_reports_the_steps_of_one_process(table: Table[Cell], cell: Cell) -> None:
    assert_same_steps(table[cell], LOSS[cell.precision], NORM, CLIP)


@each_cell
def test_the_data_ranks_together_read_what_one_process_reads(table: Table[Cell], cell: Cell) -> None:
    assert_same_samples(table[cell], cell)


@each_cell
def test_first_gradients_equal_those_of_one_process(table: Table[Cell], cell: Cell) -> None:
    assert_same_gradients(table[cell])


@each_cell
def test_final_weights_equal_those_of_one_process(table: Table[Cell], cell: Cell) -> None:
    assert_same_weights(table[cell], WEIGHTS[cell.precision])


@each_cell
def test_each_parameter_is_held_by_one_stage_but_the_tied_one(table: Table[Cell], cell: Cell) -> None:
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


def test_the_largest_differences_are_shown(table: Table[Cell], capsys: pytest.CaptureFixture[str]) -> None:
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
