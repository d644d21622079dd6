"""The end of a step: what all ranks gave is summed (all-reduce) and judged, then the optimizer updates.

The weight of a step is known only after its last micro-batch, over all ranks: the factor global batch / weight turns
gradient sums into the gradient of the mean loss. Nowhere else is anything averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lockstep.data.loader import StepBatch
from lockstep.data.transfer import HostCopy
from lockstep.errors import NonFiniteError, UserError
from lockstep.faults.nonfinite import loss_not_finite
from lockstep.faults.recover import Alarm
from lockstep.parallel.replicate.statistics import batch_norms, not_counting
from lockstep.runtime.torch_private import has_step_hooks
from lockstep.step.attention import attend_with, fastest_kernels
from lockstep.step.grads import global_norm, gradient_scale, local_gradients, scale_gradients
from lockstep.training.accumulate import Accumulated, begin_exchange, everybodys_ids, forward_backward
from lockstep.training.engine_parts import EngineParts, StepResult


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step after their exchange. `alarm` says what is wrong with its loss, if anything is."""

    loss: float
    weight: float
    items: int
    padding: int
    alarm: Alarm | None


def do_step(parts: EngineParts, batch: StepBatch) -> StepResult:
    """One optimizer step."""
    rate, loss_scale = begin_step(parts, batch)
    step = accumulate(parts, batch, loss_scale)
    agreed = exchange(parts, batch, step)
    return update(parts, batch, agreed, rate, loss_scale)


def begin_step(parts: EngineParts, batch: StepBatch) -> tuple[float, float]:
    """Make everything ready for the forwards of a step; returns its learning rate and its loss scale."""
    state, cut = parts.state, parts.state.cut
    state.settle()
    in_parts = cut.layout.tp > 1 or cut.layout.pp > 1
    if in_parts and has_step_hooks(state.optimizer) and not parts.was_hooked:
        raise UserError(
            f"a hook was registered on the optimizer after run.setup, and under {cut.layout} it would see this "
            "rank's part of the model",
            "register it in the function that makes the optimizer, where it is tried out, or use a layout without "
            "tp and pp",
        )
    rate = state.rates.begin(state.steps_done)
    parts.train_mode()
    if state.measures_attention:
        _measure_attention(parts, batch)
    parts.forwards.begin()
    state.is_in_step = True
    cut.gradients.rest()
    state.trainable.check()
    cut.gradients.begin()
    cut.statistics.begin()
    return rate, state.loss_scale.scale if state.loss_scale else 1.0


def accumulate(parts: EngineParts, batch: StepBatch, loss_scale: float) -> Accumulated:
    """Forward and backward of all micro-batches of the step."""
    # Ranks that compute one loss together derive a share of it each: gradients are sums over all ranks.
    scale = loss_scale / (batch.global_batch * parts.state.cut.layout.team)
    with attend_with(parts.state.attention):  # the backward too: blocks that are computed again need the same kernels
        return forward_backward(parts, batch.micro_batches, scale, batch.items if parts.counts_samples else (0, 0))


def exchange(parts: EngineParts, batch: StepBatch, step: Accumulated) -> Agreed:
    """Wait for the gradient sums and for what all ranks gave, and judge it, on every rank alike."""
    comm, gradients = parts.comm, parts.state.cut.gradients
    result = begin_exchange(parts, step)
    comm.beat.at("summing gradients")
    with parts.around.marked("summing gradients"):
        has_unused = gradients.wait()
        loss_sum, weight, bad_ranks, items, padding, unused, *alike = result()
        paths, rates, votes = alike[:2], alike[2:4], alike[4:]
    parts.requests.agree(votes)
    loss = loss_sum / weight if weight > 0 else math.nan
    alarm = _alarm_of_loss(parts, batch, step, None if bad_ranks else loss)
    if _differ(comm.world_size, *paths):
        raise UserError(
            "the ranks called different sharded blocks in one step, and so gathered each other's weights",
            "let every forward call the same blocks (multiply by 0 what is left out), or use a dp layout",
        )
    if _differ(comm.world_size, *rates):
        raise UserError(
            "the learning rate is not the same on all ranks",
            "set it, or step the scheduler, on every rank alike, and not only where run.is_main",
        )
    if alarm is None:
        gradients.finish(has_unused or bool(unused))
        parts.forwards.buffers.finish()
        parts.state.cut.statistics.combine()
    return Agreed(loss, weight, round(items), round(padding), alarm)


