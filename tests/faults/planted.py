"""The faults that a run has to survive or to explain: where each strikes, and what has to come of it.

`plant` lets one strike in a real `lockstep run` and measures what follows. The training is planted_training.py.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.cli.commands import LOCKSTEP, clean_environment, events
from tests.patience import Deadline, patient

TIMEOUT = 6.0
"""Seconds without progress that are a hang, in the faults that hang."""
SECONDS_TO_EXPLAIN = 5.0
"""So much later at the most there has to be a verdict."""
SECONDS_TO_BE_GONE = 20.0
MOST_SECONDS = 150.0

TRAINING = Path(__file__).with_name("planted_training.py")


@dataclass(frozen=True)
class Fault:
    """One fault. `name` is what the training is told, and `where` and `what` are for the table of docs/faults.md.

    `code` is how the first command ends, `cause` what its first `failure` event says, `rank` whom it blames. `words`
    are in the verdict. `goes_on` says how the training gets to its end: by itself ("restart", "same start") or by the
    same command once more ("same command"); "" where it does not.
    """

    name: str
    where: str
    what: str
    code: int
    cause: str = ""
    rank: int | None = 1
    words: tuple[str, ...] = ()
    hang: str = ""
    """The class of cause of a hang."""
    goes_on: str = ""
    equal: bool = True
    """Whether the weights at the end are to the bit those of a run in which nothing happened."""
    lost: int = 0
    options: tuple[str, ...] = ()
    line: str = ""
    """What stands in the line of the user's code that the verdict names."""

    @property
    def hangs(self) -> bool:
        return self.cause == "hang"


RESTART: dict[str, Any] = {"code": 0, "goes_on": "restart", "lost": 5}
STOP: dict[str, Any] = {"code": 75, "goes_on": "same command", "rank": None}
HANG: dict[str, Any] = {"code": 1, "cause": "hang", "options": ("--restarts", "0")}
RAISES = 'raise ValueError("a bad sample")'

