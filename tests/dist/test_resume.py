"""A run that stopped and came back has the bits of one that never stopped; a checkpoint is whole or it is not there."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import lockstep.checkpoint.save
from lockstep.checkpoint.disk.files import write_shard
from lockstep.errors import SaveError, UserError
from lockstep.layout import Layout
from tests.events import read_events
from tests.parity.problems import (
    GLOBAL_BATCH,
    RaggedTexts,
    Stream,
    TinyGPT,
    adamw,
    error_of,
    fingerprint,
    fork_loader_workers,
    join,
    text_loss,
    unfinished,
    weights,
)
from tests.ranks import Job, RankPool

STEPS = 12
STOP_AFTER = 7
"""In the second of three epochs, which have five steps each."""


@dataclass
class Life:
    """What one rank saw of a run from one start to the next stop."""

    first_step: int
    losses: list[float]
    ids: list[list[int]]
    draws: list[float]
    """Random numbers that the script drew between its steps."""
    weights: str
    best: tuple[int, float] | None = None
    draw_before: float = field(default=0.0, compare=False)
    """Drawn before the first step of this life."""

    def __add__(self, later: Life) -> Life:
        return Life(
            self.first_step,
            self.losses + later.losses,
            self.ids + later.ids,
            self.draws + later.draws,
            later.weights,
            later.best,
        )


def live(
    job: Job,
    layout: str,
    run_dir: Path,
    *,
    life: int = 1,
    stop_after: int | None = None,
    save_after: tuple[int, ...] = (),
    wait: bool = False,
    stream: bool = False,
    workers: int = 0,
    evaluate: bool = False,
    steps: int = STEPS,
) -> Life:
    """Join a run and train; leave it unfinished after `stop_after` steps, else do all of them."""
    with unfinished(join(job, layout, run_dir, meeting=f"{run_dir.name}-{life}")) as run:
        engine = run.setup(
            lambda: TinyGPT(dropout=0.2), text_loss, optimizer=adamw, clip=0.5, schedule=lambda step: 1 / (1 + step)
        )
        seen = Life(engine.steps_done + 1, [], [], [], "", run.best, torch.rand(()).item())
        dataset = Stream() if stream else RaggedTexts()
        for batch in run.loader(dataset, GLOBAL_BATCH, micro_batch=2, steps=steps, workers=workers):
            out = engine.step(batch)
            seen.losses.append(out.loss)
            seen.ids.append([sample for part in batch.micro_batches if not part.filler for sample in part.ids])
            seen.draws.append(torch.rand(()).item())
            if evaluate:
                run.evaluate(RaggedTexts(5))
            if out.step in save_after:
                run.save(wait=wait)
            if out.step == stop_after:
                break
        seen.weights = fingerprint(weights(engine))
    return seen


@dataclass
class Begun:
    """A run in one process, left after six steps with two checkpoints, and what it is when nothing stops it."""

    run_dir: Path
    before: Life
    whole: Life


@pytest.fixture(scope="module")
def begun(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("begun")
    (before,) = ranks.run(live, 1, "single", folder / "run", stop_after=6, save_after=(3, 6))
    (whole,) = ranks.run(live, 1, "single", folder / "whole")
    return Begun(folder / "run", before, whole)


# ---- The same bits


def with_and_without_a_stop(job: Job, layout: str, options: dict[str, Any]) -> dict[str, Life]:
    fork_loader_workers()
    stopped = live(job, layout, job.folder / "c", stop_after=STOP_AFTER, save_after=(3, STOP_AFTER), **options)
    continued = live(job, layout, job.folder / "c", life=2, **options)
    return {
        "once": live(job, layout, job.folder / "a", **options),
        "again": live(job, layout, job.folder / "b", **options),
        "before": stopped,
        "after": continued,
    }


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("single", {"workers": 2}),
        ("dp=2", {"workers": 2, "evaluate": True}),
        ("dp=2", {"stream": True, "workers": 1}),
        ("fsdp=2", {"evaluate": True}),
        pytest.param("dp=2,fsdp=2", {}, marks=pytest.mark.slow),
        pytest.param("single", {}, marks=pytest.mark.slow),
        pytest.param("single", {"stream": True}, marks=pytest.mark.slow),
        pytest.param("dp=4", {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_a_run_that_stopped_has_the_bits_of_one_that_did_not(
    ranks: RankPool, layout: str, options: dict[str, Any]
) -> None:
    everybody = ranks.run(with_and_without_a_stop, Layout.parse(layout).world_size, layout, options)
    for lives in everybody:
        assert len(lives["once"].losses) == STEPS
        assert lives["once"] == lives["again"], "two runs with one seed"
        assert len(lives["before"].losses) == STOP_AFTER
        assert lives["after"].first_step == STOP_AFTER + 1
        assert lives["before"] + lives["after"] == lives["once"], "stopped and continued"
        assert lives["after"].draw_before == lives["once"].draws[STOP_AFTER - 1], "the script's own random numbers"
    assert len({lives["after"].weights for lives in everybody}) == 1


def count_workers(job: Job) -> list[Life]:
    fork_loader_workers()
    return [live(job, "dp=2", job.folder / f"{workers}", workers=workers) for workers in (0, 2)]


def test_the_number_of_workers_changes_no_bit(ranks: RankPool) -> None:
    for without, with_two in ranks.run(count_workers, 2):
        assert without == with_two


def other_seed(job: Job) -> list[str]:
    prints = []
    for seed in (1, 2):
        with join(job, "single", meeting=str(seed), seed=seed) as run:
            prints.append(fingerprint(weights(run.setup(TinyGPT, text_loss, optimizer=adamw))))
    return prints


def test_another_seed_is_another_run(ranks: RankPool) -> None:
    ((one, two),) = ranks.run(other_seed, 1)
    assert one != two


def save_before_the_step(job: Job, run_dir: Path) -> tuple[Life, Life]:
    """Saves when the loader has handed out the fourth step but nobody has done it."""
    ids: list[list[int]] = []
    with unfinished(join(job, "single", run_dir, meeting="1")) as run:
        engine = run.setup(lambda: TinyGPT(dropout=0.2), text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=STEPS, workers=0):
            if len(ids) == 3:
                run.save()
                break
            engine.step(batch)
            ids.append([sample for part in batch.micro_batches for sample in part.ids])
    return Life(1, [], ids, [], ""), live(job, "single", run_dir, life=2)


def test_a_batch_that_was_handed_out_but_not_stepped_is_read_again(
    ranks: RankPool, tmp_path: Path, begun: Begun
) -> None:
    ((before, after),) = ranks.run(save_before_the_step, 1, tmp_path / "run")
    assert after.first_step == 4
    assert before.ids + after.ids == begun.whole.ids


def test_replicas_may_become_more_or_fewer(ranks: RankPool, tmp_path: Path, begun: Begun) -> None:
    before = ranks.run(live, 4, "dp=4", tmp_path / "run", stop_after=5, save_after=(5,))[0]
    after = ranks.run(live, 2, "dp=2", tmp_path / "run", life=2)[0]
    assert before.losses + after.losses == pytest.approx(begun.whole.losses, rel=1e-6)
    assert after.first_step == 6


# ---- Checkpoints that are not whole


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*"))


def flip_a_byte(folder: Path) -> None:
    shard = folder / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)


def cut_short(folder: Path) -> None:
    shard = folder / "shard-00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)


def delete_the_index(folder: Path) -> None:
    (folder / "index.json").unlink()


def spoil_the_index(folder: Path) -> None:
    (folder / "index.json").write_text("{")


def delete_a_shard(folder: Path) -> None:
    (folder / "shard-00000.safetensors").unlink()


@pytest.mark.parametrize(
    "damage", [flip_a_byte, cut_short, delete_the_index, spoil_the_index, delete_a_shard], ids=lambda f: f.__name__
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    ranks: RankPool, tmp_path: Path, begun: Begun, damage: Callable[[Path], None]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(begun.run_dir, run_dir)
    assert newest(run_dir).name == "step-00000006"
    damage(newest(run_dir))
    (after,) = ranks.run(live, 1, "single", run_dir, life=2)
    assert after.first_step == 4
    assert begun.before.losses[:3] + after.losses == begun.whole.losses
    assert after.weights == begun.whole.weights
    warnings = [e["text"] for e in read_events(run_dir / "events.jsonl") if e.get("level") == "warning"]
    assert len(warnings) == 1
    assert "the checkpoint of step 6 is damaged" in warnings[0]


def test_a_run_that_went_back_saves_the_damaged_step_anew(ranks: RankPool, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ranks.run(live, 2, "dp=2", run_dir, stop_after=6, save_after=(3, 6))
    flip_a_byte(newest(run_dir))
    again = ranks.run(live, 2, "dp=2", run_dir, life=2, stop_after=6, save_after=(6,))[0]
    assert again.first_step == 4
    third = ranks.run(live, 2, "dp=2", run_dir, life=3)[0]
    assert third.first_step == 7, "the checkpoint of step 6 is whole again"
    assert third.weights == ranks.run(live, 2, "dp=2", tmp_path / "whole")[0].weights


def come_back(job: Job, layout: str, run_dir: Path) -> str:
    return str(error_of(lambda: live(job, layout, run_dir, life=2)))


@pytest.mark.parametrize("damage", [flip_a_byte, delete_the_index], ids=lambda f: f.__name__)
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_as_it_is(
    ranks: RankPool, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run_dir = tmp_path / "run"
    ranks.run(live, 2, "dp=2", run_dir, stop_after=3, save_after=(3,))
    damage(newest(run_dir))
    error, _ = ranks.run(come_back, 2, "dp=2", run_dir)
    assert f"no checkpoint of {run_dir} is whole" in error
    assert "start anew" in error
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000003"]


def die_while_saving(job: Job, layout: str, run_dir: Path) -> list[str]:
    """Everything of the checkpoint of step 6 is staged when it fails."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    original = lockstep.checkpoint.save._commit
    live(job, layout, run_dir, stop_after=3, save_after=(3,))
    try:
        lockstep.checkpoint.save._commit = killed  # type: ignore[assignment]
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            live(job, layout, run_dir, life=2, save_after=(6,), wait=True)
    finally:
        lockstep.checkpoint.save._commit = original
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize("layout", ["single", "fsdp=2"])
def test_a_save_that_was_killed_leaves_the_checkpoint_before_it(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    run_dir, world_size = tmp_path / "run", Layout.parse(layout).world_size
    on_disk = ranks.run(die_while_saving, world_size, layout, run_dir)[0]
    assert on_disk == ["step-00000003"]
    after = ranks.run(live, world_size, layout, run_dir, life=3, save_after=(6,))[0]
    assert after.first_step == 4
    assert newest(run_dir).name == "step-00000006"
    assert not any((run_dir / "checkpoints").glob(".*")), "nothing is left of the one that failed"


# ---- Nothing in a checkpoint is executed


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@contextmanager
def no_unpickling() -> Iterator[None]:
    """Make every way to read a pickle raise."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    places: list[tuple[Any, str]] = [
        *((pickle, name) for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler")),
        *((torch, "load"), (torch.serialization, "load")),
    ]
    originals = [getattr(place, name) for place, name in places]
    try:
        for place, name in places:
            setattr(place, name, refuse)
        yield
    finally:
        for (place, name), original in zip(places, originals, strict=True):
            setattr(place, name, original)


def resume_without_pickle(job: Job, layout: str, run_dir: Path) -> int:
    with no_unpickling(), unfinished(join(job, layout, run_dir, meeting="2")) as run:
        return run.setup(lambda: TinyGPT(dropout=0.2), text_loss, optimizer=adamw).steps_done


@pytest.mark.parametrize("layout", ["single", "fsdp=2"])
def test_loading_unpickles_nothing(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    run_dir, world_size, mark = tmp_path / "run", Layout.parse(layout).world_size, tmp_path / "boom"
    ranks.run(live, world_size, layout, run_dir, stop_after=2, save_after=(2,))
    bomb = pickle.dumps(Bomb(mark))
    for name in ("shard-00000.pt", "model.pt", "optimizer.pkl", ".metadata", "shard-00001.safetensors.pt"):
        (newest(run_dir) / name).write_bytes(bomb)
        (run_dir / "checkpoints" / name).write_bytes(bomb)
    assert ranks.run(resume_without_pickle, world_size, layout, run_dir) == [2] * world_size
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists(), "the bomb does go off when it is unpickled"


def test_a_pickle_in_place_of_a_shard_is_damage(ranks: RankPool, tmp_path: Path, begun: Begun) -> None:
    run_dir, mark = tmp_path / "run", tmp_path / "boom"
    shutil.copytree(begun.run_dir, run_dir)
    (newest(run_dir) / "shard-00000.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    (after,) = ranks.run(live, 1, "single", run_dir, life=2)
    assert after.first_step == 4
    assert not mark.exists()


# ---- Refusals and retention


def other_model(job: Job, run_dir: Path) -> Exception | None:
    with unfinished(join(job, "single", run_dir, meeting="2")) as run:
        return error_of(lambda: run.setup(lambda: TinyGPT(tied=False), text_loss, optimizer=adamw))


def test_a_checkpoint_of_another_model_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(live, 1, "single", tmp_path / "run", stop_after=1, save_after=(1,))
    (error,) = ranks.run(other_model, 1, tmp_path / "run")
    assert isinstance(error, UserError)
    assert str(error) == "the checkpoint has no head.weight: build the model the checkpoint was written with"


def save_often(job: Job, layout: str, run_dir: Path) -> list[list[str]]:
    """Saves after each of six steps; the second is the best so far, the fourth the best of all."""
    on_disk = []
    with unfinished(join(job, layout, run_dir, meeting="1")) as run:
        run.keep_checkpoints(2)
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=6, workers=0):
            step = engine.step(batch).step
            run.save(best_loss={2: 3.5, 4: 3.25}.get(step))
            run._checkpoints.wait()
            on_disk.append(sorted(path.name for path in (run_dir / "checkpoints").glob("step-*")))
    return on_disk


@pytest.mark.parametrize("layout", ["single", "dp=2"])
def test_the_best_and_the_last_two_checkpoints_stay(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    run_dir, world_size = tmp_path / "run", Layout.parse(layout).world_size
    ranks.run(save_often, world_size, layout, run_dir)
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000005", "step-00000006"]
    events = [e for e in read_events(run_dir / "events.jsonl") if e["kind"] == "checkpoint"]
    assert [(e["step"], e["best"]) for e in events] == [(n, n in (2, 4)) for n in range(1, 7)]
    for life in ranks.run(live, world_size, layout, run_dir, life=2, steps=6):
        assert life.best == (4, 3.25)
        assert life.first_step == 7


def test_the_best_checkpoint_outlives_many_later_ones(ranks: RankPool, tmp_path: Path) -> None:
    (on_disk,) = ranks.run(save_often, 1, "single", tmp_path / "run")
    assert on_disk[2] == ["step-00000002", "step-00000003"]
    assert on_disk[3] == ["step-00000003", "step-00000004"]
    assert on_disk[5] == ["step-00000004", "step-00000005", "step-00000006"]


def fill_the_disk(job: Job, run_dir: Path) -> list[Exception | None]:
    """The second rank cannot write its shard of step 2."""
    errors: list[Exception | None] = []
    with unfinished(join(job, "fsdp=2", run_dir, meeting="1")) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=2, workers=0):
            full = engine.step(batch).step == 2 and job.rank == 1
            failing = OSError(28, "No space left on device") if full else None
            with mock.patch("lockstep.checkpoint.save.write_shard", side_effect=failing, wraps=write_shard):
                errors.append(error_of(partial(run.save, wait=True)))
    return errors


def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_and_leaves_the_last_one(
    ranks: RankPool, tmp_path: Path
) -> None:
    for before, failed in ranks.run(fill_the_disk, 2, tmp_path / "run"):
        assert before is None
        assert isinstance(failed, SaveError)
        assert str(failed).startswith("the checkpoint of step 2 was not written: rank 1: the disk is full")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
