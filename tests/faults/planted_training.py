"""A small training in which one fault strikes: `planted_training.py FAULT NOTES [WIDTH]`.

`lockstep run` starts a copy of this file, as it does a user's script; it imports nothing of the tests. What happens is
written into NOTES: when the fault struck, and at the end the weights. Where that note is there already, nothing strikes
any more, unless FAULT ends in "-again".
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

import lockstep

STEPS, STRIKES_AT, SAVES_EVERY, GLOBAL_BATCH, MICRO_BATCH = 40, 25, 10, 40, 20
BAD_SAMPLE = 777
BALLAST = 1_000_000
"""Numbers that make a checkpoint large enough to be killed in the middle of it."""


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS * GLOBAL_BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.randn(8, generator=torch.Generator().manual_seed(index))
        if index == BAD_SAMPLE and name.startswith("nan"):
            strike()
            sample[3] = torch.nan
        return sample


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, 1)
        )
        self.register_buffer("ballast", torch.zeros(BALLAST))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    if name == "memory" and engine.steps_done >= STRIKES_AT and len(x) > MICRO_BATCH // 2:
        strike()
        torch.empty(1 << 50)
    return (model(x) - x.sum(1, keepdim=True)).square().sum(), len(x)


def strike() -> None:
    """The fault comes now."""
    if not struck.exists():
        temporary = notes / f"struck.{os.getpid()}"
        temporary.write_text(f"{time.time()!r} {engine.steps_done}")
        temporary.replace(struck)


def kill_while_saving() -> None:
    while not any((run.folder.path / "checkpoints").glob(f".attempt-*/step-{SAVES_EVERY * 2:08}*")):
        time.sleep(0.0005)
    strike()
    os.kill(os.getpid(), signal.SIGKILL)


def launcher() -> int:
    return psutil.Process().parents()[1].pid


def press_ctrl_c() -> None:
    os.killpg(os.getpgid(launcher()), signal.SIGINT)  # the launcher and its terminal; the ranks have their own


def act(mine: bool) -> None:
    """Strike, on the rank whose fault it is; `mine` is rank 1."""
    if name == "shapes":
        strike()
        dist.all_reduce(torch.ones(3 + 4 * run.rank))
    elif name == "exception-everywhere":
        strike()
        raise ValueError("a bad sample")
    elif name == "max-time":
        strike()
    elif mine == name.endswith("rank-0"):
        return
    elif name == "skipped-collective":
        strike()
        dist.all_reduce(torch.ones(3))
    else:
        strike()
        act_alone()


def act_alone() -> None:
    if name in ("exception", "exception-again"):
        raise ValueError("a bad sample")
    if name.startswith("exit-"):
        sys.exit(int(name.removeprefix("exit-")))
    if name == "segfault":
        ctypes.string_at(0)
    if name == "abort":
        ctypes.CDLL(None).abort()
    if name in SIGNALS:
        os.kill(os.getpid(), SIGNALS[name])
    if name == "kill-launcher":
        os.kill(launcher(), signal.SIGKILL)
        time.sleep(60)
    if name == "save-on-rank-0":
        run.save()
    if name == "asleep":
        time.sleep(1000)
    if name == "stop-file":
        (run.folder.path / "stop").touch()
    if name.startswith("ctrl-c"):
        press_ctrl_c()
    if name == "ctrl-c-twice":
        time.sleep(0.5)
        press_ctrl_c()
        time.sleep(60)


SIGNALS = {
    "kill": signal.SIGKILL,
    "kill-rank-0": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "stopped-rank-0": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
}
SECONDS_A_STEP = {"stop-file": 0.2, "max-time": 3.0, "terminate": 0.05, "usr1": 0.05, "ctrl-c": 0.05}
"""Where something from outside is to come between steps, those after it take this long."""

name, notes = sys.argv[1], Path(sys.argv[2])
width = int(sys.argv[3]) if len(sys.argv) > 3 else 32
struck = notes / "struck"
strikes = name != "none" and (name.endswith("-again") or not struck.exists())

run = lockstep.init()
engine = run.setup(
    Model,
    loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    recover={"on_nonfinite": "skip" if name == "nan-skip" else "stop"},
)
for batch in run.loader(Samples(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, workers=0):
    out = engine.step(batch)
    if strikes and name == "kill-while-saving" and run.rank == 1 and out.step == SAVES_EVERY * 2:
        threading.Thread(target=kill_while_saving, daemon=True).start()
    if out.step % SAVES_EVERY == 0:
        run.save()
    if strikes and out.step == STRIKES_AT:
        if name == "uneven" and run.rank == 1:
            strike()
            break
        act(run.rank == 1)
    if strikes and out.step >= STRIKES_AT:
        time.sleep(SECONDS_A_STEP.get(name, 0))
if run.is_main:
    torch.save({key: value.detach().clone() for key, value in engine.model.named_parameters()}, notes / "weights.pt")
run.close()
