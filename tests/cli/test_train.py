"""`lockstep train` and `lockstep run`, as real processes."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.record.failure import short_host
from tests.cli.commands import events, in_this_process, interrupt, lockstep, ranks_of, start, started_for
from tests.patience import wait_for

HOST = short_host()
STEPS = "400"
"""Enough to be stopped on the way."""
EXAMPLES = Path(__file__).parents[2] / "examples"

NAN_SCRIPT = """
import torch, lockstep
from torch import nn

class WithOneBadSample(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.full((4,), float("nan") if i == 37 else float(i))

run = lockstep.init()
engine = run.setup(
    lambda: nn.Linear(4, 1),
    lambda model, x: (model(x).square().sum(), len(x)),
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
)
for batch in run.loader(WithOneBadSample(), global_batch=8, micro_batch=4):
    engine.step(batch)
"""


def losses(run_folder: Path) -> list[float]:
    return [event["loss"] for event in events(run_folder, "step")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `lockstep train digits` ran once on two processes."""
    folder = tmp_path_factory.mktemp("trained")
    done = lockstep(folder, "train", "digits", "--steps", STEPS, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["run"] == "runs/digits"
    assert result["step"] == int(STEPS)
    assert "try next" not in done.stdout
    return folder


def test_a_run_leaves_one_folder_with_everything_in_it(trained):
    folder = trained / "runs" / "digits"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.toml", "events.jsonl", "checkpoints", "logs", "tb", "report.html", ".lock"}
    assert len(list((folder / "logs").glob("*.0.log"))) == len(list((folder / "logs").glob("*.1.log"))) == 1
    assert (folder / "checkpoints" / "step-00000400" / "index.json").exists()
    kinds = [event["kind"] for event in events(folder)]
    assert kinds.count("step") == int(STEPS)
    assert kinds[-1] == "end"
    assert {"start", "baseline", "validation", "checkpoint"} <= set(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--layout", "fsdp=2"), ("--nproc", "1"), ("--layout", "dp=3", "--nproc", "3")])
def test_another_layout_gives_the_same_numbers(trained, tmp_path, options):
    done = lockstep(tmp_path, "train", "digits", "--steps", STEPS, *options)
    assert done.returncode == 0, done.stderr
    ours, theirs = losses(tmp_path / "runs" / "digits"), losses(trained / "runs" / "digits")
    assert ours[:10] == pytest.approx(theirs[:10], rel=1e-6)
    assert ours[:40] == pytest.approx(theirs[:40], rel=1e-3), (
        "AdamW grows the last bit of a sum; tests/parity says how much"
    )
    assert "try next" in done.stdout


@pytest.mark.slow
def test_the_same_command_gives_the_same_bits_and_the_next_number(trained):
    done = lockstep(trained, "train", "digits", "--steps", STEPS)
    assert "new run runs/digits-2" in done.stdout
    assert losses(trained / "runs" / "digits-2") == losses(trained / "runs" / "digits")
    first, second = (
        (trained / "runs" / name / "checkpoints" / "step-00000400" / "shard-00000.safetensors").read_bytes()
        for name in ("digits", "digits-2")
    )
    assert first == second


def test_dry_run_prints_every_value_with_its_source_and_writes_nothing(tmp_path):
    done = in_this_process(tmp_path, "train", "digits", "--set", "seed=7", "--dry-run", COLUMNS="160")
    assert done.returncode == 0
    rows = {line.split()[0]: line.rstrip() for line in done.stdout.splitlines() if line.strip()}
    assert rows["seed"].split() == ["seed", "7", "--set"]
    assert rows["global_batch"].endswith("recipe digits")
    assert rows["keep"].endswith("default")
    assert "dp=2" in rows["layout"]
    assert list(tmp_path.iterdir()) == []


STOPPABLE = ("train", "digits", "--steps", STEPS, "--set", 'save_every="never"')


@dataclass
class Stopped:
    """A run that a signal stopped after its first steps."""

    folder: Path
    code: int
    output: str


def stop(folder: Path, number: signal.Signals) -> Stopped:
    process = start(folder, *STOPPABLE)
    wait_for(lambda: bool(events(folder / "runs" / "digits", "step")), "the first step")
    code, output = interrupt(process, number)
    if events(folder / "runs" / "digits", "end"):
        pytest.fail("the run was over before the signal came")
    return Stopped(folder, code, output)


def assert_it_goes_on_with_the_same_bits(stopped: Stopped, trained: Path) -> None:
    folder = stopped.folder / "runs" / "digits"
    step = events(folder, "stop")[0]["step"]
    assert (folder / "checkpoints" / f"step-{step:08d}" / "index.json").exists()
    assert not started_for(folder)

    again = lockstep(stopped.folder, *STOPPABLE)

    assert again.returncode == 0, again.stderr
    assert "continuing the unfinished run runs/digits" in again.stdout
    assert losses(folder) == losses(trained / "runs" / "digits"), "no step lost, none repeated, the same bits"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    return stop(tmp_path_factory.mktemp("interrupted"), signal.SIGINT)


def test_a_changed_config_does_not_continue_a_run(interrupted, tmp_path):
    assert interrupted.code == 130, interrupted.output
    shutil.copytree(interrupted.folder / "runs", tmp_path / "runs")
    done = in_this_process(tmp_path, *STOPPABLE, "--set", "seed=1")
    assert done.returncode == 2
    assert "unfinished run with seed = 0, now it is 1" in done.stderr


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bits(trained, interrupted, tmp_path):
    assert interrupted.code == 130, interrupted.output
    shutil.copytree(interrupted.folder, tmp_path, dirs_exist_ok=True)
    assert_it_goes_on_with_the_same_bits(Stopped(tmp_path, 130, ""), trained)


@pytest.mark.slow
def test_a_terminated_run_goes_on_and_ends_with_the_same_bits(trained, tmp_path):
    terminated = stop(tmp_path, signal.SIGTERM)
    assert terminated.code == 75, terminated.output
    assert_it_goes_on_with_the_same_bits(terminated, trained)


def test_a_killed_launcher_leaves_no_worker_behind(tmp_path):
    folder = tmp_path / "runs" / "orphans"
    process = start(tmp_path, "train", "digits", "--steps", "4000", "--name", "orphans")
    wait_for(lambda: len(events(folder, "step")) > 1, "the first steps")
    assert len(ranks_of(folder)) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not started_for(folder), "the workers to end")


def test_a_nan_in_the_data_stops_at_that_step_naming_rank_and_samples(tmp_path):
    (tmp_path / "nan.py").write_text(NAN_SCRIPT)
    done = lockstep(tmp_path, "run", "nan.py")
    assert done.returncode == 1
    last = done.stderr.splitlines()
    assert len(last) <= 15
    steps = len(events(tmp_path / "runs" / "nan", "step"))
    assert f"the loss is not finite at step {steps + 1} on rank" in last[0]
    assert "37" in last[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("1 / 0", f"rank 1 on {HOST} failed: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(2)", f"rank 1 on {HOST} called sys.exit(2)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", f"rank 1 on {HOST} was killed by SIGKILL"),
    ],
)
def test_a_failing_rank_is_named_with_its_cause(tmp_path, body, verdict):
    script = f"import lockstep\nrun = lockstep.init()\nif run.rank == 1:\n    {body}\nrun.reduce(1, 'sum')\n"
    (tmp_path / "fails.py").write_text(script)
    done = lockstep(tmp_path, "run", "fails.py")
    assert done.returncode == 1, "a script's own exit code 2 is not wrong input"
    assert done.stderr.startswith(f"lockstep: {verdict}")
    assert "log: runs/fails/logs/" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr, "that is in the log"


@pytest.mark.slow
@pytest.mark.limit(300)
def test_the_default_recipe_learns_more_than_a_bigram_model(tmp_path):
    done = lockstep(tmp_path, "train", "--json")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "lm"
    baseline = events(folder, "baseline")[0]
    validation = events(folder, "validation")[-1]["loss"]
    assert baseline["name"] == "bigram"
    assert validation < baseline["loss"] - 0.2
    assert len(events(folder, "sample")[0]["text"]) > 50
