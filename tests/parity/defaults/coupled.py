"""Losses in which a sample depends on those beside it: in-batch negatives, batch statistics, balance over a batch."""

# The models and losses have no annotations, as those of most people.
# mypy: check-untyped-defs=False

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

from tests.parity.defaults.basics import (
    CLASSES,
    HIDDEN,
    INPUTS,
    UNet,
    classes,
    mlp,
    picture_classes,
    picture_masks,
    pictures,
    squares,
    vectors,
)
from tests.parity.defaults.case import COUPLED, UNCUT, Case, Columns, adamw, with_rate
from tests.parity.defaults.draws import dropout_mlp

# ---- In-batch losses


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = mlp(8), nn.Linear(3, 8)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, y):
        left, right = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        return self.logit_scale.exp() * left @ right.T


def clip_loss(model, batch):
    logits = model(batch["x"], batch["y"])
    place = torch.arange(len(logits), device=logits.device)
    both = F.cross_entropy(logits, place, reduction="sum") + F.cross_entropy(logits.T, place, reduction="sum")
    return both / 2, len(logits)


def views(batch):
    return torch.cat([batch["x"], batch["x"] + 0.3 * batch["x"].roll(1, 1)])


def simclr(model, batch):
    z = F.normalize(model(views(batch)), dim=1)
    count = len(z) // 2
    alike = (z @ z.T / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool, device=z.device), float("-inf"))
    partner = torch.arange(2 * count, device=z.device).roll(count)
    return F.cross_entropy(alike, partner, reduction="sum"), 2 * count


def hardest_triplets(model, batch):
    z, label = model(batch["x"]), batch["label"] % 2
    far = torch.cdist(z, z)
    same = label[:, None] == label[None]
    hardest = far.masked_fill(~same, 0).amax(1) - far.masked_fill(same, 9).amin(1)
    return F.relu(hardest + 1).sum(), len(z)


def vicreg(model, batch):
    a, b = model(views(batch)).chunk(2)
    apart = F.relu(1 - (a.var(0) + 1e-4).sqrt()).mean() + F.relu(1 - (b.var(0) + 1e-4).sqrt()).mean()
    cov = a.T.cov() if len(a) > 1 else torch.zeros(a.shape[1], a.shape[1])
    mixed = (cov - cov.diag().diag()).pow(2).sum() / a.shape[1]
    return F.mse_loss(a, b) * 5 + apart + 0.1 * mixed, 1


def barlow(model, batch):
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in model(views(batch)).chunk(2))
    cross = a.T @ b / len(a)
    return (cross - torch.eye(a.shape[1])).pow(2).sum(), 1


def correlation(model, batch):
    """One minus the correlation over the batch, declared a mean."""
    guess, wanted = model(batch["x"])[:, 0], batch["y"][:, 0]
    guess, wanted = guess - guess.mean(), wanted - wanted.mean()
    return 1 - (guess * wanted).sum() / (guess.norm() * wanted.norm() + 1e-3), len(guess)


def ranked_pairs(model, batch):
    score, wanted = model(batch["x"])[:, 0], batch["y"][:, 0]
    above = (wanted[:, None] > wanted[None]).float()
    return (F.softplus(score[None] - score[:, None]) * above).sum(), len(score)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh())
        self.actor, self.critic = nn.Linear(HIDDEN, CLASSES), nn.Linear(HIDDEN, 1)

    def forward(self, x):
        x = self.body(x)
        return self.actor(x), self.critic(x)[:, 0]


def ppo(model, batch):
    """Advantages are normalised over the batch."""
    logits, values = model(batch["x"])
    reward = batch["y"].sum(1)
    advantage = reward - values.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    chosen = torch.distributions.Categorical(logits=logits)
    ratio = (chosen.log_prob(batch["label"]) + 1.4).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (-gain + 0.5 * (values - reward).pow(2) - 0.01 * chosen.entropy()).sum(), len(reward)


class MoE(nn.Module):
    def __init__(self, experts=4):
        super().__init__()
        self.stem = nn.Linear(INPUTS, HIDDEN)
        self.router = nn.Linear(HIDDEN, experts)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(experts))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        x = self.stem(x).tanh()
        chances = self.router(x).softmax(-1)
        best, which = chances.max(-1)
        one_hot = F.one_hot(which, len(self.experts)).to(x.dtype)
        mixed = sum(one_hot[:, e, None] * expert(x) for e, expert in enumerate(self.experts))
        balance = len(self.experts) * (one_hot.mean(0) * chances.mean(0)).sum()
        return self.head(x + best[:, None] * mixed), balance


def with_balance(model, batch):
    logits, balance = model(batch["x"])
    total = F.cross_entropy(logits, batch["label"], reduction="sum")
    return total + 0.5 * balance * len(logits), len(logits)


def without_balance(model, batch):
    return F.cross_entropy(model(batch["x"])[0], batch["label"], reduction="sum"), len(batch["label"])


# ---- BatchNorm


def norm_mlp():
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )


class BasicBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        BasicBlock(6),
        nn.AvgPool2d(2),
        BasicBlock(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


def calls_between(model, _):
    """Forwards in training mode between steps, by which running statistics follow other data."""
    x = torch.randn(8, INPUTS, generator=torch.Generator().manual_seed(1))

    def after_step(step):
        with torch.no_grad():
            model((3 * x + 1).to(model[0].weight.device))
        if step == 4:
            model[1].eval()

    return after_step


def frozen_norms():
    """Fine-tuning with BatchNorm in eval mode."""
    model = norm_mlp()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval().requires_grad_(False)
    return model


def norm_and_dropout():
    return nn.Sequential(*list(norm_mlp())[:3], nn.Dropout(0.3), *list(norm_mlp())[3:])


def norm_without_statistics():
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN, track_running_stats=False), nn.ReLU(), nn.Linear(HIDDEN, 3)
    )


# ---- What a few samples at the first weights do not show


def rare_pairs() -> Columns:
    """Every class has two samples, which seldom are among the first few."""
    data = vectors()
    return Columns(x=data.columns["x"], label=torch.arange(len(data)) % 13)


def pull_pairs(model, batch):
    z = model(batch["x"])
    same = batch["label"][:, None] == batch["label"]
    return (torch.cdist(z, z) * same).sum(), len(z)


def hardest(model, batch):
    losses = F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")
    return losses.topk(min(8, len(losses))).values.sum(), len(losses)


def moe_from_zero():
    model = MoE()
    nn.init.zeros_(model.router.weight)
    nn.init.zeros_(model.router.bias)
    return model


class HeadFromZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head, self.projection = mlp(HIDDEN), nn.Linear(HIDDEN, CLASSES), nn.Linear(HIDDEN, CLASSES)
        nn.init.zeros_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x) + self.projection(x), self.projection(x)


def decorrelated(model, batch):
    logits, z = model(batch["x"])
    z = z - z.mean(0)
    covariance = z.T @ z / len(z)
    total = F.cross_entropy(logits, batch["label"], reduction="sum")
    return total + 3 * len(z) * (covariance - covariance.diag().diag()).square().sum(), len(z)


# ---- What a micro-batch does in which no sample counts


def of_positives(model, batch):
    positive = (batch["label"] == 0).float()
    errors = (model(batch["x"]) - batch["y"]).square().sum(1)
    return (errors * positive).sum(), positive.sum().clamp(min=1)


def dropping_bad_ones(samples):
    return default_collate([sample for sample in samples if sample["weight"] > 0] or samples[:1])


CASES = (
    Case("clip", Clip, clip_loss, vectors(), with_rate(0.5), refused=COUPLED),
    Case("simclr", partial(mlp, 8), simclr, vectors(), with_rate(0.5), refused=COUPLED),
    Case("triplets", partial(mlp, 8), hardest_triplets, vectors(), refused=COUPLED),
    Case("vicreg", partial(mlp, 8), vicreg, vectors(), refused=COUPLED),
    Case("barlow", partial(mlp, 4), barlow, vectors(), with_rate(0.03), refused=COUPLED),
    Case("correlation", mlp, correlation, vectors(), loss_reduction="mean", refused=COUPLED),
    Case("ranked-pairs", mlp, ranked_pairs, vectors(), refused=COUPLED),
    Case("ppo", Policy, ppo, vectors(), refused=COUPLED),
    Case("moe-balance", MoE, with_balance, vectors(), adamw, refused=COUPLED),
    Case("moe", MoE, without_balance, vectors(), adamw),
    Case("rare-pairs", partial(mlp, 8), pull_pairs, rare_pairs(), global_batch=16, refused=COUPLED),
    Case("hardest-of-a-batch", partial(mlp, CLASSES), hardest, vectors(), global_batch=12, refused=COUPLED),
    Case("moe-balance-from-zero", moe_from_zero, with_balance, vectors(), adamw, refused=COUPLED),
    Case("decorrelated-from-zero", HeadFromZero, decorrelated, vectors(), refused=COUPLED),
    Case("at-least-one-positive", mlp, of_positives, vectors(), refused=COUPLED),
    Case("collate-drops-samples", mlp, squares, vectors(), collate=dropping_bad_ones, refused=COUPLED),
    Case("simclr-dropout", dropout_mlp, simclr, vectors(), draws="both", refused=COUPLED),
    Case("batchnorm1d", norm_mlp, classes, vectors()),
    Case("batchnorm-calls-between", norm_mlp, classes, vectors(), with_rate(0.3), begin=calls_between),
    Case("batchnorm-frozen", frozen_norms, classes, vectors()),
    Case(
        "batchnorm-no-statistics",
        norm_without_statistics,
        squares,
        vectors(),
        refused=UNCUT,
    ),
    Case("batchnorm-dropout", norm_and_dropout, classes, vectors(), draws="both"),
    Case("resnet", resnet, picture_classes, pictures(), with_rate(0.1, momentum=0.9)),
    Case(
        "unet-batchnorm",
        partial(UNet, nn.BatchNorm2d),
        picture_masks,
        pictures(),
        partial(adamw, lr=2e-2),
        refused=UNCUT,
    ),
)
