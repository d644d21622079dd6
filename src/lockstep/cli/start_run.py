"""Starting a training as `train` and `run` do: in its run folder, shown to its end, answered for programs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.answers import answer, complain, plain_table, say

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.config.schema import LaunchConfig
    from lockstep.launch.nodes import Nodes
    from lockstep.record.folder import RunFolder


@dataclass(frozen=True)
class Start:
    """A training that is about to start: all of it is settled, and nothing is written."""

    folder: RunFolder
    config: LaunchConfig
    origin: Mapping[str, str]
    """Where the values of the config came from."""
    nodes: Nodes
    options: Mapping[str, Any]
    """What the user typed."""
    unused_gpus: str | None
    terminal: Terminal


def choose_run(name: str, options: Mapping[str, Any], terminal: Terminal) -> RunFolder | None:
    """The folder of the run that is started or continued; None where an earlier start of the same job finished it."""
    from lockstep.checkpoint.disk.format import steps_on_disk
    from lockstep.checkpoint.resume import given_checkpoint
    from lockstep.record.folder import choose_folder, look_back
    from lockstep.runtime.host.slurm_env import find_allocation

    run_dir, resume, job = options["run_dir"], options["resume"], find_allocation()
    # Slurm may have lost sight of the start that finished it.
    if run_dir is not None and job is not None and job.restart > 0 and look_back(run_dir).is_finished:
        say(terminal, f"{run_dir} is finished")
        return None
    folder = choose_folder(name, run_dir, resume)
    # A checkpoint that only began the run may be gone since.
    if resume not in ("auto", "never") and not (folder.continues and steps_on_disk(folder.path)):
        given_checkpoint(Path(resume))
    return folder


def print_plan(start: Start, **more: Mapping[str, str]) -> None:
    """What `--dry-run` shows: every value, where it came from, and which run it would be; `more` goes into its JSON."""
    from lockstep.config.checked import flatten

    folder, origin = start.folder, start.origin
    values = dict(flatten(start.config.model_dump(mode="json")))
    if start.options["as_json"]:
        plan = {key: {"value": value, "from": origin.get(key, "default")} for key, value in values.items()}
        answer({"run": str(folder.path), "continues": folder.continues, "config": plan, **more})
        return
    table = plain_table("key", "value", "from")
    for key, value in values.items():
        table.add_row(key, "unset" if value is None else str(value), origin.get(key, "default"))
    start.terminal.print(table)
    start.terminal.print(f"\nwould be: {folder.announce()}; nothing was started or written")


def train(start: Start, worker: list[str], told: dict[str, Any], on_oom: str) -> int:
    """Create the run folder, launch the workers, show the run to its end; returns the exit code."""
    from lockstep.launch.follow_job import note_start
    from lockstep.launch.local import launch
    from lockstep.launch.nodes import settle_head
    from lockstep.launch.supervise import Policy
    from lockstep.page.reading.reader import RunReader
    from lockstep.page.report import leave_report
    from lockstep.record.folder import EXIT_CODE, create_folder, hold, is_held, take_back
    from lockstep.runtime import stop_signals
    from lockstep.runtime.host.slurm_env import find_allocation
    from lockstep.sinks.closing import show_closing
    from lockstep.sinks.console import Console

    folder, config, nodes, terminal = start.folder, start.config, start.nodes, start.terminal
    made = create_folder(folder, config) if nodes.is_head else []
    nodes = settle_head(nodes, folder.path)
    assert config.nproc is not None
    with hold(folder.path) if nodes.is_head else nullcontext() as lock:
        if nodes.is_head:
            note_start(folder)
        if nodes.speaks:
            terminal.print(folder.announce(), soft_wrap=True)
            if start.unused_gpus:
                terminal.print(start.unused_gpus, style="yellow", soft_wrap=True)
        console = Console(terminal)
        try:
            policy = Policy(config.restarts, config.on_oom or on_oom)
            if lock:
                policy = replace(policy, is_ours=partial(is_held, folder.path, lock))
            ranks_read = {"options": told, "resume": start.options["resume"]}
            outcome = launch(worker, config.nproc, folder, console, ranks_read, nodes, policy)
            stop_signals.ignore()  # its code is known
        finally:
            console.close()
        is_ours = lock is not None and is_held(folder.path, lock)
        if is_ours and find_allocation():
            (folder.path / EXIT_CODE).write_text(str(outcome.code), encoding="ascii")
    reader = RunReader(folder.path) if folder.events.exists() else None  # of both: a long log is read once
    missing = leave_report(folder.path, reader) if is_ours and outcome.code != 2 and reader else ""
    if outcome.code != 2 and nodes.speaks:
        show_closing(folder.path, terminal, reader, has_report=not missing)
    if missing:
        say(terminal, missing)
    if outcome.code == 2 and nodes.is_head:
        take_back(folder, made)
    if outcome.text:
        complain(f"{outcome.text}{outcome.more}" + (f"\n  log: {outcome.log}" if outcome.log else ""))
    if start.options["as_json"]:
        answer(result_of(folder, outcome.code))
    return outcome.code


def result_of(folder: RunFolder, code: int) -> dict[str, Any]:
    """What `--json` prints of a run: where it is, how it ended, its last scores."""
    from lockstep.record.log import read_events, without_non_finite

    result: dict[str, Any] = {"run": str(folder.path), "exit": code}
    for event in read_events(folder.events) if folder.events.exists() else ():
        if event["kind"] == "end":
            result |= {key: value for key, value in event.items() if key not in ("time", "kind", "attempt")}
        elif event["kind"] == "test":
            result["test"] = {key: event[key] for key in ("step", "loss", "metrics", "samples")}
    finite: dict[str, Any] = without_non_finite(result)
    return finite
