"""Checkpoints of a GPU: copied into pinned memory that is kept, written beside the training, loaded anywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint.disk.format import steps_on_disk
from tests.events import read_events
from tests.parity.problems import adamw, join, text_loss, unfinished
from tests.parity.test_tensor import DROPOUT, GLOBAL_BATCH, GPT, Texts
from tests.ranks import Job, RankPool

pytestmark = pytest.mark.gpu


def live(job: Job, layout: str, run_dir: Path, life: int, stop: int, share: bool) -> list[float]:
    losses = []
    where = {"device": "cuda", "share_gpu": share, "timeout_minutes": 1.5}
    with unfinished(join(job, layout, run_dir, f"{run_dir.name}-{life}", **where)) as run:
        engine = run.setup(lambda: GPT(dropout=DROPOUT, fused=True), text_loss, optimizer=adamw, clip=0.3)
        for batch in run.loader(Texts(), GLOBAL_BATCH, micro_batch=4, steps=8, workers=0):
            out = engine.step(batch)
            losses.append(out.loss)
            run.save()
            if out.step == stop:
                break
        buffers = run._checkpoints._writer.staging._buffers.values()
        assert buffers
        assert all(buffer.is_pinned() for buffer in buffers)
    return losses


def test_a_run_comes_back_with_the_bits_it_would_have_had(ranks: RankPool, tmp_path: Path) -> None:
    (whole,) = ranks.run(live, 1, "single", tmp_path / "whole", 1, 8, False, timeout=110)
    (before,) = ranks.run(live, 1, "single", tmp_path / "run", 1, 4, False, timeout=110)
    (after,) = ranks.run(live, 1, "single", tmp_path / "run", 2, 8, False, timeout=110)
    assert before + after == whole


@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2"])
def test_a_run_moves_from_one_gpu_to_ranks_that_share_one_and_back(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    (whole,) = ranks.run(live, 1, "single", tmp_path / "whole", 1, 8, False, timeout=110)
    (first,) = ranks.run(live, 1, "single", tmp_path / "run", 1, 3, False, timeout=110)
    second = ranks.run(live, 2, layout, tmp_path / "run", 2, 6, True, timeout=110)[0]
    (third,) = ranks.run(live, 1, "single", tmp_path / "run", 3, 8, False, timeout=110)
    assert first + second + third == pytest.approx(whole, rel=2e-4)


STALL = """
import sys, time, torch, lockstep
from torch import nn

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((4,), float(index))

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(20))
    def forward(self, x):
        x = x.repeat(1, 1024)
        for block in self.blocks: x = torch.tanh(block(x))
        return x

def loss(model, rows): return model(rows).sum(), len(rows)

run = lockstep.init("single", run_dir=sys.argv[1], device="cuda")
engine = run.setup(Wide, loss, optimizer=torch.optim.AdamW)
for batch in run.loader(Rows(), 8, steps=8, workers=0):
    out = engine.step(batch)
    if out.step in (2, 5):
        torch.cuda.synchronize()
        run.save()
torch.cuda.synchronize()
started = time.monotonic()
torch.save({"model": engine.model.state_dict(), "optimizer": engine.optimizer.state_dict()}, sys.argv[1] + "/t.pt")
print("TORCH", time.monotonic() - started)
"""


def test_a_large_state_stalls_the_training_for_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four gigabytes; how little is printed, because a time is not a test."""
    (tmp_path / "script.py").write_text(STALL)
    command = [sys.executable, "script.py", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert steps_on_disk(tmp_path / "run") == [2, 5]
    events = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "checkpoint"]
    with capsys.disabled():
        for event in events:
            print(
                f"\n{event['bytes'] / 1e9:.1f} GB: stall {event['stall']:.2f} s, on disk after {event['seconds']:.1f} s"
            )
        print(done.stdout.splitlines()[-1])
    assert all(event["stall"] < event["seconds"] for event in events)


def test_a_gpu_checkpoint_is_plain_weights_for_a_cpu(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(live, 1, "single", tmp_path / "run", 1, 2, False, timeout=110)
    model = lockstep.load(tmp_path / "run", lambda: GPT(fused=True), step="last")
    assert isinstance(model, nn.Module)
    assert next(model.parameters()).device == torch.device("cpu")
    with lockstep.init("single", run_dir=tmp_path / "cpu", resume=str(tmp_path / "run"), device="cpu", seed=5) as run:
        engine = run.setup(lambda: GPT(fused=True), text_loss, optimizer=adamw)
        assert engine.steps_done == 2
