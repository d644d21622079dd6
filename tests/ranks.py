"""Ranks for tests: processes forked once from a server that has torch loaded, and reused by every test.

    def sum_of_ranks(job: Job) -> float:
        job.init_process_group()
        ...

    def test_sum(ranks):
        assert ranks.run(sum_of_ranks, 4) == [6, 6, 6, 6]

The function and its arguments travel by pickle, so it stands at the top level of its module.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import fcntl
import gc
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from tests.patience import Deadline, patient, slowness

# Torch is imported only in functions that run in a rank: the process that holds the pool does not need it.

Result = TypeVar("Result")

MOST_RANKS = 16
PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "lockstep",
    "tests.ranks",
]

START_SECONDS = 90.0
RESTORE_SECONDS = 15.0
EXIT_SECONDS = 5.0
LOOKS_EVERY = 1.0
# How long other ranks may still report after one failed: enough to hear of the cause behind a consequence.
SETTLE_AFTER_CAUSE = 0.2
SETTLE_AFTER_CONSEQUENCE = 2.0
CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|timed out waiting|wait timeout|broken pipe|socket closed", re.I
)
MOST_LEFT_GROUPS = 20
"""Process groups that jobs may leave behind in a rank before it is replaced.

What a hook of a parameter holds is never collected, a run's group among it, and gloo wakes up a hundred times a second
for every group there is: ranks that had served a few hundred jobs kept the cores busy with nothing.
"""
# A real-time signal, because the code under test has uses of its own for the named ones.
STACK_SIGNAL = signal.SIGRTMAX


@dataclass(frozen=True)
class Job:
    """What one rank knows of the call it takes part in."""

    rank: int
    world_size: int
    store_path: Path
    """Where the ranks of this job meet, for `torch.distributed.FileStore`. Does not exist yet."""
    folder: Path
    """Empty at the start, shared by the ranks of this job, removed after it."""
    slowness: float
    """Of the machine when the job began; for all ranks the same."""

    def patient(self, seconds: float) -> float:
        """What so many seconds of an idle machine are on this one."""
        return seconds * self.slowness

    def init_process_group(self, timeout: float = 15) -> None:
        """A plain gloo process group of all ranks of the job."""
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(self.store_path), self.world_size),
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=self.patient(timeout)),
        )


class RankFailed(AssertionError):  # noqa: N818 - a test has failed, the bench has no error
    """A rank raised, died or hung. The text has its traceback, or where it stood, and how the others fared.

    `type_name` is the name of the exception's class, or `RankDied` or `RankHung`; `exception`, also the
    cause, is the exception itself when it could be pickled.
    """

    def __init__(self, text: str, rank: int, type_name: str, message: str, exception: BaseException | None) -> None:
        super().__init__(text)
        self.rank = rank
        self.type_name = type_name
        self.message = message
        self.exception = exception


class RankPool:
    """Rank processes, started when first needed; all replaced after a failure, or when jobs left too much in them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        # Now, not at the first job: ranks inherit the environment of this moment, not one patched by a test.
        forkserver.ensure_running()
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._job_numbers = itertools.count()
        self._workers: list[Worker] = []
        self._closed = False
        atexit.register(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Result], ranks: int = 4, *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[Result]:
        """Call `function(job, *args, **kwargs)` on `ranks` ranks; their results in rank order."""
        __tracebackhide__ = True
        call = pickle.dumps((function, args, kwargs))
        workers = self._first_workers(ranks)
        with self._job_paths() as (store_path, folder):
            job = Job(0, ranks, store_path, folder, slowness())
            try:
                for worker in workers:
                    worker.send((replace(job, rank=worker.rank), call))
                results = collect(workers, timeout)
                # Only when all have returned: a closed process group looks like a crash to ranks at work.
                for worker in workers:
                    worker.send(Restore())
                left_groups = collect(workers, RESTORE_SECONDS)
            except BaseException:
                self._kill()
                raise
        if max(map(int, left_groups)) > MOST_LEFT_GROUPS:
            self._end()
        return [pickle.loads(result) for result in results]

    def close(self) -> None:
        """End every rank. The pool cannot be used again."""
        atexit.unregister(self.close)
        self._closed = True
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _first_workers(self, ranks: int) -> list[Worker]:
        if self._closed:
            raise ValueError("this pool is closed")
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"a pool has 1 to {MOST_RANKS} ranks, not {ranks}")
        dead = [worker for worker in self._workers if worker.has_ended()]
        if dead:
            names = ", ".join(f"rank {worker.rank} {worker.how_it_ended()}" for worker in dead)
            warnings.warn(f"after the end of the last job: {names}", stacklevel=3)
            self._kill()
        try:
            new_ranks = range(len(self._workers), ranks)
            for rank in new_ranks:
                self._workers.append(start_worker(self._context, rank, self._folder))
            collect(self._workers[new_ranks.start :], START_SECONDS)
        except BaseException:
            self._kill()
            raise
        return self._workers[:ranks]

    @contextlib.contextmanager
    def _job_paths(self) -> Iterator[tuple[Path, Path]]:
        name = f"job-{next(self._job_numbers)}"
        folder = self._folder / name
        store_path = self._folder / f"{name}.store"
        folder.mkdir()
        try:
            yield store_path, folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            store_path.unlink(missing_ok=True)

    def _end(self) -> None:
        for worker in self._workers:
            worker.send(None)
        join_all(self._workers, EXIT_SECONDS)
        self._kill()

    def _kill(self) -> None:
        # SIGTERM first: under coverage it makes a rank that is not stuck save what it measured.
        for worker in self._workers:
            worker.process.terminate()
        join_all(self._workers, 1.0)
        for worker in self._workers:
            worker.process.kill()
            # A rank leads a process group of its own, so this reaches the processes that it started.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.connection.close()
        join_all(self._workers, EXIT_SECONDS)
        self._workers.clear()


