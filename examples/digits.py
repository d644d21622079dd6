"""Handwritten digits, engine level: the user keeps the loop.

python examples/digits.py
torchrun --nproc-per-node 2 examples/digits.py
lockstep run --layout fsdp=2 examples/digits.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.data.corpora import digits


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()


def accuracy(model, batch):
    return (model(batch["x"]).argmax(1) == batch["y"]).sum(), batch["y"].numel()


data = digits()
run = lockstep.init()
engine = run.setup(build_model, loss, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3), clip=1.0)
for batch in run.loader(data.train, global_batch=64, micro_batch=16, epochs=10):
    out = engine.step(batch)
    if out.step % 100 == 0:
        run.validate(data.validation, {"accuracy": accuracy})  # shown, plotted, and saved when it is the best
run.close()
