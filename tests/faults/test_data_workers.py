"""Loader processes that print, raise, die or hang: one sentence with the sample and the line, and nobody stays."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from lockstep.data.loader import Loader, Reading
from lockstep.data.order import Order
from lockstep.errors import SampleError, UserError
from lockstep.observe.output import tee_to
from lockstep.record.failure import of_exception
from tests.cli.commands import run
from tests.patience import patient, wait_for

BAD = 9


def do(what: str) -> None:
    if what == "raise":
        raise ValueError("a bad pixel")
    if what == "refuse":
        raise UserError("the file is empty", "fetch it again")
    if what == "exit":
        os._exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


class Samples(Dataset[torch.Tensor]):
    """One of them is bad."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD:
            do(self.what)
        return torch.ones(2)


class Stream(IterableDataset[torch.Tensor]):
    """The same as a stream."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __iter__(self) -> Iterator[torch.Tensor]:
        samples = Samples(self.what)
        return (samples[index] for index in range(len(samples)))


def read(dataset: Any, workers: int, **reading: Any) -> None:
    order = Order(16 if isinstance(dataset, Samples) else 0, 4, 4, 0, 0, 1, equal_counts=False, shuffle=False)
    for _ in Loader(dataset, order, Reading(workers, **reading), epochs=1):
        pass


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Samples, Stream])
def test_an_exception_is_the_sample_and_the_innermost_line_of_the_users(kind: Any, workers: int) -> None:
    with pytest.raises(SampleError) as raised:
        read(kind("raise"), workers)
    sample = f"sample {BAD}" if kind is Samples else f"sample {BAD} of the stream"
    where = raised.value.where
    assert str(raised.value) == f"{sample} could not be read: ValueError: a bad pixel (at {where})"
    assert where.endswith(f"test_data_workers.py:{line_of('raise ValueError')} in do")
    failure = of_exception(raised.value, 0)
    assert (failure.where, failure.samples) == (where, sample)
    assert failure.text == f"{sample} could not be read: ValueError: a bad pixel"


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_do_not_go_together_are_named(workers: int) -> None:
    def collate(_: list[torch.Tensor]) -> torch.Tensor:
        raise TypeError("of two kinds")

    with pytest.raises(SampleError, match=r"^sample ids 0, 1, 2, 3 could not be read: TypeError: of two kinds \(at .*"):
        read(Samples(""), workers, collate=collate)


@pytest.mark.parametrize("kind", [Samples, Stream])
def test_a_refusal_in_a_worker_process_is_one_outside(kind: Any) -> None:
    with pytest.raises(UserError, match=r"^the file is empty: fetch it again$"):
        read(kind("refuse"), 1)


@pytest.mark.parametrize(
    ("what", "said"),
    [("exit", "exited with code 3"), ("kill", "was killed by SIGKILL, as the kernel does when memory")],
)
def test_a_process_that_dies_is_named_with_its_sample(what: str, said: str) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(SampleError, match=f"^sample {BAD} could not be read: the loader's worker process {said}"):
        read(Samples(what), 1)
    assert signal.getsignal(signal.SIGCHLD) is before


def test_a_process_may_print_whatever_lock_its_parent_held_at_the_fork(tmp_path: Path) -> None:
    lock, is_held, done = threading.Lock(), threading.Event(), threading.Event()

    def show(_: str) -> None:
        with lock:
            pass

    def hold() -> None:
        with lock:
            is_held.set()
            done.wait()

    undo = tee_to(tmp_path / "log", show)
    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    try:
        if (pid := os.fork()) == 0:
            print("one", file=sys.stdout)
            print("two", file=sys.stderr)
            os._exit(0)
        ended = os.waitpid(pid, 0)  # for ever, where it is stuck
    finally:
        done.set()
        holder.join()
        undo()
    assert ended == (pid, 0)
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


HANGS = """
import os, pathlib, sys, time, warnings
import torch, lockstep
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        print("reading", index)
        warnings.warn(f"odd sample {index}")
        if index == 9:
            pathlib.Path("worker").write_text(str(os.getpid()))
            time.sleep(100_000)
        return torch.ones(2)
run = lockstep.init(timeout_minutes=float(sys.argv[1]))
engine = run.setup(
    lambda: torch.nn.Linear(2, 1), lambda model, x: (model(x).sum(), len(x)),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)
for batch in run.loader(Samples(), 4, micro_batch=4, workers=2, shuffle=False):
    engine.step(batch)
"""


def test_a_process_that_hangs_ends_the_run_and_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGS)
    done = run(tmp_path, sys.executable, "train.py", str(patient(3) / 60))
    assert done.returncode == 1, done.stderr
    assert "rank 0 is waiting for samples (its loader's process is at sample 9) of step " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "reading 12" in done.stdout
    assert "odd sample 12" in done.stderr
    assert "odd sample 12" in next((tmp_path / "runs" / "train" / "logs").glob("*.0.log")).read_text()
    worker = int((tmp_path / "worker").read_text())
    wait_for(lambda: not psutil.pid_exists(worker), "the end of the loader's process")
