"""Samples that do not see each other, forwards that draw nothing: models, losses, optimizers and loops of all kinds."""

# The models and losses have no annotations, as those of most people.
# mypy: check-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import Dataset, TensorDataset

from tests.parity.defaults.case import (
    SIZE,
    UNCUT,
    WITHOUT_SEQUENCES,
    Case,
    Columns,
    adamw,
    dice,
    everywhere,
    with_rate,
)

INPUTS, HIDDEN, CLASSES = 10, 16, 4


def vectors(size: int = SIZE) -> Columns:
    draw = dice("vectors")
    x = torch.randn(size, INPUTS, generator=draw)
    return Columns(
        x=x,
        y=x[:, :3].sin() + 0.1 * torch.randn(size, 3, generator=draw),
        label=torch.randint(CLASSES, (size,), generator=draw),
        weight=torch.rand(size, generator=draw) * (torch.rand(size, generator=draw) > 0.4),
    )


def pictures() -> Columns:
    draw = dice("pictures")
    return Columns(
        image=torch.randn(SIZE, 3, 8, 8, generator=draw) * (1 + torch.arange(SIZE) / SIZE)[:, None, None, None],
        label=torch.randint(CLASSES, (SIZE,), generator=draw),
        mask=torch.randint(2, (SIZE, 8, 8), generator=draw),
    )


def mlp(outputs=3, depth=2):
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(HIDDEN, HIDDEN), nn.Tanh())]
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), *hidden, nn.Linear(HIDDEN, outputs))


def squares(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()


def classes(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum"), len(batch["label"])


def picture_classes(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum"), len(batch["label"])


def picture_masks(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["mask"], reduction="sum"), batch["mask"].numel()


# ---- Batches


def pair_loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), y.numel()


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


class Records(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        row = vectors()[index]
        return Sample(row["x"], row["y"])


def stacked(samples):
    return Sample(torch.stack([one.x for one in samples]), torch.stack([one.y for one in samples]))


def record_loss(model, batch):
    return F.mse_loss(model(batch.x), batch.y, reduction="sum"), batch.y.numel()


class Augmented(Dataset[Any]):
    """Every sample draws its own noise and flip."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        row = pictures()[index]
        image = row["image"] + 0.3 * torch.randn_like(row["image"])
        return {**row, "image": image.flip(-1) if torch.rand(()) < 0.5 else image}


# ---- Convolutions


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, 8)
        self.conv = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = F.relu(self.norm1(self.stem(x)))
        x = F.relu(self.norm2(self.conv(x)))
        return self.head(x.mean((2, 3)))


class TiedConvs(nn.Module):
    """Two convolutions that are one weight, and a third that uses it by hand."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.first = nn.Conv2d(6, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.stem(x).relu()
        x = x + self.first(x).relu()
        x = x + self.second(x).relu()
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, norm=lambda width: nn.GroupNorm(2, width)):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), norm(6), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), norm(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.out = nn.Sequential(nn.Conv2d(12, 6, 3, padding=1), norm(6), nn.ReLU(), nn.Conv2d(6, 2, 1))

    def forward(self, x):
        skip = self.down1(x)
        x = self.down2(F.max_pool2d(skip, 2))
        return self.out(torch.cat([skip, self.up(x)], 1))


# ---- Parameters that not all are trained, or not all alike


class Trunk(nn.Module):
    def __init__(self, freeze=True):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh())
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 3)
        self.trunk.requires_grad_(not freeze)

    def forward(self, x):
        return self.head(self.middle(self.trunk(x)).tanh())


def unfreeze_after_three(model, _optimizer):
    model.trunk.requires_grad_(False)

    def after(step):
        if step == 3:
            model.trunk.requires_grad_(True)

    return after


def two_groups(named):
    """A smaller rate for the trunk, no decay for biases."""
    named = list(named)
    return torch.optim.SGD(
        [
            {"params": [one for one in named if one[0].startswith("trunk")], "lr": 0.02},
            {"params": [one for one in named if not one[0].startswith("trunk")], "weight_decay": 0.1},
        ],
        lr=0.1,
        momentum=0.9,
    )


class LoRA(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def lora():
    model = mlp(depth=3)
    for number in (0, 2, 4):
        model[number] = LoRA(model[number], rank=3)
    return model


# ---- What a script does between steps


def cosine(_model, optimizer):
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return lambda _step: schedule.step()


def one_cycle(_model, optimizer):
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10)
    return lambda _step: schedule.step()


