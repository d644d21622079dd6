"""Calls of a model that is cut into the stages of a pipeline: a training step, a score, or the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.trees import PLAIN, map_tensors, tensors_of
from lockstep.follow.values import Rehearsal
from lockstep.parallel.pipeline.plan_stages import rehearse_parts
from lockstep.parallel.pipeline.runner import Pipeline
from lockstep.parallel.pipeline.stage import Stage
from lockstep.parallel.tensor.cut import whole_of
from lockstep.runtime.comm import Comm
from lockstep.runtime.torch_private import call_of, replace_call, tree_flatten, tree_leaves, tree_map
from lockstep.runtime.torch_private.seen import require

Start = Callable[[int], AbstractContextManager[Any]]
"""Sets the random stream of a micro-batch, by its number; its forward runs inside what comes back."""

MOST_SHAPES = 1000
"""Shapes of batches that are remembered."""


class PipelinedCalls:
    """Runs functions of (model, batch) through the stages of a pipeline.

    Each function and shape of a batch is looked at once, on a skeleton of the model, to know what crosses the cuts.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        skeleton: nn.Module,
        comm: Comm,
        device: torch.device,
        computing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        require("pipeline")
        self.at_once = 4 * pipeline.ranks  # micro-batches of an evaluation that are in the pipeline together
        self._pipeline = pipeline
        self._skeleton = skeleton
        self._comm = comm
        self._device = device
        self._computing = computing
        self._rehearsals: dict[Any, Rehearsal] = {}
        for stage in pipeline.stages:
            replace_call(stage.model, self._called)

    def step(
        self,
        data: Sequence[Any],
        loss: Callable[[nn.Module, Any], Any],
        start: Start,
        loss_of: Callable[[int, Any], torch.Tensor],
        backward_of: Callable[[int], AbstractContextManager[Any]],
    ) -> None:
        """Forward and backward of the micro-batches of a step."""
        with self._computing():
            rehearsals = self._look("step", loss, data)
        forward = self._forward(loss, data, rehearsals, start, self._computing)
        self._pipeline.step(rehearsals, forward, loss_of, backward_of)

    def score(
        self, name: str, data: Sequence[Any], function: Callable[[nn.Module, Any], Any], start: Start
    ) -> list[Any]:
        """What a function returns for every micro-batch, on the rank of the last stage; elsewhere nothing."""
        with self._computing():
            rehearsals = self._look(name, function, data, may_read_at_end=True)
            if not any(one.outputs for one in rehearsals):
                return self._without_model(data, function, start)
            forward = self._forward(function, data, rehearsals, start, nullcontext)
            return self._pipeline.forward_only(rehearsals, forward)

    def _without_model(self, data: Sequence[Any], function: Callable[[nn.Module, Any], Any], start: Start) -> list[Any]:
        """A function that does not call the model: the rank of the last stage computes it."""
        stage = self._pipeline.stages[-1]
        results = []
        for number, one in enumerate(data if stage.is_last else []):
            with start(number):
                results.append(function(stage.model, one))
        return results

    def _forward(
        self,
        function: Callable[[nn.Module, Any], Any],
        data: Sequence[Any],
        rehearsals: Sequence[Rehearsal],
        start: Start,
        computing: Callable[[], AbstractContextManager[None]],
    ) -> Callable[[Stage, int, Sequence[torch.Tensor]], Any]:
        def forward(stage: Stage, number: int, received: Sequence[torch.Tensor]) -> Any:
            stage.rehearsal = rehearsals[number]
            with start(number), computing():
                return stage(lambda model: function(model, data[number]), received)

        return forward

    def _called(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The model is called: in a stage's forward that is the stage's matter, else all stages compute it together."""
        if any(stage.running for stage in self._pipeline.stages):
            return call_of(module)(*args, **kwargs)
        if opaque := [leaf for leaf in tree_leaves((args, kwargs)) if not _is_plain(leaf)]:
            raise UserError(
                f"the model of a pipeline was given a {type(opaque[0]).__name__}, which every stage would change alone",
                "call it with tensors and plain values (and without a cache: use_cache=False)",
            )
        return self._call_whole((args, kwargs))

    @torch.no_grad()
    def _call_whole(self, given: tuple[Any, Any]) -> Any:
        """What the whole model returns, on every rank of the pipeline."""

        def call(model: nn.Module, given: tuple[Any, Any]) -> Any:
            return model(*given[0], **given[1])

        (rehearsal,) = rehearsals = self._look("call", call, [given])
        forward = self._forward(call, [given], rehearsals, lambda _: nullcontext(), nullcontext)
        results = self._pipeline.forward_only(rehearsals, forward)
        last = self._comm.pipeline_ranks()[self._pipeline.rank_of[-1]]
        result = results[0] if results else rehearsal.result

        def everywhere(tensor: torch.Tensor) -> torch.Tensor:
            if results:
                whole = whole_of(tensor).contiguous()
            else:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            dist.broadcast(whole, last, group=self._comm.group("pp"))
            return whole

        return _without_objects(map_tensors(everywhere, result))

    def _look(
        self,
        name: str,
        function: Callable[[nn.Module, Any], Any],
        data: Sequence[Any],
        may_read_at_end: bool = False,
    ) -> list[Rehearsal]:
        self._make_alike()
        modes = tuple(module.training for module in self._pipeline.stages[0].model.modules())
        autocast = torch.is_autocast_enabled(self._device.type), torch.get_autocast_dtype(self._device.type)
        kind = name, getattr(function, "__code__", None), torch.is_grad_enabled(), autocast, hash(modes)
        return [self._rehearsal((*kind, _shape_of(one)), function, one, modes, may_read_at_end) for one in data]

    def _make_alike(self) -> None:
        """Give all stages of this rank the plain attributes of the first, which is the one users know and change."""
        first, *others = (stage.model for stage in self._pipeline.stages)
        for other in others:
            for known, twin in zip(first.modules(), other.modules(), strict=True):
                vars(twin).update({name: value for name, value in vars(known).items() if isinstance(value, PLAIN)})
            for parameter, copied in zip(first.parameters(), other.parameters(), strict=True):
                if copied.requires_grad != parameter.requires_grad:
                    copied.requires_grad_(parameter.requires_grad)

    def _rehearsal(
        self,
        key: Any,
        function: Callable[[nn.Module, Any], Any],
        data: Any,
        modes: Sequence[bool],
        may_read_at_end: bool,
    ) -> Rehearsal:
        if key not in self._rehearsals:
            if len(self._rehearsals) >= MOST_SHAPES:
                self._rehearsals.clear()
            for module, training in zip(self._skeleton.modules(), modes, strict=True):
                module.training = training
            parts = [part.name for part in self._pipeline.plan.parts]
            with torch.random.fork_rng([]):
                rehearsal = rehearse_parts(self._skeleton, parts, lambda model: function(model, data), may_read_at_end)
            rehearsal.pieces.clear()  # they are for the plan, and hold the batch
            self._rehearsals[key] = rehearsal
        return self._rehearsals[key]


def _shape_of(data: Any) -> Any:
    """What tells batches apart for which a forward makes values of other shapes."""
    leaves, structure = tree_flatten(data)
    return str(structure), tuple(_kind_of(leaf) for leaf in leaves)


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    if leaf is None or isinstance(leaf, bool | int):
        return leaf
    return type(leaf), *(tensor.shape for tensor in tensors_of(leaf))


def _without_objects(result: Any) -> Any:
    """The result without what only one stage could have made whole, such as a cache."""

    def keep(leaf: Any) -> Any:
        return leaf if _is_plain(leaf) or any(True for _ in tensors_of(leaf)) else None

    return tree_map(keep, result)


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (torch.Tensor, *PLAIN))
