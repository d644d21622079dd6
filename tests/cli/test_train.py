"""`lockstep train` and `lockstep run`, as real processes."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.commands import events, interrupt, lockstep, run, start, wait_for, workers_of

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


SPAWN_SCRIPT = """
import socket, sys, torch, lockstep
from torch import nn

def train(rank, port):
    run = lockstep.init(rank=rank, world_size=2, head=f"127.0.0.1:{port}", name="spawned")
    engine = run.setup(
        lambda: nn.Linear(4, 1),
        lambda model, x: (model(x).square().sum(), len(x)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    for batch in run.loader(torch.utils.data.TensorDataset(torch.ones(8, 4)), global_batch=8, steps=3,
                            collate=lambda samples: torch.stack([x for x, in samples])):
        engine.step(batch)
    run.close()

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port,), nprocs=2)
"""


def losses(run_folder: Path) -> list[float]:
    return [event["loss"] for event in events(run_folder, "step")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `lockstep train digits` ran once on two processes."""
    folder = tmp_path_factory.mktemp("trained")
    done = lockstep(folder, "train", "digits", "--steps", "40", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["run"] == "runs/digits"
    assert result["step"] == 40
    assert "try next" not in done.stdout
    return folder


def test_a_run_leaves_one_folder_with_everything_in_it(trained):
    folder = trained / "runs" / "digits"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.toml", "events.jsonl", "checkpoints", "logs", "tb", ".lock"}
    assert len(list((folder / "logs").glob("*.0.log"))) == len(list((folder / "logs").glob("*.1.log"))) == 1
    assert (folder / "checkpoints" / "step-00000040" / "index.json").exists()
    assert (folder / "checkpoints" / "best.json").exists()
    kinds = [event["kind"] for event in events(folder)]
    assert kinds.count("step") == 40
    assert kinds[-1] == "end"
    assert {"start", "baseline", "validation", "checkpoint"} <= set(kinds)


@pytest.mark.parametrize(
    "options",
    [
        ("--layout", "fsdp=2"),
        pytest.param(("--nproc", "1"), marks=pytest.mark.slow),
        pytest.param(("--layout", "dp=3", "--nproc", "3"), marks=pytest.mark.slow),
    ],
)
def test_another_layout_gives_the_same_numbers(trained, tmp_path, options):
    done = lockstep(tmp_path, "train", "digits", "--steps", "40", *options)
    assert done.returncode == 0, done.stderr
    ours, theirs = losses(tmp_path / "runs" / "digits"), losses(trained / "runs" / "digits")
    assert ours[:10] == pytest.approx(theirs[:10], rel=1e-6)
    assert ours == pytest.approx(theirs, rel=1e-3), "AdamW grows the last bit of a sum; tests/parity says how much"
    assert "try next" in done.stdout


@pytest.mark.slow
def test_the_same_command_gives_the_same_bits_and_the_next_number(trained):
    done = lockstep(trained, "train", "digits", "--steps", "40")
    assert "new run runs/digits-2" in done.stdout
    assert losses(trained / "runs" / "digits-2") == losses(trained / "runs" / "digits")
    first, second = (
        (trained / "runs" / name / "checkpoints" / "step-00000040" / "shard-00000.safetensors").read_bytes()
        for name in ("digits", "digits-2")
    )
    assert first == second


def test_dry_run_prints_every_value_with_its_source_and_writes_nothing(tmp_path):
    done = lockstep(tmp_path, "train", "digits", "--set", "seed=7", "--dry-run", COLUMNS="160")
    assert done.returncode == 0
    rows = {line.split()[0]: line.rstrip() for line in done.stdout.splitlines() if line.strip()}
    assert rows["seed"].split() == ["seed", "7", "--set"]
    assert rows["global_batch"].endswith("recipe digits")
    assert rows["keep"].endswith("default")
    assert "dp=2" in rows["layout"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow)]
)
def test_a_stopped_run_goes_on_and_ends_with_the_same_bits(trained, tmp_path, number, code):
    folder = tmp_path / "runs" / "digits"
    command = ("train", "digits", "--steps", "40", "--set", 'save_every="never"')
    process = start(tmp_path, *command)
    wait_for(lambda: len(events(folder, "step")) > 3, "the first steps")
    stopped, output = interrupt(process, number)
    if events(folder, "end"):
        pytest.fail("the run was over before the signal came")
    assert stopped == code, output
    step = events(folder, "stop")[0]["step"]
    assert (folder / "checkpoints" / f"step-{step:08d}" / "index.json").exists()
    assert not workers_of(folder)

    again = lockstep(tmp_path, *command)

    assert again.returncode == 0, again.stderr
    assert "continuing the unfinished run runs/digits" in again.stdout
    assert losses(folder) == losses(trained / "runs" / "digits"), "no step lost, none repeated, the same bits"


