"""Ranks that measure or show something and are no training: forks of the command, which has torch loaded.

answers = run_ranks(work, 4, hear=print)      work(seat) in four processes; what they tell, and what they return
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import UserError
from lockstep.launch.meeting import Meeting, use_interface_of
from lockstep.runtime.nursery import die_with_parent
from lockstep.runtime.rank_env import Place, cpus_per_rank

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from lockstep.layout import Layout
    from lockstep.runtime.comm import Comm

SECONDS_TO_END = 3.0
SECONDS_AFTER_A_FAILURE = 5.0
"""How long the others may still answer when one has failed."""
MOST_LINES = 12
HUNG = "did not come back"
CONSEQUENCE = re.compile(r"connection (was )?(closed|reset|refused)|timed out|broken pipe", re.I)


@dataclass(frozen=True)
class Seat:
    """What such a rank knows: which one it is, and how it talks to the others and to its command."""

    place: Place
    scratch: Path
    """A folder of this node, gone when all have ended."""
    open_store: Callable[[float], Store]
    """Where the ranks meet; every call is a connection of its own, that waits so many seconds at most."""
    pipe: connection.Connection[Any, Any]

    def tell(self, message: Any) -> None:
        """Say something to the command, which hears it at once."""
        self.pipe.send(("told", message))

    def join(self, layout: Layout, device: torch.device, backend: str, seconds: float) -> Comm:
        """The process groups of a layout; a collective that takes longer than `seconds` fails."""
        from lockstep.runtime.comm import Comm

        patience = datetime.timedelta(seconds=seconds)
        return Comm(self.place, layout, device, backend, patience, self.open_store(seconds))


@dataclass(frozen=True)
class Answer:
    """What one rank returned, or what kept it from that."""

    rank: int
    value: Any = None
    trouble: str = ""
    log: str = ""
    """The last lines that a rank in trouble has written."""


def run_ranks(
    work: Callable[[Seat], Any],
    nproc: int,
    meeting: Meeting | None = None,
    *,
    hear: Callable[[int, Any], None] = lambda _rank, _message: None,
    seconds: float = 600.0,
) -> list[Answer]:
    """Call `work(seat)` in `nproc` processes of this node and wait for them; the answers in the order of the ranks.

    A rank that raises a UserError has it raised here. Whoever has not returned after `seconds` is killed, and so are
    all where this is interrupted.
    """
    # Else torch asks the driver whether there is a GPU, and processes that are forked then cannot use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch.distributed  # noqa: F401 - now, and not once in every rank

    meeting = meeting or Meeting()
    counts = meeting.share("processes", nproc, seconds)
    assert None not in counts, "the nodes have met before"
    use_interface_of(meeting)
    first = sum(counts[: meeting.rank])
    scratch = Path(tempfile.mkdtemp(prefix="lockstep-ranks-"))
    children: dict[int, _Child] = {}
    answers: dict[int, Answer] = {}
    try:
        with leaving_on_sigterm():
            for local in range(nproc):
                rank = first + local
                place = Place(rank, sum(counts), local, nproc, meeting.rank, meeting.nodes, "store:1", "explicit")
                children[rank] = _start(work, place, scratch, meeting)
            _listen(children, answers, hear, seconds)
            return [answers[rank] for rank in sorted(answers)]
    finally:
        _end(children.values(), {children[rank].pid for rank, answer in answers.items() if not answer.trouble})
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """A scheduler's SIGTERM ends the command as Ctrl-C does: its ranks are killed, and no files stay."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def first_trouble(answers: list[Answer]) -> Answer | None:
    """The rank that went wrong by itself, and not because another one did."""
    found = [answer for answer in answers if answer.trouble]
    return min(found, key=lambda answer: (CONSEQUENCE.search(answer.trouble) is not None, answer.rank), default=None)


@dataclass(frozen=True)
class _Child:
    pid: int
    pipe: connection.Connection[Any, Any]
    log: Path


def _start(work: Callable[[Seat], Any], place: Place, scratch: Path, meeting: Meeting) -> _Child:
    ours, theirs = connection.Pipe()
    log = scratch / f"{place.rank}.log"
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return _Child(pid, ours, log)
    # From here on this is the rank, and it never returns.
    try:
        ours.close()
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is interrupted, and ends its ranks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # What shows progress on a terminal has put its own in their place, with locks that other threads hold.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        _be_rank(work, place, scratch, meeting, theirs)
    finally:
        os._exit(0)


def _be_rank(
    work: Callable[[Seat], Any], place: Place, scratch: Path, meeting: Meeting, pipe: connection.Connection[Any, Any]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(cpus_per_rank(place))

    def open_store(seconds: float) -> Store:
        if meeting.store is None:
            return dist.FileStore(str(scratch / "store"), place.world_size)
        shared = meeting.store
        while isinstance(shared, dist.PrefixStore):
            shared = shared.underlying_store
        assert isinstance(shared, dist.TCPStore)
        patience = datetime.timedelta(seconds=seconds)
        own = dist.TCPStore(shared.host, shared.port, is_master=False, timeout=patience, wait_for_workers=False)
        return dist.PrefixStore("ranks", own)

    try:
        answer: tuple[str, Any] = ("returned", work(Seat(place, scratch, open_store, pipe)))
    except UserError as error:
        answer = ("refused", (error.cause, error.fix))
    except BaseException as error:
        traceback.print_exc()
        answer = ("failed", f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):
        pipe.send(answer)


def _listen(
    children: dict[int, _Child], answers: dict[int, Answer], hear: Callable[[int, Any], None], seconds: float
) -> None:
    """Collect the answers of all ranks."""
    end = time.monotonic() + seconds
    while silent := {child.pipe: rank for rank, child in children.items() if rank not in answers}:
        ready = connection.wait(list(silent), max(0.0, end - time.monotonic()))
        if not ready:
            for rank in silent.values():
                answers[rank] = Answer(rank, trouble=HUNG, log=_last_lines(children[rank]))
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = silent[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                kind, value = "failed", _how_it_ended(children[rank])
            if kind == "told":
                hear(rank, value)
            elif kind == "refused":
                raise UserError(*value)
            elif kind == "failed":
                answers[rank] = Answer(rank, trouble=value, log=_last_lines(children[rank]))
                end = min(end, time.monotonic() + SECONDS_AFTER_A_FAILURE)
            else:
                answers[rank] = Answer(rank, value)


def _how_it_ended(child: _Child) -> str:
    with suppress(ChildProcessError):
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return "is gone"


def _last_lines(child: _Child) -> str:
    try:
        lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines()[-MOST_LINES:]
    except OSError:
        return ""
    return "\n".join(f"  | {line}" for line in lines)


def _end(children: Collection[_Child], done: set[int]) -> None:
    """Those that are done end by themselves; the others are killed. One that is stuck in the kernel is left to it."""
    for child in children:
        child.pipe.close()
        if child.pid not in done:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
    end = time.monotonic() + SECONDS_TO_END
    left = {child.pid for child in children}
    while left and time.monotonic() < end + SECONDS_TO_END:
        for pid in list(left):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    if time.monotonic() > end:
                        os.kill(pid, signal.SIGKILL)
                    continue
            left.discard(pid)
        time.sleep(0.01)