def update(parts: EngineParts, batch: StepBatch, agreed: Agreed, rate: float, loss_scale: float) -> StepResult:
    """Clip and scale the gradients, let the optimizer step unless the step is skipped, and count it."""
    state, alarm = parts.state, agreed.alarm
    norm, overflowed = torch.zeros((), device=state.device), False
    skipped = alarm is not None or agreed.weight <= 0
    if not skipped:
        parts.invariants.check_gradients(state.steps_done + 1)
        with parts.around.optimizing():
            norm = _scaled_gradients(parts, batch, agreed.weight, loss_scale)
        copy = HostCopy(norm)
        parts.last_norm = copy, batch
        overflowed = _overflowed(parts, copy)
        if state.device.type == "cpu" or parts.recovery.reads_gradients:
            alarm = _alarm_of_gradient(parts, agreed.loss)
        skipped = overflowed or alarm is not None
    if alarm is not None:
        parts.forwards.put_buffers_back()
    _count_step(parts, skipped)
    parts.invariants.check_values(state.steps_done)
    result = StepResult(
        step=state.steps_done,
        loss=agreed.loss,
        weight=agreed.weight,
        grad_norm=norm,
        lr=rate,
        skipped=skipped,
        loss_scale=loss_scale,
        overflowed=overflowed and alarm is None,
        items=agreed.items,
        padding=agreed.padding,
    )
    parts.around.observe(result, batch)
    if alarm is not None:
        parts.recovery.act(alarm)
    return result


def _scaled_gradients(parts: EngineParts, batch: StepBatch, weight: float, loss_scale: float) -> torch.Tensor:
    """Turn gradient sums into clipped gradients of the mean loss, by one factor; returns their norm before clipping."""
    state, cut, clip = parts.state, parts.state.cut, parts.forwards.setup.settings.clip
    grads = local_gradients([parameter for _, parameter in cut.trained])
    derived_of = weight if parts.forwards.whole_steps.hook else batch.global_batch
    factor = derived_of / (weight * loss_scale)
    counted = grads if len(cut.counted) == len(cut.parameters) else local_gradients(cut.counted)
    norm = global_norm(counted, cut.norm_groups, state.device) * factor
    scale_gradients(grads, gradient_scale(norm, factor, clip), state.optimizer)
    return norm


def _count_step(parts: EngineParts, skipped: bool) -> None:
    """Update the weights, unless the step is skipped; one more step is done."""
    state = parts.state
    if skipped:
        state.steps_skipped += 1
    else:
        state.is_sound = False
        parts.comm.beat.at("the optimizer")
        with parts.around.optimizing(), parts.around.marked("optimizer"):
            state.optimizer.step()
            state.cut.gradients.updated()
        parts.recovery.fine()
    state.steps_done += 1
    state.is_sound, state.is_in_step = True, False
    state.seed_between_steps()


def _differ(ranks: int, total: float, squares: float) -> bool:
    """Whether the numbers that all ranks have added up were not one number: only equal ones have no variance."""
    return ranks * squares > total * total * (1 + 1e-12)


def _alarm_of_loss(parts: EngineParts, batch: StepBatch, step: Accumulated, loss: float | None) -> Alarm | None:
    """What is wrong with the loss of this step, None: not finite, on every rank alike; raises where the run stops."""
    if loss is None:
        error = loss_not_finite(parts.state, parts.comm, step.counted, parts.forwards.copies.values)
        return parts.recovery.nonfinite(error, math.nan)
    number, found = parts.state.steps_done + 1, parts.state.spikes.see(loss)
    return parts.recovery.spike(found, loss, number, lambda: everybodys_ids(parts.comm, batch.ids))


def _alarm_of_gradient(parts: EngineParts, loss: float) -> Alarm | None:
    """What is wrong with the last gradient, before the update; raises where the run is to stop."""
    if parts.last_norm is None:
        return None
    copy, batch = parts.last_norm
    parts.last_norm = None
    if math.isfinite(copy.read()[0]):
        return None
    # It is a sum over the ranks: nobody knows any more whose it was.
    error = NonFiniteError("gradient", parts.state.steps_done + 1, None, everybodys_ids(parts.comm, batch.ids))
    return parts.recovery.nonfinite(error, loss)


def _overflowed(parts: EngineParts, norm: HostCopy) -> bool:
    """Whether the gradients of an fp16 step are too large for its loss scale, which learns from it.

    Every rank has the same norm, and with it the same answer. A gradient that is not finite without any scaling is
    no overflow: `check_last_gradient` stops the run.
    """
    loss_scale = parts.state.loss_scale
    if loss_scale is None:
        return False
    overflow = not math.isfinite(norm.read()[0])
    if overflow and loss_scale.scale > 1:
        parts.last_norm = None
    loss_scale.update(overflow)
    return overflow


def _measure_attention(parts: EngineParts, batch: StepBatch) -> None:
    """Before the first step on a GPU: take the fastest attention kernels for what this model does."""

    def forward() -> None:
        with not_counting(batch_norms(parts.state.cut.models[0])):
            for micro_batch in batch.micro_batches[:1]:
                parts.forwards.forward(micro_batch, parts.transfers.send(micro_batch.data).take())

    parts.state.use_attention(fastest_kernels(forward, parts.state.device, parts.comm))
    parts.state.rest()