def test_a_changed_config_does_not_continue_a_run(tmp_path):
    folder = tmp_path / "runs" / "digits"
    process = start(tmp_path, "train", "digits", "--steps", "4000")
    wait_for(lambda: len(events(folder, "step")) > 1, "the first steps")
    interrupt(process, signal.SIGINT)
    done = lockstep(tmp_path, "train", "digits", "--steps", "4000", "--set", "seed=1")
    assert done.returncode == 2
    assert "unfinished run with seed = 0, now it is 1" in done.stderr


def test_a_killed_launcher_leaves_no_worker_behind(tmp_path):
    folder = tmp_path / "runs" / "orphans"
    process = start(tmp_path, "train", "digits", "--steps", "4000", "--name", "orphans")
    wait_for(lambda: len(events(folder, "step")) > 1, "the first steps")
    assert len(workers_of(folder)) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not workers_of(folder), "the workers to end", 10)


def test_a_nan_in_the_data_stops_at_that_step_naming_rank_and_samples(tmp_path):
    (tmp_path / "nan.py").write_text(NAN_SCRIPT)
    done = lockstep(tmp_path, "run", "nan.py")
    assert done.returncode == 1
    last = done.stderr.splitlines()
    assert len(last) <= 15
    steps = len(events(tmp_path / "runs" / "nan", "step"))
    assert f"the loss is not finite at step {steps + 1} on rank" in last[0]
    assert "37" in last[0]


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("1 / 0", "rank 1 failed: ZeroDivisionError: division by zero"),
        pytest.param("import sys; sys.exit(2)", "rank 1 exited with code 2", marks=pytest.mark.slow),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL"),
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
def test_one_script_runs_unchanged_under_every_launcher_with_the_same_numbers(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    launchers = {
        "plain python": (sys.executable,),
        "torchrun": torchrun,
        "lockstep run": (sys.executable, "-m", "lockstep.cli", "run", "--layout", "fsdp=2"),
    }
    first_losses = {}
    for name, launcher in launchers.items():
        (tmp_path / name).mkdir()
        done = run(tmp_path / name, *launcher, str(EXAMPLES / "digits.py"))
        assert done.returncode == 0, done.stderr
        assert re.search(r"step 200 \| validation loss .* \| accuracy 9.* \(3\d\d/359\)", done.stdout)
        first_losses[name] = losses(tmp_path / name / "runs" / "digits")[:10]
        assert len(first_losses[name]) == 10
    assert first_losses["torchrun"] == pytest.approx(first_losses["plain python"], rel=1e-6)
    assert first_losses["lockstep run"] == pytest.approx(first_losses["plain python"], rel=1e-6)


@pytest.mark.slow
def test_ranks_that_a_script_spawned_itself_train_together(tmp_path):
    (tmp_path / "spawn.py").write_text(SPAWN_SCRIPT)
    done = run(tmp_path, sys.executable, "spawn.py")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "spawned"
    assert events(folder, "start")[0]["layout"] == "dp=2"
    assert len(losses(folder)) == 3


@pytest.mark.slow
@pytest.mark.limit(240)
def test_the_default_recipe_learns_more_than_a_bigram_model(tmp_path):
    done = lockstep(tmp_path, "train", "--json")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "lm"
    baseline = events(folder, "baseline")[0]
    validation = events(folder, "validation")[-1]["loss"]
    assert baseline["name"] == "bigram"
    assert validation < baseline["loss"] - 0.2
    assert len(events(folder, "sample")[0]["text"]) > 50
