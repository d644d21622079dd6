"""The text of a script that trains for some seconds: `train.py [PAUSE]` waits so long after every step."""

from __future__ import annotations

from tests.patience import patient


def small_training(steps: int, saves_every: int, dropout: float = 0.0) -> str:
    """A script with the batch in eight micro-batches, so that any few ranks can share it out, unevenly too."""
    return f"""
import sys, time
import torch, lockstep
from torch import nn

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, i):
        return torch.randn(8, generator=torch.Generator().manual_seed(i))

def loss(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().sum(), len(x)

def build():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout({dropout}), nn.Linear(32, 1))

run = lockstep.init(timeout_minutes={patient(12) / 60})
run.keep_checkpoints(1000)
engine = run.setup(build, loss, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
for batch in run.loader(Samples(), global_batch=24, micro_batch=3, workers=0, steps={steps}):
    out = engine.step(batch)
    if out.step % {saves_every} == 0:
        run.save()
    time.sleep(float(sys.argv[1]) if sys.argv[1:] else 0.1)
run.close()
"""
