"""Starting the processes of a run on this node, on torch's elastic agent, and showing the run while it lasts."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.events import follow_events, read_events
from lockstep.folder import RunFolder
from lockstep.launch.worker import END_OF_OUTPUT
from lockstep.sinks.console import Console

SECONDS_TO_SAVE = 300
"""How long workers may take to write a checkpoint after Ctrl-C or SIGTERM before they are killed."""

STOP_CODES = {"interrupted": 130, "terminated": 75}

CONSEQUENCE = re.compile(r"connection (was )?(closed|reset|refused)|timed out waiting|broken pipe|socket closed", re.I)


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: the exit code, and when it is not 0 what to say, and the log of who is to blame."""

    code: int
    text: str = ""
    log: Path | None = None


def launch(
    worker: list[str],
    nproc: int,
    folder: RunFolder,
    console: Console,
    *,
    options: dict[str, Any],
    resume: str,
    verify: dict[str, Any] | None = None,
) -> Outcome:
    """Start `nproc` workers, show their events and rank 0's output, and wait for the end."""
    console.handle({"kind": "status", "text": f"starting {nproc} process{'es' if nproc > 1 else ''}"})
    told = {"run_dir": str(folder.path), "attempt": folder.attempt, "resume": resume, "options": options}
    if verify is not None:
        told["verify"] = verify
    os.environ.update(
        LOCKSTEP_LAUNCH=json.dumps(told),
        LOCKSTEP_RUN_DIR=str(folder.path),
        # With the agent's own store, ranks of a restarted attempt would read addresses of dead ones (torch 2.11, 2.13).
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    # glibc gives every large block back to the system, and each step on CPUs faults its pages in again.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 << 30))
    ended = threading.Event()
    log = folder.log_here(0)
    readers = [
        threading.Thread(target=_show_events, args=(folder, console, ended), daemon=True),
        threading.Thread(target=_show_output, args=(log, console, ended), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        return _run_agent(worker, nproc, folder)
    finally:
        ended.set()
        for reader in readers:
            reader.join()


def _run_agent(worker: list[str], nproc: int, folder: RunFolder) -> Outcome:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # our own lines say it better
    scratch = tempfile.mkdtemp(prefix="lockstep-")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=folder.path.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"is_host": True},
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=scratch),
    )
    if hasattr(config, "shutdown_timeout"):  # newer than torch 2.11
        config.shutdown_timeout = SECONDS_TO_SAVE
    try:
        elastic_launch(config, entrypoint=sys.executable)("-u", "-m", "lockstep.launch.worker", *worker)
    except SignalException as error:
        return _stopped(folder) or Outcome(130 if error.sigval == signal.SIGINT else 1, f"ended by {error.sigval.name}")
    except ChildFailedError as error:
        return _stopped(folder) or _verdict(error.failures, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Outcome(0)


def _stopped(folder: RunFolder) -> Outcome | None:
    """A stop on purpose, if this attempt wrote one down: the console has shown it."""
    if not folder.events.exists():
        return None
    for event in read_events(folder.events):
        if event["kind"] == "stop" and event["attempt"] == folder.attempt and event["reason"] in STOP_CODES:
            return Outcome(STOP_CODES[event["reason"]])
    return None


def _verdict(failures: dict[int, Any], folder: RunFolder) -> Outcome:
    """Who failed first and why, in a few lines; errors that only follow from another rank's are passed over."""
    by_time = sorted(failures.items(), key=lambda item: item[1].timestamp)
    rank, failure = next((f for f in by_time if not CONSEQUENCE.search(str(f[1].message))), by_time[0])
    log = folder.log_here(rank)
    if not isinstance(failure.message, dict):
        signal_name = failure.signal_name()
        how = f"was killed by {signal_name}" if failure.exitcode < 0 else f"exited with code {failure.exitcode}"
        return Outcome(1, f"rank {rank} {how}", log)
    message = str(failure.message.get("message", ""))
    if message.startswith("UserError: "):
        return Outcome(2, message.removeprefix("UserError: "))
    where = _user_frame(failure.message.get("extraInfo", {}).get("py_callstack", ""))
    return Outcome(1, f"rank {rank} failed: {message}{where}", log)


def _user_frame(traceback: str) -> str:
    """The innermost frame of the user's own code."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', traceback)
    package = str(Path(__file__).parent.parent)
    own = [f for f in frames if "site-packages" not in f[0] and not f[0].startswith((package, "<", sys.base_prefix))]
    return f"\n  at {own[-1][0]}:{own[-1][1]} in {own[-1][2]}" if own else ""


def _show_events(folder: RunFolder, console: Console, ended: threading.Event) -> None:
    for event in follow_events(folder.events, ended.is_set):
        failed = event["kind"] == "stop" and event["reason"] == "failed"  # the verdict says who was first, and why
        if event["attempt"] == folder.attempt and not failed:
            console.handle(event)


def _show_output(log: Path, console: Console, ended: threading.Event) -> None:
    """What rank 0 prints, from now on, above the bar."""
    offset = log.stat().st_size if log.exists() else 0
    rest = ""
    while True:
        last_round = ended.wait(0.1)
        if log.exists():
            with log.open("r", encoding="utf-8", errors="replace") as file:
                file.seek(offset)
                *lines, rest = (rest + file.read()).split("\n")
                offset = file.tell()
            for line in lines:
                if line == END_OF_OUTPUT:
                    return
                console.print_line(line)
        if last_round:
            if rest:
                console.print_line(rest)
            return
