"""Showing a job of Slurm from the queue to its end, over all its starts."""

from __future__ import annotations

import re
import threading
from typing import TextIO

from rich.console import Console as Terminal

from lockstep.launch.queue import JobState, history_of, last_job, state_of
from lockstep.record.folder import RunFolder
from lockstep.record.log import EventLog, follow_events, read_events
from lockstep.runtime.host.slurm_env import find_allocation
from lockstep.sinks.closing import show_closing
from lockstep.sinks.console import Console, job_text

SECONDS_BETWEEN_LOOKS = 2.0


def follow_job(job: str, folder: RunFolder, out: TextIO) -> int:
    """Show a job's states and its run until it is over; returns the job's exit code. Ctrl-C only ends the showing."""
    terminal = Terminal(file=out, highlight=False)
    console = Console(terminal)
    over = threading.Event()
    last: list[JobState] = []
    watcher = threading.Thread(target=_watch_states, args=(job, console, over, last), daemon=True)
    watcher.start()
    try:
        for event in follow_events(folder.events, over.is_set):
            if event["attempt"] >= folder.attempt and event["kind"] != "job":
                console.handle(event)
    except KeyboardInterrupt:
        over.set()
        console.close()
        print(f"not shown any more; job {job} goes on, and lockstep jobs shows it (scancel {job} ends it)", file=out)
        return 130
    finally:
        console.close()
    note_end(folder, last[-1])
    show_closing(folder.path, terminal)
    return _verdict(last[-1], folder, out)


def note_end(folder: RunFolder, state: JobState) -> None:
    """Write how a job ended into the events of its run, once."""
    told = [event for event in read_events(folder.events) if event["kind"] == "job"] if folder.events.exists() else []
    if told and (told[-1]["id"], told[-1]["state"]) == (state.job, state.state):
        return
    note(RunFolder(folder.path, max((event["attempt"] for event in told), default=1)), state)


def note_start(folder: RunFolder) -> None:
    """At the start of a launcher inside a job: what Slurm says of it, and how the start before this one ended."""
    job = find_allocation()
    if job is None:
        return
    before = [one for one in history_of(job.job) if one.restarts < job.restart] if job.restart else []
    if not before and (previous := last_job(folder.path)) not in (None, job.job):
        before = [state] if (state := state_of(previous)) is not None and state.is_over else []
    now = JobState(job.job, "RUNNING", "", job.node_list, job.restart, "", job.partition, job.account)
    note(folder, *before[-1:], now)


def note(folder: RunFolder, *states: JobState) -> None:
    """Write what Slurm says of a job into the events of its run."""
    log = EventLog(folder.events, folder.attempt)
    for state in states:
        log.emit("job", **state.event)
    log.close()


def _watch_states(job: str, console: Console, over: threading.Event, last: list[JobState]) -> None:
    ended_before = False
    while not over.is_set():
        state = state_of(job)
        if state is not None and (not last or state != last[-1]):
            last.append(state)
            console.say(job_text(state.event))
        if state is not None:
            if state.is_over and (ended_before or state.state in ("COMPLETED", "CANCELLED")):
                over.set()
            ended_before = state.is_over  # a job that lost a node may be seen so on its way back into the queue
        over.wait(SECONDS_BETWEEN_LOOKS)


def _verdict(state: JobState, folder: RunFolder, out: TextIO) -> int:
    if state.state == "COMPLETED":
        return 0
    failures = [event for event in read_events(folder.events) if event["kind"] == "failure"]
    text = f": {failures[-1]['text']}" if failures and not failures[-1]["restarted"] else ""
    print(f"lockstep: job {state.job} ended {state.state.lower().replace('_', ' ')}{text}", file=out)
    print(f"  log: {folder.path / 'logs'}/slurm-{state.job}.out", file=out)
    match = re.fullmatch(r"(\d+):0", state.exit_code)
    return int(match[1]) if match and int(match[1]) in (2, 75, 130) else 1
