"""One small script that every launcher starts, and what it must give under each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.commands import events

STEPS = 6

SCRIPT = f"""
import torch, lockstep
from torch import nn

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return torch.randn(6, generator=torch.Generator().manual_seed(i))

def loss(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().sum(), len(x)

run = lockstep.init()
engine = run.setup(
    lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 1)),
    loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    clip=1.0,
)
for batch in run.loader(Samples(), global_batch=8, micro_batch=2, steps={STEPS}, workers=0):
    engine.step(batch)
run.export("weights.safetensors")
"""
"""Trains in `runs/one` below the folder it is started in, and leaves `weights.safetensors` there."""


def write_script(folder: Path) -> Path:
    """The script, as `one.py` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "one.py"
    path.write_text(SCRIPT)
    return path


def assert_trained_alike(folder: Path, reference: Path, layout: str, *, rel: float = 1e-6) -> None:
    """The script ran to its end in `folder`, on this layout, with the numbers that it gave in `reference`."""
    run, expected = folder / "runs" / "one", reference / "runs" / "one"
    starts = events(run, "start")
    assert [start["layout"] for start in starts] == [layout], "one run, of all processes together"
    assert len(events(run, "end")) == 1, "the run is finished"
    losses, expected_losses = ([event["loss"] for event in events(it, "step")] for it in (run, expected))
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected_losses, rel=rel)
    weights, expected_weights = (load_file(it / "weights.safetensors") for it in (folder, reference))
    assert weights.keys() == expected_weights.keys()
    for name, value in weights.items():
        error = (value - expected_weights[name]).norm() / expected_weights[name].norm()
        assert error <= rel, f"{name} is off by {error:.1e}"