def rate_by_hand(_model, optimizer):
    def after(step):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (1 + step)

    return after


# ---- Losses


def with_l2(model, batch):
    total, count = squares(model, batch)
    return total + count * 0.05 * sum(p.pow(2).sum() for p in model.parameters()), count


def with_gradient_penalty(model, batch):
    x = batch["x"].requires_grad_(True)
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return (scores - batch["y"]).pow(2).sum() + ((slope.norm(dim=1) - 1) ** 2).sum(), len(x)


class Deep(nn.Module):
    """Every layer has a classifier of its own."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(HIDDEN, CLASSES) for _ in range(3))

    def forward(self, x):
        x = self.stem(x).tanh()
        logits = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = x + layer(x).tanh()
            logits.append(head(x))
        return logits


def deep_supervision(model, batch):
    losses = [F.cross_entropy(logits, batch["label"], reduction="sum") for logits in model(batch["x"])]
    return losses[-1] + 0.3 * sum(losses[:-1]), len(batch["label"])


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(HIDDEN)
        self.values = nn.Linear(HIDDEN, 3)
        self.classes = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        x = self.body(x)
        return {"values": self.values(x), "classes": self.classes(x)}


def auxiliary(model, batch):
    out = model(batch["x"])
    main = F.mse_loss(out["values"], batch["y"], reduction="none").mean(1).sum()
    return main + 0.5 * F.cross_entropy(out["classes"], batch["label"], reduction="sum"), len(batch["label"])


def focal(model, batch):
    logged = F.log_softmax(model(batch["x"]), -1).gather(1, batch["label"][:, None])[:, 0]
    return -((1 - logged.exp()) ** 2 * logged).sum(), len(logged)


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5])


def class_weights(model, batch):
    total = F.cross_entropy(model(batch["x"]), batch["label"], CLASS_WEIGHTS, reduction="sum")
    return total, CLASS_WEIGHTS[batch["label"]].sum()


def sample_weights(model, batch):
    """Many samples weigh nothing."""
    each = F.mse_loss(model(batch["x"]), batch["y"], reduction="none").sum(1)
    return (each * batch["weight"]).sum(), batch["weight"].sum()


def declared_mean(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"]), len(batch["y"])


def mean_with_count(model, batch):
    """Forgot reduction="sum"."""
    return F.mse_loss(model(batch["x"]), batch["y"]), batch["y"].numel()


LOGGED: list[float] = []


def logged_loss(model, batch):
    total, count = squares(model, batch)
    LOGGED.append(total.item() / count)
    return total, count


# ---- How the model is called


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = mlp(HIDDEN)
        self.head = nn.Linear(HIDDEN, 3)

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x):
        return self.head(self.encode(x))


def called_twice(model, batch):
    a, b = model(batch["x"]), model(batch["x"].flip(1))
    same = torch.cosine_similarity(a, b)
    return (same - batch["weight"]).pow(2).sum(), len(same)


def with_encode(model, batch):
    return (model.head(model.encode(batch["x"])) - batch["y"]).pow(2).sum(), batch["y"].numel()


def with_encode_and_forward(model, batch):
    close = F.mse_loss(model(batch["x"]), batch["y"], reduction="sum")
    return close + 0.1 * model.encode(batch["x"]).pow(2).sum(), batch["y"].numel()


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad, None


class WithFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(INPUTS, HIDDEN)
        self.outer = nn.Linear(HIDDEN, 3)

    def forward(self, x):
        return self.outer(ScaledGradient.apply(self.inner(x), 0.5))


# ---- Parametrised, scalar, complex and lazy weights


def normed(norm):
    model = mlp()
    return nn.Sequential(norm(model[0]), nn.Tanh(), norm(model[2]), nn.Tanh(), model[4])


class Scaled(nn.Module):
    """Single numbers as parameters."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return self.scale.exp() * self.body(x) + self.shift


