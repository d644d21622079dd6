"""`lockstep submit --snapshot`: a copy of the script's code, and the job that runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lockstep.config import cluster
from lockstep.errors import UserError
from lockstep.launch import queue, snapshot
from lockstep.launch.snapshot import copy_code, files_of
from tests.cli.commands import in_this_process


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in ("train.py", "parts/model.py", "conf/small.yaml", "data/big.bin", "runs/old/code/train.py", "new.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    return folder


def names(folder: Path) -> list[str]:
    return [str(path) for path in files_of(folder / "train.py", folder / "runs")]


def test_it_has_what_git_tracks_and_python_files_but_nothing_of_the_runs(project: Path) -> None:
    assert names(project) == ["new.py", "parts/model.py", "train.py"], "without git"
    for command in ("init -q", "add train.py parts conf"):
        subprocess.run(["git", *command.split()], cwd=project, check=True)
    assert names(project) == ["conf/small.yaml", "new.py", "parts/model.py", "train.py"]
    (project / ".gitignore").write_text("train.py\nnew.py\n")
    subprocess.run(["git", "rm", "-q", "--cached", "train.py"], cwd=project, check=True)
    assert names(project) == ["conf/small.yaml", "parts/model.py", "train.py"], "the script is always there"


def test_too_much_of_it_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_FILES", 2)
    with pytest.raises(UserError, match=r"more than 2 files or 50 MB: put the script into a folder"):
        names(project)


def test_a_copy_takes_the_place_of_the_one_before(project: Path, tmp_path: Path) -> None:
    target = tmp_path / "run" / "code"
    target.parent.mkdir()
    copy_code(project / "train.py", [Path("train.py"), Path("parts/model.py")], target)
    (project / "train.py").write_text("# another\n")
    copy_code(project / "train.py", [Path("train.py")], target)
    assert [str(path.relative_to(target)) for path in target.rglob("*")] == ["train.py"]
    assert (target / "train.py").read_text() == "# another\n"
    assert list(target.parent.iterdir()) == [target]


def test_the_job_runs_the_copy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "check_shared", lambda *_: None)  # of the folder for temporary files
    monkeypatch.setattr(queue, "check_accepted", lambda _: None)
    monkeypatch.setattr(queue, "submit", lambda _: "17")
    options = ["--snapshot", "--nproc", "2"]
    done = in_this_process(project, "submit", *options, "run", "--layout", "dp=2", "./train.py", "--lr", "./train.py")
    assert done.returncode == 0, done.stderr
    code = project / "runs" / "train" / "code"
    assert f"--layout dp=2 {code}/train.py --lr ./train.py &" in (project / "runs/train/job.sbatch").read_text()
    assert (code / "parts/model.py").read_text() == "# parts/model.py\n"
    assert not (code / "data").exists()


def test_a_job_that_is_refused_leaves_no_copy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> str:
        raise UserError("Slurm does not take it", "ask it why")

    monkeypatch.setattr(cluster, "check_shared", lambda *_: None)  # of the folder for temporary files
    monkeypatch.setattr(queue, "check_accepted", lambda _: None)
    monkeypatch.setattr(queue, "submit", refuse)
    assert in_this_process(project, "submit", "--snapshot", "run", "train.py").returncode == 2
    assert not (project / "runs" / "train").exists()


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("submit --snapshot train digits", "--snapshot keeps a script's code, and a recipe has none of its own"),
        ("submit --snapshot --kubernetes image run train.py", "and a JobSet runs its image's: leave it out"),
    ],
)
def test_it_is_refused_where_there_is_no_code_to_keep(project: Path, command: str, sentence: str) -> None:
    done = in_this_process(project, *command.split())
    assert done.returncode == 2
    assert sentence in done.stderr
