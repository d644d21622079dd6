"""The state of a run: report, board, watch, jobs, the closing table and the trackers say one word at one moment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from lockstep.launch import queue
from lockstep.launch.queue import JobState
from lockstep.page.reading.reader import RunReader
from lockstep.page.serve import follow as follow_page
from lockstep.record.folder import existing_runs, look_back
from lockstep.record.run_state import SILENCE, State
from lockstep.sinks import tracking
from lockstep.sinks.closing import closing_rows
from lockstep.sinks.watch_view import Screen, view
from lockstep.sinks.watched import Watched
from tests.cli.commands import in_this_process
from tests.events import Event
from tests.runs import Made, run_events
from tests.unit.test_tracking import told

JOB = {"kind": "job", "attempt": 1, "id": "4711", "restart": 0, "reason": "", "nodes": "", "partition": ""}
RESTARTED = Made(steps=100, fails_after=[60])


def job(state: str, attempt: int = 1) -> Event:
    return {"time": 1.0, **JOB, "attempt": attempt, "state": state, "account": "", "exit_code": ""}


def until(made: Made, is_last: Callable[[Event], bool]) -> list[Event]:
    """The events of a made run up to the first for which that is true."""
    events = list(run_events(made))
    return events[: 1 + next(number for number, event in enumerate(events) if is_last(event))]


def of_kind(kind: str, attempt: int = 1) -> Callable[[Event], bool]:
    return lambda event: bool(event["kind"] == kind and event["attempt"] == attempt)


KILLED, STOPPED = list(run_events(Made(steps=20, ending="killed"))), list(run_events(Made(steps=20, ending="stop")))

CASES: dict[str, tuple[list[Event], float, State]] = {
    "submitted": ([job("PENDING")], 5000.0, "queued"),
    "the job has begun": ([job("PENDING"), job("RUNNING")], 5.0, "starting"),
    "the job ended before the run began": ([job("PENDING"), job("NODE_FAIL")], 5.0, "failed"),
    "an empty log": ([], 5.0, "starting"),
    "an empty log of long ago": ([], SILENCE + 5, "lost"),
    "building the model": (until(Made(), of_kind("status")), 5.0, "starting"),
    "before the first step": (until(Made(), of_kind("flops")), 5.0, "starting"),
    "after the first step": (until(Made(), of_kind("step")), 5.0, "running"),
    "silent for long": (until(Made(), of_kind("step")), SILENCE + 5, "lost"),
    "silent, with long steps": (until(Made(compute=60.0), of_kind("step")), SILENCE + 5, "running"),
    "killed a moment ago": (KILLED, 5.0, "running"),
    "killed": (KILLED, SILENCE + 5, "lost"),
    "killed, and Slurm says why": ([*KILLED, job("TIMEOUT")], 5.0, "stopped"),
    "killed with its node": ([*KILLED, job("NODE_FAIL")], 5.0, "failed"),
    "killed in its second start": ([*until(RESTARTED, of_kind("step", 2)), job("TIMEOUT")], 5.0, "stopped"),
    "killed and requeued": ([*KILLED, job("PREEMPTED", 2), job("RUNNING", 2)], 5.0, "starting"),
    "a rank raised": (until(RESTARTED, of_kind("stop")), 5.0, "failed"),
    "the launcher starts it again": (until(RESTARTED, of_kind("failure")), 5.0, "restarting"),
    "the launcher has gone too": (until(RESTARTED, of_kind("failure")), SILENCE + 5, "failed"),
    "started again": (until(RESTARTED, of_kind("status", 2)), 5.0, "starting"),
    "going on": (until(RESTARTED, of_kind("step", 2)), 5.0, "running"),
    "failed for good": (list(run_events(Made(steps=20, ending="failed"))), 5.0, "failed"),
    "out of time": (STOPPED, 5.0, "stopped"),
    "out of time, and submitted again": ([*STOPPED, job("PENDING")], 5000.0, "queued"),
    "out of time, and begun again": ([*STOPPED, job("COMPLETED", 2), job("RUNNING", 2)], 5.0, "starting"),
    "finished": (list(run_events(RESTARTED)), 5.0, "finished"),
    "finished, and its job too": ([*run_events(RESTARTED), job("COMPLETED", 2)], 5000.0, "finished"),
    "an end that lacks its numbers": ([*KILLED, {"time": 1.0, "kind": "end", "attempt": 1}], 5.0, "finished"),
}


def write_until_now(folder: Path, events: list[Event], ago: float) -> Path:
    """A log whose last event came so many seconds ago; what Slurm said, it said then."""
    end = max((event["time"] for event in events if event["time"] > 1.0), default=0.0)
    now = time.time() - ago
    moved = [{**event, "time": event["time"] - end + now if event["time"] > 1.0 else now} for event in events]
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in moved))
    os.utime(folder / "events.jsonl", (now, now))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_all_say_the_same_word(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events, ago, state = CASES[case]
    folder = write_until_now(tmp_path / "runs" / "lm", events, ago)
    now = time.time()
    assert look_back(folder).state(now) == state

    reader = RunReader(folder)
    reader.read()
    summary = reader.summary(now)
    assert (summary.state, reader.page(now).headline.state) == (state, state)
    assert follow_page(existing_runs([folder]))().runs[0].headline.state == state
    assert not summary.attempts or dict(closing_rows(summary))["run"].endswith(f", {state}")

    watched = Watched()
    for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
        watched.take(event)
    watched.run.changed = look_back(folder).changed
    assert view("lm", watched, now, Screen(100))[0].plain.split()[1] == state

    listed = in_this_process(tmp_path, "jobs", "--json")
    assert [line["state"] for line in json.loads(listed.stdout)] == [state]
    shown = in_this_process(tmp_path, "watch", "runs/lm", "--once")
    assert shown.stdout.split()[1] == state
    assert shown.returncode == (state == "failed")

    assert told(folder, monkeypatch).ending == tracking.ENDINGS.get(state, "stopped")


def test_every_state_is_among_the_cases() -> None:
    assert {state for _, _, state in CASES.values()} == set(get_args(State))


def test_damaged_lines_change_no_state_and_are_told(tmp_path: Path) -> None:
    events = until(RESTARTED, of_kind("step", 2))
    folder = write_until_now(tmp_path / "runs" / "lm", events, 5.0)
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    damaged = [line for one in lines for line in (one, "\0\0\xff\n", '{"half": \n')]
    (folder / "events.jsonl").write_text("".join(damaged))
    assert look_back(folder).state(time.time()) == "running"
    listed = in_this_process(tmp_path, "jobs")
    assert "runs/lm  running" in listed.stdout
    assert f"{2 * len(lines)} lines are damaged in its events.jsonl, and passed over" in listed.stdout


def test_a_log_that_cannot_be_read_does_not_empty_the_list(tmp_path: Path) -> None:
    write_until_now(tmp_path / "runs" / "lm", KILLED, 5.0)
    (tmp_path / "runs" / "odd" / "events.jsonl").mkdir(parents=True)
    listed = in_this_process(tmp_path, "jobs")
    assert "runs/lm  running" in listed.stdout
    assert "runs/odd: cannot read its events.jsonl (is a directory)" in listed.stdout


@pytest.mark.parametrize(("slurm", "state"), [("RUNNING", "starting"), ("FAILED", "failed"), ("PENDING", "queued")])
def test_jobs_takes_slurms_word_where_it_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: str, state: State
) -> None:
    folder = write_until_now(tmp_path / "runs" / "lm", [job("PENDING")], 5.0)
    monkeypatch.setattr(queue, "state_of", lambda number: JobState(number, slurm))
    [line] = json.loads(in_this_process(tmp_path, "jobs", "--json").stdout)
    assert (line["state"], line["job_state"]) == (state, slurm)
    if state == "failed":
        assert look_back(folder).state(time.time()) == state, "it is in the log now, for everybody"
