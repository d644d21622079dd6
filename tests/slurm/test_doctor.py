"""The doctor inside an allocation of a real Slurm."""

from __future__ import annotations

import json

import pytest

from tests.cli.commands import LOCKSTEP

pytestmark = pytest.mark.slurm


@pytest.mark.slow
def test_an_allocation_is_examined_as_a_whole(slurm, tmp_path):
    step = ("srun", "--nodes=2", "--ntasks-per-node=1")
    done = slurm.run(*step, *LOCKSTEP, "doctor", "--nproc", "1", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert [node["host"] for node in report["nodes"]] == ["node1", "node2"]
    evidence = {finding["check"]: finding["evidence"] for finding in report["findings"]}
    assert "the right values" in evidence["collectives"], done.stdout + done.stderr
    assert "the same on all nodes" in evidence["run folder"]
    assert done.returncode == (0 if report["ok"] else 1)
