"""One optimizer step under any layout.

    engine.step(batch):
        forward_backward(micro-batches)      gradients of the loss SUM accumulate, times the constant 1 / global batch
        exchange(weight, loss, requests)     float64 over all ranks, on the CPU, beside the last backward
        finish the gradient sums             buckets (dp) or reduce-scatter (fsdp), overlapped with the last backward
        norm, one factor, optimizer          the factor global batch / weight makes it the gradient of the mean loss

The weight W of a step is known only after its last micro-batch, over all ranks. Nowhere else is anything averaged.
The parts stand in training/; how a model is cut in parallel/.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.data.loader import MicroBatch, StepBatch
from lockstep.data.transfer import Transfers
from lockstep.errors import UserError
from lockstep.faults.out_of_memory import memory_explained
from lockstep.faults.recover import Recovery
from lockstep.faults.requests import Requests
from lockstep.layout import Layout
from lockstep.parallel.build.apply import Look
from lockstep.parallel.cut_model import CutModel
from lockstep.parallel.pipeline.runner import Pipeline
from lockstep.parallel.tensor.context import cut_sequences
from lockstep.parallel.train_state import TrainState
from lockstep.runtime.comm import Comm
from lockstep.step.scoring import Metric, MetricFunction
from lockstep.training.do_step import check_last_gradient, do_step
from lockstep.training.engine_parts import Around, EngineParts, StepResult
from lockstep.training.forwards import Forwards
from lockstep.training.prepare import look_with, make_parts, make_state
from lockstep.training.scores import score_all, scoring
from lockstep.training.setup import LossFunction, Setup
from lockstep.training.tries import Tried, rounding_of, try_forward, try_gradients

__all__ = ["Engine", "LossFunction", "StepResult"]


class NotYetError(UserError, AttributeError):
    """Something of the engine was asked for before its model is cut; to `hasattr` it is not there."""


class Engine:
    """A model, its loss and its optimizer, cut for a layout. `step` is one optimizer step, whatever the layout.

    A layout with pp, tp or cp looks at samples before it can cut: until then (`is_ready`) the engine is what it was
    told, and has no model.
    """

    def __init__(
        self,
        setup: Setup,
        comm: Comm,
        layout: Layout,
        device: torch.device,
        *,
        requests: Requests,
        recovery: Recovery,
        around: Around,
        begins_at: int = 0,
    ) -> None:
        self.setup = setup
        self.layout = layout
        self.device = device
        self.rank = comm.rank
        self._comm = comm
        self._requests = requests
        self._recovery = recovery
        self._around = around
        self._begins_at = begins_at
        self._parts: EngineParts | None = None

    # How it is made -----------------------------------------------------------------------------------------------

    def look_at(self, data: Any) -> Look:
        """The first samples are there, as the loss function gets them; every rank sees the same ones."""
        data = Transfers(self.device).send(data).take()
        if (axis := self._comm.cut_axis("cp")) is not None:
            cut_sequences(data, axis)  # refuses lengths that cannot be shared out
        return look_with(self.setup, self.layout, self.device, data)

    def take(self, cut: CutModel) -> None:
        """Take over a model that was cut for this rank, and make its optimizer."""
        state = make_state(self.setup, cut, self.device)
        self._parts = make_parts(self.setup, state, self._comm, self._recovery, self._requests, self._around)

    @property
    def is_ready(self) -> bool:
        """Whether the model is there; one that has to be looked at waits for the first samples."""
        return self._parts is not None

    @property
    def parts(self) -> EngineParts:
        """What steps, trials and scores work with."""
        if self._parts is None:
            raise NotYetError(
                "the engine's model is not there yet: it is cut when the first samples are known",
                "make the loader (run.loader) before you use it",
            )
        return self._parts

    # What a script sees -------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model; between steps its parameters are whole tensors, whatever the layout."""
        return self.state.cut.models[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, whose learning rates a script may change between steps."""
        return self.state.optimizer

    @property
    def lr(self) -> float:
        """The learning rate of the next step (of the first parameter group)."""
        return self.state.rates.of_step(self.steps_done)[0]

    @property
    def steps_done(self) -> int:
        """The optimizer steps of this training so far, over all restarts."""
        return self._begins_at if self._parts is None else self._parts.state.steps_done

    def step(self, batch: StepBatch) -> StepResult:
        """Do one optimizer step on what `run.loader` yields."""
        if not isinstance(batch, StepBatch):
            raise UserError(f"engine.step was given a {type(batch).__name__}", "give it what run.loader(...) yields")
        parts, state, beat = self.parts, self.state, self._comm.beat
        self._around.entered()
        beat.step = state.steps_done + 1
        beat.at("forward and backward")
        if parts.between is not None:
            parts.between.gone_on(state.steps_done + 1)
        largest = max((len(part.ids) for part in batch.micro_batches), default=1)
        with state.hidden(), memory_explained(state, self.setup.settings.precision, beat, largest):
            try:
                result = do_step(parts, batch)
            finally:
                state.cut.statistics.end()
        beat.at("the code between steps")
        return result

    def evaluate(
        self, micro_batches: Iterable[MicroBatch], metrics: Mapping[str, MetricFunction] | None = None
    ) -> dict[str, Metric]:
        """Loss and metrics over a dataset's micro-batches: every sample counted once, summed in float64."""
        return score_all(self.parts, micro_batches, metrics or {})

    def scoring(self) -> AbstractContextManager[None]:
        """In eval mode inside; afterwards every layer is in the mode it was in, and only shards are held."""
        return scoring(self.state)

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter or its gradient, as one device has it; every rank that holds a part calls it."""
        return self.state.whole(name, tensor)

    # What a run sees ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainState:
        """What changes in the training, and what checkpoints keep."""
        return self.parts.state

    @property
    def forwards(self) -> Forwards:
        """How this rank runs forwards, and what is known of them."""
        return self.parts.forwards

    @property
    def cut(self) -> CutModel:
        """The description of the cut model."""
        return self.parts.state.cut

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of this rank's stages, where the layout has one."""
        return self.cut.pipeline

    @property
    def stored(self) -> list[tuple[str, nn.Parameter]]:
        """What this rank stores of the parameters, by name."""
        return self.cut.parameters

    @property
    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers of this rank, by name."""
        return self.cut.buffers

    def check_last_gradient(self) -> None:
        """Stop if the norm of the last gradient is not finite and nobody has asked yet."""
        if self._parts is not None:
            check_last_gradient(self._parts)

    def check_replicas(self, again: bool = True) -> None:
        """Stop if ranks that hold the same hold it differently; without `again` only if this step was not looked at.

        Every rank calls it, between steps.
        """
        if again or self.parts.invariants.checked_step < self.steps_done:
            self.parts.invariants.check_all(self.steps_done)

    def stop_observing(self) -> None:
        """Nobody is told of the steps that follow."""
        self.parts.around = replace(self.parts.around, observe=Around().observe)

    def undo_half_a_step(self) -> None:
        """A step has failed half-way: buffers as they were before it, which its forward may have changed."""
        if self.state.is_in_step:
            self.forwards.put_buffers_back()
            self.state.is_in_step = False

    # What is tried out before the first step ----------------------------------------------------------------------

    def try_forward(self, micro_batch: MicroBatch) -> Tried:
        """Loss sum and weight of samples that all ranks have, in training mode and exactly, counting for nothing."""
        return try_forward(self.parts, micro_batch)

    def try_gradients(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[str, torch.Tensor]]:
        """This rank's part of the gradients of samples that all ranks have, exactly, counting for nothing."""
        return try_gradients(self.parts, micro_batches)

    @property
    def trial_rounding(self) -> float:
        """By how much two numbers of `try_forward` may differ that are the same but for rounding, relative to them."""
        return rounding_of(self.parts)

    @property
    def needs_whole_steps(self) -> str | None:
        """Why a step has to be one forward although no loss shows it, for people; None: it need not."""
        return self.forwards.whole_steps.reason

    def change_once(self, buffers: Collection[str]) -> None:
        """Forwards change these buffers, of all ranks, whatever samples they see: once a step."""
        self.forwards.buffers.change_once(buffers)
        self.cut.statistics.leave(buffers)

    def synchronise_batch_norm(self, is_on: bool) -> None:
        """Let BatchNorm normalise over the samples of all data ranks, where the model was cut for that, or not."""
        self.cut.statistics.synchronise(is_on)
        if self.is_synchronised:
            self.forwards.together = self.forwards.together or "a synchronised BatchNorm"

    @property
    def is_synchronised(self) -> bool:
        """Whether BatchNorm normalises over the samples of all data ranks."""
        return self.cut.statistics.is_synchronised

    def would_synchronise(self, is_on: bool) -> bool:
        """Whether BatchNorm would, where that is switched on: there may be none, or it may not be able to."""
        return is_on and self.cut.statistics.can_synchronise