# ---- The pool's side of a rank


@dataclass(frozen=True)
class Worker:
    """One rank process as the pool sees it."""

    rank: int
    process: ForkServerProcess
    connection: connection.Connection[Any, Any]
    stack_file: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, message: Any) -> None:
        # A rank that is gone is told apart, with its exit code, where its answer is awaited.
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def has_ended(self) -> bool:
        """Whether an idle rank is gone: its pipe is closed before the fork server knows of its end."""
        if self.connection.poll():
            self.process.join(patient(EXIT_SECONDS))
        return not self.process.is_alive()

    def report(self) -> Returned | Trouble:
        """The answer that is there to be read, or how the process ended."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                answer = self.connection.recv()
                assert isinstance(answer, Returned | Trouble)
                return answer
        self.process.join(patient(EXIT_SECONDS))
        return Trouble("RankDied", self.how_it_ended(), self.stack(), None, time.monotonic())

    def how_it_ended(self) -> str:
        code = self.process.exitcode
        if code is None:
            return "closed its connection"
        return f"died: killed by {signal_name(-code)}" if code < 0 else f"died: exit code {code}"

    def stack(self) -> str:
        """What faulthandler wrote, down to where the function under test was called."""
        lines = self.stack_file.read_text(errors="replace").splitlines()
        return "\n".join(itertools.takewhile(lambda line: f"in {serve_jobs.__name__}" not in line, lines))

    def has_written_its_stack(self) -> bool:
        return f"in {serve_jobs.__name__}" in self.stack_file.read_text(errors="replace")


@dataclass(frozen=True)
class Restore:
    """Tells a rank to become as it was before the job."""


@dataclass(frozen=True)
class Returned:
    result: bytes = b""


@dataclass(frozen=True)
class Trouble:
    type_name: str
    message: str
    details: str
    exception: bytes | None
    when: float

    @property
    def is_consequence(self) -> bool:
        return CONSEQUENCE.search(self.message) is not None

    def headline(self) -> str:
        if self.type_name in ("RankDied", "RankHung"):
            return self.message
        return f"raised {self.type_name}: {self.message}"


def start_worker(context: multiprocessing.context.ForkServerContext, rank: int, folder: Path) -> Worker:
    ours, theirs = context.Pipe()
    stack_file = folder / f"stack-{rank}"
    stack_file.write_text("")
    # Not a daemon: those may not have children, and the code under test has data loaders.
    process = context.Process(target=serve_jobs, args=(theirs, stack_file), name=f"rank-{rank}", daemon=False)
    process.start()
    theirs.close()
    return Worker(rank, process, ours, stack_file)


def collect(workers: Sequence[Worker], timeout: float) -> list[bytes]:
    """What each worker returned; raises RankFailed when one failed or is silent for `timeout` seconds.

    Those of an idle machine, as all seconds here.
    """
    __tracebackhide__ = True
    returned: dict[int, bytes] = {}
    troubles: dict[int, Trouble] = {}
    silent = list(workers)
    deadline = Deadline(timeout)
    while silent:
        handles = [handle for worker in silent for handle in (worker.connection, worker.process.sentinel)]
        ready = connection.wait(handles, min(deadline.left, LOOKS_EVERY))
        if not ready and deadline.passed:
            break
        for worker in [w for w in silent if w.connection in ready or w.process.sentinel in ready]:
            silent.remove(worker)
            match worker.report():
                case Returned(result):
                    returned[worker.rank] = result
                case Trouble() as trouble:
                    troubles[worker.rank] = trouble
                    settle = SETTLE_AFTER_CONSEQUENCE if trouble.is_consequence else SETTLE_AFTER_CAUSE
                    deadline = Deadline(min(deadline.left, settle))
    if not silent and not troubles:
        return [returned[worker.rank] for worker in workers]
    if all(trouble.is_consequence for trouble in troubles.values()):
        ask_for_stacks(silent)
    message = "still running" if troubles else f"still running after {timeout:g} s"
    for worker in silent:
        troubles[worker.rank] = Trouble("RankHung", message, worker.stack(), None, time.monotonic())
    raise failure(troubles, sorted(returned))


def ask_for_stacks(workers: Sequence[Worker]) -> None:
    """Let faulthandler in these ranks write where they stand; a stopped process writes nothing."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, STACK_SIGNAL)
    deadline = Deadline(1.0)
    while not deadline.passed and not all(worker.has_written_its_stack() for worker in workers):
        time.sleep(0.02)


