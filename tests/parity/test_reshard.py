"""The table of restarts: saved under one layout and continued under any other, a run has the numbers it would have had.

Every layout of the table trains four steps and saves; from each of these checkpoints every layout trains two more, into
the next epoch. The model has fused matrices of unequal parts, a tied embedding, buffers that no state_dict has, and
dropout. The quick half goes once around a few layouts which together have every axis.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from lockstep.checkpoint.disk.files import bytes_of, reading
from lockstep.checkpoint.disk.format import open_checkpoint, read_index
from lockstep.checkpoint.disk.load import read_whole
from lockstep.layout import AXES, Layout
from tests.golden import checkpoint_reader
from tests.golden.checkpoint_reader import read_checkpoint
from tests.marks import others_slow
from tests.parity.problems import Tensors, adamw, join, text_loss, unfinished
from tests.parity.records import held, relative, union
from tests.parity.test_tensor import DROPOUT, GLOBAL_BATCH, GPT, Texts
from tests.ranks import Job, RankPool

LAYOUTS = ["single", "dp=4", "fsdp=4", "dp=2,fsdp=2", "tp=2", "cp=2", "pp=2", "fsdp=2,tp=2", "pp=2,tp=2"]
QUICK = ["single", "dp=2,fsdp=2", "cp=2", "pp=2,tp=2"]
STEPS, SAVED = 6, 4
LOSS = 1e-6
WEIGHTS = 6e-5
"""Allowed differences: of a loss, and of a weight relative to how far the training moved it.

Adam makes 3.5e-5 of cp's rounding in a training that nobody has stopped.
"""


@dataclass
class Life:
    """What one rank saw of a run between two stops."""

    losses: list[float]
    ids: list[list[int]]
    weights: Tensors
    initial: Tensors


def live(job: Job, layout: str, run_dir: Path, meeting: str, stop: int = STEPS, resume: str = "auto") -> Life:
    with unfinished(join(job, layout, run_dir, meeting, resume=resume)) as run:
        build = partial(GPT, dropout=DROPOUT, fused=True)
        engine = run.setup(build, text_loss, optimizer=adamw, clip=0.3, schedule=lambda step: 1 / (1 + step))
        seen = Life([], [], {}, {})
        for batch in run.loader(Texts(), GLOBAL_BATCH, micro_batch=4, steps=STEPS, workers=0):
            seen.initial = seen.initial or held(engine)
            out = engine.step(batch)
            seen.losses.append(out.loss)
            seen.ids.append([sample for part in batch.micro_batches if not part.filler for sample in part.ids])
            if out.step == stop:
                run.save(wait=True)
                break
        seen.weights = held(engine)
    return seen


def go_on(job: Job, folder: Path, sources: list[str], layout: str) -> dict[str, Life]:
    return {
        source: live(
            job,
            layout,
            folder / f"{source}-to-{layout}",
            f"{source}-to-{layout}",
            resume=str(folder / source / "checkpoints" / f"step-{SAVED:08d}"),
        )
        for source in sources
    }


def together(ranks: list[Life]) -> tuple[list[float], list[list[int]], Tensors]:
    """Losses, all sample ids of each step, and the last weights."""
    ids = [sorted({one for rank in ranks for one in rank.ids[step]}) for step in range(len(ranks[0].ids))]
    return ranks[0].losses, ids, union([rank.weights for rank in ranks])


class Restarts:
    """The runs of the table, each trained when a test asks for it."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self._ranks = ranks
        self.folder = folder
        self.whole = ranks.run(live, 1, "single", folder / "whole", "whole")
        self._begun: dict[str, list[Life]] = {}
        self._continued: dict[tuple[str, str], list[Life]] = {}

    def begun(self, layout: str) -> list[Life]:
        if layout not in self._begun:
            size = Layout.parse(layout).world_size
            self._begun[layout] = self._ranks.run(live, size, layout, self.folder / layout, layout, stop=SAVED)
        return self._begun[layout]

    def continued(self, sources: list[str], layout: str) -> dict[str, list[Life]]:
        for source in sources:
            self.begun(source)
        missing = [source for source in sources if (source, layout) not in self._continued]
        if missing:
            everybody = self._ranks.run(go_on, Layout.parse(layout).world_size, self.folder, missing, layout)
            self._continued |= {(source, layout): [rank[source] for rank in everybody] for source in missing}
        return {source: self._continued[source, layout] for source in sources}

    def checkpoint(self, layout: str) -> Path:
        self.begun(layout)
        return self.folder / layout / "checkpoints" / f"step-{SAVED:08d}"

    def check(self, source: str, layout: str, ranks: list[Life]) -> None:
        losses, ids, weights = together(self.whole)
        before, ids_before, _ = together(self.begun(source))
        after, ids_after, end = together(ranks)
        assert ids_before + ids_after == ids
        assert before + after == pytest.approx(losses, rel=LOSS)
        for name, tensor in weights.items():
            moved = (tensor.double() - self.whole[0].initial[name].double()).norm()
            assert relative(end[name], tensor, moved) < WEIGHTS, (source, layout, name)


