"""Where a loss that is not finite comes from: weights that were not finite before, or samples, and whose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lockstep.data.loader import MicroBatch
from lockstep.errors import NonFiniteError
from lockstep.follow.trees import tensors_of
from lockstep.parallel.train_state import TrainState
from lockstep.runtime.comm import Comm
from lockstep.runtime.dtensors import local_part


@dataclass(frozen=True)
class Counted:
    """What one micro-batch gave to its step, still on the device."""

    micro_batch: MicroBatch
    loss: torch.Tensor
    weight: int | float | torch.Tensor

    @property
    def is_finite(self) -> bool:
        """Waits for the device."""
        return math.isfinite(float(self.loss)) and math.isfinite(float(self.weight))


def loss_not_finite(
    state: TrainState, comm: Comm, counted: Sequence[Counted], buffers: Sequence[torch.Tensor]
) -> NonFiniteError:
    """The error for a step whose loss is not finite on some rank, found by all ranks together before any update.

    `buffers` are the model's as they were before the step.
    """
    bad = [one.micro_batch for one in counted if not one.is_finite]
    names = [(name, local_part(value.detach())) for name, value in state.cut.parameters]
    tensor = next((name for name, value in names if not value.isfinite().all()), None)
    if tensor is None:  # of buffers, infinite ones may be masks
        tensor = next(
            (name for (name, _), old in zip(state.cut.buffers, buffers, strict=True) if old.isnan().any()), None
        )
    ids = [sample for part in bad for sample in part.ids]
    holding = [sample for part in bad for sample in _samples_with_nan(part)]
    reports = [Found(*told) for told in comm.gather([tensor, ids, holding, len(bad), len(counted)])]
    return blame(state.steps_done + 1, reports, state.cut.layout.data_rank, state.cut.tensor_names)


@dataclass(frozen=True)
class Found:
    """What one rank has found: a tensor that was not finite before, samples, and how many micro-batches are bad."""

    tensor: str | None
    sample_ids: list[int]
    with_nan: list[int]
    bad: int
    counted: int


def blame(step: int, reports: Sequence[Found], data_rank: Callable[[int], int], order: Sequence[str]) -> NonFiniteError:
    """From what every rank has found to one cause. `order` has the names of all tensors as the model has them."""
    broken = {report.tensor for report in reports} - {None}
    if broken:
        return NonFiniteError("loss", step, None, [], tensor=next(name for name in order if name in broken))
    affected: dict[int, tuple[int, Found]] = {}  # ranks that compute one loss together have the same samples
    for rank, report in enumerate(reports):
        if report.bad:
            affected.setdefault(data_rank(rank), (rank, report))
    found = [report for _, report in affected.values()]
    is_shared = len(reports) > 1 and len({data_rank(rank) for rank in range(len(reports))}) == 1
    return NonFiniteError(
        "loss",
        step,
        next(rank for rank, _ in affected.values()) if len(affected) == 1 and not is_shared else None,
        [sample for report in found for sample in report.sample_ids],
        with_nan=[sample for report in found for sample in report.with_nan],
        is_everywhere=all(one.bad == one.counted for one in reports) and sum(one.counted for one in found) > 1,
    )


def _samples_with_nan(part: MicroBatch) -> list[int]:
    """The samples of a micro-batch that have a NaN in what the collate function made of them."""
    found: set[int] = set()
    for tensor in tensors_of(part.data):
        is_plain = tensor.layout == torch.strided and tensor.is_floating_point() and tensor.ndim > 0
        if is_plain and len(tensor) == len(part.ids):
            rows = tensor.isnan().reshape(len(tensor), -1).any(1)
            found.update(rows.nonzero().flatten().tolist())
    return [part.ids[row] for row in sorted(found)]
