"""From a cut model to an engine that can step: its optimizer is made last, of what this rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.config.arguments import check_made
from lockstep.config.schema import SetupConfig
from lockstep.data.transfer import Transfers
from lockstep.errors import UserError
from lockstep.faults.invariants import Invariants
from lockstep.faults.recover import Recovery
from lockstep.faults.requests import Requests
from lockstep.layout import Layout
from lockstep.parallel.build.apply import Look
from lockstep.parallel.build.names import refuse_extra_state
from lockstep.parallel.cut_model import CutModel
from lockstep.parallel.tensor.context import cut_sequences
from lockstep.parallel.train_state import TrainState
from lockstep.parallel.whole.between import BetweenSteps
from lockstep.parallel.whole.shown import Showing
from lockstep.parallel.whole.trainable import Trainable
from lockstep.runtime import process
from lockstep.runtime.axis import Axis
from lockstep.runtime.comm import Comm
from lockstep.runtime.torch_private import has_step_hooks
from lockstep.step.elementwise import refuse_closure, refuse_coupled
from lockstep.step.optim import use_fused_kernels, with_empty_groups
from lockstep.step.precision import LossScale, apply_tf32, refuse_untrainable
from lockstep.step.rates import Rates
from lockstep.step.spikes import SpikeDetector
from lockstep.training.engine_parts import Around, EngineParts
from lockstep.training.forwards import Forwards, checked_loss, computing
from lockstep.training.setup import Setup


def look_with(setup: Setup, layout: Layout, device: torch.device, data: Any) -> Look:
    """How planning looks at a forward: the user's loss on the first samples, which every rank sees."""
    settings = setup.settings
    together = "a pipeline" if layout.pp > 1 else None

    def look(model: nn.Module, sequence: Axis | None = None) -> Any:
        own = data if sequence is None else cut_sequences(data, sequence)
        with computing(settings.precision, device, settings.kernels), torch.random.fork_rng([]):
            return checked_loss(setup.loss(model, own), setup.loss_reduction, together, device)

    return look


def make_state(setup: Setup, cut: CutModel, device: torch.device) -> TrainState:
    """Make the optimizer of a cut model, by the user's own function; refuses one that could not work on parts."""
    settings, layout, named = setup.settings, cut.layout, cut.trained
    refuse_extra_state(cut.whole)
    if not named and cut.pipeline is None:
        raise UserError("the model has no parameters to train", "check what build_model returns")
    trainable = Trainable(cut.models, named, cut.pipeline is not None)
    if not named:  # the stages of this rank are frozen, and torch's optimizers want something
        named = [("nothing", nn.Parameter(torch.zeros(1, device=device)))]
    make = with_empty_groups(setup.optimizer) if layout.pp > 1 else setup.optimizer
    optimizer = make(named)
    check_made(optimizer, named)
    refuse_untrainable(named, optimizer, settings.numerics)
    refuse_closure(optimizer)
    refuse_coupled(optimizer, make, named, layout)
    use_fused_kernels(optimizer, cut.models[0])
    numerics = settings.numerics
    loss_scale = LossScale(numerics.loss_scale, numerics.loss_scale_window) if settings.precision == "fp16" else None
    return TrainState(
        cut=cut,
        device=device,
        seed=setup.seed,
        optimizer=optimizer,
        rates=Rates(optimizer, setup.schedule),
        trainable=trainable,
        loss_scale=loss_scale,
        spikes=SpikeDetector(),
        showing=Showing(),
        attention=settings.kernels,
        measures_attention=settings.attention == "auto" and device.type == "cuda" and layout.pp == 1,
    )


def make_parts(
    setup: Setup, state: TrainState, comm: Comm, recovery: Recovery, requests: Requests, around: Around
) -> EngineParts:
    """Everything that steps, trials and scores need beside the state of the training."""
    cut = state.cut
    # A layer that build_model put into eval mode, a frozen BatchNorm say, stays there; a whole model does not.
    frozen = [module for model in cut.models for module in model.modules() if not module.training and model.training]
    forwards = Forwards(setup, state, comm)
    between = None
    # With zero1 the model is whole on every rank, and the optimizer has rows of it.
    if cut.skeleton is not None or any(isinstance(stored, DTensor) for _, stored in cut.parameters):
        between = BetweenSteps(cut, state.optimizer, comm, state.showing, state.steps_done)
    parts = EngineParts(
        comm=comm,
        state=state,
        forwards=forwards,
        invariants=Invariants(state, comm, recovery.config.check_every),
        between=between,
        recovery=recovery,
        requests=requests,
        around=around,
        transfers=Transfers(state.device),
        frozen=frozen,
        was_hooked=has_step_hooks(state.optimizer),
    )
    state.seed_between_steps()
    return parts


def use_backends(settings: SetupConfig, layout: Layout, device: torch.device) -> None:
    """Switch what torch computes with, for the whole process."""
    apply_tf32(settings.numerics, device)
    process.tag_compiled_code(f"attention={settings.kernels}")
    if layout.team > 1:
        process.keep_attention_open()
    if layout.team * layout.pp > 1:
        process.leave_distributions_unchecked()
