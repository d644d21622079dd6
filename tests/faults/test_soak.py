"""Random kills of ranks and launchers: the run comes through with the bits of one that nobody disturbed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep.checkpoint.disk.files import verify_checkpoint
from lockstep.checkpoint.disk.format import step_folder, steps_on_disk
from tests.cli.commands import clean_environment, events, ranks_of, started_for
from tests.faults.test_nodes import weights_of
from tests.patience import wait_for

STEPS_FOR_A_KILL = 8

SCRIPT = """
import time
import torch, lockstep
from torch import nn

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 3200
    def __getitem__(self, i):
        return torch.randn(8, generator=torch.Generator().manual_seed(i))

def loss(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().sum(), len(x)

def build():
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))

run = lockstep.init(timeout_minutes=1)
engine = run.setup(build, loss, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
for batch in run.loader(Samples(), global_batch=8, workers=0, steps=STEPS):
    out = engine.step(batch)
    if out.step % 4 == 0:
        run.save()
    time.sleep(0.02)
run.close()
"""


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lockstep.cli", "run", "--nproc", "2", "--restarts", "5", "train.py"]
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            command, cwd=folder, env=clean_environment(), stdout=output, stderr=subprocess.STDOUT, text=True
        )


def steps_of_last_attempt(run_folder: Path) -> int:
    found = events(run_folder, "step")
    return sum(event["attempt"] == found[-1]["attempt"] for event in found) if found else 0


@pytest.mark.slow
@pytest.mark.limit(1800)
@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.soak)])
def test_random_kills_of_ranks_and_launchers_change_no_bit(count: int, tmp_path: Path) -> None:
    steps = STEPS_FOR_A_KILL * count
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in (undisturbed, killed):
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT.replace("STEPS", str(steps)))
    assert start(undisturbed).wait() == 0
    chance = random.Random(7)
    run_folder = killed / "runs" / "train"
    launcher = start(killed)
    kills = 0
    attempts: set[int] = set()
    while launcher.poll() in (None, -signal.SIGKILL):
        if launcher.poll() is not None:
            wait_for(lambda: not started_for(run_folder), "the end of the ranks of a killed launcher")
            launcher = start(killed)
        last = events(run_folder, "step")[-1:] if (run_folder / "events.jsonl").exists() else []
        is_new = bool(last) and last[0]["attempt"] not in attempts
        if kills < count and is_new and steps_of_last_attempt(run_folder) >= chance.randint(1, 9):
            victims: list[Any] = [launcher] if chance.random() < 0.2 else ranks_of(run_folder)
            with suppress(psutil.NoSuchProcess, IndexError):
                chance.choice(victims).kill()
                attempts.add(last[0]["attempt"])
                kills += 1
        time.sleep(0.05)
    output = (killed / "output.txt").read_text()
    assert launcher.returncode == 0, output[-3000:]
    assert kills == count
    for step in steps_on_disk(run_folder):
        verify_checkpoint(step_folder(run_folder, step))
    found, wanted = weights_of(run_folder, steps), weights_of(undisturbed / "runs" / "train", steps)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    losses = [
        {event["step"]: event["loss"] for event in events(one, "step")}
        for one in (run_folder, undisturbed / "runs" / "train")
    ]
    assert losses[0] == losses[1]
    assert events(run_folder, "recovered"), "ranks were killed and started again by their launcher"
