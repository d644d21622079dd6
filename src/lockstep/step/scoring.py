"""Metrics over whole datasets: sums and counts, so that every sample counts once on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError

MetricFunction = Callable[[nn.Module, Any], tuple[Any, Any]]
"""(model, batch) -> (sum, count)"""


@dataclass(frozen=True)
class Metric:
    """A sum and a count over a whole dataset."""

    sum: float
    count: float

    @property
    def value(self) -> float:
        """The mean; NaN when nothing counted."""
        return self.sum / self.count if self.count else math.nan


@dataclass(frozen=True)
class Perplexity(Metric):
    """The sum and the count of a loss in nats; the value is exp(sum / count)."""

    @property
    def value(self) -> float:
        """The perplexity; infinite where it is too large for a float."""
        try:
            return math.exp(super().value)
        except OverflowError:
            return math.inf


def checked_pair(name: str, returned: Any) -> tuple[Any, Any]:
    """A metric's sum and count; anything else is refused by its name."""
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not is_pair or any(isinstance(part, torch.Tensor) and part.numel() != 1 for part in returned):
        what = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
        raise UserError(
            f"the metric {name} returned {'numbers that are not single ones' if is_pair else what}",
            "return (sum, count), two numbers: how much, of how many",
        )
    return returned[0], returned[1]
