"""What a forward or a script keeps from one step to the next, and what embeddings and hooks do behind the scenes."""

# The models and losses have no annotations, as those of most people.
# mypy: check-untyped-defs=False

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.parity.defaults.basics import HIDDEN, INPUTS, mlp, squares, vectors
from tests.parity.defaults.case import (
    DATA_RANKS,
    LAYOUTS,
    SEVERAL,
    UNCUT,
    WITHOUT_SEQUENCES,
    Case,
    Columns,
    everywhere,
    with_rate,
)
from tests.parity.defaults.sequences import VOCABULARY, WIDTH, next_tokens, texts

# ---- State


class Codebook(nn.Module):
    """A VQ-VAE whose codes follow the batch as a moving average."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(INPUTS, 4), nn.Linear(4, INPUTS)
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x):
        z = self.encoder(x)
        which = torch.cdist(z.detach(), self.codes).argmin(1)
        if self.training:
            one_hot = F.one_hot(which, 5).float()
            counts = one_hot.sum(0)[:, None]
            means = one_hot.T @ z.detach() / counts.clamp(min=1)
            self.codes.copy_(torch.where(counts > 0, 0.8 * self.codes + 0.2 * means, self.codes))
        code = self.codes[which]
        return self.decoder(z + (code - z).detach()), z, code


def quantised(model, batch):
    out, z, code = model(batch["x"])
    return F.mse_loss(out, batch["x"], reduction="sum") + 0.3 * (z - code.detach()).pow(2).sum(), out.numel()


class Counting(nn.Module):
    """A weight that grows with the number of forwards, kept as a Python number."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        return self.body(x) * min(1.0, self.forwards / 5)


class CountingBuffer(nn.Module):
    """The same as a buffer, which is the same for everybody who does as many forwards."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.forwards += 1
        return self.body(x) * (self.forwards / 5).clamp(max=1.0)


class Assigned(nn.Module):
    """A mean of what it has seen, as a buffer that is assigned anew, and used in the next forward."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.register_buffer("centre", torch.zeros(INPUTS))

    def forward(self, x):
        out = self.body(x - self.centre)
        if self.training:
            self.centre = 0.7 * self.centre + 0.3 * x.detach().mean(0)
        return out


class Annealed(nn.Module):
    """A block whose scale follows the number of forwards: used, needed by the backward pass, and assigned anew."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.inner, self.outer = nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, outputs)
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x):
        out = self.outer(self.inner(x).tanh()) * self.scale
        self.scale = 0.7 * self.scale + 0.1
        return out


class Remembering(nn.Module):
    """A mean of what it has seen, as a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.seen = torch.zeros(INPUTS)

    def forward(self, x):
        self.seen = 0.7 * self.seen + 0.3 * x.detach().mean(0)
        return self.body(x - self.seen)


class Carrying(nn.Module):
    """An RNN whose state goes on from one batch to the next."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.state = None

    def forward(self, tokens):
        if self.state is not None and self.state.shape[1] != len(tokens):
            self.state = None
        x, state = self.rnn(self.embedding(tokens), self.state)
        self.state = state.detach()
        return self.head(x)


class OwnDice(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.dice = torch.Generator().manual_seed(3)

    def forward(self, x):
        return self.body(x + 0.3 * torch.randn(x.shape, generator=self.dice))


class LateBuffer(nn.Module):
    """A buffer that the first forwards leave alone."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))
        self.register_buffer("centre", torch.zeros(INPUTS))

    def forward(self, x):
        if self.training:
            self.forwards += 1
            if self.forwards > 3:
                self.centre.lerp_(x.detach().mean(0), 0.3)
        return self.body(x - self.centre)


class Momentum(nn.Module):
    """BYOL: a copy of the model that follows it, as frozen parameters that the forward moves."""

    def __init__(self):
        super().__init__()
        self.online = mlp(4)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.lerp_(theirs, 0.2)
            wanted = self.target(x.roll(1, 1))
        return self.predictor(self.online(x)), wanted


def byol(model, batch):
    guess, wanted = model(batch["x"])
    return (2 - 2 * torch.cosine_similarity(guess, wanted)).sum(), len(guess)


# ---- Gradients and weights that something changes


def clamped_gradients():
    model = mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
    return model


def scaled_gradients():
    """A hook that is linear gives the same wherever it is applied."""
    model = mlp()
    model[0].weight.register_hook(lambda grad: 0.1 * grad)
    return model


def clamp_weights(model, _optimizer):
    """A WGAN's: between steps, by hand."""

    def after(_step):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    return after


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, **options)
        self.hidden = nn.Linear(WIDTH, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.hidden(self.embedding(tokens)).tanh())


class Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean", **options)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens):
        return self.head(self.bag(tokens))


class FunctionalWords(nn.Module):
    """Tables that no nn.Embedding holds."""

    def __init__(self, **options):
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.hidden = nn.Linear(WIDTH, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.options = options

    def forward(self, tokens):
        return self.head(self.hidden(F.embedding(tokens, self.table, **self.options)).tanh())


class FunctionalBags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.head = nn.Linear(WIDTH, 4)
        self.options = options

    def forward(self, tokens):
        return self.head(F.embedding_bag(tokens, self.table, mode="mean", **self.options))


class Centred(torch.autograd.Function):
    """Takes the mean over the batch off a gradient, which no loss shows."""

    @staticmethod
    def forward(_ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(_ctx, grad):
        return grad - grad.mean(0)


class CentredGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        return self.outer(Centred.apply(self.inner(x).tanh()))


def weighted_by_the_model(model, batch):
    """How much a sample counts is learnt, too."""
    out = model(batch["x"])
    weight = out[:, 0].sigmoid()
    return (weight * (out[:, 1:] - batch["y"][:, 1:]).pow(2).sum(1)).sum(), weight.sum()


class OwnNoise(Columns):
    """Draws from a generator of its own, which every process would have a copy of."""

    def __init__(self) -> None:
        super().__init__(**vectors().columns)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"x": sample["x"] + torch.from_numpy(self.rng.normal(size=INPUTS)).float()}


def clip_in_a_hook(model, optimizer):
    """Clips by hand, right before the optimizer's step."""
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.05) and None)
    return lambda _step: None


class Smuggled(nn.Module):
    """Straight through: the value of one thing and the gradient of another, which looks at the whole batch."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        x = self.inner(x).tanh()
        among = x - x.mean(0)
        return self.outer(x.detach() + among - among.detach())


class NormedGradients(nn.Module):
    """A hook on an activation that makes all of its gradient as long as 1."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        x = self.inner(x).tanh()
        if x.requires_grad:
            x.register_hook(lambda grad: grad / grad.norm())
        return self.outer(x)


def bag_classes(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum"), len(batch["label"])


BEHIND_THE_LOSS = everywhere("the gradient of inner.weight is not the sum", DATA_RANKS)
HOOKED = everywhere("hook on its gradient", SEVERAL)

MOVED = {**everywhere("changes the parameter target", ("single", *DATA_RANKS)), **UNCUT, "pp=2": "changes a parameter"}
FOLLOWED = {**everywhere("the buffer centre", DATA_RANKS), "pp=2": "the buffer centre"}


class EveryThird(nn.Module):
    """Does something else in every third forward."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = mlp(), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (0.5 if self.calls % 3 == 0 else 1.0)


def with_a_foreign_parameter(named):
    return torch.optim.SGD([*(one for _, one in named), nn.Parameter(torch.zeros(2))], lr=0.1)


class OwnParameter(nn.Module):
    """A loss that weighs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, model, batch):
        total, weight = squares(model, batch)
        return total * (-self.log_scale).exp() + self.log_scale * weight, weight


def annealed():
    return nn.Sequential(Annealed(INPUTS, INPUTS), Annealed(INPUTS, 3))


def freezing_groups(_, optimizer):
    """Freezes the first layer by the parameters that the optimizer has."""

    def after_step(step):
        if step == 3:
            for parameter in optimizer.param_groups[0]["params"][:2]:
                parameter.requires_grad_(False)

    return after_step


def forgetting_momentum(model, optimizer):
    """Finds the optimizer's state by the parameters that the model has."""

    def after_step(step):
        if step == 4:
            for parameter in model.parameters():
                if parameter in optimizer.state:
                    optimizer.state[parameter]["momentum_buffer"].zero_()

    return after_step


