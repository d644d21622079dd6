"""Forwards that draw random numbers: dropout in all its forms, noise and masks in the loss, layers left out."""

# The models and losses have no annotations, as those of most people.
# mypy: check-untyped-defs=False

from __future__ import annotations

import random
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.parity.defaults.basics import (
    CLASSES,
    HIDDEN,
    INPUTS,
    ConvNet,
    classes,
    mlp,
    picture_classes,
    pictures,
    squares,
    vectors,
)
from tests.parity.defaults.case import COUPLED, GLOBAL_BATCH, UNCUT, Case, adamw, with_rate

# ---- Dropout


def dropout_mlp():
    return nn.Sequential(
        nn.Dropout(0.1),
        nn.Linear(INPUTS, HIDDEN),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(HIDDEN, 3),
    )


class FunctionalDropout(nn.Module):
    """In the model's own forward, between its layers."""

    def __init__(self, dropout=F.dropout):
        super().__init__()
        self.inner, self.outer = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, 3)
        self.dropout = dropout

    def forward(self, x):
        x = self.dropout(self.inner(x).tanh(), 0.25, self.training)
        return self.outer(self.dropout(x, 0.1, training=self.training))


class ChannelDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.drop = nn.Dropout2d(0.2)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.drop(self.stem(x).relu())
        x = F.dropout2d(self.conv(x).relu(), 0.3, self.training)
        return self.head(x.mean((2, 3)))


class LeakyNet(nn.Module):
    """A random slope for what is negative, and a Gumbel softmax."""

    def __init__(self):
        super().__init__()
        self.inner, self.gate, self.outer = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 3)
        self.leak = nn.RReLU()

    def forward(self, x):
        x = self.leak(self.inner(x))
        return self.outer(x * HIDDEN * F.gumbel_softmax(self.gate(x), tau=2.0))


class ResidualBlock(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner, self.outer = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.outer(F.gelu(self.inner(self.norm(x)))))


class Residual(nn.Module):
    """Repeated blocks, and what becomes of each of them."""

    def __init__(self, keep=lambda x, _: x, dropout=0.0, depth=3):
        super().__init__()
        self.stem = nn.Linear(INPUTS, HIDDEN)
        self.blocks = nn.ModuleList(ResidualBlock(dropout) for _ in range(depth))
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.keep = keep

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + self.keep(block(x), self.training)
        return self.head(x)


def drop_path(x, training, rate=0.3):
    """timm's: a branch is left out for some samples."""
    if not training:
        return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    return x * x.new_empty(shape).bernoulli_(1 - rate) / (1 - rate)


def drop_path_by_floor(x, training, rate=0.3):
    """torchvision's and ConvNeXt's older way to write it."""
    if not training:
        return x
    return x.div(1 - rate) * (torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device) + (1 - rate)).floor()


class LayerDrop(nn.Module):
    """fairseq's: a whole layer is left out, for everybody alike."""

    def __init__(self, chance):
        super().__init__()
        self.stem = nn.Linear(INPUTS, HIDDEN)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(4))
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.chance = chance

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or self.chance() > 0.3:
                x = x + block(x)
        return self.head(x)


def torch_chance():
    return torch.rand(()).item()


# ---- Noise in the loss


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(INPUTS, HIDDEN)
        self.mean, self.spread = nn.Linear(HIDDEN, 4), nn.Linear(HIDDEN, 4)
        self.decoder = nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, INPUTS))

    def forward(self, x):
        x = self.encoder(x).tanh()
        mean, logvar = self.mean(x), self.spread(x)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        return self.decoder(z), mean, logvar


def elbo(model, batch):
    out, mean, logvar = model(batch["x"])
    divergence = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum()
    return F.mse_loss(out, batch["x"], reduction="sum") + 0.1 * divergence, len(out)


class NormalVAE(VAE):
    """The same with torch.distributions."""

    def forward(self, x):
        x = self.encoder(x).tanh()
        q = torch.distributions.Normal(self.mean(x), self.spread(x).exp())
        return self.decoder(q.rsample()), q


