"""Running a pipeline: a timetable of forwards and backwards over the stages of this rank.

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
from lockstep.parallel.pipeline.point_to_point import Key, Links
from lockstep.parallel.pipeline.stage import Stage
from lockstep.parallel.pipeline.timeline import Lane, Moment, Stopwatch
from lockstep.parallel.pipeline.timetable import Action, stages_of, timetable

Forward = Callable[[Stage, int, Sequence[torch.Tensor]], Any]
"""Runs a stage on a micro-batch, by its number, and what was received for it."""


@dataclass
class InFlight:
    """What a stage holds of a micro-batch between its forward and its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    weights_later: Callable[[], None] | None = None


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
    _timeline: list[tuple[Action, Moment, Moment]] = field(default_factory=list)

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

    def step(
        self,
        rehearsals: Sequence[Rehearsal],
        forward: Forward,
        loss_of: Callable[[int, Any], torch.Tensor],
        backward_of: Callable[[int], AbstractContextManager[Any]],
    ) -> None:
        """Forward and backward of all micro-batches, by the timetable.

        `loss_of` is given what the last stage's forward of a micro-batch returned, and gives the number to derive. What
        `backward_of` returns is entered around the backward of a micro-batch.
        """
        tables = timetable(self.schedule, self.ranks, len(self.stages), len(rehearsals))
        self.stopwatch.forget([moment for _, *moments in self._timeline for moment in moments])
        self._timeline.clear()
        self._run(tables, rehearsals, forward, loss_of, backward_of)

    def forward_only(self, rehearsals: Sequence[Rehearsal], forward: Forward) -> list[Any]:
        """What the last stage's forward returns for each micro-batch; nothing on the other ranks."""
        results: list[Any] = []

        def keep(_: int, result: Any) -> torch.Tensor:
            results.append(result)
            return torch.empty(0)

        tables = [[Action("F", stage, n) for stage in own for n in range(len(rehearsals))] for own in self.by_rank]
        self._run(tables, rehearsals, forward, keep, lambda _: nullcontext())
        return results

    def _run(
        self,
        tables: list[list[Action]],
        rehearsals: Sequence[Rehearsal],
        forward: Forward,
        loss_of: Callable[[int, Any], torch.Tensor],
        backward_of: Callable[[int], AbstractContextManager[Any]],
    ) -> None:
        here = {stage.number: stage for stage in self.stages}
        in_flight: dict[tuple[int, int], InFlight] = {}
        local: dict[Key, list[torch.Tensor]] = {}
        self.links.expect(self._messages(tables, rehearsals))
        derives = any(action.kind != "F" for action in tables[self.rank])
        now = self.stopwatch.now if derives else float
        for action in tables[self.rank]:
            stage, number = here[action.stage], action.micro_batch
            if action.kind == "W":
                began = now()
                held = in_flight.pop((stage.number, number))
                assert held.weights_later is not None
                with backward_of(number):
                    held.weights_later()
                ended = now()
            elif action.kind == "F":
                entering = [] if stage.is_first else self._entering(stage.number, rehearsals[number])
                key = ("F", stage.number, number)
                received = local.pop(key) if key in local else self.links.receive(key) if entering else []
                began = now()
                inputs = [_as_sent(tensor, value) for tensor, value in zip(received, entering, strict=True)]
                output = forward(stage, number, inputs)
                outputs = [loss_of(number, output)] if stage.is_last else list(output)
                if derives:
                    in_flight[stage.number, number] = InFlight(inputs, outputs)
                ended = now()  # before the others can have what it made
                if not stage.is_last:
                    self._hand_on(("F", stage.number + 1, number), outputs, local)
            else:
                gradients = self._gradients_for(stage, number, rehearsals[number], local)
                began = now()
                held = in_flight[stage.number, number]
                with backward_of(number):
                    self._backward(action.kind, stage, held, gradients)
                if action.kind == "B":
                    del in_flight[stage.number, number]
                back = [i.grad if i.grad is not None else torch.zeros_like(i) for i in held.inputs if i.requires_grad]
                for tensor in held.inputs:
                    tensor.grad = None
                ended = now()
                if back:
                    self._hand_on(("B", stage.number - 1, number), back, local)
            if derives:
                self._timeline.append((action, began, ended))
        self.links.finish()
        for stage in self.stages:
            stage.forget()

    def _backward(self, kind: str, stage: Stage, held: InFlight, gradients: list[torch.Tensor | None]) -> None:
        arrived = [True] if stage.is_last else [gradient is not None for gradient in gradients]
        roots = [
            (o, g) for o, g, here in zip(held.outputs, gradients, arrived, strict=True) if here and o.requires_grad
        ]
        outputs, grads = [o for o, _ in roots], [g for _, g in roots]
        inputs = [tensor for tensor in held.inputs if tensor.requires_grad]
        held.outputs = []

        def everything() -> None:
            if outputs:
                torch.autograd.backward(outputs, grads)

        if kind == "B":
            everything()
        elif inputs and outputs:
            held.weights_later = backward_of_inputs(outputs, grads, inputs, _with_data(stage))
        else:  # nobody waits for its inputs' gradients
            held.weights_later = everything

    def _gradients_for(
        self, stage: Stage, number: int, rehearsal: Rehearsal, local: dict[Key, list[torch.Tensor]]
    ) -> list[torch.Tensor | None]:
        if stage.is_last:
            return [None]
        leaving = self._entering(stage.number + 1, rehearsal)
        key = ("B", stage.number, number)
        if not any(value.requires_grad for value in leaving):
            return [None] * len(leaving)
        received = iter(local.pop(key) if key in local else self.links.receive(key))
        return [next(received) if value.requires_grad else None for value in leaving]

    def _hand_on(self, key: Key, tensors: list[torch.Tensor], local: dict[Key, list[torch.Tensor]]) -> None:
        to = self.rank_of[key[1]]
        if to == self.rank:
            local[key] = tensors
        elif tensors:
            self.links.send(to, tensors)

    def _entering(self, stage: int, rehearsal: Rehearsal) -> list[Value]:
        return [rehearsal.values[number] for number in rehearsal.crossing(self.plan.cuts[stage])]

    def _messages(
        self, tables: list[list[Action]], rehearsals: Sequence[Rehearsal]
    ) -> dict[int, list[tuple[Key, list[Value]]]]:
        """What every other rank will send to this one, in the order it does."""
        messages: dict[int, list[tuple[Key, list[Value]]]] = {}
        for source, actions in enumerate(tables):
            for kind, stage, number in actions:
                if kind == "F" and stage + 1 < self.plan.stages:
                    key, values = ("F", stage + 1, number), self._entering(stage + 1, rehearsals[number])
                elif kind in "BI" and stage > 0:
                    values = [v for v in self._entering(stage, rehearsals[number]) if v.requires_grad]
                    key = ("B", stage - 1, number)
                else:
                    continue
                if source != self.rank and self.rank_of[key[1]] == self.rank and values:
                    messages.setdefault(source, []).append((key, values))
        return messages


def _with_data(stage: Stage) -> list[nn.Parameter]:
    return [parameter for parameter in stage.parameters() if not is_fake(parameter)]


def _as_sent(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """What was received, laid out in memory as it was where it was made."""
    if tensor.stride() != value.stride and 0 not in value.stride:
        laid_out = torch.empty_strided(value.shape, value.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = laid_out.copy_(tensor)
    return tensor.detach().requires_grad_(value.requires_grad)
