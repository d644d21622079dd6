"""A cut model, its optimizer, and how far both are: what changes in a training, and what checkpoints keep of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from lockstep.parallel.cut_model import CutModel
from lockstep.parallel.held import gather_whole
from lockstep.parallel.whole.shown import Showing, Shown
from lockstep.parallel.whole.trainable import Trainable
from lockstep.runtime import process
from lockstep.runtime.seeds import seed_everything, seed_of
from lockstep.step.precision import LossScale
from lockstep.step.rates import Rates
from lockstep.step.spikes import SpikeDetector


@dataclass
class TrainState:
    """The state of a training on this rank.

    `attention` are the kernels of scaled_dot_product_attention, None: as torch chooses; `measures_attention` says that
    the first step is to find the fastest. `is_sound` says whether weights and optimizer are those of `steps_done`
    steps, which they are not in the middle of an update, and `is_in_step` whether a step is under way.
    """

    cut: CutModel
    device: torch.device
    seed: int
    optimizer: torch.optim.Optimizer
    rates: Rates
    trainable: Trainable
    loss_scale: LossScale | None
    spikes: SpikeDetector
    showing: Showing
    attention: str | None
    measures_attention: bool
    steps_done: int = 0
    steps_skipped: int = 0
    is_sound: bool = True
    is_in_step: bool = False

    def hidden(self) -> AbstractContextManager[None]:
        """Inside, the model is what this rank computes with. Elsewhere it shows whole tensors (parallel/whole)."""
        return self.showing.hidden()

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter or its gradient, as one device has it; every rank that holds a part calls it."""
        return tensor.whole() if isinstance(tensor, Shown) else gather_whole(self.cut.held[name], tensor)

    def rest(self) -> None:
        """Put the model back into its state between steps, after a forward that was not part of one."""
        with self.hidden():
            self.cut.gradients.rest()

    def settle(self) -> None:
        """Before the first step: what the script has made anew goes on where a checkpoint has it."""
        self.rates.settle()
        self.trainable.settle()

    def use_attention(self, kernels: str | None) -> None:
        """Compute attention with these kernels from now on, None: as torch chooses."""
        self.attention, self.measures_attention = kernels, False
        process.tag_compiled_code(f"attention={kernels}")

    def seed_between_steps(self) -> None:
        """Code between two steps draws the same numbers on every rank and after a restart."""
        seed_everything(seed_of(self.seed, "between", self.steps_done))
