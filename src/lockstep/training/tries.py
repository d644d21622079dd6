"""Forwards and backwards that count for nothing: in training mode, exactly (fp32), on samples all ranks have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.data.loader import MicroBatch
from lockstep.parallel.pipeline.runner import MicroBatches
from lockstep.parallel.whole.stay import ParametersStay
from lockstep.step.attention import attend_with
from lockstep.step.grads import local_gradients
from lockstep.training.do_step import begin_exchange, forward_backward
from lockstep.training.engine_parts import EngineParts


@dataclass(frozen=True)
class Tried:
    """A forward that counted for nothing: loss sum, weight, and whether it drew random numbers; equal on every rank."""

    loss: float
    weight: float
    drew: bool
    flips: bool
    """Whether it drew one number for all samples, by which it may do something in some steps only."""
    by_rank: list[float]
    """The loss sum of every data rank."""
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    """The buffers of this rank that it has changed, with what it made of them."""


def try_forward(parts: EngineParts, micro_batch: MicroBatch) -> Tried:
    """Loss sum and weight of samples that all ranks have."""
    state, forwards, cut = parts.state, parts.forwards, parts.state.cut
    data = parts.transfers.send(micro_batch.data).take()
    state.rest()
    with state.hidden():
        state.trainable.check()
    parts.train_mode()
    forwards.buffers.take_in()
    forwards.buffers.forget()
    forwards.copies.take()
    forwards.is_trial = True
    try:
        try:
            with torch.no_grad():
                result = _tried(parts, micro_batch, data)
        except RuntimeError as error:
            is_full = isinstance(error, torch.OutOfMemoryError)
            if is_full or cut.pipeline is not None or cut.layout.team > 1:  # others are in the middle of it
                raise
            forwards.put_buffers_back()
            result = _tried(parts, micro_batch, data)  # it may derive something itself, a gradient penalty say
        forwards.buffers.take_in()
        changed = {cut.buffers[number][0]: value for number, value in forwards.copies.changed()}
    finally:
        forwards.is_trial = False
        forwards.put_buffers_back()
        forwards.draws.forget()
        state.rest()
    drew, flips = forwards.may_draw or forwards.has_drawn(micro_batch), forwards.flips_coins
    speaks = parts.speaks and result is not None
    loss, weight = (torch.as_tensor(number).detach().item() for number in result) if speaks else (0.0, 0.0)
    own = [0.0] * parts.comm.data_size
    own[cut.layout.data_rank(parts.comm.rank)] = loss
    weight, draws, coins, *losses = parts.comm.sum([weight, float(drew), float(flips), *own])
    return Tried(sum(losses) / len(losses), weight / len(losses), draws > 0, coins > 0, losses, changed)


def _tried(parts: EngineParts, micro_batch: MicroBatch, data: Any) -> Any:
    """What `try_forward` computes; in a pipeline only its last stage knows."""
    forwards, pipeline = parts.forwards, parts.state.cut.pipeline

    @contextmanager
    def start(_: int) -> Iterator[None]:
        forwards.start(micro_batch)
        with forwards.drawing(), forwards.buffers.forward():
            yield

    # Not compiled: the trial is over before that would pay, and a compiler cannot follow what watches it.
    with torch.compiler.set_stance("force_eager"), forwards.whole_steps.seeing_tables():
        if pipeline is None:
            with ParametersStay(parts.state.cut.models[0]):
                return forwards.forward(micro_batch, data)
        with parts.state.hidden():
            work = MicroBatches("trial", forwards.summed_loss, [data], start, forwards.computing)
            return next(iter(pipeline.score(work)), None)


def try_gradients(parts: EngineParts, micro_batches: Sequence[MicroBatch]) -> list[tuple[str, torch.Tensor]]:
    """This rank's part of the gradients of samples that all ranks have."""
    state, forwards, cut = parts.state, parts.forwards, parts.state.cut
    parts.train_mode()
    forwards.is_trial = True
    try:
        with state.hidden(), torch.compiler.set_stance("force_eager"), attend_with(state.attention):
            forwards.begin()
            cut.gradients.begin()
            step = forward_backward(parts, micro_batches, 1 / cut.layout.team)
            exchange = begin_exchange(parts, step)
            has_unused = cut.gradients.wait()
            unused = exchange()[5]  # who asks for something by the others is asked again in the first step
            cut.gradients.finish(has_unused or bool(unused))
        return [(name, part.clone()) for name, one in cut.trained for part in local_gradients([one])]
    finally:
        forwards.is_trial = False
        forwards.put_buffers_back()
        state.rest()
        for _, parameter in cut.trained:
            parameter.grad = None


def rounding_of(parts: EngineParts) -> float:
    """By how much two numbers of `try_forward` may differ that are the same but for rounding, relative to them."""
    numerics = parts.forwards.setup.settings.numerics
    if numerics.storage_dtype != "fp32" or numerics.param_dtype is not None or numerics.tf32:
        return 1e-2
    return 1e-5 if parts.state.device.type == "cpu" else 1e-4
