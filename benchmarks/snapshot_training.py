"""The training of tests/faults/planted_training.py as it is written by hand: DDP, and a snapshot every ten steps.

`snapshot_training.py FAULT NOTES WIDTH TIMEOUT`, under torchrun. The snapshot is torch.save with an atomic rename, much
as in torch's own tutorial on fault tolerance. The faults are the same, at the same step.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

STEPS, STRIKES_AT, SAVES_EVERY, MICRO_BATCH, RANKS = 40, 25, 10, 20, 2
BAD_SAMPLE = 777
SIGNALS = {
    "kill": signal.SIGKILL,
    "kill-rank-0": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "stopped-rank-0": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
}

name, notes, width, timeout = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
struck, snapshot = notes / "struck", notes / "snapshot.pt"
strikes = name != "none" and (name.endswith("-again") or not struck.exists())


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS * MICRO_BATCH * RANKS

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.randn(8, generator=torch.Generator().manual_seed(index))
        if index == BAD_SAMPLE and name.startswith("nan"):
            strike()
            sample[3] = torch.nan
        return sample


def strike() -> None:
    if not struck.exists():
        temporary = notes / f"struck.{os.getpid()}"
        temporary.write_text(repr(time.time()))
        temporary.replace(struck)


def act(rank: int) -> None:
    if name == "shapes":
        strike()
        dist.all_reduce(torch.ones(3 + 4 * rank))
    elif name == "exception-everywhere":
        strike()
        raise ValueError("a bad sample")
    elif (rank == 1) != name.endswith("rank-0"):
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
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if name == "skipped-collective":
        dist.all_reduce(torch.ones(3))
    if name == "save-on-rank-0":
        dist.barrier()
    if name == "asleep":
        time.sleep(1000)
    if name == "ctrl-c":
        os.killpg(os.getpgid(os.getppid()), signal.SIGINT)
        time.sleep(1)


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = 0
if snapshot.exists():
    state = torch.load(snapshot, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
replicas = DistributedDataParallel(model)
torch.manual_seed(rank)
samples = Samples()
sampler: DistributedSampler[torch.Tensor] = DistributedSampler(samples, RANKS, rank, seed=0)
began = step
for number, x in enumerate(DataLoader(samples, MICRO_BATCH, sampler=sampler)):
    if number < began:
        continue
    if name == "memory" and strikes and step >= STRIKES_AT:
        strike()
        torch.empty(1 << 50)
    optimizer.zero_grad()
    loss = (replicas(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    step += 1
    if rank == 0:
        with (notes / "steps").open("a") as file:
            file.write(f"{began} {step} {time.time()!r}\n")
    if step % SAVES_EVERY == 0 and rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, snapshot.with_suffix(".new"))
        snapshot.with_suffix(".new").replace(snapshot)
    if strikes and step == STRIKES_AT:
        if name == "uneven" and rank == 1:
            strike()
            break
        act(rank)
if rank == 0:
    torch.save({key: value.detach().clone() for key, value in model.named_parameters()}, notes / "weights.pt")
dist.destroy_process_group()
