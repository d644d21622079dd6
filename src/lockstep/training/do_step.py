"""One optimizer step: gradients of the loss sum accumulate, ranks exchange (all-reduce), one factor updates.

The weight of a step is known only after its last micro-batch, over all ranks: the factor global batch / weight turns
gradient sums into the gradient of the mean loss. Nowhere else is anything averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.data.loader import MicroBatch, StepBatch
from lockstep.data.transfer import HostCopy
from lockstep.errors import NonFiniteError, UserError
from lockstep.faults.nonfinite import Counted, loss_not_finite
from lockstep.faults.recover import Alarm
from lockstep.parallel.pipeline.runner import MicroBatches
from lockstep.parallel.replicate.statistics import batch_norms, not_counting
from lockstep.runtime.comm import Comm
from lockstep.runtime.torch_private import has_step_hooks
from lockstep.step.attention import attend_with, fastest_kernels
from lockstep.step.grads import global_norm, gradient_scale, local_gradients, scale_gradients
from lockstep.training.engine_parts import EngineParts, StepResult
from lockstep.training.setup import Weight


@dataclass
class Accumulated:
    """What the forwards of a step gave on this rank; its gradients lie with the parameters.

    `totals` are the loss sum and the weight, sent to the host behind the last forward so that they arrive while the
    backward still runs. `items` are samples or tokens and how many of them are padding. `exchange`, once it is begun,
    returns what all ranks gave, added up.
    """

    items: tuple[int, int]
    totals: HostCopy | None = None
    counted: list[Counted] = field(default_factory=list)
    exchange: Callable[[], list[float]] | None = None

    def add(self, sums: torch.Tensor, micro_batch: MicroBatch, loss_sum: torch.Tensor, weight: Weight) -> None:
        """Count what a micro-batch gives to the loss of its step."""
        if not micro_batch.filler:
            sums[0] += loss_sum.detach()
            sums[1] += weight
            of_part = weight.detach() if isinstance(weight, torch.Tensor) else weight
            self.counted.append(Counted(micro_batch, loss_sum.detach(), of_part))


def forward_backward(
    parts: EngineParts, micro_batches: Sequence[MicroBatch], scale: float, items: tuple[int, int] = (0, 0)
) -> Accumulated:
    """Accumulate the gradients of `scale` times the loss sum, in a loop or by a pipeline's timetable."""
    parts.forwards.whole_steps.check(micro_batches)
    step = Accumulated(items)
    sums = torch.zeros(2, dtype=torch.float64, device=parts.state.device)
    if not micro_batches:  # the last step of an epoch may have fewer than there are data ranks
        step.totals = HostCopy(sums)
    elif parts.state.cut.pipeline is None:
        _in_a_loop(parts, step, sums, micro_batches, scale)
    else:
        _by_timetable(parts, step, sums, micro_batches, scale)
    return step


def _in_a_loop(
    parts: EngineParts, step: Accumulated, sums: torch.Tensor, micro_batches: Sequence[MicroBatch], scale: float
) -> None:
    forwards, cut, marked = parts.forwards, parts.state.cut, parts.around.marked
    following = map(parts.transfers.send, (part.data for part in micro_batches))
    sent = next(following, None)
    for number, micro_batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        assert sent is not None
        data, sent = sent.take(), next(following, None)
        with marked("forward"), cut.statistics.not_counting() if micro_batch.filler else nullcontext():
            loss_sum, weight = forwards.forward(micro_batch, data)
        forwards.check_undrawn()
        step.add(sums, micro_batch, loss_sum, weight)
        if last:
            step.totals = HostCopy(sums)
            if cut.gradients.counts_unused and parts.state.device.type == "cpu":
                begin_exchange(parts, step)
        cut.gradients.before_backward(last)
        if forwards.together is not None and not loss_sum.requires_grad and not forwards.is_trial:
            raise UserError(
                f"the loss function returned a constant, and {forwards.together} cannot leave a forward out",
                "call the model in any case, and multiply the loss by 0 where nothing counts",
            )
        forwards.whole_steps.try_functions(loss_sum)
        forwards.whole_steps.check(micro_batches)
        if loss_sum.requires_grad:
            derived = _derived(parts, loss_sum, weight, 0.0 if micro_batch.filler else scale)
            with marked("backward"), forwards.draws.in_backward_of(micro_batch.index):
                torch.autograd.backward(derived)
        forwards.draws.forget()