class Spectral(nn.Module):
    """A Fourier layer, as FNet's and FNO's."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(INPUTS, HIDDEN)
        self.modes = nn.Parameter(torch.randn(HIDDEN // 2 + 1, dtype=torch.complex64))
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x):
        x = torch.fft.irfft(torch.fft.rfft(self.lift(x)) * self.modes, HIDDEN)
        return self.head(x.tanh())


def lazy():
    return nn.Sequential(nn.LazyLinear(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))


CASES = (
    Case("mlp", mlp, squares, vectors()),
    Case("tuple-batch", mlp, pair_loss, TensorDataset(vectors().columns["x"], vectors().columns["y"])),
    Case("dataclass-batch", mlp, record_loss, Records(), collate=stacked),
    Case("augmented", ConvNet, picture_classes, Augmented()),
    Case("ragged-epoch", mlp, squares, vectors(9), global_batch=5),
    Case("odd-batch", partial(mlp, CLASSES), classes, vectors(), global_batch=7),
    Case("conv-groupnorm", ConvNet, picture_classes, pictures()),
    Case("conv-tied", TiedConvs, picture_classes, pictures()),
    Case("unet-groupnorm", UNet, picture_masks, pictures(), partial(adamw, lr=2e-2), refused=UNCUT),
    Case("adamw-decay-clip", mlp, squares, vectors(), partial(adamw, lr=3e-2, weight_decay=0.3), clip=0.5),
    Case("adagrad", mlp, squares, vectors(), partial(torch.optim.Adagrad, lr=0.1)),
    Case("rmsprop", mlp, squares, vectors(), partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5)),
    Case("momentum", mlp, squares, vectors(), with_rate(0.1, momentum=0.9, nesterov=True, weight_decay=0.05)),
    Case("two-groups", partial(Trunk, freeze=False), squares, vectors(), two_groups),
    Case("own-schedule", mlp, squares, vectors(), schedule=lambda step: 1 / (1 + step)),
    Case("cosine-scheduler", mlp, squares, vectors(), begin=cosine),
    Case("one-cycle-scheduler", mlp, squares, vectors(), with_rate(0.1, momentum=0.9), begin=one_cycle),
    Case("rate-by-hand", mlp, squares, vectors(), begin=rate_by_hand),
    Case("frozen-trunk", Trunk, squares, vectors()),
    Case(
        "unfrozen-mid-run",
        partial(Trunk, freeze=False),
        squares,
        vectors(),
        begin=unfreeze_after_three,
        refused={"pp=2": "was frozen"},
    ),
    Case("lora", lora, squares, vectors(), with_rate(0.5)),
    Case("l2-term", mlp, with_l2, vectors(), refused=UNCUT),
    Case(
        "gradient-penalty",
        mlp,
        with_gradient_penalty,
        vectors(),
        with_rate(0.02),
        refused={
            **everywhere("gradient inside the loss", ("tp=2", "pp=2")),
            "fsdp=2": "computes a gradient itself",
        },
    ),
    Case("deep-supervision", Deep, deep_supervision, vectors()),
    Case("auxiliary-head", TwoHeads, auxiliary, vectors()),
    Case("focal", partial(mlp, CLASSES), focal, vectors(), with_rate(0.5)),
    Case("class-weights", partial(mlp, CLASSES), class_weights, vectors()),
    Case("sample-weights", mlp, sample_weights, vectors()),
    Case("declared-mean", mlp, declared_mean, vectors(), loss_reduction="mean"),
    Case("mean-as-sum", mlp, mean_with_count, vectors(), refused=everywhere('loss_reduction="mean"')),
    Case("item-for-logging", mlp, logged_loss, vectors()),
    Case("called-twice", Towers, called_twice, vectors(), refused={"pp=2": "calls the model 2 times"}),
    Case("encode-in-loss", Towers, with_encode, vectors()),
    Case("encode-beside-forward", Towers, with_encode_and_forward, vectors(), refused={"pp=2": "at most 1"}),
    Case("autograd-function", WithFunction, squares, vectors(), refused={**UNCUT, "pp=2": "autograd.Function"}),
    Case("weight-norm", partial(normed, weight_norm), squares, vectors(), refused=UNCUT),
    Case(
        "spectral-norm",
        partial(normed, spectral_norm),
        squares,
        vectors(),
        refused=UNCUT,
    ),
    Case("scalar-parameters", Scaled, squares, vectors(), with_rate(0.05)),
    Case("complex-parameter", Spectral, squares, vectors(), refused={**UNCUT, "fsdp=2": "complex"}),
    Case("lazy-layer", lazy, squares, vectors(), refused=everywhere("a Lazy module", WITHOUT_SEQUENCES)),
    Case("lbfgs", mlp, squares, vectors(), torch.optim.LBFGS, refused=everywhere("LBFGS", WITHOUT_SEQUENCES)),
)
