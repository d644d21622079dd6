"""The unchanged script as the tasks of a real srun: nothing is set by hand, the numbers are those of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.one_script import assert_trained_alike, write_script
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    done = run(folder, sys.executable, write_script(folder).name, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return folder


def srun(slurm: Cluster, folder: Path, *options: str) -> str:
    done = slurm.run("srun", "--kill-on-bad-exit=1", *options, sys.executable, write_script(folder).name, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_nodes_with_two_ranks_each(slurm, reference, tmp_path):
    note = 'echo $SLURM_PROCID $(hostname) $(ip -4 -o address show eth0 | grep -o "10[.0-9]*" | head -1)'
    two_by_two = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    told = slurm.run("srun", *two_by_two, "sh", "-c", note)
    places = [line.split() for line in sorted(told.stdout.splitlines())]
    nodes = [slurm.nodes[f"node{number}"] for number in (1, 1, 2, 2)]
    assert places == [[str(rank), node.name, node.address] for rank, node in enumerate(nodes)]

    printed = srun(slurm, tmp_path, *two_by_two)

    assert_trained_alike(tmp_path, reference, "dp=4")
    assert printed.count("done: 6 steps") == 1, "rank 0 alone speaks"
    assert (tmp_path / "runs" / "one" / "checkpoints").is_dir(), "the run folder is on the shared disk"


@pytest.mark.slow
def test_two_ranks_on_one_node(slurm, reference, tmp_path):
    srun(slurm, tmp_path, "--nodes=1", "--ntasks=2")
    assert_trained_alike(tmp_path, reference, "dp=2")


@pytest.mark.slow
def test_nodes_with_unequally_many_ranks(slurm, reference, tmp_path):
    srun(slurm, tmp_path, "--nodes=2", "--ntasks=3", "--distribution=block", "--nodelist=node3,node4")
    assert_trained_alike(tmp_path, reference, "dp=3", rel=3e-6)


@pytest.mark.slow
def test_python_in_a_batch_script_is_one_process_though_the_job_has_four_tasks(slurm, reference, tmp_path):
    write_script(tmp_path)
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\nexec {sys.executable} one.py\n")
    options = ("--nodes=2", "--ntasks-per-node=2", "--output=job.out", "--open-mode=append")
    submitted = slurm.run("sbatch", "--parsable", *options, "job.sh", cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    job = slurm.wait_for_job(submitted.stdout.strip(), "COMPLETED", "FAILED", "CANCELLED")
    assert job["JobState"] == "COMPLETED", (tmp_path / "job.out").read_text()
    assert_trained_alike(tmp_path, reference, "single")
