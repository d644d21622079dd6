"""Scores over whole datasets: sums and counts, so that every sample counts once on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

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
