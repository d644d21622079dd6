"""One forward of a micro-batch, under the random streams of its logical coordinates: run, step, sample, block.

Dropout and other draws follow (seed, step, position of the sample, number of the module), never the rank or who shares
the forward, so that every layout and every micro-batch draws the same.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.config.schema import Format
from lockstep.data.loader import MicroBatch
from lockstep.errors import UserError
from lockstep.parallel.build.compile import compile_whole, compiled_calls
from lockstep.parallel.replicate.buffers import BufferCopies, ForwardBuffers
from lockstep.parallel.replicate.shard import call_gathered, read_elsewhere, weights_read_by_their_modules
from lockstep.parallel.tensor.context import cut_sequences
from lockstep.parallel.train_state import TrainState
from lockstep.parallel.whole.alone import WholeSteps
from lockstep.runtime.comm import Comm
from lockstep.runtime.draws import SampleDraws, has_moved
from lockstep.runtime.seeds import draw_seed, hosts_have_moved, seed_everything, seed_torch
from lockstep.runtime.torch_private import in_backward, replaced
from lockstep.step.attention import attend_with
from lockstep.step.precision import compute_in
from lockstep.training.setup import Setup, Weight


class Forwards:
    """The forwards of a training on this rank: in its steps, in trials before them, and where memory is measured."""

    def __init__(self, setup: Setup, state: TrainState, comm: Comm) -> None:
        cut, settings = state.cut, setup.settings
        self.setup = setup
        self.state = state
        self.comm = comm
        self.loss = compile_whole(setup.loss, cut.layout.team > 1) if settings.compile == "model" else setup.loss
        self.whole_steps = WholeSteps(cut.models, cut.layout)
        self.buffers = ForwardBuffers(cut.models, cut.buffers, comm)
        self.copies = BufferCopies([buffer for _, buffer in cut.buffers])
        self.draws = SampleDraws()
        self.draws_by_sample = settings.compile == "off"  # compiled code draws for all samples of a forward at once
        self.may_draw = True
        """Whether forwards draw random numbers, as far as the first samples tell."""
        self.is_trial = False
        """Trials compute in fp32, and count for nothing."""
        self.begins: Callable[[MicroBatch], None] = lambda _: None
        """Called before each forward of a micro-batch, outside of it."""
        self.together = cut.together
        """Why no rank can leave a forward out, for people; None: it can."""
        self._sequence = comm.cut_axis("cp")
        self._step = 0  # whose draws modules make
        self._calls: Counter[int] = Counter()
        self._streams: dict[tuple[int, int, int], int] = {}
        self._explaining: Callable[[], AbstractContextManager[None]] = nullcontext
        if settings.compile != "off":
            self._explaining = compiled_calls
        elif any(isinstance(parameter, DTensor) for model in cut.models for parameter in model.parameters()):
            self._explaining = weights_read_by_their_modules
        # A whole compiled model cannot be left between its blocks: it draws from the micro-batch's stream alone.
        for seeded in cut.seeded if settings.compile != "model" else []:
            for number, module in enumerate(seeded):
                module.register_forward_pre_hook(self._seed_module(number))

    def begin(self) -> None:
        """A step begins, or a trial of one: what the forwards before it drew and changed is over."""
        self._streams.clear()
        self.whole_steps.begin()
        self.buffers.begin()
        self.copies.take()

    def put_buffers_back(self) -> None:
        """What forwards have done to buffers does not count."""
        self.buffers.forget()
        self.copies.put_back()

    def forward(self, micro_batch: MicroBatch, data: Any) -> tuple[torch.Tensor, Weight]:
        """Loss sum and weight of one micro-batch (`data`: on the device)."""
        self.start(micro_batch)
        counts = self.state.is_in_step or self.is_trial  # others measure something
        if not counts:
            self.buffers.begin()
            self.copies.take()
        try:
            with self.drawing(), self.computing(), self.state.hidden(), self.buffers.forward():
                return self.summed_loss(self.state.cut.models[0], self.own_tokens(data))
        finally:
            if not counts:
                self.put_buffers_back()

    def computing(self) -> AbstractContextManager[None]:
        """In the number formats and with the attention kernels of this training."""
        precision = "fp32" if self.is_trial else self.setup.settings.precision
        return computing(precision, self.state.device, self.state.attention)

    def own_tokens(self, data: Any) -> Any:
        """This rank's part of the sequences of a micro-batch, where the layout cuts those (cp)."""
        return data if self._sequence is None else cut_sequences(data, self._sequence)

    def summed_loss(self, model: nn.Module, data: Any) -> tuple[torch.Tensor, Weight]:
        """Call the user's loss function, and refuse what it must not do or return."""
        with self._explaining(), self.whole_steps.watching(), no_backward():
            returned = call_gathered(model, lambda whole: self.loss(whole, data))
        loss, weight = checked_loss(returned, self.setup.loss_reduction, self.together, self.state.device)
        _check_has_gradient(loss, weight)
        return loss, weight

    def start(self, micro_batch: MicroBatch) -> None:
        """Set the random streams of a micro-batch, whose forward follows."""
        self.begins(micro_batch)
        self._step, seed = self.state.steps_done, self.setup.seed
        self._calls.clear()
        self.comm.beat.tick()
        seed_everything(draw_seed(seed, self._step))
        self.draws.begin(micro_batch.index, micro_batch.positions, partial(draw_seed, seed, self._step))
        if not self.draws_by_sample:
            seed_torch(draw_seed(seed, self._step, micro_batch.first))

    def drawing(self) -> AbstractContextManager[Any]:
        """Entered around a forward, so that what it draws follows the samples."""
        return self.draws if self.draws_by_sample and self.may_draw else nullcontext()

    def check_undrawn(self) -> None:
        """After a forward of a training that drew nothing before it began: it still draws nothing.

        Of compiled code nobody knows: it draws to time kernels, and for nothing.
        """
        step = self.state.steps_done
        if (
            self.draws_by_sample
            and not self.may_draw
            and has_moved(self.state.device, draw_seed(self.setup.seed, step))
        ):
            raise UserError(
                f"the forward of step {step + 1} draws random numbers, and at the start it drew none",
                "let it draw from the first step on, and multiply by 0 what is not wanted yet",
            )

    def has_drawn(self, micro_batch: MicroBatch) -> bool:
        """Whether anybody drew random numbers since a forward began that nothing else seeded."""
        step, seed = self.state.steps_done, self.setup.seed
        own = draw_seed(seed, step) if self.draws_by_sample else draw_seed(seed, step, micro_batch.first)
        return has_moved(self.state.device, own) or hosts_have_moved(draw_seed(seed, step))

    @property
    def flips_coins(self) -> bool:
        """Whether anybody drew one number for all samples since a forward began."""
        return self.draws.has_drawn_for_all or hosts_have_moved(draw_seed(self.setup.seed, self.state.steps_done))

    def _seed_module(self, number: int) -> Callable[[nn.Module, Any], None]:
        def seed(module: nn.Module, _: Any) -> None:
            if not module.training or not self.may_draw:
                return
            key = self.draws.micro_batch, torch.default_generator.initial_seed(), number
            # torch.utils.checkpoint calls a module again in the backward pass, in the stream it was called in first.
            if (again := self._streams.get(key)) is not None and in_backward():
                seed_torch(again)
                return
            call = self._calls[number]  # a module that is called twice draws two masks
            self._calls[number] += 1
            run, step = self.setup.seed, self._step
            self.draws.reseed(lambda position: draw_seed(run, step, position, number, call), (number, call))
            of_all = -1 if self.draws_by_sample else self.draws.positions[0]
            self._streams[key] = own = draw_seed(run, step, of_all, number, call)
            seed_torch(own)

        return seed


