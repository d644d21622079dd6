"""Whether every data rank computes the same for the same samples: `lockstep verify` asks when numbers differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep.data.first_samples import first_micro_batch
from lockstep.data.loader import Loader, StepBatch

if TYPE_CHECKING:
    from lockstep.engine import Engine


@dataclass(frozen=True)
class RankNumbers:
    """What a data rank finds for samples that all of them compute in turn."""

    loss: float
    gradient: float
    """The largest difference of a gradient to that of the first data rank, relative to the norm of all."""
    parameter: str
    """Of which parameter that gradient is."""


def each_rank_in_turn(engine: Engine, batch: StepBatch, loader: Loader) -> list[RankNumbers]:
    """The numbers of every data rank for the first samples of the training; ends it: the engine updates nothing more.

    All ranks compute the same micro-batch, as often as the layout has data ranks, and only the loss of one counts.
    """
    rank = engine.layout.data_rank(engine.rank)
    first = first_micro_batch(loader.dataset, loader.order, loader.reading)
    done, count = engine.steps_done, max(1, len(batch.micro_batches))
    engine.stop_observing()
    vars(engine.optimizer)["step"] = lambda *_, **__: None
    found: list[RankNumbers] = []
    reference: dict[str, torch.Tensor] = {}
    for turn in range(engine.layout.data_size):
        engine.state.steps_done = done
        parts = [replace(first, filler=rank != turn)] * count
        result = engine.step(replace(batch, micro_batches=parts, samples=count * len(first.ids)))
        gradients = _gradients(engine)
        reference = reference or gradients
        found.append(RankNumbers(result.loss, *_largest_difference(gradients, reference)))
    return found


@torch.no_grad()
def _gradients(engine: Engine) -> dict[str, torch.Tensor]:
    engine.state.rest()
    return {
        name: engine.whole(name, parameter.grad).detach().clone()
        for name, parameter in engine.stored
        if parameter.grad is not None
    }


def _largest_difference(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> tuple[float, str]:
    def norm(tensor: Any) -> float:
        return 0.0 if tensor is None else float(torch.linalg.vector_norm(tensor, dtype=torch.float64))

    whole = sum(norm(one) ** 2 for one in (*reference.values(), *gradients.values())) ** 0.5
    largest, parameter = 0.0, ""
    for name in reference.keys() | gradients.keys():
        ours, theirs = gradients.get(name), reference.get(name)
        distance = norm(ours if theirs is None else theirs if ours is None else ours.double() - theirs.double())
        if distance > largest * whole:
            largest, parameter = distance / whole, name
    return largest, parameter