def normal_elbo(model, batch):
    out, q = model(batch["x"])
    divergence = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum()
    return F.mse_loss(out, batch["x"], reduction="sum") + 0.1 * divergence, len(out)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(50, HIDDEN)
        self.inner = nn.Linear(INPUTS, HIDDEN)
        self.outer = nn.Linear(HIDDEN, INPUTS)

    def forward(self, x, t):
        return self.outer((self.inner(x) + self.time(t)).tanh())


def diffusion(model, batch):
    x = batch["x"]
    t = torch.randint(0, 50, (x.shape[0],), device=x.device)
    noise = torch.randn_like(x)
    kept = (torch.pi / 2 * t / 50).cos()[:, None]
    noisy = kept * x + (1 - kept**2).sqrt() * noise
    return F.mse_loss(model(noisy, t), noise, reduction="sum"), noise.numel()


def flow_matching(model, batch):
    x1 = batch["x"]
    x0, t = torch.randn(x1.shape, device=x1.device), torch.rand(len(x1), 1, device=x1.device)
    guess = model((1 - t) * x0 + t * x1, (t[:, 0] * 50).long())
    return (guess - (x1 - x0)).pow(2).mean(1).sum(), len(x1)


def masked_inputs(model, batch):
    x = batch["x"]
    keep = torch.rand(x.shape, device=x.device) > 0.3
    return (model(x * keep) - batch["y"]).pow(2).sum(), batch["y"].numel()


def bernoulli_inputs(model, batch):
    x = batch["x"]
    x = x * torch.bernoulli(torch.full_like(x, 0.7)) + torch.normal(0.0, 0.1, x.shape)
    return (model(x) - batch["y"]).pow(2).sum(), batch["y"].numel()


def mixup(model, batch):
    """Every sample is mixed with another one."""
    x, label = batch["x"], batch["label"]
    share, other = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
    logits = model(share * x + (1 - share) * x[other])
    mixed = share * F.cross_entropy(logits, label, reduction="none")
    return (mixed + (1 - share) * F.cross_entropy(logits, label[other], reduction="none")).sum(), len(x)


def mixup_in_some_steps(model, batch):
    """One coin for all samples; in the first step it says no."""
    return mixup(model, batch) if random.random() < 0.3 else classes(model, batch)


def noise_of_the_step(model, batch):
    """One shift for all samples: it has no batch dim."""
    x = batch["x"]
    return (model(x + 0.3 * torch.randn(INPUTS, device=x.device)) - batch["y"]).pow(2).sum(), batch["y"].numel()


def numpy_noise(model, batch):
    noise = torch.from_numpy(np.random.randn(*batch["x"].shape)).float()
    return (model(batch["x"] + 0.3 * noise) - batch["y"]).pow(2).sum(), batch["y"].numel()


class NoiseOfAWidth(nn.Module):
    """One draw for all samples, as wide as there are samples in a step."""

    def __init__(self, *shape):
        super().__init__()
        self.shape = shape
        self.first, self.last = nn.Linear(INPUTS, GLOBAL_BATCH), nn.Linear(GLOBAL_BATCH, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh() * (1 + 0.3 * torch.randn(*self.shape, device=x.device)))