@contextmanager
def computing(precision: Format, device: torch.device, attention: str | None) -> Iterator[None]:
    """In these number formats (autocast) and with these attention kernels."""
    with compute_in(precision, device), attend_with(attention):
        yield


def checked_loss(
    returned: Any, reduction: Literal["sum", "mean"], together: str | None, device: torch.device
) -> tuple[torch.Tensor, Weight]:
    """Sum and weight of what a loss function returned. `together` says why no rank can leave a forward out."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        what = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        raise UserError(
            f"the loss function returned {what}",
            "return (sum of the losses, how many of them count), as the README's own script does",
        )
    value, weight = returned
    _check_is_tensor(value)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise UserError("the loss function returned a loss that is not one number", 'use reduction="sum"')
    if isinstance(value, DTensor):
        raise read_elsewhere()
    if isinstance(weight, torch.Tensor) and weight.requires_grad:
        raise UserError(
            "the weight that the loss function returns depends on the model's parameters, and a weight counts only",
            "detach it where it is a count; where it belongs to the loss, divide by it there, and return that mean "
            'and a count, with loss_reduction="mean"',
        )
    if reduction == "sum":
        return value.float().reshape(()), weight
    # A mean over nothing is NaN, and its gradient too: such a micro-batch is left out, not multiplied by zero.
    if float(weight) > 0:
        return value.float().reshape(()) * weight, weight
    if together is not None:
        raise UserError(
            f"a micro-batch of weight 0 has no mean loss, and {together} cannot leave it out",
            'return the sum (reduction="sum") and drop loss_reduction="mean"',
        )
    return torch.zeros((), device=device), 0


def _check_is_tensor(loss: Any) -> None:
    """Refuse a loss that is a plain number, from which no gradient comes."""
    if isinstance(loss, bool | int | float):
        raise UserError(
            f"the loss function returned {loss!r}, a plain number without a gradient",
            "return the loss itself, a tensor, without .item() or float()",
        )


def _check_has_gradient(loss: torch.Tensor, weight: int | float | torch.Tensor) -> None:
    """Refuse a loss that no parameter has a part in, although it counts. Of weight 0 it is a constant by right."""
    if torch.is_grad_enabled() and not loss.requires_grad and float(weight) > 0:
        raise UserError(
            f"the loss function returned a loss without a gradient, of weight {float(weight):g}",
            "compute it with the model and without detach() and torch.no_grad(); where nothing counts return weight 0",
        )


@contextmanager
def no_backward() -> Iterator[None]:
    """Refuse a backward pass over all parameters inside: their gradients would count twice."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def refuse(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("inputs") is None:
            raise UserError(
                "the loss function calls backward, which engine.step does itself",
                "leave it out; for gradients inside of the loss use torch.autograd.grad",
            )
        backward(*args, **kwargs)

    with replaced(torch.autograd, "backward", refuse):
        yield
