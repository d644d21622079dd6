"""The parity table of tp, cp and their mixes: ranks that compute one forward together give the numbers of one process.

A cell is a layout and what is trained on it: with dropout or without, recomputed, in bf16, with other optimizers, with
a frozen part. Every cell is trained for 12 steps, over the ends of two epochs, with clipping, accumulation, a tied
embedding and ragged labels, and compared with one process that sees the same logical micro-batches; dropout masks are
those of one process too. Tensors are compared whole, and ranks that hold the same parameter have to agree on it to the
bit. The largest differences of every cell are printed at the end.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from lockstep.config.schema import Format, Schedule
from lockstep.data.order import sample_ids
from lockstep.layout import Layout
from lockstep.run import Run
from lockstep.step.scoring import Metric
from tests.parity.problems import (
    IGNORED,
    SEED,
    Batch,
    adamw,
    anew,
    fingerprint,
    join,
    sgd,
    text_loss,
    unfinished,
    weights,
)
from tests.parity.records import (
    Record,
    Table,
    Trained,
    assert_same_gradients,
    assert_same_samples,
    assert_same_steps,
    assert_same_weights,
    recorded,
)
from tests.ranks import Job, RankPool

STEPS = 12
MANY_RANKS_STEPS = 6
"""Eight ranks and more on a few cores: still over the end of an epoch."""
GLOBAL_BATCH = 16
SIZE = 4 * GLOBAL_BATCH + 13
"""The last step of an epoch has a smaller micro-batch at its end."""
CLIP = 0.3
DROPOUT = 0.2

LENGTH = 16
VOCABULARY = 32
WIDTH = 32
HEADS = 8
KEY_HEADS = 4
HIDDEN = 48

LOSS = {"fp32": 1e-6, "bf16": 2e-3}
"""Allowed difference of a step's loss, relative to the loss or to 1, whichever is more."""
NORM = {"fp32": 1e-5, "bf16": 2e-3}
"""Allowed difference of the norm of the first gradient, relative."""
ROUNDED_GRADIENT = 3e-2
"""Allowed difference of a gradient in bf16, relative in norm: every rank rounds its own share of a sum."""
ROUNDED_ALONE = 1.5
"""How far bf16 may lead ranks that compute together from fp32, in units of how far it leads one process."""
WEIGHTS = {"fp32": 3e-5, "bf16": 8e-2}
"""Allowed difference of a parameter after the last step, relative to how far the training moved it, both in norm."""


# ---- The model and its data


class Attention(nn.Module):
    """Causal attention with rotated queries and keys, two query heads to a key; `fused`: one matrix for all three."""

    def __init__(self, dropout: float, fused: bool) -> None:
        super().__init__()
        self.head = WIDTH // HEADS
        self.sizes = [WIDTH, KEY_HEADS * self.head, KEY_HEADS * self.head]
        if fused:
            self.qkv = nn.Linear(WIDTH, sum(self.sizes))
        else:
            self.query, self.key, self.value = (nn.Linear(WIDTH, size) for size in self.sizes)
        self.fused = fused
        self.out = nn.Linear(WIDTH, WIDTH)
        self.p = dropout

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        all_three = self.qkv(x).split(self.sizes, dim=-1) if self.fused else (self.query(x), self.key(x), self.value(x))
        query, key, value = (one.view(batch, length, -1, self.head).transpose(1, 2) for one in all_three)
        mixed = F.scaled_dot_product_attention(
            rotated(query, cos, sin),
            rotated(key, cos, sin),
            value,
            dropout_p=self.p if self.training else 0.0,
            is_causal=True,
            enable_gqa=True,
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))  # type: ignore[no-any-return]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class GatedMLP(nn.Module):
    def __init__(self, dropout: float, fused: bool) -> None:
        super().__init__()
        if fused:
            self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        else:
            self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.fused = fused
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1) if self.fused else (self.gate(x), self.up(x))
        return self.down(self.dropout(F.silu(gate) * up))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, dropout: float, fused: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH)
        self.attention = Attention(dropout, fused)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = GatedMLP(dropout, fused)
        self.p = dropout

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # Not one module called twice, so that every call has a name.
        x = x + F.dropout(self.attention(self.norm1(x), cos, sin), self.p, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.p, self.training)


