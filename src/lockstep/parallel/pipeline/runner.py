"""What happens to one micro-batch in this rank's stages (`Passage`), in the order of a pipeline's timetable.

torch's own schedules say in which order; they run here, because theirs want every micro-batch to have one shape, a
model cut by hand, and a loss outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lockstep.config.schema import Schedule
from lockstep.follow.blocks import ModelPlan, balance
from lockstep.follow.values import Rehearsal, Value, is_fake
from lockstep.parallel.pipeline.backward import backward_of_inputs
from lockstep.parallel.pipeline.look import Rehearsals
from lockstep.parallel.pipeline.point_to_point import Key, Links
from lockstep.parallel.pipeline.stage import Stage
from lockstep.parallel.pipeline.timeline import Lane, Moment, Stopwatch
from lockstep.parallel.pipeline.timetable import Action, stages_of, timetable


def _nothing(_: int) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True)
class MicroBatches:
    """What is computed of some micro-batches, each known by its number: all that a pipeline has to know of a step.

    `function(model, data)` is the user's own; `name` tells functions apart that see other values. `start` is entered
    around a forward and sets its random streams, `computing` inside of that sets number formats. `loss` makes of what
    the last stage returned the number to derive, `backward` is entered around each half of a backward pass.
    """

    name: str
    function: Callable[[nn.Module, Any], Any]
    data: Sequence[Any]
    start: Callable[[int], AbstractContextManager[Any]] = _nothing
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext
    loss: Callable[[int, Any], torch.Tensor] | None = None
    backward: Callable[[int], AbstractContextManager[Any]] = _nothing


@dataclass
class Pipeline:
    """The stages of one rank and its way to the others."""

    stages: list[Stage]
    plan: ModelPlan
    schedule: Schedule
    ranks: int
    rank: int
    links: Links
    stopwatch: Stopwatch
    rehearsals: Rehearsals
    _timeline: list[tuple[Action, Moment, Moment]] = field(default_factory=list)

    @property
    def at_once(self) -> int:
        """How many micro-batches of an evaluation are in the pipeline together."""
        return 4 * self.ranks

    @cached_property
    def by_rank(self) -> list[list[int]]:
        """The stages of every rank."""
        return stages_of(self.schedule, self.ranks, len(self.stages))

    @cached_property
    def rank_of(self) -> list[int]:
        """The rank of every stage."""
        places = {stage: rank for rank, own in enumerate(self.by_rank) for stage in own}
        return [places[stage] for stage in range(self.plan.stages)]

    def describe(self) -> str:
        """One line for people: the stages and how evenly they share the work."""
        return f"{self.plan.stages} stages, cut before {', '.join(self.plan.cut_names)}; {balance(self.plan)}"

    def last_step(self) -> Lane:
        """When each action of the last step began and ended; a GPU is waited for."""
        begins = self.stopwatch.seconds([began for _, began, _ in self._timeline])
        ends = self.stopwatch.seconds([ended for _, _, ended in self._timeline])
        actions = (action for action, _, _ in self._timeline)
        return [(*action, began, ended) for action, began, ended in zip(actions, begins, ends, strict=True)]

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to know to be cut the same way again."""
        return {"schedule": self.schedule, "cuts": self.plan.cut_names, "stages": self.by_rank}

    def step(self, work: MicroBatches) -> None:
        """Forward and backward of the micro-batches of a step, by the timetable."""
        with work.computing():
            rehearsals = self.rehearsals.look(self.stages, work.name, work.function, work.data)
        tables = timetable(self.schedule, self.ranks, len(self.stages), len(work.data))
        self.stopwatch.forget([moment for _, *moments in self._timeline for moment in moments])
        self._timeline.clear()
        passage = Passage(self, work, rehearsals, self.stopwatch.now)
        for action, began, ended in passage.run(tables):
            self._timeline.append((action, began, ended))

    def score(self, work: MicroBatches) -> list[Any]:
        """What the function returns for every micro-batch, on the rank of the last stage; elsewhere nothing."""
        with work.computing():
            rehearsals = self.rehearsals.look(self.stages, work.name, work.function, work.data, may_read_at_end=True)
        last = self.stages[-1]
        if not any(rehearsal.outputs for rehearsal in rehearsals):  # the model is not called
            results = []
            for number, data in enumerate(work.data if last.is_last else []):
                with work.start(number), work.computing():
                    results.append(work.function(last.model, data))
            return results
        passage = Passage(self, work, rehearsals)
        passage.run([[Action("F", stage, n) for stage in own for n in range(len(work.data))] for own in self.by_rank])
        return passage.results