def failure(troubles: dict[int, Trouble], returned: Sequence[int]) -> RankFailed:
    """Blames the first rank that failed by itself, rather than because another one did."""

    def blame_order(rank: int) -> tuple[bool, bool, float]:
        trouble = troubles[rank]
        return trouble.type_name == "RankHung", trouble.is_consequence, trouble.when

    rank, *others = sorted(troubles, key=blame_order)
    blamed = troubles[rank]
    lines = [f"rank {rank} {blamed.headline()}"]
    lines += [f"  rank {other} {shorten(troubles[other].headline())}" for other in sorted(others)]
    lines += [f"  rank {other} returned" for other in returned]
    for shown in [rank, *sorted(other for other in others if troubles[other].type_name == "RankHung")]:
        if troubles[shown].details:
            lines += ["", f"On rank {shown}:", troubles[shown].details.rstrip()]
    exception = None
    if blamed.exception is not None:
        # Many exceptions pickle but cannot be built again from their arguments.
        with contextlib.suppress(Exception):
            exception = pickle.loads(blamed.exception)
    failed = RankFailed("\n".join(lines), rank, blamed.type_name, blamed.message, exception)
    failed.__cause__ = exception
    return failed


def join_all(workers: Sequence[Worker], seconds: float) -> None:
    deadline = Deadline(seconds)
    for worker in workers:
        worker.process.join(patient(deadline.left))


def shorten(text: str, limit: int = 200) -> str:
    first_line = text.partition("\n")[0]
    return first_line if len(first_line) <= limit else first_line[:limit] + "..."


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- Inside a rank


def serve_jobs(pool: connection.Connection[Any, Any], stack_file: Path) -> None:
    """The life of a rank process: calls what it is sent until told to end."""
    os.setsid()  # Ctrl-C in the terminal is for pytest, which then ends the ranks
    die_with_parent()
    # An error in a pipeline schedule prints its whole timetable, on every rank.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that a rank that dies has said what it said
    with stack_file.open("w") as stacks:
        restore = remember_process_state(stacks)
        restore()
        pool.send(Returned())
        while (message := pool.recv()) is not None:
            try:
                if isinstance(message, Restore):
                    restore()
                    answer: Returned | Trouble = Returned(str(left_groups()).encode())
                else:
                    job, call = message
                    function, args, kwargs = pickle.loads(call)
                    # Plain pickle: the pickler of `multiprocessing` would hand over tensors as shared memory.
                    answer = Returned(pickle.dumps(function(job, *args, **kwargs)))
            except BaseException as error:
                answer = trouble_from(error)
            pool.send(answer)


def die_with_parent() -> None:
    """Have the kernel kill this process when the pool's process is gone, even if it is stuck or stopped.

    PR_SET_PDEATHSIG would not do: it watches the fork server, which lives as long as its children.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def remember_process_state(stacks: IO[str]) -> Callable[[], None]:
    """A function that undoes what a job may have changed in this process."""
    import numpy
    import torch
    import torch.distributed as dist

    os.environ["OMP_NUM_THREADS"] = "1"
    environment = dict(os.environ)
    folder = os.getcwd()
    streams = sys.stdin, sys.stdout, sys.stderr
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    faulthandler.register(STACK_SIGNAL, stacks)
    gc.freeze()  # what is loaded now need not be looked at by each collection below

    def restore() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.stdin, sys.stdout, sys.stderr = streams
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        faulthandler.enable(stacks)
        dist.set_debug_level_from_env()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        gc.collect()

    return restore


def left_groups() -> int:
    """How many process groups of gloo this process still has a thread for."""
    found = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += path.read_text().startswith("gloo_tcp_loop")
    return found


def trouble_from(error: BaseException) -> Trouble:
    # The first frame is this module's.
    inner = error.__traceback__ and error.__traceback__.tb_next
    details = "".join(traceback.format_exception(type(error), error, inner))
    if isinstance(error, AssertionError) and not str(error) and inner is not None:
        details += locals_where_raised(inner)
    try:
        exception = pickle.dumps(error)
    except Exception:
        exception = None
    return Trouble(type(error).__name__, str(error), details, exception, time.monotonic())


def locals_where_raised(inner: TracebackType) -> str:
    """Stands in for pytest's rewriting of asserts, which does not reach into a rank."""
    *_, (frame, _) = traceback.walk_tb(inner)
    return "".join(f"    {name} = {shorten(repr(value))}\n" for name, value in frame.f_locals.items())
