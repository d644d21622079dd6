"""`lockstep submit` on a real Slurm: whatever happens, a job ends COMPLETED with the weights of an undisturbed one."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.cli.commands import LOCKSTEP, events, run
from tests.faults.test_nodes import weights_of
from tests.patience import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.faults import FAULTS, STEPS, SUBMIT, SlurmFault, plant, submit, write_files

pytestmark = [pytest.mark.slurm, pytest.mark.limit(500)]


@pytest.fixture(scope="module")
def undisturbed(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a job that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = submit(slurm, folder, pause=0)
    state = slurm.wait_for_job(job.number, "COMPLETED", "FAILED", "CANCELLED", seconds=120)
    assert state["JobState"] == "COMPLETED", job.log
    assert "waiting for 2 nodes at node1i:" in job.log, "the profile's name of the fast network"
    start = job.events("start")[0]
    assert (start["nodes"], start["world_size"], start["layout"]) == (2, 4, "dp=4")
    assert [one["state"] for one in job.events("job")] == ["PENDING", "RUNNING"]
    return weights_of(job.run_folder, STEPS)


@pytest.mark.parametrize("fault", [pytest.param(one, id=one.name) for one in FAULTS])
def test_whatever_happens_the_job_completes_with_the_same_weights(
    slurm: Cluster, undisturbed: dict[str, torch.Tensor], tmp_path: Path, fault: SlurmFault
) -> None:
    row = plant(slurm, fault, tmp_path)
    assert row.state == "COMPLETED", row.log
    assert row.starts > 1, row.log
    assert all(torch.equal(row.weights[name], tensor) for name, tensor in undisturbed.items())
    if fault.saves:
        assert row.lost == 0


@pytest.mark.slow
def test_a_node_that_was_cut_off_cannot_write_into_the_run_that_has_moved_on(
    slurm: Cluster, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """It has all ranks of the job, and could go on alone: nodes share this machine's disk, whatever their cables do."""
    job = submit(slurm, tmp_path, "--nodes", "1", pause=1.2)
    job.wait_for_step(12)
    name = job.node_names[0]
    slurm.nodes[name].cut()
    try:
        wait_for(lambda: len(job.events("start")) > 1, "the next start", 150)
        began = job.events("start")[1]["time"]
        assert job.node_names[0] != name
        slurm.wait_for_job(job.number, "COMPLETED", seconds=120)
    finally:
        slurm.nodes[name].mend()
        wait_for(lambda: slurm.node_state(name) == "IDLE", f"{name} to be idle", 120)
    late = [one for one in job.events("step") if one["attempt"] == 1 and one["time"] > began + 3]
    assert late == [], "the first start has ended as soon as it looked"
    for key, tensor in weights_of(job.run_folder, STEPS).items():
        torch.testing.assert_close(tensor, undisturbed[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_job_that_may_lose_a_node_goes_on_without_the_queue(
    slurm: Cluster, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    job = submit(slurm, tmp_path, "--nodes", "2:3", "--nproc", "1", pause=0.3)
    job.wait_for_step(12)
    name = job.node_names[2]
    slurm.crash(name)
    try:
        state = slurm.wait_for_job(job.number, "COMPLETED", "FAILED", "PENDING", "CANCELLED", seconds=150)
    finally:
        slurm.boot(name)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), job.log
    assert [one["world_size"] for one in job.events("start")] == [3, 2]
    for key, tensor in weights_of(job.run_folder, STEPS).items():
        torch.testing.assert_close(tensor, undisturbed[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_job_is_followed_through_a_requeue_to_its_end(slurm: Cluster, tmp_path: Path) -> None:
    write_files(tmp_path)
    shown = slurm.popen(*SUBMIT, "--follow", "run", "train.py", "0.3", cwd=tmp_path)
    run_folder = tmp_path / "runs" / "train"
    wait_for(lambda: len(events(run_folder, "step")) > 5, "the first steps", 100)
    job = events(run_folder, "job")[-1]["id"]
    slurm.run("scancel", "--signal=USR1", f"{job}.0")
    output, _ = shown.communicate()
    assert shown.returncode == 0, output
    for words in (
        "pending",
        "running on node",
        "terminated at step",
        "requeued 1 time",
        "resumed from step",
        "completed",
    ):
        assert words in output, output
    assert f"done: {STEPS} steps" in output
    assert [one["state"] for one in events(run_folder, "job")] == ["PENDING", "RUNNING", "RUNNING", "COMPLETED"]
    listed = slurm.run(*LOCKSTEP, "jobs", cwd=tmp_path)
    assert listed.returncode == 0
    assert f"finished  {STEPS}/{STEPS}" in listed.stdout
    assert f"{job} completed" in listed.stdout


@pytest.mark.slow
def test_a_cancelled_job_has_saved_stays_cancelled_and_the_same_command_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path)
    job.wait_for_step(12)
    slurm.run("scancel", job.number)
    state = slurm.wait_for_job(job.number, "CANCELLED", "PENDING", "COMPLETED", "FAILED")
    assert state["JobState"] == "CANCELLED"
    [stop] = job.events("stop")
    listed = json.loads(slurm.run(*LOCKSTEP, "jobs", "--json", cwd=tmp_path).stdout)
    assert [(one["state"], one["job_state"]) for one in listed] == [("stopped", "CANCELLED")]
    again = submit(slurm, tmp_path, pause=0)
    slurm.wait_for_job(again.number, "COMPLETED", seconds=100)
    assert again.events("start")[1]["resumed_from_step"] == stop["step"]


@pytest.mark.slow
def test_of_an_array_only_the_task_that_was_stopped_goes_back_into_the_queue(slurm: Cluster, tmp_path: Path) -> None:
    write_files(tmp_path)
    options = ("--array", "0-1", "--nodes", "1", "--nproc", "1")
    done = slurm.run(*SUBMIT, *options, "run", "--set", "seed=%a", "train.py", "0.3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    number = done.stdout.split("submitted job ")[1].split(":")[0]
    folders = [tmp_path / "runs" / f"train-{task}" for task in (0, 1)]
    wait_for(lambda: all(len(events(folder, "step")) > 3 for folder in folders), "the first steps of both", 100)
    slurm.run("scancel", "--signal=USR1", "--batch", f"{number}_0")
    for task in (0, 1):
        state = slurm.wait_for_job(f"{number}_{task}", "COMPLETED", "FAILED", "CANCELLED", seconds=120)
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", str(1 - task))
    seeds = [tomllib.loads((folder / "config.toml").read_text())["seed"] for folder in folders]
    assert seeds == [0, 1]


def test_what_slurm_would_not_take_is_refused_in_its_own_words_and_leaves_nothing(
    slurm: Cluster, tmp_path: Path
) -> None:
    write_files(tmp_path)
    before = sorted(tmp_path.iterdir())
    for options, words in (
        (("--partition", "nowhere"), "Invalid partition name specified"),
        (("--nodes", "9"), "Requested node configuration is not available"),
        (("--sbatch", "--no-such-option"), "unrecognized option"),
    ):
        done = slurm.run(*SUBMIT, *options, "run", "train.py", "0", cwd=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
        assert sorted(tmp_path.iterdir()) == before


def test_a_run_that_waits_in_the_queue_is_not_submitted_twice(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--sbatch", "--hold")
    try:
        again = slurm.run(*SUBMIT, "run", "train.py", "0", cwd=tmp_path)
        assert again.returncode == 2
        assert f"is job {job.number} already, which is pending" in again.stderr
        listed = slurm.run(*LOCKSTEP, "jobs", cwd=tmp_path)
        assert "queued" in listed.stdout
        assert f"{job.number} pending" in listed.stdout
    finally:
        slurm.run("scancel", job.number)


def test_without_slurm_the_script_can_be_seen_and_not_submitted(tmp_path: Path) -> None:
    write_files(tmp_path)
    shown = run(tmp_path, *SUBMIT, "--dry-run", "run", "train.py", "0")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    done = run(tmp_path, *SUBMIT, "run", "train.py", "0", PATH=str(Path(sys.executable).parent))
    assert done.returncode == 2
    assert "there is no sbatch on this machine" in done.stderr
    assert not (tmp_path / "runs").exists()
