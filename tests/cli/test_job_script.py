"""What `lockstep submit` asks of a cluster for each node, as it stands in the script of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import in_this_process

CPUS = """
[node]
cpus = 32
"""


def asked_for(folder: Path, *options: str) -> dict[str, str]:
    """The options of the job's script."""
    done = in_this_process(folder, "submit", "--dry-run", "--time", "1h", *options, "train", "digits")
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("#SBATCH --") for line in done.stdout.splitlines() if line.startswith("#SBATCH --")]
    return dict(line.partition("=")[::2] for line in lines)


@pytest.mark.parametrize(("gpus", "cpus"), [(1, "12"), (2, "24"), (3, "36"), (4, "48")])
def test_a_part_of_a_nodes_gpus_comes_with_their_part_of_its_cpus(tmp_path: Path, gpus: int, cpus: str) -> None:
    script = asked_for(tmp_path, "--cluster", "example-gpu", "--gpus", str(gpus))
    assert (script["gres"], script["cpus-per-task"]) == (f"gpu:{gpus}", cpus)


def test_a_whole_node_is_all_of_its_cpus(tmp_path: Path) -> None:
    assert asked_for(tmp_path, "--cluster", "example-gpu")["cpus-per-task"] == "48"
    (tmp_path / "plain.toml").write_text(CPUS)
    assert asked_for(tmp_path, "--cluster", "plain.toml")["cpus-per-task"] == "32"


def test_what_the_user_says_of_cpus_is_asked_for(tmp_path: Path) -> None:
    assert asked_for(tmp_path, "--cluster", "example-gpu", "--gpus", "2", "--cpus", "7")["cpus-per-task"] == "7"


def test_without_a_profile_every_process_has_a_cpu(tmp_path: Path) -> None:
    assert asked_for(tmp_path, "--nproc", "3")["cpus-per-task"] == "3"