FAULTS = (
    # Crashes.
    Fault("exception", "rank 1, between steps", "raises ValueError, once", cause="exception",
          words=("ValueError: a bad sample",), line=RAISES, **RESTART),
    Fault("exception-everywhere", "all ranks, between steps", "raise ValueError, once", cause="exception", rank=None,
          words=("ValueError: a bad sample",), line=RAISES, **RESTART),
    Fault("exception-again", "rank 1, between steps", "raises ValueError, at the same step every time", 1, "exception",
          words=("ValueError: a bad sample", "the same way at the same step"), line=RAISES),
    Fault("exit-3", "rank 1, between steps", "sys.exit(3)", cause="exit", words=("sys.exit(3)",),
          line="sys.exit(", **RESTART),
    Fault("exit-2", "rank 1, between steps", "sys.exit(2)", cause="exit", words=("sys.exit(2)",),
          line="sys.exit(", **RESTART),
    Fault("exit-0", "rank 1, between steps", "sys.exit(0), too early", cause="left",
          words=("exit code 0 while the others were still training",), **RESTART),
    Fault("segfault", "rank 1, between steps", "reads address 0", cause="signal", words=("SIGSEGV",),
          line="ctypes.string_at(0)", **RESTART),
    Fault("abort", "rank 1, between steps", "C calls abort()", cause="signal", words=("SIGABRT",),
          line="abort()", **RESTART),
    Fault("kill", "rank 1, between steps", "kill -9", cause="signal", words=("SIGKILL",), **RESTART),
    Fault("kill-rank-0", "rank 0, between steps", "kill -9", cause="signal", rank=0, words=("SIGKILL",), **RESTART),
    Fault("kill-while-saving", "rank 1, in the middle of a checkpoint", "kill -9", cause="signal",
          words=("SIGKILL",), code=0, goes_on="restart", lost=10),
    Fault("kill-launcher", "the launcher", "kill -9", -signal.SIGKILL, rank=None, goes_on="same command", lost=5),
    Fault("memory", "all ranks, in the forward", "the host has no memory for a micro-batch of 20", cause="memory",
          words=("no memory left", "forward and backward", "micro_batch = 10"), equal=False, rank=None,
          options=("--on-oom", "shrink"), line="torch.empty(1 << 50)", **RESTART),
    # Hangs.
    Fault("skipped-collective", "rank 0, between steps", "makes no all_reduce, the others do", rank=None,
          hang="skipped collective", words=("dist.all_reduce",), line="dist.all_reduce(torch.ones(3))", **HANG),
    Fault("save-on-rank-0", "rank 0, between steps", "run.save() behind `if rank == 0`", rank=0,
          hang="rank-conditional call", words=("every rank has to call run.save",), line="run.save()", **HANG),
    Fault("shapes", "all ranks, between steps", "all_reduce tensors of different shapes", rank=None,
          words=("different shapes",), line="dist.all_reduce(torch.ones(3 + 4 * run.rank))", **HANG),
    Fault("asleep", "rank 1, between steps", "takes for ever", hang="slow rank", words=("rank 1 is still at",),
          line="time.sleep(1000)", **HANG),
    Fault("stopped", "rank 1, between steps", "kill -STOP", hang="dead rank", words=("rank 1 on", "not answer"),
          **HANG),
    Fault("stopped-rank-0", "rank 0, between steps", "kill -STOP", hang="dead rank", rank=0,
          words=("rank 0 on", "not answer"), **HANG),
    Fault("uneven", "rank 1, between steps", "leaves the loop too early", hang="uneven data",
          words=("left the training loop",), **HANG),
    # Numbers.
    Fault("nan", "one sample", "holds a NaN", 1, "exception", rank=None, words=("not finite", "sample ids")),
    Fault("nan-skip", "one sample", 'holds a NaN, with on_nonfinite = "skip"', 0, rank=None, goes_on="same start",
          equal=False, lost=1),
    # Stops on purpose.
    Fault("terminate", "rank 1", "kill -TERM", **STOP),
    Fault("usr1", "rank 1", "kill -USR1, as Slurm before the end", **STOP),
    Fault("stop-file", "the run folder", "a file called stop", **STOP),
    Fault("max-time", "the launcher", "--max-time is over", options=("--max-time", "30s"), **STOP),
    Fault("ctrl-c", "the launcher", "Ctrl-C", **{**STOP, "code": 130}),
    Fault("ctrl-c-twice", "the launcher", "Ctrl-C twice", 130, rank=None, goes_on="same command", lost=5),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass
class Row:
    """What came of one fault. Seconds count from the fault; None where there was nothing to measure."""

    fault: Fault
    code: int
    output: str
    failures: list[dict[str, Any]] = field(default_factory=list)
    detected: float | None = None
    ended: float | None = None
    """Until the command was over, where it did not go on by itself."""
    next_step: float | None = None
    lost: int | None = None
    recovered: dict[str, float] | None = None
    last_code: int | None = None
    """Of the second command, where there was one."""
    weights: dict[str, torch.Tensor] | None = None
    hang: str = ""
    left: list[str] = field(default_factory=list)
    """Processes that were still there long after the end."""
    folder: Path = Path()

    @property
    def tail(self) -> list[str]:
        """What people see on their console when it is over."""
        return self.output.rstrip().splitlines()[-15:]

    @property
    def verdict(self) -> str:
        """What the launcher said at last."""
        return self.output[self.output.rfind("lockstep: ") :] if "lockstep: " in self.output else ""


def plant(
    fault: Fault | None, folder: Path, width: int = 32, more: Sequence[str] = (), timeout: float = TIMEOUT
) -> Row:
    """Let a fault strike in a run in an empty folder, start it again where that is for people to do, and measure.

    Without a fault the run is undisturbed. `timeout` is for faults that hang.
    """
    notes = folder / "notes"
    notes.mkdir(parents=True)
    shutil.copy(TRAINING, folder / "train.py")
    fault = fault or Fault("none", "", "", 0)
    command = [*LOCKSTEP, "run", "--nproc", "2", "--device", "cpu", *fault.options, *more]
    command += ["--set", f"timeout_minutes={timeout / 60}"] if fault.hangs else []
    command += ["train.py", fault.name, str(notes), str(width)]
    code, output, over = _run(command, folder)
    run = folder / "runs" / "train"
    row = Row(fault, code, output, folder=folder)
    before = events(run)
    if fault.goes_on == "same command":
        row.last_code, output, _ = _run(command, folder)
        row.output += "" if row.last_code == 0 else output
    everything = events(run)
    row.failures = [event for event in everything if event["kind"] == "failure"]
    struck = notes / "struck"
    if struck.exists():
        when, step = struck.read_text().split()
        _measure(row, float(when), int(step), everything, len(before), over)
    if (notes / "weights.pt").exists():
        row.weights = torch.load(notes / "weights.pt", weights_only=True)
    with suppress(FileNotFoundError):
        row.hang = json.loads((run / "logs" / "hang.json").read_text())["verdict"]["cause"]
    row.left = left_after(folder, SECONDS_TO_BE_GONE)
    return row


def _measure(
    row: Row, struck: float, step: int, everything: list[dict[str, Any]], first_command: int, over: float
) -> None:
    told = [event for event in everything[:first_command] if _tells(event) and event["time"] >= struck]
    row.detected = told[0]["time"] - struck if told else None
    attempt = min((event["attempt"] for event in everything if event["kind"] == "step"), default=0)
    steps = [event for event in everything if event["kind"] == "step"]
    # Rank 0 writes its events a moment later; those of a rank that is killed are not all there.
    done = max([step, *(event["step"] for event in steps if event["attempt"] == attempt)])
    after = [event for event in steps if event["attempt"] > attempt]
    if row.fault.goes_on == "same start":
        after = [event for event in steps if event["time"] > struck + (row.detected or 0)]
        row.lost = sum(event["skipped"] for event in steps)
    elif after:
        row.lost = done - (after[0]["step"] - 1)
    row.next_step = after[0]["time"] - struck if after else None
    row.ended = over - struck
    row.recovered = next((event["seconds"] for event in everything if event["kind"] == "recovered"), None)


def _tells(event: dict[str, Any]) -> bool:
    return event["kind"] in ("failure", "alarm") or (event["kind"] == "stop" and event["reason"] != "failed")


def _run(command: list[str], folder: Path) -> tuple[int, str, float]:
    """Run a command as from a terminal of its own; returns exit code, output and when it was over."""
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(patient(MOST_SECONDS))
        finally:
            if process.poll() is None:
                process.kill()
                for other in processes_of(folder):
                    with suppress(psutil.NoSuchProcess):
                        other.kill()
        over = time.time()
        output.seek(0)
        return code, output.read(), over


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes that were started for a folder: its name is in their command lines."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if any(str(folder) in part for part in process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def left_after(folder: Path, seconds: float) -> list[str]:
    """Which processes of a folder are still there after so long; returns as soon as there is none."""
    deadline = Deadline(seconds)
    while (found := processes_of(folder)) and not deadline.passed:
        time.sleep(0.1)
    return [" ".join(process.info["cmdline"]) for process in found]


def same_weights(row: Row, other: Row) -> bool:
    """To the bit."""
    assert other.weights is not None
    return row.weights is not None and all(torch.equal(value, other.weights[key]) for key, value in row.weights.items())
