"""What crosses the cuts of a pipeline (boundary activations): found once for each function and shape of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.follow.trees import PLAIN, tensors_of
from lockstep.follow.values import Rehearsal
from lockstep.parallel.pipeline.plan_stages import rehearse_parts
from lockstep.parallel.pipeline.stage import Stage
from lockstep.runtime.torch_private import tree_flatten

MOST_SHAPES = 1000
"""Shapes of batches that are remembered."""


class Rehearsals:
    """Forwards of a model without data, which is cut into these parts, as far as they were seen."""

    def __init__(self, skeleton: nn.Module, parts: list[str], device: torch.device) -> None:
        self._skeleton = skeleton
        self._parts = parts
        self._device = device
        self._known: dict[Any, Rehearsal] = {}

    def look(
        self,
        stages: Sequence[Stage],
        name: str,
        function: Callable[[nn.Module, Any], Any],
        data: Sequence[Any],
        may_read_at_end: bool = False,
    ) -> list[Rehearsal]:
        """A forward of a function for each of some batches, in the modes that the first stage's model has now."""
        _make_alike(stages)
        modes = tuple(module.training for module in stages[0].model.modules())
        autocast = torch.is_autocast_enabled(self._device.type), torch.get_autocast_dtype(self._device.type)
        kind = name, getattr(function, "__code__", None), torch.is_grad_enabled(), autocast, hash(modes)
        found = []
        for batch in data:
            key = (*kind, _shape_of(batch))
            if key not in self._known:
                if len(self._known) >= MOST_SHAPES:
                    self._known.clear()
                self._known[key] = self._rehearse(function, batch, modes, may_read_at_end)
            found.append(self._known[key])
        return found

    def _rehearse(
        self, function: Callable[[nn.Module, Any], Any], batch: Any, modes: Sequence[bool], may_read_at_end: bool
    ) -> Rehearsal:
        for module, training in zip(self._skeleton.modules(), modes, strict=True):
            module.training = training
        with torch.random.fork_rng([]):
            rehearsal = rehearse_parts(
                self._skeleton, self._parts, lambda model: function(model, batch), may_read_at_end
            )
        rehearsal.pieces.clear()  # they are for the plan, and hold the batch
        return rehearsal


def _make_alike(stages: Sequence[Stage]) -> None:
    """Give all stages of this rank the plain attributes of the first, which is the one users know and change."""
    first, *others = (stage.model for stage in stages)
    for other in others:
        for known, twin in zip(first.modules(), other.modules(), strict=True):
            vars(twin).update({name: value for name, value in vars(known).items() if isinstance(value, PLAIN)})
        for parameter, copied in zip(first.parameters(), other.parameters(), strict=True):
            if copied.requires_grad != parameter.requires_grad:
                copied.requires_grad_(parameter.requires_grad)


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
