"""What a rank that dies leaves behind for the people who ask why: one small JSON file beside its log.

A rank that raises writes its own. For one that was killed its launcher does, and for ranks that hang the watchdog. A
launcher reads those of all hosts, finds out who was first, and folds the rest: an error that another rank's death
caused explains nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from lockstep.errors import (
    InvariantError,
    MemoryFullError,
    NonFiniteError,
    SampleError,
    SaveError,
    StoppedTogetherError,
    UserError,
)

Kind = Literal["refused", "exception", "exit", "signal", "memory", "hang", "left"]
"""How a rank ended: refused input, an exception, its own sys.exit, a signal, memory, a hang, or too early with 0."""

FOLDER = "failed"

CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|timed out waiting|broken pipe|socket closed|connection aborted"
    r"|connectFullMesh failed|failed to recv|failed to connect|remote process exited|nccl communicator was aborted"
    r"|wait timeout|unhealthy connection|no route to host|network is unreachable|rank 0 failed in once"
    r"|pair closure|connection timed out|has timed out|ncclSystemError|ncclRemoteError|NCCL gave up",
    re.IGNORECASE,
)
"""What ranks say when another one has gone."""

MISMATCH = re.compile(r"data size doesn't match expected size", re.IGNORECASE)
"""What gloo says on its way out when ranks gave one collective tensors of different sizes."""

NCCL_GAVE_UP = re.compile(r"process group watchdog thread terminated|ProcessGroupNCCL.*timeout", re.IGNORECASE)
"""What NCCL's own watchdog says before it aborts a process."""

MISMATCHED = " because ranks gave one collective tensors of different sizes"

START_OF_OUTPUT = "---- lockstep starts the script ----"
END_OF_OUTPUT = "---- the script ended ----"
"""What follows in a log is a traceback: it stays there, and the console gets the launcher's verdict instead."""

OWN_CODE = str(Path(__file__).parent.parent)
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
BETWEEN_RANKS = (
    f"{OWN_CODE}/runtime/",
    f"{OWN_CODE}/observe/clock.py",
    f"{OWN_CODE}/parallel/",
    f"{OWN_CODE}/checkpoint/",
    f"{OWN_CODE}/training/",
    f"{OWN_CODE}/engine.py",
)
"""Code of ours that hears of other ranks. What a script says of connections is about its own."""


@dataclass(frozen=True)
class Failure:
    """How one rank ended, in words for people. `where` is file:line of the user's own code."""

    rank: int
    host: str
    kind: Kind
    text: str
    where: str = ""
    call: str = ""
    """What the user's code called there, of Lockstep or torch.distributed."""
    step: int | None = None
    time: float = 0.0
    micro_batch: int | None = None
    of_script: bool = False
    """Whether the script's own code, or a library that it called, raised it."""
    final: bool = False
    """Whether another try would only fail again."""
    samples: str = ""
    """Which samples could not be read, where it was that."""
    shapes: list[str] = field(default_factory=list)
    """Of what it gave to the collective that it was in."""
    together: bool = False
    """Whether all ranks have stopped of one mind, and say the same."""
    blamed: int | None = None
    """The rank that they stopped because of, where it is one."""

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank is gone."""
        tells = self.kind in ("exception", "signal") and not self.of_script
        return tells and CONSEQUENCE.search(self.text) is not None

    @property
    def is_mismatch(self) -> bool:
        """Whether a collective found that the ranks' tensors do not go together."""
        return self.text.endswith(MISMATCHED)


def short_host() -> str:
    """This host's name as logs and verdicts show it."""
    return socket.gethostname().split(".")[0]


def of_exception(error: BaseException, rank: int) -> Failure:
    """What an exception says, and where in the user's code it came from."""
    kind: Kind = "exception"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, UserError):
        kind, text = "refused", str(error)
    elif isinstance(error, MemoryFullError):
        kind, text = "memory", str(error)
    elif isinstance(error, SampleError):
        text = error.text
    elif isinstance(error, SystemExit):
        kind, text = "exit", f"called sys.exit({error.code!r})"
    final = isinstance(error, UserError | StoppedTogetherError | InvariantError | SaveError)
    trace = error.__traceback__
    if kind == "memory" and error.__cause__ is not None:
        trace = error.__cause__.__traceback__  # from there the line that wanted the memory is known
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(trace)]
    return Failure(
        rank,
        short_host(),
        kind,
        text,
        getattr(error, "where", "") or user_line(frames[::-1]),
        user_call(frames[::-1]),
        time=time.time(),
        final=final,
        samples=getattr(error, "samples", ""),
        shapes=shapes_given(reversed([frame for frame, _ in traceback.walk_tb(trace)])),
        together=isinstance(error, StoppedTogetherError),
        blamed=error.rank if isinstance(error, NonFiniteError) else None,
        micro_batch=getattr(error, "micro_batch", None),
        of_script=not any(
            "/torch/distributed/" in file or file.startswith(BETWEEN_RANKS) for file, _, _ in frames[-2:]
        ),
    )


Line = tuple[str, int, str]
"""File, line and function of one frame of a stack; stacks are given innermost first."""


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a running thread. Keep none: it would keep the tensors of its function alive."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def lines_of(frame: FrameType | None) -> list[Line]:
    """The stack of a running thread."""
    return [(one.f_code.co_filename, one.f_lineno, one.f_code.co_name) for one in frames_of(frame)]