@pytest.fixture(scope="module")
def restarts(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Restarts:
    return Restarts(ranks, tmp_path_factory.mktemp("restarts"))


each_layout = pytest.mark.parametrize("layout", others_slow(LAYOUTS, QUICK))


@pytest.mark.parametrize("layout", QUICK)
def test_a_run_goes_on_as_another_layout_left_it(restarts: Restarts, layout: str) -> None:
    source = QUICK[QUICK.index(layout) - 1]
    restarts.check(source, layout, restarts.continued([source], layout)[source])


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_as_any_layout_left_it(restarts: Restarts, layout: str) -> None:
    for source, life in restarts.continued(LAYOUTS, layout).items():
        restarts.check(source, layout, life)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_going_on_under_the_same_layout_changes_no_bit(restarts: Restarts, ranks: RankPool, layout: str) -> None:
    whole = ranks.run(live, Layout.parse(layout).world_size, layout, restarts.folder / f"whole-{layout}", "whole")
    for rank, one in enumerate(whole):
        before, after = restarts.begun(layout)[rank], restarts.continued([layout], layout)[layout][rank]
        assert before.losses + after.losses == one.losses
        assert before.ids + after.ids == one.ids
        assert all(after.weights[name].equal(tensor) for name, tensor in one.weights.items())


@each_layout
def test_a_reader_written_from_the_documentation_alone_reads_the_same_bytes(restarts: Restarts, layout: str) -> None:
    index, tensors = read_checkpoint(restarts.checkpoint(layout))
    ours = open_checkpoint(restarts.checkpoint(layout))
    assert index == ours.index.model_dump(mode="json")
    assert tensors.keys() == ours.index.tensors.keys()
    with reading(ours) as reader:
        for name, stored in ours.index.tensors.items():
            assert tensors[name].tobytes() == bytes(bytes_of(read_whole(reader, stored)))
            assert list(tensors[name].shape) == stored.shape
    assert len(inspect.getsource(checkpoint_reader).splitlines()) <= 100


@each_layout
def test_every_layout_writes_each_tensor_once_and_every_rank_a_share(restarts: Restarts, layout: str) -> None:
    index, alone = read_index(restarts.checkpoint(layout)), read_index(restarts.checkpoint("single"))
    assert {name: (t.dtype, t.shape) for name, t in index.tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in alone.tensors.items()
    }
    assert index.state_dict == alone.state_dict
    assert index.optimizer is not None
    assert alone.optimizer is not None
    assert [set(g.parameters) for g in index.optimizer.groups] == [set(g.parameters) for g in alone.optimizer.groups]
    sizes = [file.bytes - file.header_bytes for file in index.files.values()]
    assert sum(sizes) == sum(tensor.bytes for tensor in index.tensors.values())
    assert len(sizes) == Layout.parse(layout).world_size
    if "pp" not in layout:  # stages are as large as they are
        assert max(sizes) < 1.2 * min(sizes)


def test_the_quick_layouts_have_every_axis() -> None:
    assert {axis for axis in AXES for layout in QUICK if Layout.parse(layout).size(axis) > 1} == set(AXES)