def _derived(parts: EngineParts, loss_sum: torch.Tensor, weight: Weight, scale: float) -> torch.Tensor:
    """What a backward pass begins with: the sum times a constant, or the mean where a hook looks at gradients."""
    if parts.forwards.whole_steps.hook is None:
        return loss_sum * scale
    counted = weight if isinstance(weight, torch.Tensor) else weight or 1
    loss_scale = parts.state.loss_scale
    return loss_sum * ((loss_scale.scale if loss_scale else 1.0) / counted)


def _by_timetable(
    parts: EngineParts, step: Accumulated, sums: torch.Tensor, micro_batches: Sequence[MicroBatch], scale: float
) -> None:
    """By a pipeline's timetable; only the rank of its last stage has a loss and a weight."""
    forwards, cut = parts.forwards, parts.state.cut

    @contextmanager
    def start(number: int) -> Iterator[None]:
        forwards.start(micro_batches[number])
        uncounted = cut.statistics.not_counting() if micro_batches[number].filler else nullcontext()
        with forwards.drawing(), uncounted, forwards.buffers.forward():
            yield
        forwards.check_undrawn()

    def backward_of(number: int) -> AbstractContextManager[Any]:
        cut.gradients.before_backward(False)
        return forwards.draws.in_backward_of(micro_batches[number].index)

    def loss_of(number: int, result: tuple[torch.Tensor, Weight]) -> torch.Tensor:
        loss_sum, weight = result
        step.add(sums, micro_batches[number], loss_sum, weight)
        forwards.whole_steps.try_functions(loss_sum)
        return loss_sum * (0.0 if micro_batches[number].filler else scale)

    assert cut.pipeline is not None
    data = [parts.transfers.send(part.data).take() for part in micro_batches]
    with parts.around.marked("pipeline"):
        work = MicroBatches("step", forwards.summed_loss, data, start, forwards.computing, loss_of, backward_of)
        cut.pipeline.step(work)
    forwards.draws.forget()
    step.totals = HostCopy(sums)


def begin_exchange(parts: EngineParts, step: Accumulated) -> Callable[[], list[float]]:
    """Begin to add up loss, weight and what ranks have to agree on (an all-reduce of float64 on the CPU).

    On a CPU before the last backward, beside which it then runs; on a GPU after it was launched, because the host
    has to wait for the last forward first.
    """
    if step.exchange is None:
        assert step.totals is not None
        loss, weight = step.totals.read()
        check_last_gradient(parts)
        bad = float(not math.isfinite(loss) or not math.isfinite(weight))
        if not parts.speaks:
            loss, weight = 0.0, 0.0
        gradients = parts.state.cut.gradients
        unused = 0 if gradients.counts_unused else gradients.unused()
        alike = (power for mark in (float(gradients.path), parts.state.rates.mark) for power in (mark, mark * mark))
        numbers = [loss, weight, bad, *map(float, step.items), float(unused), *alike]
        step.exchange = parts.comm.start_sum([*numbers, *parts.requests.votes()])
    return step.exchange


def check_last_gradient(parts: EngineParts) -> None:
    """Stop if the norm of the last gradient is not finite and nobody has asked yet.

    Where the run is to stop, that is asked on a GPU one step later, and before anything is saved, because asking at
    once would let the GPU run dry in every step. The weights are not sound any more then.
    """
    if parts.last_norm is None:
        return
    copy, batch = parts.last_norm
    parts.last_norm = None
    if not math.isfinite(copy.read()[0]):
        parts.state.is_sound = False
        raise NonFiniteError("gradient", parts.state.steps_done, None, everybodys_ids(parts.comm, batch.ids))


def everybodys_ids(comm: Comm, own: Sequence[int]) -> list[int]:
    """The samples of all ranks in a step, each once."""
    return list(dict.fromkeys(sample for rank in comm.gather(own) for sample in rank))


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
