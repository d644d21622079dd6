"""One training as it would run: a model, a machine, and how the work is cut. It is what all estimates are about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from lockstep.config.schema import Schedule
from lockstep.layout import Layout
from lockstep.parallel.pipeline.timetable import SPLITS_BACKWARD
from lockstep.planner.cost.stack import LOCKSTEP, TrainingStack
from lockstep.planner.machine.hardware import Machine
from lockstep.planner.model.parts import Model

Recompute = Literal["none", "selective", "full"]
"""selective: attention alone, as Megatron does. Lockstep has none and full; the others are for published runs."""


def count_micro_batches(global_batch: int, data_ranks: int, micro_batch: int) -> int:
    """Of a step, on the data rank that has most."""
    samples = -(-global_batch // data_ranks)
    return -(-samples // micro_batch)


@dataclass(frozen=True)
class Job:
    """Everything that decides memory and time."""

    model: Model
    machine: Machine
    layout: Layout
    global_batch: int
    micro_batch: int
    recompute: Recompute = "none"
    zero: Literal[0, 1, 2, 3] = 3
    """What the fsdp axis is asked to shard: 1 optimizer state, 2 gradients too, 3 weights too."""
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1
    sequence_parallel: bool = True
    """With tp: norms and residuals work on some tokens a rank."""
    precision: Literal["fp32", "fp16", "bf16", "fp8", "fp4"] = "bf16"
    async_tensor: bool = False
    """Communication of tp runs beside its products, piece by piece. Lockstep does not do it; published runs do."""
    flash: bool = True
    """Attention may use a kernel that does not write its scores down."""
    compiled: bool = False
    stack: TrainingStack = LOCKSTEP
    """Whose software."""

    @property
    def width(self) -> float:
        """Bytes of an activation: products in 8 or 4 bits read what is kept in 16."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def residual(self) -> float:
        """Bytes of an element of the stream of residuals."""
        return self.stack.residual_bytes(self.width)

    @property
    def rows(self) -> int:
        """Ranks over which sequence parallelism divides what tensor parallelism leaves whole."""
        return self.layout.tp if self.sequence_parallel else 1

    @property
    def data_size(self) -> int:
        """Ranks that read different samples."""
        return self.layout.data_size

    @property
    def effective_zero(self) -> Literal[0, 1, 2, 3]:
        """What it really shards: a backward in two halves reads the weights twice, so that they stay gathered."""
        return 2 if self.zero == 3 and self.layout.pp > 1 and self.schedule in SPLITS_BACKWARD else self.zero

    @property
    def uses_flash(self) -> bool:
        """Whether no scores are written down.

        Lockstep draws the dropout of attention for all ranks of tp and cp at once, step by step, and CPUs have no flash
        kernel that drops.
        """
        shape, layout = self.model.shape, self.layout
        drops = self.stack is LOCKSTEP and shape is not None and shape.dropout
        return self.flash and not (drops and (layout.tp * layout.cp > 1 or self.machine.gpu.is_cpu))

    @cached_property
    def micro_batches(self) -> int:
        """Of a step, per data rank; the fullest of them where the batch does not divide."""
        return count_micro_batches(self.global_batch, self.data_size, self.micro_batch)

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.global_batch * self.model.sequence
