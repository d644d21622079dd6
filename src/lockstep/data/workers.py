"""The processes that read samples ahead for a rank: they end with it, leave stops to it, show where they are."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, get_worker_info

from lockstep.errors import SampleError, UserError
from lockstep.record.failure import user_line
from lockstep.runtime import stop_signals
from lockstep.runtime.nursery import die_with_parent


class _KilledPopen(Popen):
    """A process that is ended by SIGKILL: it leaves SIGTERM, which its whole group may get, to its rank."""

    def terminate(self) -> None:
        self.kill()


class _Process(ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Popen:  # noqa: N802 - Python's name
        return _KilledPopen(process_obj)


class Workers(ForkContext):
    """The processes of one DataLoader, which takes this as its `multiprocessing_context`.

    By fork, whatever Python's default is: the others start slowly and cannot take a lambda along.
    """

    awaited: Workers | None = None
    """Those that the training waits for now; for the watchdog."""

    def __init__(self, count: int) -> None:
        super().__init__()
        # For each process the sample it is at, and how many times that has changed; shared by all of them.
        self._places = np.frombuffer(mmap.mmap(-1, 16 * max(1, count)), np.int64).reshape(-1, 2)
        self._places[:, 0] = -1
        self._processes: list[_Process] = []
        self._rank = os.getpid()
        self._is_of_main_thread = threading.current_thread() is threading.main_thread()

    def Process(self, *args: Any, **options: Any) -> _Process:  # type: ignore[override]  # noqa: N802 - Python's name
        """A process that is remembered."""
        self._processes.append(_Process(*args, **options))
        return self._processes[-1]

    def begin(self, _: int) -> None:
        """In a new process: the rank decides about stops, and when it ends, however that is, so does this."""
        if self._is_of_main_thread:  # the kernel ends it with the thread that has started it
            die_with_parent()
        if os.getppid() != self._rank:
            os._exit(1)
        stop_signals.ignore()
        stop_signals.release()

    def at(self, sample: int) -> None:
        """In a process: a sample is begun; -1 when a step is done."""
        info = get_worker_info()
        place = self._places[info.id if info else 0]
        place[0] = sample
        place[1] += 1

    @property
    def progress(self) -> int:
        """What changes while samples are read."""
        return int(self._places[:, 1].sum())

    @property
    def samples(self) -> list[int]:
        """The samples that are being read."""
        return sorted(int(sample) for sample in self._places[:, 0] if sample >= 0)

    def why_it_died(self) -> SampleError | None:
        """What to say where a process has ended that was still to read samples."""
        for number, process in enumerate(self._processes):
            process.join(0.1)
            if process.exitcode:
                sample = int(self._places[number, 0])
                read = f"sample {sample}" if sample >= 0 else "the samples of a step"
                return SampleError(read, f"the loader's worker process {_died(process.exitcode)}")
        return None


def _died(code: int) -> str:
    if code > 0:
        return f"exited with code {code}"
    killed = f"was killed by {signal.Signals(-code).name}"
    return f"{killed}, as the kernel does when memory runs out" if code == -signal.SIGKILL else killed


def delivered(make: Callable[[Workers | None], DataLoader[Any]], count: int) -> Iterator[Any]:
    """What a DataLoader of so many processes reads; what went wrong in one of them is raised here as it was there."""
    workers = Workers(count) if count else None
    loader = make(workers)
    if workers is None:
        yield from loader
        return
    of_child = signal.getsignal(signal.SIGCHLD)
    with stop_signals.held():
        batches = iter(loader)
    if workers._is_of_main_thread and of_child is not None:
        # Torch would raise wherever the training happens to be when a process dies, and not where it is missed.
        signal.signal(signal.SIGCHLD, of_child)
    while (batch := _next(batches, workers)) is not None:
        if isinstance(batch, Exception):
            raise batch
        yield batch


def _next(batches: Iterator[Any], workers: Workers) -> Any:
    Workers.awaited = workers
    try:
        return next(batches, None)
    except (RuntimeError, OSError, EOFError) as error:
        if (died := workers.why_it_died()) is not None:
            raise died from error
        raise
    finally:
        Workers.awaited = None


@contextmanager
def naming(samples: str) -> Iterator[None]:
    """Whatever is raised here is about these samples."""
    try:
        yield
    except (UserError, SampleError):
        raise
    except Exception as error:
        frames = [(at.filename, at.lineno or 0, at.name) for at in traceback.extract_tb(error.__traceback__)]
        why = " ".join(f"{type(error).__name__}: {error}".split())  # one sentence, however many lines it has
        named = SampleError(samples, why, user_line(frames[::-1]))
        if get_worker_info():  # it travels without its cause
            named.add_note(traceback.format_exc())
        raise named from error


def as_value(read: Callable[[], Any]) -> Any:
    """What is read; in a worker process also what it raises, which torch would wrap in a text."""
    try:
        return read()
    except (UserError, SampleError) as error:
        if get_worker_info() is None:
            raise
        return error
