"""Small models, ragged data and bookkeeping for the tests that compare layouts.

Labels are ragged: most samples have some that do not count, a few have none that do. In the second step the last four
samples have none, so that all a rank has in that step, or its last micro-batches, may weigh nothing.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset

import lockstep
from lockstep.data.order import sample_ids
from lockstep.data.progress import Progress
from lockstep.engine import Engine
from lockstep.run import Run
from tests.ranks import Job

SEED = 5
SIZE = 37
GLOBAL_BATCH = 8
LENGTH = 10
VOCABULARY = 31
WIDTH = 16
HEADS = 2
IGNORED = -100

Batch = dict[str, torch.Tensor]
Tensors = dict[str, torch.Tensor]


# ---- Models


class Attention(nn.Module):
    """Causal self-attention, its mask a buffer that no checkpoint of the model itself would hold."""

    causal: torch.Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        # Three layers rather than one: the key's bias has no influence on anything, and is told apart by its name.
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, HEADS, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        scores = scores.masked_fill(~self.causal[:length, :length], float("-inf"))
        mixed = self.dropout(scores.softmax(-1)) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention(dropout)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class TinyGPT(nn.Module):
    """Repeated blocks in a ModuleList; embedding and head are one weight when `tied`."""

    waves: torch.Tensor

    def __init__(self, tied: bool = True, dropout: float = 0.0, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        angles = torch.arange(LENGTH)[:, None] / 100.0 ** (torch.arange(WIDTH)[None] / WIDTH)
        self.register_buffer("waves", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens) + self.waves[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Perceptron(nn.Module):
    """A model in which nothing repeats: it has no blocks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(3 * WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.dropout(F.gelu(self.hidden(self.embedding(tokens)))))  # type: ignore[no-any-return]


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm, whose statistics follow the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, bias=False)
        self.norm2 = nn.BatchNorm2d(6, momentum=0.3)
        self.out = nn.Linear(6, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]


# ---- Data and losses


class RaggedTexts(Dataset[Batch]):
    """Token sequences with a next-token label for only a part of each."""

    def __init__(self, size: int = SIZE, seed: int = SEED) -> None:
        draw = torch.Generator().manual_seed(1234)
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=draw)
        self.labels = self.tokens[:, 1:].clone()
        counted = torch.randint(1, LENGTH + 1, (size, 1), generator=draw)
        counted[::9] = 0
        if size >= 2 * GLOBAL_BATCH:
            end_of_second_step = np.arange(GLOBAL_BATCH + GLOBAL_BATCH // 2, 2 * GLOBAL_BATCH, dtype=np.int64)
            counted[torch.from_numpy(sample_ids(end_of_second_step, size, seed, 0))] = 0
        self.labels[torch.arange(LENGTH) >= counted] = IGNORED

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.tokens[index, :-1], "y": self.labels[index]}


class Stream(IterableDataset[Batch]):
    """The same samples from an iterator that knows no length, in an order that differs from epoch to epoch."""

    def __init__(self, size: int = SIZE, shuffle: bool = True) -> None:
        self.texts = RaggedTexts(size)
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[Batch]:
        size = len(self.texts)
        order = torch.randperm(size).tolist() if self.shuffle else range(size)
        return (self.texts[index] for index in order)


class Images(Dataset[Batch]):
    """Small pictures of unequal brightness, so that the statistics of every micro-batch differ."""

    def __init__(self, size: int = SIZE) -> None:
        draw = torch.Generator().manual_seed(4321)
        self.pixels = torch.randn(size, 1, 7, 7, generator=draw) * (1 + torch.arange(size) / size)[:, None, None, None]
        self.classes = torch.randint(5, (size,), generator=draw)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.pixels[index], "y": self.classes[index]}


def text_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = model(batch["x"]), batch["y"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def image_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 3e-3, "weight_decay": 0.1, **options})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True)


# ---- Runs and what they leave


def fork_loader_workers() -> None:
    """Ranks come from a fork server, and their data loaders would start from a new one each, for seconds."""
    multiprocessing.set_start_method("fork", force=True)


def join(job: Job, layout: str, run_dir: Path | None = None, meeting: str = "", **options: Any) -> Run:
    """Become one rank of a run. A job that joins several runs in turn gives each a `meeting` of its own."""
    store = None
    if job.world_size > 1:
        path = job.store_path if not meeting else job.folder / f"{meeting}.store"
        store = dist.FileStore(str(path), job.world_size)
    return lockstep.init(
        layout,
        rank=job.rank,
        world_size=job.world_size,
        store=store,
        run_dir=run_dir or job.folder / f"run{meeting}",
        **{"seed": SEED, "device": "cpu", **options},
    )


def anew(run: Run) -> Run:
    """The same run without the training it had, for another `setup`, which scripts may not call twice."""
    run.engine = None
    run._progress = Progress({})
    return run


@contextmanager
def unfinished(run: Run) -> Iterator[Run]:
    """Leave the run so that it can be continued."""
    try:
        yield run
    finally:
        run.leave()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole of a tensor, also where it is cut; every rank calls it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(engine: Engine) -> Tensors:
    """The gradients of the last step, scaled and clipped, by parameter; those that have one."""
    named = ((name, parameter.grad) for name, parameter in engine.stored)
    return {name: engine.whole(name, grad).detach().clone() for name, grad in named if grad is not None}


def weights(engine: Engine) -> Tensors:
    """All parameters and buffers, whole."""
    held = engine.stored if engine.layout.tp > 1 else engine.model.named_parameters()
    found = {name: engine.whole(name, tensor).detach().clone() for name, tensor in held}
    return found | {name: full(tensor) for name, tensor in engine.model.named_buffers()}


def fingerprint(tensors: Tensors) -> str:
    """Changes with any bit of any tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def disagreeing_gradients(ours: Tensors, theirs: Tensors) -> Iterator[str]:
    """The parameters whose gradients differ, in norm, by more than rounding: the design's criterion.

    One that is below the rounding error of all gradients together carries no signal: it has to stay that small.
    """
    assert ours.keys() == theirs.keys()
    whole = torch.stack([grad.norm() for grad in theirs.values()]).norm()
    for name, expected in theirs.items():
        size, difference = expected.norm(), (ours[name] - expected).norm()
        without_signal = size < 1e-6 * whole
        if without_signal and ours[name].norm() < 2e-6 * whole:
            continue
        if not difference <= 1e-5 * size + 1e-6 * whole:
            yield f"{name}: |dg| = {difference:.2e}, |g| = {size:.2e}, |g_all| = {whole:.2e}"


def error_of(function: Callable[[], Any]) -> Exception | None:
    """What a call raises: for a worker whose test is about what every single rank says."""
    try:
        function()
    except Exception as error:
        return error
    return None
