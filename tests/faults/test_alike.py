"""Nodes with another copy of the script, or another command, are refused as soon as they meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import LOCKSTEP, clean_environment
from tests.hosts import hosts
from tests.small_training import small_training

SCRIPT = small_training(40, saves_every=5)


@pytest.mark.parametrize(
    ("lr", "layout", "sentence"),
    [
        ("1e-3", "fsdp=2", "has another train.py than rank"),
        ("1e-2", "dp=2", "has layout = "),
    ],
    ids=["a forgotten copy", "another layout"],
)
def test_two_nodes_that_do_not_run_the_same_thing_are_refused_by_host_and_name(
    tmp_path: Path, lr: str, layout: str, sentence: str
) -> None:
    with hosts(2) as two:
        launchers = []
        for number, host in enumerate(two):
            folder = tmp_path / host.name
            folder.mkdir()
            (folder / "train.py").write_text(SCRIPT.replace("lr=1e-2", f"lr={lr}") if number else SCRIPT)
            where = ["--nodes", "2", "--node-rank", str(number), "--head", f"{two[0].address}:29557", "--nproc", "1"]
            options = [*where, "--run-dir", str(tmp_path / "run"), "--layout", layout if number else "fsdp=2"]
            launchers.append(host.popen([*LOCKSTEP, "run", *options, "train.py"], folder, clean_environment()))
        said = [launcher.communicate()[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [2, 2], said
    for text in said:
        (line,) = [line for line in text.splitlines() if line.startswith("lockstep: ")]
        assert sentence in line
        assert "on host1" in line
        assert "on host2" in line
    assert not (tmp_path / "run").exists(), "nothing was trained"