class TimeFirst(nn.Module):
    """Dropout on tokens that are before the samples, as many as there are of those."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(INPUTS, HIDDEN), nn.Dropout(0.3), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        tokens = torch.stack([self.first(x) * (1 + 0.1 * place) for place in range(GLOBAL_BATCH)])
        return self.last(self.dropout(tokens.tanh()).mean(0))


def shuffled_features(model, batch):
    """The order is one for all samples, and the only thing that is drawn."""
    return (model(batch["x"][:, torch.randperm(INPUTS)]) - batch["y"]).pow(2).sum(), batch["y"].numel()


def jittered_channels(model, batch):
    """One factor for each channel, the same for all samples: as many as a part of the trial has samples."""
    x = batch["image"] * (1 + 0.3 * torch.randn(3, 1, 1, device=batch["image"].device))
    return F.cross_entropy(model(x), batch["label"], reduction="sum"), len(x)


class DroppedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        weight = F.dropout(self.first.weight, 0.3, self.training)
        return self.last(F.linear(x, weight, self.first.bias).tanh())


OUTSIDE = {"pp=2": "outside of any module"}
OTHER_PATH = {"pp=2": "another path"}

CASES = (
    Case("dropout", dropout_mlp, squares, vectors(), draws="sample"),
    Case("functional-dropout", FunctionalDropout, squares, vectors(), draws="sample"),
    Case(
        "alpha-dropout", partial(FunctionalDropout, F.alpha_dropout), squares, vectors(), draws="sample", refused=UNCUT
    ),
    Case("dropout2d", ChannelDropout, picture_classes, pictures(), with_rate(0.3), draws="sample", refused=OUTSIDE),
    Case("rrelu-gumbel", LeakyNet, squares, vectors(), draws="sample", refused=UNCUT),
    Case("residual-dropout", partial(Residual, dropout=0.2), classes, vectors(), draws="sample"),
    Case("drop-path", partial(Residual, drop_path), classes, vectors(), draws="sample"),
    Case("drop-path-dropout", partial(Residual, drop_path, 0.2), classes, vectors(), draws="sample"),
    Case(
        "drop-path-by-floor",
        partial(Residual, drop_path_by_floor),
        classes,
        vectors(),
        adamw,
        draws="sample",
    ),
    Case(
        "layerdrop-by-random", partial(LayerDrop, random.random), classes, vectors(), draws="step", refused=OTHER_PATH
    ),
    Case("layerdrop-by-torch", partial(LayerDrop, torch_chance), classes, vectors(), draws="step", refused=OTHER_PATH),
    Case("vae", VAE, elbo, vectors(), with_rate(0.02), draws="sample"),
    Case("vae-distributions", NormalVAE, normal_elbo, vectors(), with_rate(0.02), draws="sample"),
    Case("diffusion", Denoiser, diffusion, vectors(), with_rate(0.3), draws="sample"),
    Case("flow-matching", Denoiser, flow_matching, vectors(), draws="sample"),
    Case("masked-inputs", mlp, masked_inputs, vectors(), draws="sample"),
    Case("bernoulli-inputs", mlp, bernoulli_inputs, vectors(), draws="sample"),
    Case("mixup", partial(mlp, CLASSES), mixup, vectors(), draws="step", refused=COUPLED),
    Case(
        "mixup-in-some-steps",
        partial(mlp, CLASSES),
        mixup_in_some_steps,
        vectors(),
        draws="step",
        refused=COUPLED,
        layouts=("single", "dp=2", "dp=3", "fsdp=2", "tp=2"),
    ),
    Case("noise-of-the-step", mlp, noise_of_the_step, vectors(), draws="step"),
    Case("noise-of-a-width", partial(NoiseOfAWidth, GLOBAL_BATCH), squares, vectors(), draws="step"),
    Case("drop-connect", partial(NoiseOfAWidth, 1, GLOBAL_BATCH), squares, vectors(), draws="step"),
    Case("jittered-channels", ConvNet, jittered_channels, pictures(), with_rate(0.3), draws="step"),
    Case(
        "dropped-weights",
        DroppedWeights,
        squares,
        vectors(),
        draws="step",
        refused={**UNCUT, "pp=2": "at most 1"},
    ),
    Case("time-first-dropout", TimeFirst, squares, vectors(), draws="sample", refused={"pp=2": "at most 1"}),
    Case("shuffled-features", mlp, shuffled_features, vectors(), draws="step"),
    Case("numpy-noise", mlp, numpy_noise, vectors(), draws="step", refused=COUPLED),
)