def shapes_given(frames: Iterable[FrameType]) -> list[str]:
    """What tensors were given to the innermost function of torch.distributed, each kind once. Needs no torch."""
    for frame in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith("/torch/distributed/distributed_c10d.py") and name != "wrapper" and not name.startswith("_"):
            given = [
                one for value in frame.f_locals.values() for one in (value if isinstance(value, list) else [value])
            ]
            tensors = [one for one in given if hasattr(one, "shape") and hasattr(one, "dtype")]
            kinds = [f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in tensors]
            return list(dict.fromkeys(kinds))[:4]
    return []


def user_line(stack: Sequence[Line]) -> str:
    """The innermost line of the user's own code, as file:line in function; empty where there is none."""
    return next((f"{shown_file(file)}:{line} in {name}" for file, line, name in stack if is_users(file)), "")


def user_call(stack: Sequence[Line]) -> str:
    """What the user's innermost line called: `run.save`, `engine.step`, or a function of torch.distributed."""
    inside = list(itertools.takewhile(lambda line: not is_users(line[0]), stack))
    for file, _, name in reversed(inside):
        if name in ("wrapper", "__enter__", "__exit__", "inner"):  # of decorators and with statements
            continue
        if file.endswith("/torch/nn/modules/module.py"):
            return "a layer"
        if file.startswith(f"{OWN_CODE}/"):
            return "the loop over the loader" if name == "__iter__" else f"{Path(file).stem}.{name}"
        return f"dist.{name}" if "/torch/distributed/" in file else name
    return ""


def is_users(file: str) -> bool:
    """Whether a file is the user's: not a library, not Python's own, not Lockstep's (whose recipes count as theirs)."""
    libraries = ("site-packages", "dist-packages")
    ours = file.startswith(f"{OWN_CODE}/") and not file.startswith(f"{OWN_CODE}/recipes/")
    standard = file.startswith(("<", f"{STANDARD_LIBRARY}/"))
    return not (ours or standard or any(name in file for name in libraries))


def is_ours(stack: Sequence[Line]) -> bool:
    """Whether a thread is inside of Lockstep, other than of what starts a script."""
    own = f"{OWN_CODE}/"
    return any(
        file.startswith(own) and not file.startswith((f"{own}launch/", f"{own}recipes/")) for file, _, _ in stack
    )


def shown_file(file: str) -> str:
    """A path for people: from here, where that is shorter."""
    with suppress(ValueError):
        return str(Path(file).relative_to(Path.cwd()))
    return file


def of_exit(rank: int, code: int, log: Path, last_seen: str) -> Failure:
    """What can be said of a process that left no word: its exit code or signal, and where it was seen last."""
    tail = _end_of(log)
    if code >= 0:
        text = f"exited with code {code}"
    else:
        text = f"was killed by {signal.Signals(-code).name}"
        if MISMATCH.search(tail):
            text += MISMATCHED
        elif code == -signal.SIGABRT and NCCL_GAVE_UP.search(tail):
            text += ": NCCL gave up waiting for others"
    stack = _stack_in(tail)
    if not stack and last_seen:
        text += f" (last seen at {last_seen})"
    kind: Kind = "exit" if code >= 0 else "signal"
    return Failure(rank, short_host(), kind, text, user_line(stack), user_call(stack), time=time.time())


def _end_of(log: Path, size: int = 20_000) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _stack_in(log: str) -> list[Line]:
    """The main thread's stack in what Python's fault handler wrote when a fatal signal came."""
    _, _, dump = log.rpartition("Fatal Python error")
    for thread in reversed(re.split(r"\n(?=(?:Current thread|Thread) 0x)", dump)[1:]):
        lines = [
            (file, int(line), name) for file, line, name in re.findall(r'File "(.+)", line (\d+) in (\S+)', thread)
        ]
        if any(name == "_run_module_as_main" for _, _, name in lines):
            return lines
    return []


def failed_folder(run_folder: Path, round_: str) -> Path:
    """Where the ranks of one start leave their failures; a launcher gives every start a name."""
    return run_folder / "logs" / FOLDER / round_


def record(run_folder: Path, failure: Failure, round_: str = "") -> None:
    """Leave a failure where every launcher of the run finds it; a disk that refuses must not hide the failure.

    That others have gone does not replace what is known of a rank: after the verdict on a hang every rank loses others.
    """
    folder = failed_folder(run_folder, round_)
    name = f"{failure.host}.{failure.rank}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if failure.is_consequence and (folder / f"{name}.json").exists():
            return
        temporary = folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        temporary.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        os.replace(temporary, folder / f"{name}.json")


def recorded(run_folder: Path, round_: str = "") -> list[Failure]:
    """What the ranks of all hosts left, the earliest first."""
    found = []
    for path in failed_folder(run_folder, round_).glob("[!.]*.json"):
        with suppress(OSError, ValueError, TypeError):
            found.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda failure: failure.time)


def forget(run_folder: Path, but: str) -> None:
    """Remove what the ranks of other starts left."""
    for path in (run_folder / "logs" / FOLDER).glob("*"):
        if path.name != but and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


ORDER: dict[Kind, int] = {"refused": 0, "hang": 1, "memory": 2, "signal": 3, "exception": 3, "exit": 3, "left": 4}


def root_cause(failures: Sequence[Failure], here: str = "") -> Failure | None:
    """The failure that the others follow from; None where every one of them only tells of another.

    Where a link was cut, each side says that the other one is gone: then the host that asks believes its own.
    """
    causes = [failure for failure in failures if not failure.is_consequence]

    def weight(failure: Failure) -> tuple[int, bool, bool, float]:
        says_it_of_another = failure.together and failure.rank != (failure.blamed or 0)
        blames_here = failure.kind == "hang" and failure.host == here
        return ORDER[failure.kind], blames_here, says_it_of_another, failure.time

    return min(causes, key=weight, default=None)
