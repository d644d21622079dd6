"""Running the real command, as a user does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from lockstep.cli import main
from tests.signals import own_signals

LOCKSTEP = [sys.executable, "-m", "lockstep.cli"]
SMALL_LM = (
    "--set",
    "model.width=32",
    "--set",
    "model.layers=2",
    "--set",
    "model.context=32",
    "--set",
    "global_batch=8",
)


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def in_this_process(folder: Path, *args: str, **environment: str) -> Done:
    """`lockstep ARGS` where no process of its own matters: this one has imported everything already."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch("sys.argv", ["lockstep", *args]),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as exit_,
        own_signals(),
    ):
        main()
    assert isinstance(exit_.value.code, int | None)
    return Done(exit_.value.code or 0, out.getvalue(), err.getvalue())


def lockstep(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `lockstep ARGS` in a folder to its end."""
    return run(folder, *LOCKSTEP, *args, **environment)


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run any command in a folder to its end."""
    return subprocess.run(
        command,
        cwd=folder,
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    """Start `lockstep ARGS` in a folder and go on."""
    return subprocess.Popen(
        [*LOCKSTEP, *args],
        cwd=folder,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def clean_environment() -> dict[str, str]:
    """An environment in which no launcher, and no other test, has left anything."""
    strange = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
        "MASTER_",
        "SLURM_",
        "OMPI_",
        "PMI",
        "LOCKSTEP_",
        "TORCHELASTIC_",
        "OMP_",
        "GLOO_",
        "NCCL_",
        "TP_",
    )
    return {key: value for key, value in os.environ.items() if not key.startswith(strange)}


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def events(run_folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The events of a run so far."""
    path = run_folder / "events.jsonl"
    whole_lines = path.read_text().split("\n")[:-1] if path.exists() else []
    found = [json.loads(line) for line in whole_lines]
    return [event for event in found if kind is None or event["kind"] == kind]


def started_for(run_folder: Path) -> list[psutil.Process]:
    """What the launchers of a run have started that is alive; other tests have runs of the same name."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "lockstep.launch.worker" in (process.info["cmdline"] or []):
            with suppress(psutil.Error, KeyError):  # one that ends has no environment any more
                here = Path(process.cwd()) / process.environ()["LOCKSTEP_RUN_DIR"]
                found += [process] if here.resolve() == run_folder.resolve() else []
    return found


def ranks_of(run_folder: Path) -> list[psutil.Process]:
    """The ranks among them, without what these have started: a fork has the name of its parent until it is another."""
    named = {}
    for process in started_for(run_folder):
        with suppress(psutil.Error):
            if process.name().startswith("lockstep-rank"):
                named[process.pid] = (process, process.ppid())
    return [process for process, parent in named.values() if parent not in named]


def listens(pid: int) -> bool:
    """Whether a process has said what it does with SIGTERM."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def interrupt(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """Send a signal and wait for the end; returns exit code and output."""
    process.send_signal(number)
    output, _ = process.communicate()
    return process.returncode, output


MODEL_OF_BLOCKS = """
import sys
import torch, lockstep
from torch import nn

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return torch.randn(6, generator=torch.Generator().manual_seed(i))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(4))
        self.out = nn.Linear(6, 1)
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
            if "item" in sys.argv:
                x = x * x.mean().item()
        return self.out(x)
"""
"""The head of a script: samples, and a model of four blocks, which reads a value when it is told `item`."""
