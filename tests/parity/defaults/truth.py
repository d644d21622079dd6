"""The truth of the table: a case as a plain loop on one device.

Of Lockstep it takes what a plain script has no word for: the order of the samples, and the seeds of random draws.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lockstep.data.order import sample_ids
from lockstep.follow.blocks import find_blocks, seed_points
from lockstep.runtime.seeds import draw_seed, seed_host, seed_of
from tests.parity.defaults.case import SEED, STEPS, Case

STEP_AS_A_WHOLE = -1


def plain_losses(case: Case, *, lr_factor: float = 1.0, device: str = "cpu") -> list[float]:
    """The losses of the training, as everybody would write it without Lockstep; with other rates if asked."""
    seed_host(seed_of(SEED, "init"))
    model = case.build().to(device)
    optimizer = case.optimizer(list(model.named_parameters()))
    for group in optimizer.param_groups:
        group["lr"] *= lr_factor
    base = [group["lr"] for group in optimizer.param_groups]
    after_step = case.begin(model, optimizer) if case.begin else lambda _: None
    streams = Streams(model)
    losses = []
    for step, samples in enumerate(batches(case)):
        if case.schedule:
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * case.schedule(step)
        optimizer.zero_grad()
        total, weight = summed(case, model, samples, step, streams)
        losses.append(float(total.detach() / weight) if weight else float("nan"))
        if weight:
            (total / weight).backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
        if lr_factor:
            after_step(step + 1)
    return losses


def batches(case: Case) -> Iterator[list[Any]]:
    """The samples of every step, in the order of the run; the last ones of an epoch are a batch of their own."""
    size, epoch, consumed = len(case.dataset), 0, 0  # type: ignore[arg-type]
    for _ in range(STEPS):
        end = min(consumed + case.global_batch, size)
        ids = sample_ids(np.arange(consumed, end, dtype=np.int64), size, SEED, epoch).tolist()
        yield [sample(case, epoch, one) for one in ids]
        epoch, consumed = (epoch + 1, 0) if end == size else (epoch, end)


def sample(case: Case, epoch: int, index: int) -> Any:
    """Augmentation follows the sample."""
    seed_host(seed_of(SEED, "sample", epoch, index))
    return case.dataset[index]


def summed(case: Case, model: nn.Module, samples: list[Any], step: int, streams: Streams) -> tuple[torch.Tensor, Any]:
    """Sum and weight of a step's loss. Where draws follow the sample, each goes through the model alone."""
    if case.draws != "sample":
        streams.begin(step, STEP_AS_A_WHOLE)
        with DropoutBySample(streams, len(samples)) if case.draws == "both" else nullcontext():
            return pair(case, model, collated(case, model, samples))
    pairs = []
    for position, one in enumerate(samples):
        streams.begin(step, position)
        pairs.append(pair(case, model, collated(case, model, [one])))
    totals, weights = zip(*pairs, strict=True)
    return torch.stack(totals).sum(), sum(weights)


def collated(case: Case, model: nn.Module, samples: list[Any]) -> Any:
    """A batch where the model is."""
    device = next(model.parameters()).device
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), case.collate(samples))


def pair(case: Case, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    value, weight = case.loss(model, batch)
    return (value if case.loss_reduction == "sum" else value * weight), weight


class Streams:
    """Seeds what a forward draws, by step and sample; some modules have streams of their own."""

    def __init__(self, model: nn.Module) -> None:
        self.step = self.position = 0
        self.module = (0, 0)
        """Number and call of the module that was entered last, of those with a stream of their own."""
        self.calls: Counter[int] = Counter()
        blocks = [block for _, block in find_blocks(model)]
        for number, module in enumerate(seed_points(model, blocks)):
            module.register_forward_pre_hook(self.seed_module(number))

    def begin(self, step: int, position: int) -> None:
        self.step, self.position = step, position
        self.calls.clear()
        host = draw_seed(SEED, step)
        random.seed(host)
        np.random.seed(host % 2**32)
        torch.manual_seed(host if position == STEP_AS_A_WHOLE else draw_seed(SEED, step, position))

    def seed_module(self, number: int) -> Callable[[nn.Module, Any], None]:
        def seed(_module: nn.Module, _args: Any) -> None:
            self.module = (number, self.calls[number])
            self.calls[number] += 1
            torch.manual_seed(draw_seed(SEED, self.step, self.position, *self.module))

        return seed


class DropoutBySample(TorchFunctionMode):
    """Of samples that have to go through the model together, each is given the mask that it would draw alone.

    Every dropout is a layer of its own here, and draws once for each of its calls. A sample may have several rows.
    """

    def __init__(self, streams: Streams, samples: int) -> None:
        super().__init__()
        self.streams, self.samples = streams, samples

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.dropout:
            return function(*args, **kwargs or {})
        x, *options = args
        rows = []
        for position, row in enumerate(x.chunk(self.samples)):
            torch.manual_seed(draw_seed(SEED, self.streams.step, position, *self.streams.module))
            rows.append(F.dropout(row, *options, **kwargs or {}))
        return torch.cat(rows)
