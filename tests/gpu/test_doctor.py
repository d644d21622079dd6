"""The doctor on a machine with a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.commands import LOCKSTEP, run

pytestmark = pytest.mark.gpu


def test_it_sees_the_gpu_and_checks_nccl(tmp_path: Path) -> None:
    done = run(tmp_path, *LOCKSTEP, "doctor", "--nproc", "1", "--json")
    report = json.loads(done.stdout)
    (gpu,) = report["nodes"][0]["gpus"]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert {"driver", "nccl", "cuda"} <= report["nodes"][0]["versions"].keys()
    assert not [one for one in report["findings"] if one["level"] == "broken"], report["findings"]


def test_ranks_that_share_a_gpu_get_the_right_values(tmp_path: Path) -> None:
    done = run(tmp_path, *LOCKSTEP, "doctor", "--nproc", "2", "--share-gpu", "--json")
    evidence = {one["check"]: one["evidence"] for one in json.loads(done.stdout)["findings"]}
    assert evidence["collectives"].endswith("over gloo: the right values"), done.stdout + done.stderr


def test_a_gpu_that_another_process_is_on_is_named(tmp_path: Path) -> None:
    torch.zeros(10_000_000, device="cuda")
    done = run(tmp_path, *LOCKSTEP, "doctor", "--nproc", "1", "--json")
    found = [one["evidence"] for one in json.loads(done.stdout)["findings"] if one["check"] == "GPUs"]
    assert any("another process is on it" in text for text in found), found
