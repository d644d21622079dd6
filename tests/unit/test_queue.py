"""What is asked of Slurm: answers are read, and no answer is one, too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli.jobs import jobs_command
from lockstep.errors import UserError
from lockstep.launch import queue
from lockstep.launch.follow_job import note_end, note_start
from lockstep.launch.queue import JobState, check_accepted, history_of, state_of
from lockstep.record.folder import RunFolder
from lockstep.record.log import EventLog
from tests.events import read_events
from tests.runs import Made, write_run

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
    programs(scontrol="sleep infinity", sacct="sleep infinity", sbatch="sleep infinity")
    monkeypatch.setattr(queue, "SECONDS", 0.3)
    assert state_of("4711") is None
    with pytest.raises(UserError, match="sbatch gave no answer"):
        check_accepted(tmp_path / "job.sbatch")


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


def test_a_damaged_line_hides_no_run_from_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "sound", Made(steps=20))
    write_run(tmp_path / "damaged", Made(steps=20, ending="stop"), ["{broken\n", '{"time": 1, "kind": "step"}\n'])
    assert jobs_command([tmp_path], as_json=True) == 0
    found = {Path(line["run"]).name: line for line in json.loads(capsys.readouterr().out)}
    assert [(line["state"], line["step"], line["lost"]) for _, line in sorted(found.items())] == [
        ("stopped", 20, 2),
        ("finished", 20, 0),
    ]
    assert jobs_command([tmp_path], as_json=False) == 0
    assert "damaged: 2 lines are damaged in its events.jsonl, and passed over" in capsys.readouterr().out
