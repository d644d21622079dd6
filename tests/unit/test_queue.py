"""What is asked of Slurm: answers are read, and no answer is one, too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.events import EventLog, read_events
from lockstep.folder import RunFolder
from lockstep.launch import queue
from lockstep.launch.follow import note_end, note_start
from lockstep.launch.queue import JobState, check_accepted, history_of, state_of

Programs = Callable[..., None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Programs of Slurm's that only print what they are told to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(**bodies: str) -> None:
        for name, body in {"scontrol": "exit 1", "sacct": "exit 1", **bodies}.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)

    make()
    return make


ACCOUNTS = """cat <<END
4711|NODE_FAIL|None|node[1-2]|1:0|gpu|project7
4711|PREEMPTED|None|node[1-2]|0:0|gpu|project7
4711|CANCELLED by 1000|None|None assigned|0:0|gpu|project7
END"""


def test_the_controller_is_asked_first(programs: Programs) -> None:
    programs(scontrol="echo JobId=4711 JobState=RUNNING Reason=None Restarts=1 NodeList=node1", sacct=ACCOUNTS)
    assert state_of("4711") == JobState("4711", "RUNNING", "", "node1", 1)


def test_what_the_controller_has_forgotten_accounting_knows(programs: Programs) -> None:
    programs(sacct=ACCOUNTS)
    assert state_of("4711") == JobState("4711", "CANCELLED", "", "", 2, "0:0", "gpu", "project7")
    assert [one.state for one in history_of("4711")] == ["NODE_FAIL", "PREEMPTED", "CANCELLED"]


def test_a_controller_that_does_not_answer_holds_nobody_up(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs(scontrol="sleep 60", sacct="sleep 60", sbatch="sleep 60")
    monkeypatch.setattr(queue, "SECONDS", 0.3)
    began = time.monotonic()
    assert state_of("4711") is None
    with pytest.raises(UserError, match="sbatch gave no answer"):
        check_accepted(tmp_path / "job.sbatch")
    assert time.monotonic() - began < 10


def states(folder: RunFolder) -> list[tuple[str, str, int]]:
    return [(one["id"], one["state"], one["restart"]) for one in read_events(folder.events)]


def test_each_start_tells_of_the_job_and_of_how_the_start_before_it_ended(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run", 2)
    programs(sacct=ACCOUNTS)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    note_start(folder)
    assert states(folder) == [("4711", "NODE_FAIL", 0), ("4711", "RUNNING", 1)]


def test_how_a_job_ended_is_written_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", 1)
    log = EventLog(folder.events, 1)
    log.emit("job", **JobState("4711", "RUNNING").event)
    log.close()
    for _ in range(2):
        note_end(folder, JobState("4711", "COMPLETED"))
    assert states(folder) == [("4711", "RUNNING", 0), ("4711", "COMPLETED", 0)]
