"""`lockstep jobs`: my runs, how far they are, and their Slurm jobs."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer, open_terminal, plain_table, say
from lockstep.errors import UserError, reason


@dataclass(frozen=True)
class RunLine:
    """One run in the list."""

    run: str
    state: str
    step: int | None
    total_steps: int | None
    loss: float | None
    starts: int
    job: str | None
    job_state: str | None
    changed: float
    lost: int
    """How many lines of its event log cannot be read."""


def jobs_command(
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders with runs in them. Default: runs.")] = None,
    as_json: opt.Json = False,
) -> int:
    """List my runs with their jobs; the newest last. How a job ended is written into its run's events."""
    from lockstep.record.folder import EVENTS, lost_lines

    folders = runs or [Path("runs")]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}", "name the folder that holds your runs")
    found: list[RunLine] = []
    unreadable: list[str] = []
    for path in (path for folder in folders for path in folder.iterdir() if (path / EVENTS).exists()):
        try:
            found.append(_line(path))
        except OSError as error:  # the others are there all the same
            unreadable.append(f"{path}: cannot read its {EVENTS} ({reason(error)})")
    found.sort(key=lambda line: line.changed)
    if as_json:
        answer([asdict(line) for line in found])
        return 0
    terminal = open_terminal()
    for text in unreadable:
        say(terminal, text, style="yellow")
    if not found:
        terminal.print(f"no runs in {', '.join(map(str, folders))}")
        return 0
    table = plain_table("run", "state", "step", "loss", "starts", "job", "changed")
    for line in found:
        done = f"{line.step or 0}/{line.total_steps}" if line.total_steps else str(line.step or 0)
        loss = "" if line.loss is None else f"{line.loss:.4g}"
        job = f"{line.job} {(line.job_state or 'unknown').lower()}" if line.job else ""
        table.add_row(line.run, line.state, done, loss, str(line.starts), job, _ago(line.changed))
    terminal.print(table)
    for line in found:
        if line.lost:
            say(terminal, f"{line.run}: {lost_lines(line.lost)}", style="yellow")
    return 0


def _line(path: Path) -> RunLine:
    from lockstep.launch.follow_job import note_end
    from lockstep.launch.queue import state_of
    from lockstep.record.folder import RunFolder, look_back

    run, now = look_back(path), time.time()
    if run.job is not None and run.job_state in ("PENDING", "RUNNING") and (slurm := state_of(run.job)) is not None:
        if slurm.state != run.job_state:
            run.take({"time": now, "kind": "job", "attempt": max(1, run.attempt), **slurm.event})
        if slurm.is_over:
            with suppress(OSError):  # somebody else's run
                note_end(RunFolder(path, 1), slurm)
    progress = (run.step or None, run.total_steps, run.loss, run.starts)
    return RunLine(str(path), run.state(now), *progress, run.job, run.job_state, run.changed, run.damaged)


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
