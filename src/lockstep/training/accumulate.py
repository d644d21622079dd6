"""Forward and backward of the micro-batches of a step: gradients of the loss sum accumulate, times one constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.data.loader import MicroBatch
from lockstep.data.transfer import HostCopy
from lockstep.errors import NonFiniteError, UserError
from lockstep.faults.nonfinite import Counted
from lockstep.parallel.pipeline.runner import MicroBatches
from lockstep.runtime.comm import Comm
from lockstep.training.engine_parts import EngineParts
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
