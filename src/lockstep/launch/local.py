"""Starting the processes of a run on this node, on torch's elastic agent, and showing the run while it lasts."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.launch.nodes import Nodes, end_without_head
from lockstep.launch.supervise import Outcome, Policy, Supervisor
from lockstep.record.failure import END_OF_OUTPUT, START_OF_OUTPUT
from lockstep.record.folder import RunFolder
from lockstep.record.log import follow_events
from lockstep.runtime import stop_signals
from lockstep.runtime.nursery import Nursery
from lockstep.sinks.console import Console

MOST_OPEN_FILES = 65536


def launch(
    worker: list[str],
    nproc: int,
    folder: RunFolder,
    console: Console,
    told: dict[str, Any],
    nodes: Nodes | None = None,
    policy: Policy | None = None,
) -> Outcome:
    """Start `nproc` workers, show their events and rank 0's output, start them again after failures as the policy has
    it, and wait for the end. `told` is what every rank reads: `options`, `resume`, and what `verify` records."""
    nodes = nodes or Nodes()
    what = f"starting {nproc} process{'es' if nproc > 1 else ''}"
    what += "" if nodes.is_alone else f", waiting for {nodes.least} nodes at {nodes.head}"
    if nodes.speaks:
        console.show_status(what)
    scratch = tempfile.mkdtemp(prefix="lockstep-")
    told = {"run_dir": str(folder.path), "attempt": folder.attempt, "scratch": scratch, "began": time.time(), **told}
    os.environ["LOCKSTEP_RUN_DIR"] = str(folder.path)
    # With the agent's own store, ranks of a restarted attempt would read addresses of dead ones (torch 2.11, 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    # glibc gives every large block back to the system, and each step on CPUs faults its pages in again.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 << 30))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # sockets complain of hosts without names
    _allow_open_files()

    def say(text: str, level: str) -> None:
        if nodes.speaks:
            console.say(text, level)

    with stop_signals.noting():
        nursery = Nursery(worker)  # it imports torch while this process does
        supervisor = Supervisor(folder, nodes, told, say, policy or Policy())
        ended = threading.Event()
        beside: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(end_without_head, (nodes, ended))]
        if nodes.is_head:
            beside = [(_show_events, (folder, console, ended)), (_show_output, (folder, console, ended))]
        readers = [threading.Thread(target=work, args=of, daemon=True) for work, of in beside]
        for reader in readers:
            reader.start()
        try:
            return _run_agent(nursery, nproc, nodes, folder, scratch, supervisor)
        finally:
            nursery.close()
            ended.set()
            for reader in readers:
                reader.join()
            shutil.rmtree(scratch, ignore_errors=True)


def _allow_open_files() -> None:
    """As many as the system allows, up to plenty: loaders and sockets soon need more than the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _run_agent(
    nursery: Nursery, nproc: int, nodes: Nodes, folder: RunFolder, scratch: str, supervisor: Supervisor
) -> Outcome:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    from lockstep.launch.agent import run_agent

    run_id = f"{folder.path.name}.{nodes.meeting}"  # one that was cut off and is back does not meet the next start
    try:
        result = run_agent(nursery, nproc, nodes, run_id, scratch, supervisor)
    except SignalException as error:
        code, name = stop_signals.CODES[stop_signals.STOPS[error.sigval]], error.sigval.name
        return Outcome(code, f"ended by {name} before the workers had started; the same command goes on")
    except RendezvousError as error:
        text = f"the nodes did not meet at {nodes.head}: {type(error).__name__}"
        return supervisor.outcome or Outcome(
            1, f"{text}; see whether the head runs, and the same --nodes on every node"
        )
    if result is None or result.is_failed():
        return supervisor.outcome or Outcome(1, "the other nodes have ended the run; the head says why")
    return Outcome(0)


def _show_events(folder: RunFolder, console: Console, ended: threading.Event) -> None:
    for event in follow_events(folder.events, ended.is_set):
        # Why it failed, and who was first, the launcher says.
        said_better = event["kind"] in ("failure", "job") or (event["kind"] == "stop" and event["reason"] == "failed")
        if event["attempt"] >= folder.attempt and not said_better:
            console.handle(event)


def _show_output(folder: RunFolder, console: Console, ended: threading.Event) -> None:
    """What rank 0 prints, from now on, above the bar; it may come to be on another host."""
    offsets = {log: log.stat().st_size for log in folder.logs_of(0)}
    rests: dict[Path, str] = {}
    muted: set[Path] = set()
    while True:
        last_round = ended.wait(0.1)
        for log in folder.logs_of(0):
            with log.open("r", encoding="utf-8", errors="replace") as file:
                file.seek(offsets.get(log, 0))
                *lines, rests[log] = (rests.get(log, "") + file.read()).split("\n")
                offsets[log] = file.tell()
            for line in lines:
                if line == START_OF_OUTPUT:
                    muted.discard(log)
                elif line == END_OF_OUTPUT or line.startswith("Fatal Python error: "):
                    muted.add(log)
                elif log not in muted:
                    console.print_line(line)
        if last_round:
            for log, rest in rests.items():
                if rest and log not in muted:
                    console.print_line(rest)
            return