CASES = (
    Case(
        "codebook",
        Codebook,
        quantised,
        vectors(),
        refused={**everywhere("the buffer codes", DATA_RANKS), **UNCUT, "pp=2": "writes a value"},
    ),
    Case("counter", Counting, squares, vectors(), refused=everywhere("forwards", WITHOUT_SEQUENCES)),
    Case("every-third", EveryThird, squares, vectors(), refused=everywhere("calls", WITHOUT_SEQUENCES)),
    Case(
        "foreign-parameter",
        mlp,
        squares,
        vectors(),
        with_a_foreign_parameter,
        refused=everywhere("not the model's", WITHOUT_SEQUENCES),
    ),
    Case(
        "loss-with-a-parameter",
        mlp,
        OwnParameter(),
        vectors(),
        refused=everywhere("parameter of its own", WITHOUT_SEQUENCES),
    ),
    Case("counter-buffer", CountingBuffer, squares, vectors(), refused={"pp=2": "the buffer forwards"}),
    Case(
        "frozen-by-the-optimizer",
        mlp,
        squares,
        vectors(),
        with_rate(0.3),
        begin=freezing_groups,
        layouts=WITHOUT_SEQUENCES[:-1],
    ),
    Case("momentum-set-to-zero", mlp, squares, vectors(), with_rate(0.1, momentum=0.9), begin=forgetting_momentum),
    Case("assigned-buffer", Assigned, squares, vectors(), refused=FOLLOWED),
    Case(
        "buffer-assigned-after-use",
        annealed,
        squares,
        vectors(),
    ),
    Case("remembered-tensor", Remembering, squares, vectors(), refused=everywhere("seen", WITHOUT_SEQUENCES)),
    Case("carried-state", Carrying, next_tokens, texts(), refused=everywhere("state", WITHOUT_SEQUENCES)),
    Case("own-generator", OwnDice, squares, vectors(), refused=everywhere("dice", WITHOUT_SEQUENCES)),
    Case("late-buffer", LateBuffer, squares, vectors(), refused={**FOLLOWED, "pp=2": "the buffer"}),
    Case("byol", Momentum, byol, vectors(), refused=MOVED),
    Case("clamped-gradients", clamped_gradients, squares, vectors(), with_rate(0.5), refused=HOOKED),
    Case("scaled-gradients", scaled_gradients, squares, vectors(), with_rate(0.5), refused=HOOKED),
    Case("clamped-weights", mlp, squares, vectors(), begin=clamp_weights),
    Case("embedding", Words, next_tokens, texts(), with_rate(0.5)),
    Case(
        "embedding-max-norm",
        partial(Words, max_norm=1.0),
        next_tokens,
        texts(),
        with_rate(0.5),
        refused=everywhere("max_norm", DATA_RANKS),
    ),
    Case(
        "embedding-by-frequency",
        partial(Words, scale_grad_by_freq=True),
        next_tokens,
        texts(),
        with_rate(0.5),
        refused=everywhere("scale_grad_by_freq", DATA_RANKS),
    ),
    Case(
        "embedding-sparse",
        partial(Words, sparse=True),
        next_tokens,
        texts(),
        with_rate(0.5),
        refused=everywhere("sparse gradients", ("fsdp=2", "tp=2")),
    ),
    Case("embedding-bag", Bags, bag_classes, texts(), with_rate(0.5)),
    Case(
        "functional-max-norm",
        partial(FunctionalWords, max_norm=1.0),
        next_tokens,
        texts(),
        with_rate(0.5),
        refused={**everywhere("embedding max_norm", (*DATA_RANKS, "cp=2")), "pp=2": "changes a parameter"},
        layouts=LAYOUTS,
    ),
    Case(
        "functional-by-frequency",
        partial(FunctionalWords, scale_grad_by_freq=True),
        next_tokens,
        texts(),
        with_rate(0.5),
        refused=everywhere("embedding scale_grad_by_freq", (*DATA_RANKS, "cp=2")),
        layouts=LAYOUTS,
    ),
    Case(
        "functional-bag-max-norm",
        partial(FunctionalBags, max_norm=1.0),
        bag_classes,
        texts(),
        with_rate(0.5),
        refused={**everywhere("embedding_bag max_norm", DATA_RANKS), "pp=2": "changes a parameter"},
    ),
    Case(
        "functional-bag-by-frequency",
        partial(FunctionalBags, scale_grad_by_freq=True),
        bag_classes,
        texts(),
        with_rate(0.5),
        refused={**everywhere("embedding_bag scale_grad_by_freq", DATA_RANKS), "pp=2": "at most 1"},
    ),
    Case(
        "centred-gradients",
        CentredGradients,
        squares,
        vectors(),
        with_rate(0.5),
        refused={**BEHIND_THE_LOSS, **UNCUT, "pp=2": "autograd.Function"},
    ),
    Case("weight-of-the-model", mlp, weighted_by_the_model, vectors(), refused=everywhere("detach it")),
    Case("own-generator-of-the-data", mlp, squares, OwnNoise(), refused=everywhere("another one whenever it is read")),
    Case(
        "clip-in-a-hook",
        mlp,
        squares,
        vectors(),
        with_rate(0.5),
        begin=clip_in_a_hook,
        refused=everywhere("a hook was registered on the optimizer after run.setup", ("tp=2", "pp=2")),
    ),
    Case("straight-through", Smuggled, squares, vectors(), with_rate(0.5), refused=BEHIND_THE_LOSS),
    Case("normed-gradients", NormedGradients, squares, vectors(), refused=everywhere("hook on a gradient", SEVERAL)),
)