class GPT(nn.Module):
    """Embedding and head are one weight; the rotations are buffers that no checkpoint of the model itself would hold.

    `dropout` acts on values that are cut and on values that are whole, and inside of attention.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, depth: int = 2, dropout: float = 0.0, fused: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.embedding.weight.requires_grad_(not frozen)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout, fused) for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        half = WIDTH // HEADS // 2
        angles = torch.arange(LENGTH)[:, None] / 100.0 ** (torch.arange(half)[None] / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Texts(Dataset[Batch]):
    """Token sequences with a next-token label for only a part of each, and for none of the end of the second step."""

    def __init__(self, size: int = SIZE) -> None:
        draw = torch.Generator().manual_seed(1234)
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=draw)
        self.labels = self.tokens[:, 1:].clone()
        counted = torch.randint(1, LENGTH + 1, (size, 1), generator=draw)
        counted[::9] = 0
        if size >= 2 * GLOBAL_BATCH:
            end_of_second_step = np.arange(GLOBAL_BATCH + GLOBAL_BATCH // 2, 2 * GLOBAL_BATCH, dtype=np.int64)
            counted[torch.from_numpy(sample_ids(end_of_second_step, size, SEED, 0))] = 0
        self.labels[torch.arange(LENGTH) >= counted] = IGNORED

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.tokens[index, :-1], "y": self.labels[index]}


# ---- The table

Optimizer = Literal["adamw", "fused adamw", "sgd"]
OPTIMIZERS: dict[Optimizer, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(adamw, foreach=True),
    "fused adamw": partial(adamw, fused=True),
    "sgd": sgd,
}


@dataclass(frozen=True)
class Cell:
    layout: str
    level: str = "zero3"
    schedule: Schedule = "1f1b"
    micro_batches: int = 2
    """Of a full step, on every data rank."""
    precision: Format = "fp32"
    dropout: float = 0.0
    fused: bool = False
    frozen: bool = False
    recompute: bool = False
    sequence: bool = False
    """Whether what is between the matrices is cut by tokens."""
    optimizer: Optimizer = "adamw"
    depth: int = 2
    steps: int = STEPS
    slow: bool = field(default=False, compare=False)

    @property
    def micro_batch(self) -> int:
        return GLOBAL_BATCH // (Layout.parse(self.layout).data_size * self.micro_batches)

    @property
    def world_size(self) -> int:
        return Layout.parse(self.layout).world_size

    @property
    def place(self) -> str:
        level = f" {self.level}" if "fsdp" in self.layout else ""
        return f"{self.layout}{level}{f' {self.schedule}' if 'pp' in self.layout else ''}"

    @property
    def variant(self) -> str:
        said = {
            self.precision: self.precision != "fp32",
            "dropout": self.dropout > 0,
            "fused matrices": self.fused,
            "frozen": self.frozen,
            "recompute": self.recompute,
            "sequence": self.sequence,
            self.optimizer: self.optimizer != "adamw",
        }
        return " ".join(word for word, is_said in said.items() if is_said)

    def __str__(self) -> str:
        return f"{self.place} {self.variant}".strip().replace(" ", "-")


# fmt: off
CELLS = [
    Cell("tp=2",             slow=True),
    Cell("tp=2",             dropout=DROPOUT, slow=True),
    Cell("tp=2",             fused=True),
    Cell("tp=2",             frozen=True, slow=True),
    Cell("tp=2",             recompute=True, dropout=DROPOUT, slow=True),
    Cell("tp=2",             precision="bf16", slow=True),
    Cell("tp=2",             optimizer="sgd", slow=True),
    Cell("tp=2",             sequence=True, dropout=DROPOUT),
    Cell("tp=2",             sequence=True, fused=True, recompute=True, slow=True),
    Cell("tp=2",             optimizer="fused adamw", slow=True),
    Cell("tp=4",             slow=True),
    Cell("tp=4",             fused=True, dropout=DROPOUT, slow=True),
    Cell("cp=2",             slow=True),
    Cell("cp=2",             dropout=DROPOUT),
    Cell("cp=2",             recompute=True, dropout=DROPOUT, slow=True),
    Cell("cp=2",             precision="bf16", slow=True),
    Cell("cp=4",             slow=True),
    Cell("cp=4",             dropout=DROPOUT, slow=True),
    Cell("dp=2,tp=2",        slow=True),
    Cell("dp=2,cp=2",        slow=True),
    Cell("cp=2,tp=2",        slow=True),
    Cell("cp=2,tp=2",        dropout=DROPOUT, slow=True),
    Cell("fsdp=2,tp=2",      "zero1", slow=True),
    Cell("fsdp=2,tp=2",      "zero1", frozen=True, slow=True),
    Cell("fsdp=2,tp=2",      "zero2", slow=True),
    Cell("fsdp=2,tp=2",      "zero3", slow=True),
    Cell("fsdp=2,tp=2",      "zero3", fused=True, slow=True),
    Cell("fsdp=2,tp=2",      "zero3", frozen=True, slow=True),
    Cell("fsdp=2,tp=2",      "zero3", recompute=True, dropout=DROPOUT, slow=True),
    Cell("fsdp=2,cp=2",      "zero1", slow=True),
    Cell("fsdp=2,cp=2",      "zero2", slow=True),
    Cell("fsdp=2,cp=2",      "zero3", slow=True),
    Cell("pp=2,tp=2",        schedule="1f1b"),
    Cell("pp=2,tp=2",        schedule="1f1b", dropout=DROPOUT, slow=True),
    Cell("pp=2,tp=2",        schedule="zbv", depth=4, slow=True),
    Cell("pp=2,fsdp=2,tp=2", "zero3", "1f1b", steps=MANY_RANKS_STEPS, slow=True),
    Cell("pp=2,fsdp=2,tp=2", "zero3", "interleaved-zero-bubble", depth=4, steps=MANY_RANKS_STEPS, slow=True),
    Cell("dp=2,fsdp=2,tp=2", "zero3", steps=MANY_RANKS_STEPS, slow=True),
    Cell("pp=2,dp=2,tp=2",   schedule="1f1b", steps=MANY_RANKS_STEPS, slow=True),
    Cell("fsdp=2,cp=2,tp=2", "zero3", steps=MANY_RANKS_STEPS, slow=True),
    Cell("dp=2,cp=2,tp=2",   steps=MANY_RANKS_STEPS, slow=True),
    Cell("fsdp=2,tp=2",      "zero3", sequence=True, slow=True),
    Cell("cp=2,tp=2",        sequence=True, slow=True),
    Cell("dp=2,fsdp=2,cp=2", "zero3", steps=MANY_RANKS_STEPS, slow=True),
    Cell("pp=2,dp=2,fsdp=2,tp=2", "zero3", "1f1b", steps=MANY_RANKS_STEPS, slow=True),
    Cell("dp=2,fsdp=2,cp=2,tp=2", "zero3", steps=MANY_RANKS_STEPS, slow=True),
]
# fmt: on


def each(cells: list[Cell]) -> pytest.MarkDecorator:
    def marks(cell: Cell) -> list[Any]:
        many = [pytest.mark.soak] * (cell.world_size > 4) + [pytest.mark.limit(300)] * (cell.world_size > 8)
        return many + [pytest.mark.slow] * cell.slow

    marked = [pytest.param(cell, id=str(cell), marks=marks(cell)) for cell in cells]
    return pytest.mark.parametrize("cell", marked)


each_cell = each(CELLS)


# ---- What runs in a rank


def train_one(run: Run, cell: Cell) -> Record:
    engine = anew(run).setup(
        partial(GPT, cell.depth, cell.dropout, cell.fused, cell.frozen),
        text_loss,
        optimizer=OPTIMIZERS[cell.optimizer],
        clip=CLIP,
        precision=cell.precision,
        recompute=cell.recompute,
        shard={"level": cell.level},
        pipeline={"schedule": cell.schedule},
        tensor={"sequence": "on" if cell.sequence else "off"},
    )
    loader = run.loader(Texts(), GLOBAL_BATCH, micro_batch=cell.micro_batch, steps=cell.steps, workers=0)
    return recorded(engine, loader)


def in_one_process(cell: Cell) -> Cell:
    return replace(
        cell,
        layout="single",
        level="zero3",
        schedule="1f1b",
        micro_batches=GLOBAL_BATCH // cell.micro_batch,
        recompute=False,
        sequence=False,
        slow=False,
    )


@pytest.fixture(scope="module")
def table(ranks: RankPool) -> Table[Cell]:
    return Table(ranks, CELLS, train_one, in_one_process)


# ---- The promises


@each_cell
def test_every_rank_reports_the_steps_of_one_process(table: Table[Cell], cell: Cell) -> None:
    assert_same_steps(table[cell], LOSS[cell.precision], NORM[cell.precision], CLIP)


@each_cell
def test_the_data_ranks_together_read_what_one_process_reads(table: Table[Cell], cell: Cell) -> None:
    assert_same_samples(table[cell], cell)


@each_cell
def test_first_gradients_equal_those_of_one_process(table: Table[Cell], cell: Cell) -> None:
    if cell.precision == "fp32":
        assert_same_gradients(table[cell])
    else:
        apart = table[cell].gradients_apart()
        assert {name: far for name, far in apart.items() if far > ROUNDED_GRADIENT} == {}


@each_cell
def test_final_weights_equal_those_of_one_process(table: Table[Cell], cell: Cell) -> None:
    assert_same_weights(table[cell], WEIGHTS[cell.precision])


@each([cell for cell in CELLS if cell.precision != "fp32"])
def test_rounding_leads_ranks_hardly_further_astray_than_one_process(table: Table[Cell], cell: Cell) -> None:
    trained, exact = table[cell], table.reference(replace(cell, precision="fp32"))
    together, alone = Trained(trained.ranks, exact), Trained([trained.reference], exact)
    assert typical(together.gradients_apart()) < ROUNDED_ALONE * typical(alone.gradients_apart())
    assert typical(together.moved_apart()) < ROUNDED_ALONE * typical(alone.moved_apart())


def typical(apart: dict[str, float]) -> float:
    """The root of the mean square over parameters."""
    return math.sqrt(sum(far * far for far in apart.values()) / len(apart))


@each([cell for cell in CELLS if cell.frozen])
def test_a_frozen_parameter_has_no_gradient_and_stays_as_it_was_built(table: Table[Cell], cell: Cell) -> None:
    trained = table[cell]
    assert "embedding.weight" not in trained.gradients
    assert trained.final["embedding.weight"].equal(trained.initial["embedding.weight"])


@each([cell for cell in CELLS if "tp" in cell.layout and "fsdp" not in cell.layout])
def test_a_rank_stores_its_share_of_every_matrix_that_tp_cuts(table: Table[Cell], cell: Cell) -> None:
    tp = Layout.parse(cell.layout).tp
    for record in table[cell].ranks:
        matrices = {name for name, whole in record.initial.items() if whole.dim() == 2}
        if "pp" in cell.layout:  # the tied one is outside of the parts of a pipeline
            matrices.discard("embedding.weight")
        assert {name: record.stored[name] for name in matrices} == {
            name: record.initial[name].numel() // tp for name in matrices
        }


def test_dropout_fused_matrices_and_rounding_really_are_another_computation(table: Table[Cell]) -> None:
    cells = {in_one_process(cell): cell for cell in CELLS if cell.layout == "tp=2" and not cell.slow}
    losses = {tuple(round(step["loss"], 4) for step in table.reference(cell).steps) for cell in cells.values()}
    assert len(losses) == len(cells) > 1


# ---- How often ranks talk


def count_collectives(job: Job, layout: str, sequence: str) -> dict[int, tuple[Counter[str], Counter[str]]]:
    """What one forward and one backward send, by the number of blocks."""
    found = {}
    with join(job, layout) as run:
        for depth in (2, 3):
            model = partial(GPT, depth, fused=sequence == "on")
            engine = anew(run).setup(model, text_loss, optimizer=adamw, tensor={"sequence": sequence})
            batch = next(iter(run.loader(Texts(), GLOBAL_BATCH, micro_batch=GLOBAL_BATCH, steps=1, workers=0)))
            with Collectives() as forward:
                loss, _ = engine.forwards.forward(batch.micro_batches[0], batch.micro_batches[0].data)
            with Collectives() as backward:
                loss.backward()  # type: ignore[no-untyped-call]
            found[depth] = by_kind(forward), by_kind(backward)
    return found


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is sent, by the names torch has for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def by_kind(seen: Collectives) -> Counter[str]:
    """Torch has several names for each kind of collective."""
    kinds: Counter[str] = Counter()
    for operation, times in seen.counts.items():
        name = operation.replace("_", "")
        known = re.match("allreduce|allgather|reducescatter", name)
        kinds[known[0] if known else name] += times
    return kinds


@pytest.mark.parametrize(
    ("layout", "sequence", "forward", "backward"),
    [
        ("tp=2", "off", {"allreduce": 2}, {"allreduce": 2}),
        ("tp=2", "on", {"allgather": 2, "reducescatter": 2}, {"allgather": 2, "reducescatter": 2}),
        ("cp=2", "off", {"allgather": 2}, {"reducescatter": 2}),
    ],
)
def test_a_block_talks_as_often_as_it_has_to(
    ranks: RankPool, layout: str, sequence: str, forward: dict[str, int], backward: dict[str, int]
) -> None:
    for by_depth in ranks.run(count_collectives, 2, layout, sequence):
        of_a_block = [three - two for two, three in zip(by_depth[2], by_depth[3], strict=True)]
        assert of_a_block == [forward, backward]
        for two, of_one in zip(by_depth[2], of_a_block, strict=True):
            rest = set(two - of_one - of_one)
            assert rest <= {"allreduce"} or sequence == "on", "outside of blocks only sums"


# ---- Compiled


def train_compiled(job: Job, layout: str, compiled: list[str], cache: Path) -> list[list[float]]:
    found = []
    with pytest.MonkeyPatch.context() as patch, join(job, layout) as run:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        for how in compiled:
            torch.compiler.reset()
            engine = anew(run).setup(GPT, text_loss, optimizer=adamw, clip=CLIP, compile=how)  # type: ignore[arg-type]
            loader = run.loader(Texts(), GLOBAL_BATCH, micro_batch=2, steps=4, workers=0)
            found.append([number for out in map(engine.step, loader) for number in (out.loss, out.grad_norm.item())])
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all layouts: kernels are compiled once."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.slow
@pytest.mark.limit(500)
@pytest.mark.parametrize(
    ("layout", "compiled"),
    [
        ("tp=2", ["blocks", "model"]),
        ("cp=2", ["blocks", "model"]),
        *(
            pytest.param(layout, ["blocks"], marks=pytest.mark.soak)
            for layout in ("fsdp=2,tp=2", "cp=2,tp=2", "pp=2,tp=2")
        ),
    ],
)
def test_compiled_code_gives_the_numbers_of_one_eager_process(
    ranks: RankPool, cache: Path, layout: str, compiled: list[str]
) -> None:
    ((expected,),) = ranks.run(train_compiled, 1, "single", ["off"], cache)
    for rank in ranks.run(train_compiled, Layout.parse(layout).world_size, layout, compiled, cache, timeout=450):
        for numbers in rank:
            assert numbers == pytest.approx(expected, rel=1e-5)


# ---- Evaluation

SIZES = (1, 5, 21)
Results = dict[int, dict[str, Metric]]


def right_labels(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    counted = batch["y"] != IGNORED
    return ((model(batch["x"]).argmax(-1) == batch["y"]) & counted).sum(), counted.sum()


def evaluate(job: Job, layout: str) -> Results:
    with join(job, layout) as run:
        engine = run.setup(partial(GPT, dropout=DROPOUT), text_loss, optimizer=adamw)
        for batch in run.loader(Texts(), GLOBAL_BATCH, micro_batch=8, steps=2, workers=0):
            engine.step(batch)
        found = {
            size: run.evaluate(Texts(size), {"accuracy": right_labels}, micro_batch=4, workers=0) for size in SIZES
        }
        assert engine.model.training
    return found


def test_evaluation_counts_and_scores_as_one_process_does(ranks: RankPool) -> None:
    (alone,) = ranks.run(evaluate, 1, "single")
    for layout in ("tp=2", "cp=2"):
        everybody = ranks.run(evaluate, 2, layout)
        assert repr(everybody[0]) == repr(everybody[1]), "by their text, because NaN equals nothing"
        for size, metrics in alone.items():
            ours = everybody[0][size]
            assert ours["accuracy"] == metrics["accuracy"], (layout, size)
            assert ours["loss"].count == metrics["loss"].count, (layout, size)
            assert ours["loss"].sum == pytest.approx(metrics["loss"].sum, rel=1e-6), (layout, size)


# ---- Resume

STOP_AFTER = 5
RESUMED_STEPS = 7


def live(job: Job, layout: str, run_dir: Path, life: int = 1, stop_after: int | None = None) -> list[Any]:
    """Join a run and train; leave it unfinished after `stop_after` steps, else do all of them."""
    with unfinished(join(job, layout, run_dir, meeting=f"{run_dir.name}-{life}")) as run:
        engine = run.setup(
            partial(GPT, dropout=DROPOUT, fused=True),
            text_loss,
            optimizer=adamw,
            clip=CLIP,
            schedule=lambda step: 1 / (1 + step),
        )
        seen: list[Any] = []
        for batch in run.loader(Texts(), GLOBAL_BATCH, micro_batch=4, steps=RESUMED_STEPS, workers=0):
            out = engine.step(batch)
            seen.append((out.step, out.loss, out.grad_norm.item()))
            if out.step == stop_after:
                run.save()
                return seen
        seen.append(fingerprint(weights(engine)))
    return seen


def with_and_without_a_stop(job: Job, layout: str) -> tuple[list[Any], list[Any]]:
    stopped = live(job, layout, job.folder / "stopped", stop_after=STOP_AFTER)
    continued = live(job, layout, job.folder / "stopped", life=2)
    assert continued[0][0] == STOP_AFTER + 1
    return stopped + continued, live(job, layout, job.folder / "whole")


@pytest.mark.parametrize(
    "layout", ["tp=2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("cp=2", "fsdp=2,tp=2"))]
)
def test_a_run_that_stopped_has_the_bits_of_one_that_did_not(ranks: RankPool, layout: str) -> None:
    everybody = ranks.run(with_and_without_a_stop, Layout.parse(layout).world_size, layout)
    for in_parts, at_once in everybody:
        assert len(at_once) == RESUMED_STEPS + 1
        assert in_parts == at_once
    assert all(rank == everybody[0] for rank in everybody)


# ---- The table, shown


def test_the_largest_differences_are_shown(table: Table[Cell], capsys: pytest.CaptureFixture[str]) -> None:
    cells = table.trained()
    with capsys.disabled():
        print(
            f"\n\n{'largest differences from one process':<70}"
            f"{'loss':>9}{'gradient':>10}{'norm':>9}{'weights':>9}{'seconds':>9}"
        )
        for cell in cells:
            trained = table[cell]
            found, seconds = trained.difference, max(record.seconds for record in trained.ranks)
            numbers = f"{found.loss:9.0e}{found.gradient:10.0e}{found.norm:9.0e}{found.weights:9.0e}{seconds:9.1f}"
            print(f"{cell.place:<48}{cell.variant:<22}{numbers}")
