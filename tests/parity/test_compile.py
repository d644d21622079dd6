"""compile x recompute x layout: every cell gives the numbers of one eager process, or is refused by name."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.config.schema import NumericsConfig, ShardConfig
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.parallel.build.compile import allow_variants, check_compile, compiled_calls
from tests.parity.problems import Batch, adamw, anew, join
from tests.ranks import Job, RankPool

STEPS = 4
GLOBAL_BATCH, MICRO_BATCH = 8, 2


class Block(nn.Module):
    """Small: its kernels are compiled anew on every machine."""

    def __init__(self, dropout: float, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = norm(8), nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(F.gelu(self.linear(self.norm(x))))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, dropout: float, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout, norm) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Points(Dataset[Batch]):
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(7)
        self.x = torch.randn(GLOBAL_BATCH * STEPS, 8, generator=draw)
        self.y = torch.randint(4, (len(self.x),), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.x[index], "y": self.y[index]}


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


Cell = tuple[str, bool, float]
"""compile, recompute, dropout"""

CELLS: list[Cell] = [
    (compile_, recompute, dropout)
    for compile_ in ("blocks", "model")
    for recompute in (False, True)
    for dropout in (0.0, 0.2)
]
LAYOUTS = [
    ("single", "zero3"),
    ("dp=2", "zero3"),
    ("fsdp=2", "zero1"),
    ("fsdp=2", "zero2"),
    ("fsdp=2", "zero3"),
    ("dp=2,fsdp=2", "zero3"),
]


def train(
    job: Job, layout: str, level: str, cells: list[Cell], cache: Path, norm: type[nn.Module]
) -> list[list[float] | str]:
    """The losses of one training for each cell, or why it was refused."""
    found: list[list[float] | str] = []
    with pytest.MonkeyPatch.context() as patch, join(job, layout) as run:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        for compile_, recompute, dropout in cells:
            torch.compiler.reset()
            try:
                engine = anew(run).setup(
                    partial(Stack, dropout, norm),
                    loss,
                    optimizer=adamw,
                    clip=1.0,
                    compile=compile_,  # type: ignore[arg-type]
                    recompute=recompute,
                    shard={"level": level},
                )
            except UserError as error:
                found.append(str(error))
                continue
            batches = run.loader(Points(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=STEPS, workers=0)
            found.append([engine.step(batch).loss for batch in batches])
    return found


def losses_by_cell(
    ranks: RankPool, layout: str, level: str, cells: list[Cell], cache: Path, norm: type[nn.Module] = nn.LayerNorm
) -> dict[Cell, Any]:
    everybody = ranks.run(train, Layout.parse(layout).world_size, layout, level, cells, cache, norm, timeout=500)
    assert all(rank == everybody[0] for rank in everybody)
    return dict(zip(cells, everybody[0], strict=True))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all layouts: kernels are compiled once."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def eager(ranks: RankPool, cache: Path) -> list[float]:
    cell = ("off", False, 0.0)
    return losses_by_cell(ranks, "single", "zero3", [cell], cache)[cell]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def compiled(ranks: RankPool, cache: Path) -> dict[Cell, Any]:
    return losses_by_cell(ranks, "single", "zero3", CELLS, cache)


@pytest.mark.slow
@pytest.mark.limit(900)
@pytest.mark.parametrize(("layout", "level"), LAYOUTS)
def test_the_whole_table_gives_the_numbers_of_one_process(
    ranks: RankPool, eager: list[float], compiled: dict[Cell, Any], cache: Path, layout: str, level: str
) -> None:
    shards_weights = level != "zero1" and Layout.parse(layout).fsdp > 1
    found = losses_by_cell(ranks, layout, level, CELLS, cache)
    for cell, losses in found.items():
        compile_, _, dropout = cell
        if compile_ == "model" and shards_weights:
            assert "compile = model does not go with the sharded weights" in losses
        elif dropout == 0:
            assert losses == pytest.approx(eager, rel=1e-6), cell
        else:
            # Compiled dropout draws other masks than eager dropout, the same ones on every layout and recomputed too.
            assert losses == pytest.approx(compiled[compile_, False, dropout], rel=1e-6), cell
            assert losses != pytest.approx(eager, rel=1e-3), "dropout drops something"


@pytest.mark.slow
@pytest.mark.limit(900)
def test_compiled_batch_norm_counts_every_micro_batch_once(ranks: RankPool, cache: Path) -> None:
    off, blocks, recomputed = ("off", False, 0.0), ("blocks", False, 0.0), ("blocks", True, 0.0)
    whole = ("model", True, 0.0)
    reference = losses_by_cell(ranks, "single", "zero3", [off], cache, nn.BatchNorm1d)[off]
    for layout in ("single", "dp=2", "fsdp=2"):
        cells = [blocks, recomputed, whole] if layout == "dp=2" else [blocks, recomputed]
        found = losses_by_cell(ranks, layout, "zero3", cells, cache, nn.BatchNorm1d)
        assert found[blocks] == pytest.approx(reference, rel=1e-6)
        assert found[recomputed] == pytest.approx(reference, rel=1e-6)
        assert "recompute of a model with BatchNorm" in found.get(whole, "recompute of a model with BatchNorm")


class Funnel(nn.Module):
    """Blocks of one class and different widths: each is a variant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Narrowing(width) for width in (8, 7, 6, 5))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Narrowing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x), 0.3, self.training)


