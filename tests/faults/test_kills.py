"""However a training is killed, the newest checkpoint on disk is whole, and the run goes on from it with the same bits.

The ranks are real processes, killed by SIGKILL at random instants while they save after every step.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.checkpoint.disk.files import verify_checkpoint
from lockstep.checkpoint.disk.format import Index, checkpoints_folder, read_index, steps_on_disk
from lockstep.layout import Layout
from tests.parity.problems import (
    GLOBAL_BATCH,
    SEED,
    VOCABULARY,
    RaggedTexts,
    adamw,
    fingerprint,
    text_loss,
    unfinished,
    weights,
)
from tests.patience import Deadline
from tests.ranks import RankPool, die_with_parent

WIDTH = 64
FOR_EVER = 1_000_000
LONGEST_START = 60.0
START_SECONDS = 0.8
"""About what a life needs until its first step: within this time a kill hits the start itself."""
SAVING_SECONDS = 0.3
"""So long after its first step a life is killed at any instant: several saves begin and end in it."""
STAGED_SECONDS = 0.04
"""About what it takes to write a checkpoint: a kill within this time hits its shards, its index or its rename."""


# ---- One rank of a training that saves all the time


class Heavy(nn.Module):
    """Quick to train and slow to save: of its 8 MB most is ballast that no step touches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(WIDTH, VOCABULARY)
        for number in range(4):
            self.register_buffer(f"ballast{number}", torch.full((512, 1024), float(number)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.out(self.dropout(x + self.hidden(x)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Life:
    """One start of a run: where its ranks meet and what each of them writes down."""

    layout: str
    run_dir: Path
    notes: Path
    number: int
    steps: int
    saves: bool = True

    @property
    def store(self) -> Path:
        return self.notes / f"{self.number}.store"

    def note(self, rank: int) -> Path:
        return self.notes / f"{self.number}.{rank}"

    def complaints(self, rank: int) -> Path:
        return self.notes / f"{self.number}.{rank}.stderr"


def train(life: Life, rank: int, ranks: int) -> None:
    """Train and save after every step; notes where it began, the loss of every step, and at the end the weights."""
    die_with_parent()
    for stream, path in ((1, Path(os.devnull)), (2, life.complaints(rank))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    # One write for a line, so that a kill cannot tear it.
    note = os.open(life.note(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = dist.FileStore(str(life.store), ranks) if ranks > 1 else None
    run = lockstep.init(
        life.layout, rank=rank, world_size=ranks, store=store, run_dir=life.run_dir, seed=SEED, device="cpu"
    )
    with unfinished(run):
        engine = run.setup(Heavy, text_loss, optimizer=adamw, clip=1.0, schedule=lambda step: 1 / (1 + step))
        os.write(note, f"began {engine.steps_done}\n".encode())
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=life.steps, workers=0):
            out = engine.step(batch)
            os.write(note, f"{out.step} {out.loss.hex()}\n".encode())
            if life.saves:
                run.save(best_loss=1 / out.step if out.step % 3 == 1 else None)
                if out.step % 3 == 2:
                    run.save(best_loss=1 / out.step)  # is on disk already: its index is written anew
        os.write(note, f"weights {fingerprint(weights(engine))}\n".encode())


# ---- What is left of it


@dataclass
class Diary:
    """What one rank noted in one life."""

    began: int | None = None
    losses: dict[int, str] = field(default_factory=dict)
    weights: str | None = None


def read_diary(path: Path) -> Diary:
    diary = Diary()
    for line in path.read_text().splitlines() if path.exists() else ():
        key, value = line.split()
        if key == "began":
            diary.began = int(value)
        elif key == "weights":
            diary.weights = value
        else:
            diary.losses[int(key)] = value
    return diary


def verify_all(run_dir: Path) -> dict[int, Index]:
    """Read every checkpoint completely; raises where one is not what was written."""
    found = {}
    for folder in sorted(checkpoints_folder(run_dir).glob("step-*")):
        verify_checkpoint(folder)
        index = read_index(folder)
        found[index.step] = index
    return found


def is_saving(run_dir: Path) -> bool:
    return any(checkpoints_folder(run_dir).glob(".attempt-*/step-*"))


# ---- Killing


@dataclass
class Tally:
    kills: int = 0
    groups: int = 0
    while_saving: int = 0
    before_the_first_step: int = 0
    resumed: int = 0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.groups} of the whole group and {self.kills - self.groups} of one rank: "
            f"{self.while_saving} while a save was staged, {self.before_the_first_step} before the first step; "
            f"{self.resumed} lives resumed"
        )


@contextmanager
def living(life: Life) -> Iterator[list[ForkServerProcess]]:
    """The rank processes of a life; none of them outlives the block."""
    context = multiprocessing.get_context("forkserver")
    ranks = Layout.parse(life.layout).world_size
    processes = [context.Process(target=train, args=(life, rank, ranks), daemon=False) for rank in range(ranks)]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        end(processes)


def end(processes: Sequence[ForkServerProcess]) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()


def wait_until(is_so: Callable[[], bool], life: Life, processes: Sequence[ForkServerProcess]) -> None:
    """Wait for something that a life does, and fail with what its ranks complained of where one fails before it."""
    deadline = Deadline(LONGEST_START)
    while not is_so():
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed or deadline.passed:
            said = "\n".join(f"rank {rank}: {life.complaints(rank).read_text()}" for rank in range(len(processes)))
            pytest.fail(f"life {life.number} of {life.layout}: ranks {failed} failed by themselves\n{said}")
        time.sleep(0.001)


def kill_at_random(life: Life, draw: random.Random, tally: Tally) -> None:
    """Begin a life and kill it, all of its ranks at once or one first and the others a moment later."""
    with living(life) as processes:
        when = draw.choices(("starting", "training", "saving"), (2, 4, 4))[0]
        if when == "starting":
            time.sleep(draw.uniform(0, START_SECONDS))
        else:
            wait_until(lambda: bool(read_diary(life.note(0)).losses), life, processes)
            time.sleep(draw.uniform(0, SAVING_SECONDS))
        if when == "saving":
            wait_until(lambda: is_saving(life.run_dir), life, processes)
            time.sleep(draw.uniform(0, STAGED_SECONDS))
        all_at_once = len(processes) == 1 or draw.random() < 0.5
        victims = processes if all_at_once else [draw.choice(processes)]
        for victim in victims:
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
        tally.while_saving += is_saving(life.run_dir)
        if not all_at_once:
            time.sleep(draw.uniform(0, 0.2))
    for victim in victims:
        assert victim.exitcode == -signal.SIGKILL, life.complaints(processes.index(victim)).read_text()
    tally.kills += 1
    tally.groups += all_at_once
    tally.before_the_first_step += not read_diary(life.note(0)).losses


def survive(layout: str, kills: int, seed: int, folder: Path, tally: Tally) -> None:
    """Kill a run so many times, and check after every one of them that nothing is lost but the steps since the save."""
    draw = random.Random(seed)
    ranks = range(Layout.parse(layout).world_size)
    run_dir, notes = folder / "run", folder / "notes"
    notes.mkdir(parents=True)
    diaries: list[list[Diary]] = []
    newest = 0

    def check(life: Life) -> None:
        nonlocal newest
        where = f"{layout}, seed {seed}, life {life.number}"
        lived = [read_diary(life.note(rank)) for rank in ranks]
        for diary in lived:
            assert diary.began in (None, newest), f"{where} did not go on from the newest checkpoint"
        tally.resumed += newest > 0 and lived[0].began is not None
        diaries.append(lived)
        whole = verify_all(run_dir)
        assert list(whole) == steps_on_disk(run_dir), where
        assert max(whole, default=0) >= newest, f"{where} lost a checkpoint"
        newest = max(whole, default=0)
        assert newest <= max([0, *(step for lives in diaries for step in lives[0].losses)]), where
        if newest:
            training = whole[newest].training
            assert training is not None
            assert training.best is None or training.best.step in whole, f"{where} lost the best checkpoint"

    for number in range(kills):
        life = Life(layout, run_dir, notes, number, FOR_EVER)
        kill_at_random(life, draw, tally)
        check(life)
    steps = newest + 4
    last = Life(layout, run_dir, notes, kills, steps)
    never_killed = Life(layout, folder / "never-killed", notes, kills + 1, steps, saves=False)
    for life in (last, never_killed):
        with living(life) as processes:
            wait_until(lambda: all(process.exitcode == 0 for process in processes), life, processes)
    check(last)

    left = [path.name for path in checkpoints_folder(run_dir).iterdir() if not path.name.startswith("step-")]
    assert not left, "what the killed ones left behind is cleared away"
    for rank in ranks:
        whole = read_diary(never_killed.note(rank))
        assert list(whole.losses) == list(range(1, steps + 1))
        seen = set()
        for number, lived in enumerate(diaries):
            for step, loss in lived[rank].losses.items():
                seen.add(step)
                if step <= steps:  # a life may have got further than its saves
                    assert loss == whole.losses[step], f"{layout}, seed {seed}: step {step} of life {number}"
        assert seen >= set(whole.losses)
        assert diaries[-1][rank].weights == whole.weights is not None


def survive_all(kills: dict[str, int], seeds: Sequence[int], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began, tally = time.monotonic(), Tally()
    for seed, (layout, count) in zip(seeds, kills.items(), strict=True):
        survive(layout, count, seed, folder / layout, tally)
    with capsys.disabled():
        print(f"\n{tally} ({time.monotonic() - began:.0f} s)", end=" ")
    assert tally.kills == sum(kills.values())
    assert tally.while_saving >= tally.kills / 5, "too few kills hit a save to say anything"
    assert tally.resumed >= tally.kills / 2


@pytest.mark.slow
@pytest.mark.soak
def test_a_killed_run_loses_nothing_but_the_steps_since_its_last_save(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del ranks  # its fork server makes starts cheap
    survive_all({"single": 5, "fsdp=2": 9}, (1, 3), tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.limit(900)
def test_a_hundred_kills_lose_nothing_either(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del ranks
    kills = {"single": 20, "dp=2": 30, "fsdp=2": 30, "dp=2,fsdp=2": 20}
    survive_all(kills, (11, 12, 13, 14), tmp_path, capsys)
