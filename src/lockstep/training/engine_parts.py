"""What an engine works with once its model is cut: the state of the training, and who does what in a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lockstep.data.loader import StepBatch
from lockstep.data.transfer import HostCopy, Transfers
from lockstep.faults.invariants import Invariants
from lockstep.faults.recover import Recovery
from lockstep.faults.requests import Requests
from lockstep.parallel.train_state import TrainState
from lockstep.parallel.whole.between import BetweenSteps
from lockstep.runtime.comm import Comm
from lockstep.training.forwards import Forwards


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on every rank.

    `loss` is the mean over everything that counted in the step, `weight` how much that was. `grad_norm` is the norm
    before clipping, still on the device. A step in which nothing counted, or whose gradients overflowed in fp16, is
    skipped: the weights stay as they were. So is one whose numbers are wrong, where `recover` says so. `loss_scale` is
    what the step ran with, 1 unless in fp16, and `overflowed` whether that was too much. `items` are the samples of the
    step, or its tokens where those are counted; of these `padding` only fill rows up.
    """

    step: int
    loss: float
    weight: float
    grad_norm: torch.Tensor
    lr: float
    skipped: bool
    loss_scale: float
    overflowed: bool
    items: int
    padding: int


@dataclass(frozen=True)
class Around:
    """What a run does around the parts of a step.

    `entered` is called when a step begins, `observe` when it is counted; `optimizing` is entered while gradients are
    clipped and weights updated, and `marked` around named parts, so that a profiler can tell them apart.
    """

    entered: Callable[[], None] = lambda: None
    observe: Callable[[StepResult, StepBatch], None] = lambda _result, _batch: None
    optimizing: Callable[[], AbstractContextManager[Any]] = nullcontext
    marked: Callable[[str], AbstractContextManager[Any]] = nullcontext


@dataclass
class EngineParts:
    """The parts of an engine whose model is cut.

    `last_norm` is the norm of the last gradient, where nobody has asked yet whether it is finite, and of which samples.
    """

    comm: Comm
    state: TrainState
    forwards: Forwards
    invariants: Invariants
    between: BetweenSteps | None
    recovery: Recovery
    requests: Requests
    around: Around
    transfers: Transfers
    frozen: list[torch.nn.Module]
    was_hooked: bool
    last_norm: tuple[HostCopy, StepBatch] | None = None

    @cached_property
    def speaks(self) -> bool:
        """Whether of the ranks that compute one loss together (tp, cp) this one reports it."""
        at = self.state.cut.layout.coordinate(self.comm.rank)
        return at["tp"] == at["cp"] == 0

    @cached_property
    def counts_samples(self) -> bool:
        """Whether of the ranks that read the same samples this one counts them."""
        return self.speaks and self.state.cut.layout.coordinate(self.comm.rank)["pp"] == 0

    def train_mode(self) -> None:
        """Put the model into training mode, but for the layers that build_model has put into eval mode."""
        models = self.state.cut.models
        if all(model.training for model in models):
            return
        for model in models:
            model.train()
        for module in self.frozen:
            module.training = False