def train_in_parts(job: Job, cache: Path) -> dict[str, list[float]]:
    """Losses of a compiled run that never stopped and of one that did; both choose their micro-batch themselves."""
    losses: dict[str, list[float]] = {"whole": [], "parts": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        for name, stop in (("whole", STEPS), ("parts", 2), ("parts", STEPS)):
            torch.compiler.reset()
            run = join(job, "single", job.folder / name)
            engine = anew(run).setup(Funnel, loss, optimizer=adamw, compile="blocks")
            for batch in run.loader(Points(), 6, steps=STEPS, workers=0):
                losses[name].append(engine.step(batch).loss)
                run.evaluate(Points())
                if engine.steps_done == stop:
                    run.save()
                    break
            run.leave()
    return losses


@pytest.mark.slow
@pytest.mark.limit(600)
def test_a_compiled_run_goes_on_with_the_same_dropout_masks(ranks: RankPool, cache: Path) -> None:
    (losses,) = ranks.run(train_in_parts, 1, cache, timeout=500)
    assert losses["parts"] == losses["whole"]


def test_too_many_variants_are_refused_rather_than_run_eagerly() -> None:
    seen: list[int] = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        seen.append(1)
        return graph.forward

    with pytest.MonkeyPatch.context() as patch:
        for name in ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit"):
            patch.setattr(f"torch._dynamo.config.{name}", getattr(torch._dynamo.config, name))
        allow_variants(1)
        patch.setattr("torch._dynamo.config.recompile_limit", 3)
        double = torch.compile(lambda x: x * 2, backend=count, dynamic=False)

        def call_with_many_shapes() -> None:
            with compiled_calls():
                for size in range(2, 10):
                    double(torch.ones(size))

        with pytest.raises(UserError, match="compiled more than 3 times"):
            call_with_many_shapes()
    torch.compiler.reset()
    assert seen


SCRIPT = """
import sys, torch, lockstep
from tests.parity.test_compile import GLOBAL_BATCH, Points, Stack, adamw, loss
with lockstep.init("single", device="cpu", run_dir=sys.argv[1]) as run:
    engine = run.setup(lambda: Stack(0.0), loss, optimizer=adamw, compile="blocks")
    for batch in run.loader(Points(), GLOBAL_BATCH, micro_batch=2, steps=1, workers=0):
        engine.step(batch)
from torch._dynamo.utils import counters
print("compiled", counters["inductor"]["fxgraph_cache_miss"], "found", counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_second_process_finds_the_compiled_code_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    counts = []
    for name in ("first", "second"):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
        counts.append([int(word) for word in done.stdout.splitlines()[-1].split()[1::2]])
    assert counts[0][0] > 0
    assert counts[1][0] == 0
    assert counts[1][1] > 0
    assert list((tmp_path / "cache" / "compile").iterdir())


def test_what_does_not_compile_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    single, shard, numerics = Layout(), ShardConfig(), NumericsConfig()
    with pytest.raises(UserError, match="does not go with batch_norm = sync"):
        check_compile("blocks", single, shard, numerics, "sync")
    with pytest.raises(UserError, match=r"does not go with numerics\.param_dtype"):
        check_compile("model", single, shard, NumericsConfig(param_dtype="bf16"), "micro-batch")
    run = lockstep.init("single", device="cpu", run_dir=tmp_path / "run")
    with run, pytest.raises(UserError, match="the model has no repeated blocks: use compile = model"):
        run.setup(lambda: nn.Linear(8, 4), loss, optimizer=adamw, compile="blocks")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        check_compile("blocks", single, shard, numerics, "micro-batch")
