"""Faults on a GPU: memory that is full, ranks that hang, and what NCCL has recorded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lockstep.faults.watchdog import dump_flights
from tests.cli.commands import LOCKSTEP, clean_environment, events
from tests.ranks import Job, RankPool

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys, time
import torch, lockstep
from torch import nn

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 640
    def __getitem__(self, i):
        return torch.randn(8, generator=torch.Generator().manual_seed(i))

def loss(model, x):
    if "memory" in sys.argv and len(x) > 4:
        x = x + torch.zeros(40 << 30, device=x.device).sum()
    return (model(x) - x.sum(1, keepdim=True)).square().sum(), len(x)

run = lockstep.init(timeout_minutes=0.15)
engine = run.setup(lambda: nn.Linear(8, 1), loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
for batch in run.loader(Samples(), global_batch=32, micro_batch=16, workers=0, steps=12):
    out = engine.step(batch)
    run.save()
    if out.step == 5 and "hang" in sys.argv and run.rank == 1:
        time.sleep(600)
run.close()
"""


def lockstep(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    environment = clean_environment()
    return subprocess.run(
        [*LOCKSTEP, "run", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_run_that_fills_the_memory_goes_on_with_half_the_micro_batch(tmp_path: Path) -> None:
    done = lockstep(tmp_path, "--nproc", "1", "--on-oom", "shrink", "train.py", "memory")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "train"
    assert [event["micro_batch"] for event in events(folder, "failure")] == [8, 4]
    assert [(event["micro_batch"], event["global_batch"]) for event in events(folder, "start")][-1] == (4, 32)
    text = events(folder, "failure")[0]["text"]
    assert "the GPU has no memory left in the trial of step 1" in text
    assert "micro_batch = 8 (--on-oom shrink does it by itself)" in text


def test_a_hang_of_ranks_that_share_a_gpu_is_explained(tmp_path: Path) -> None:
    done = lockstep(tmp_path, "--nproc", "2", "--share-gpu", "--restarts", "0", "train.py", "hang")
    assert done.returncode == 1
    assert "rank 1 is still at train.py" in done.stderr
    assert "rank 0 waits in the loop over the loader at train.py" in done.stderr


def record(_: Job, folder: Path) -> str:
    """One rank with NCCL: its collectives are kept without any variable of the user's."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    dist.all_reduce(torch.ones(3, device="cuda"))
    torch.cuda.synchronize()
    dump_flights(folder / "collectives.json")
    dist.destroy_process_group()
    return (folder / "collectives.json").read_text()


def test_nccl_keeps_its_last_collectives_for_the_details_of_a_hang(ranks: RankPool, tmp_path: Path) -> None:
    (text,) = ranks.run(record, 1, tmp_path, timeout=100)
    assert any("all_reduce" in entry["profiling_name"] for entry in json.loads(text)["entries"])