@dataclass
class InFlight:
    """What a stage holds of a micro-batch between its forward and its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    weights_later: Callable[[], None] | None = None


class Passage:
    """Micro-batches on their way through the stages of this rank, once.

    `forward`, `backward` and `backward_of_weights` are all that is done with one of them; each returns when it began
    and ended to compute, without the time it waited for others.
    """

    def __init__(
        self, pipeline: Pipeline, work: MicroBatches, rehearsals: Sequence[Rehearsal], now: Callable[[], Moment] = float
    ) -> None:
        self._pipeline = pipeline
        self._work = work
        self._rehearsals = rehearsals
        self._now = now
        self._in_flight: dict[tuple[int, int], InFlight] = {}
        self._local: dict[Key, list[torch.Tensor]] = {}  # from one stage of this rank to another
        self.results: list[Any] = []
        """What the function returned, where the last stage is here and nothing is derived."""

    def run(self, tables: list[list[Action]]) -> list[tuple[Action, Moment, Moment]]:
        """Do what the table of this rank says, given those of all."""
        pipeline, done = self._pipeline, []
        here = {stage.number: stage for stage in pipeline.stages}
        pipeline.links.expect(self._messages(tables))
        for action in tables[pipeline.rank]:
            stage, number = here[action.stage], action.micro_batch
            if action.kind == "F":
                times = self.forward(stage, number)
            elif action.kind == "W":
                times = self.backward_of_weights(stage, number)
            else:
                times = self.backward(stage, number, in_halves=action.kind == "I")
            done.append((action, *times))
        pipeline.links.finish()
        for stage in pipeline.stages:
            stage.forget()
        return done

    def forward(self, stage: Stage, number: int) -> tuple[Moment, Moment]:
        """Receive the boundary activations, run the user's function up to the next cut, send what crosses that."""
        work, rehearsal = self._work, self._rehearsals[number]
        entering = [] if stage.is_first else self._crossing(stage.number, number)
        received = self._receive(("F", stage.number, number)) if entering else []
        began = self._now()
        inputs = [_as_sent(tensor, value) for tensor, value in zip(received, entering, strict=True)]
        stage.rehearsal = rehearsal
        with work.start(number), work.computing():  # the stage leaves the function where the next one begins
            output = stage(lambda model: work.function(model, work.data[number]), inputs)
        if stage.is_last and work.loss is None:
            self.results.append(output)
            return began, self._now()
        outputs = [work.loss(number, output)] if stage.is_last and work.loss else list(output)
        if work.loss is not None:
            self._in_flight[stage.number, number] = InFlight(inputs, outputs)
        ended = self._now()  # before the others can have what it made
        if not stage.is_last:
            self._send(("F", stage.number + 1, number), outputs)
        return began, ended

    def backward(self, stage: Stage, number: int, in_halves: bool) -> tuple[Moment, Moment]:
        """Receive the gradients of what was sent, derive, send the gradients of what was received.

        `in_halves`: only the gradients of the stage's inputs, which the stage before waits for.
        """
        gradients = self._gradients_for(stage, number)
        began = self._now()
        held = self._in_flight[stage.number, number]
        roots = [
            (output, gradient)
            for output, gradient in zip(held.outputs, gradients, strict=True)
            if output.requires_grad and (stage.is_last or gradient is not None)
        ]
        outputs, grads = [output for output, _ in roots], [gradient for _, gradient in roots]
        inputs = [tensor for tensor in held.inputs if tensor.requires_grad]
        held.outputs = []

        def everything() -> None:
            if outputs:
                torch.autograd.backward(outputs, grads)

        with self._work.backward(number):
            if not in_halves:
                everything()
            elif inputs and outputs:
                weights = [parameter for parameter in stage.parameters() if not is_fake(parameter)]
                held.weights_later = backward_of_inputs(outputs, grads, inputs, weights)
            else:  # nobody waits for its inputs' gradients
                held.weights_later = everything
        if not in_halves:
            del self._in_flight[stage.number, number]
        back = [i.grad if i.grad is not None else torch.zeros_like(i) for i in inputs]
        for tensor in held.inputs:
            tensor.grad = None
        ended = self._now()
        if back:
            self._send(("B", stage.number - 1, number), back)
        return began, ended

    def backward_of_weights(self, stage: Stage, number: int) -> tuple[Moment, Moment]:
        """The other half of a backward pass, which nobody waits for."""
        began = self._now()
        held = self._in_flight.pop((stage.number, number))
        assert held.weights_later is not None
        with self._work.backward(number):
            held.weights_later()
        return began, self._now()

    def _gradients_for(self, stage: Stage, number: int) -> list[torch.Tensor | None]:
        """The gradients of a stage's outputs, from the one behind it."""
        if stage.is_last:
            return [None]
        leaving = self._crossing(stage.number + 1, number)
        if not any(value.requires_grad for value in leaving):
            return [None] * len(leaving)
        received = iter(self._receive(("B", stage.number, number)))
        return [next(received) if value.requires_grad else None for value in leaving]

    def _receive(self, key: Key) -> list[torch.Tensor]:
        return self._local.pop(key) if key in self._local else self._pipeline.links.receive(key)

    def _send(self, key: Key, tensors: list[torch.Tensor]) -> None:
        to = self._pipeline.rank_of[key[1]]
        if to == self._pipeline.rank:
            self._local[key] = tensors
        elif tensors:
            self._pipeline.links.send(to, tensors)

    def _crossing(self, stage: int, number: int) -> list[Value]:
        """The values of a micro-batch that cross the cut before a stage (boundary activations)."""
        rehearsal = self._rehearsals[number]
        return [rehearsal.values[value] for value in rehearsal.crossing(self._pipeline.plan.cuts[stage])]

    def _messages(self, tables: list[list[Action]]) -> dict[int, list[tuple[Key, list[Value]]]]:
        """What every other rank will send to this one, in the order it does."""
        messages: dict[int, list[tuple[Key, list[Value]]]] = {}
        pipeline = self._pipeline
        for source, actions in enumerate(tables):
            for kind, stage, number in actions:
                if kind == "F" and stage + 1 < pipeline.plan.stages:
                    key, values = ("F", stage + 1, number), self._crossing(stage + 1, number)
                elif kind in "BI" and stage > 0:
                    key = ("B", stage - 1, number)
                    values = [value for value in self._crossing(stage, number) if value.requires_grad]
                else:
                    continue
                if source != pipeline.rank and pipeline.rank_of[key[1]] == pipeline.rank and values:
                    messages.setdefault(source, []).append((key, values))
        return messages


def _as_sent(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """What was received, laid out in memory as it was where it was made."""
    if tensor.stride() != value.stride and 0 not in value.stride:
        laid_out = torch.empty_strided(value.shape, value.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = laid_out.copy_(tensor)
    return tensor.detach().requires_grad_(value.requires_grad)
