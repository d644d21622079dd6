"""What a launcher makes of the variables that Slurm leaves: which node it is, whom it meets, and what is refused."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.launch.nodes import Nodes, find_nodes, settle_head
from lockstep.launch.queue import JobState, last_job, parse_job
from lockstep.record.folder import LOCK, choose_folder, hold, is_held, look_back
from lockstep.record.log import EventLog
from lockstep.runtime.host.slurm_env import find_allocation, find_step

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "node[07-09]",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ACCOUNT": "project7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "1(x3)",
}
TASK = JOB | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
}


@pytest.fixture
def as_in(monkeypatch: pytest.MonkeyPatch):
    """Let this process have the variables of a job, and no others of Slurm's."""

    def set_all(variables: dict[str, str]) -> None:
        for name in {**JOB, **TASK}:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_all({})
    return set_all


def test_outside_of_slurm_there_is_no_job() -> None:
    assert find_allocation({}) is None
    assert find_step(None, {}) is None


def test_a_task_of_srun_knows_its_node_and_the_head() -> None:
    step = find_step(None, TASK)
    assert step is not None
    assert (step.nodes, step.rank, step.head, step.name) == (3, 2, "node07", "4711.0.0")


def test_hosts_may_have_other_names_in_the_fast_network() -> None:
    step = find_step(None, TASK | {"LOCKSTEP_HOST_SUFFIX": "i"})
    assert step is not None
    assert step.head == "node07i"


def test_every_start_of_a_job_is_a_meeting_of_its_own() -> None:
    again = find_step(None, TASK | {"SLURM_RESTART_COUNT": "2"})
    in_array = find_step(None, TASK | {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "11"})
    assert again is not None
    assert in_array is not None
    assert (again.name, in_array.name) == ("4711.2.0", "4700_11.0.0")


def test_a_smaller_step_of_a_larger_job_has_its_own_nodes() -> None:
    smaller = {"SLURM_STEP_NODELIST": "node08", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    step = find_step(None, TASK | smaller | {"SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert step is not None
    assert (step.nodes, step.head) == (1, "node08")


@pytest.mark.parametrize(
    ("variables", "counts", "sentence"),
    [
        (JOB, None, "job 4711 has 3 nodes, and without srun only this one would train"),
        (TASK | {"SLURM_STEP_TASKS_PER_NODE": "4(x3)"}, None, "srun started 4 tasks on a node"),
        (TASK, (2, 2), "--nodes 2, but srun started this on 3"),
        (TASK, (4, 8), "--nodes 4:8, but srun started this on 3"),
        (TASK | {"SLURM_STEP_NODELIST": "node[07-"}, None, "is not a Slurm node list"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(
    variables: dict[str, str], counts: tuple[int, int] | None, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence.replace("[", r"\[")):
        find_step(counts, variables)


def test_the_shell_of_a_job_may_ask_for_one_node_on_purpose() -> None:
    assert find_step((1, 1), JOB) is None


def test_nodes_come_from_srun_unless_they_are_given_by_hand(as_in) -> None:
    as_in(TASK)
    assert find_nodes(None, None, None, "auto") == Nodes(3, 3, 2, "node07", meeting="4711.0.0")
    assert find_nodes("2:3", None, None, "auto") == Nodes(2, 3, 2, "node07", meeting="4711.0.0")
    with pytest.raises(UserError, match="give a new --run-dir"):
        find_nodes(None, None, None, "never")


def test_the_head_leaves_its_port_for_the_others_of_its_start_and_no_others(tmp_path: Path) -> None:
    head = settle_head(Nodes(2, 2, 0, "localhost", meeting="4711.1.0"), tmp_path)
    other = settle_head(Nodes(2, 2, 1, "localhost", meeting="4711.1.0"), tmp_path)
    assert head.head == other.head
    assert head.head.startswith("localhost:")
    with pytest.raises(UserError, match="the head localhost has left no word"):
        settle_head(Nodes(2, 2, 1, "localhost", patience=1, meeting="4711.2.0"), tmp_path)


# ---- Who may write into a run


def test_a_requeued_job_takes_its_run_from_a_start_that_was_cut_off(
    tmp_path: Path, as_in, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_in(JOB)
    with hold(tmp_path) as first:
        assert is_held(tmp_path, first)
        with pytest.raises(UserError, match="a second time"):
            hold(tmp_path)
        monkeypatch.setattr("socket.gethostname", lambda: "another-node")
        with pytest.raises(UserError, match="is being written by another process"):
            hold(tmp_path)
        as_in(JOB | {"SLURM_RESTART_COUNT": "1"})
        with hold(tmp_path) as second:
            assert is_held(tmp_path, second)
            assert not is_held(tmp_path, first), "the first start may not write any more"
            as_in(JOB | {"SLURM_JOB_ID": "4712", "SLURM_RESTART_COUNT": "5"})
            monkeypatch.setattr("socket.gethostname", lambda: "a-third-node")
            with pytest.raises(UserError, match="is being written by another process"):
                hold(tmp_path)


def test_nobody_takes_a_run_from_a_process_outside_of_slurm(tmp_path: Path, as_in) -> None:
    with (tmp_path / LOCK).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        as_in(JOB | {"SLURM_RESTART_COUNT": "1"})
        with pytest.raises(UserError, match="is being written by another process"):
            hold(tmp_path)


# ---- What Slurm knew

SHOWN = (
    "JobId=4713 ArrayJobId=4711 ArrayTaskId=2 JobName=my job UserId=user(1000) JobState=PENDING Reason=BeginTime "
    "Dependency=(null) Requeue=1 Restarts=3 BatchFlag=1 ExitCode=0:0 Partition=gpu Account=(null) NodeList=(null) "
)


def test_a_line_of_scontrol_is_read() -> None:
    assert parse_job(SHOWN) == JobState("4711_2", "PENDING", "BeginTime", "", 3, "0:0", "gpu", "")


def test_a_submitted_run_is_still_to_begin_and_a_finished_one_stays_finished(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "lm"
    (run / "logs").mkdir(parents=True)
    (run / "job.sbatch").write_text("#!/bin/bash\n")
    log = EventLog(run / "events.jsonl", 1)
    log.emit("job", **JobState("4711", "PENDING").event)
    log.close()
    assert choose_folder("lm", runs=tmp_path / "runs").path == run
    assert look_back(run).attempt == 0, "the first start is still to come"
    assert last_job(run) == "4711"
    end: dict[str, object] = {
        "step": 5,
        "loss": 1.0,
        "best_loss": None,
        "best_step": None,
        "metrics": {},
        "seconds": 1.0,
    }
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.0, "kind": "end", "attempt": 1, **end}) + "\n")
        file.write(json.dumps({"time": 2.0, "kind": "job", "attempt": 1, **JobState("4711", "COMPLETED").event}) + "\n")
    assert look_back(run).is_finished
