"""One optimizer step under any layout.

    engine.step(batch):
        forward_backward(micro-batches)      gradients of the loss SUM accumulate, times the constant 1 / global batch
        exchange(weight, loss, requests)     float64 over all ranks, on the CPU, beside the last backward
        finish the gradient sums             buckets (dp) or reduce-scatter (fsdp), overlapped with the last backward
        norm, one factor, optimizer          the factor global batch / weight makes it the gradient of the mean loss

The weight W of a step is known only after its last micro-batch, over all ranks. Nowhere else is anything averaged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.state import TrainingState
from lockstep.config.arguments import check_has_gradient, check_is_tensor, check_made
from lockstep.config.schema import Attention, Compile, Format, NumericsConfig, RecoverConfig
from lockstep.data.loader import MicroBatch, StepBatch, in_groups
from lockstep.data.transfer import HostCopy, Transfers
from lockstep.errors import NonFiniteError, UserError
from lockstep.faults.invariants import Invariants
from lockstep.faults.nonfinite import Counted, loss_not_finite
from lockstep.faults.out_of_memory import memory_explained
from lockstep.faults.recover import Alarm, BufferCopies, Recovery
from lockstep.faults.requests import Requests
from lockstep.layout import Layout
from lockstep.parallel.build.apply import Look
from lockstep.parallel.build.compile import compile_whole, compiled_calls
from lockstep.parallel.build.names import refuse_extra_state
from lockstep.parallel.cut_model import CutModel
from lockstep.parallel.held import gather_whole
from lockstep.parallel.pipeline.runner import MicroBatches
from lockstep.parallel.replicate.buffers import ForwardBuffers
from lockstep.parallel.replicate.shard import call_gathered, read_elsewhere, weights_read_by_their_modules
from lockstep.parallel.replicate.statistics import batch_norms, not_counting
from lockstep.parallel.tensor.context import cut_sequences, sequence_length
from lockstep.parallel.whole.alone import WholeSteps
from lockstep.parallel.whole.between import BetweenSteps
from lockstep.parallel.whole.shown import Showing, Shown
from lockstep.parallel.whole.stay import ParametersStay
from lockstep.parallel.whole.trainable import Trainable
from lockstep.runtime import process
from lockstep.runtime.axis import Axis
from lockstep.runtime.comm import Comm
from lockstep.runtime.draws import SCORING, SampleDraws, has_moved
from lockstep.runtime.seeds import (
    draw_seed,
    hosts_have_moved,
    seed_everything,
    seed_of,
    seed_torch,
)
from lockstep.runtime.torch_private import has_step_hooks, in_backward
from lockstep.step.attention import attend_with, fastest_kernels
from lockstep.step.backward import no_backward
from lockstep.step.elementwise import refuse_closure, refuse_coupled
from lockstep.step.grads import global_norm, gradient_scale, local_gradients, scale_gradients
from lockstep.step.optim import OptimizerFactory, Schedule, use_fused_kernels, with_empty_groups
from lockstep.step.precision import LossScale, apply_tf32, compute_in, refuse_untrainable
from lockstep.step.rates import Rates
from lockstep.step.scoring import Metric, MetricFunction, checked_pair
from lockstep.trial.coupling import Tried

LossFunction = Callable[[nn.Module, Any], tuple[torch.Tensor, int | float | torch.Tensor]]


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


class Engine:
    """A model, its loss and its optimizer, cut for a layout. `step` is one optimizer step, whatever the layout."""

    def __init__(
        self,
        loss: LossFunction,
        optimizer: OptimizerFactory,
        *,
        layout: Layout,
        comm: Comm,
        device: torch.device,
        requests: Requests,
        seed: int,
        schedule: Schedule | None = None,
        clip: float | None = None,
        precision: Format = "fp32",
        numerics: NumericsConfig | None = None,
        compile_: Compile = "off",
        attention: Attention = "auto",
        loss_reduction: Literal["sum", "mean"] = "sum",
        recovery: Recovery | None = None,
        observe: Callable[[StepResult, StepBatch], None] | None = None,
        entered: Callable[[], None] = lambda: None,
        optimizing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.layout = layout
        self.rank = comm.rank
        self.device = device
        self.precision: Format = precision
        self.numerics = numerics or NumericsConfig()
        self.loss_scale = (
            LossScale(self.numerics.loss_scale, self.numerics.loss_scale_window) if precision == "fp16" else None
        )
        self.clip = clip
        self.seed = seed
        self.steps_done = 0
        self.steps_skipped = 0
        apply_tf32(self.numerics, device)
        if layout.team > 1:
            process.keep_attention_open()
        if layout.team * layout.pp > 1:
            process.leave_distributions_unchecked()
        self._make_optimizer = with_empty_groups(optimizer) if layout.pp > 1 else optimizer
        self._schedule = schedule
        self._compile = compile_
        self.plain_loss = loss
        self._loss = compile_whole(loss, layout.team > 1) if compile_ == "model" else loss
        self._loss_reduction = loss_reduction
        self._comm = comm
        self._requests = requests
        self._observe = observe
        self._entered = entered  # called when a step begins, as `observe` when it ends
        self._optimizing = optimizing  # entered while gradients are clipped and weights updated
        self.recovery = recovery or Recovery(RecoverConfig())
        self.is_sound = True
        """Whether weights and optimizer are those of `steps_done` steps; not so in the middle of an update."""
        self.is_in_step = False
        self.marked: Callable[[str], AbstractContextManager[Any]] = nullcontext
        """Entered around the parts of a step, with their names: how a profiler tells them apart."""
        self.forward_begins: Callable[[MicroBatch], None] = lambda _: None
        """Called before each forward of a micro-batch, outside of it."""
        self._explaining: Callable[[], AbstractContextManager[None]] = nullcontext
        self._transfers = Transfers(device)
        self.use_attention(None if attention == "auto" else attention)
        self.measures_attention = attention == "auto" and device.type == "cuda" and layout.pp == 1
        self._last_norm: tuple[HostCopy, StepBatch] | None = None
        self._exchange: Callable[[], list[float]] | None = None
        self._drawn_in = 0  # the step whose draws modules make
        self._calls: Counter[int] = Counter()
        self._streams: dict[tuple[int, int, int], int] = {}
        self.draws = SampleDraws()
        self.draws_by_sample = compile_ == "off"  # compiled code draws for all samples of a forward at once
        self.may_draw = True
        """Whether forwards draw random numbers, as far as the first samples tell."""
        self._is_trial = False
        self._prepare: Callable[[Look], None] | None = None
        self._together: str | None = "a pipeline" if layout.pp > 1 else None
        self._sequence = comm.cut_axis("cp")
        at = layout.coordinate(comm.rank)
        self._speaks = at["tp"] == at["cp"] == 0  # of ranks that compute one loss together, one reports it
        self._counts = self._speaks and at["pp"] == 0  # and of those that read the same samples, one counts them
        self._items = (0, 0)
        self._losses: list[Counted] = []  # of the step, one for each micro-batch

    def attach(self, parallel: CutModel) -> None:
        """Take over a model that was cut for this rank, and make its optimizer."""
        self.cut = parallel
        self.models = parallel.models
        self.model = parallel.models[0]
        self.blocks = parallel.blocks
        self.pipeline = parallel.pipeline
        self.stored = parallel.parameters
        refuse_extra_state(parallel.whole)
        self.state_dict_names = parallel.state_dict_names
        self.parameter_count = parallel.parameter_count
        self.tensor_names = parallel.tensor_names
        self.buffers = parallel.buffers
        named = self.trained = parallel.trained
        self.trainable = Trainable(self.models, named, parallel.pipeline is not None)
        self.parameters = [parameter for _, parameter in named]
        if not named and self.pipeline is None:
            raise UserError("the model has no parameters to train", "check what build_model returns")
        if not named:  # the stages of this rank are frozen, and torch's optimizers want something
            named = [("nothing", nn.Parameter(torch.zeros(1, device=self.device)))]
        # A layer that build_model put into eval mode, a frozen BatchNorm say, stays there; a whole model does not.
        self._frozen = [
            module for model in self.models for module in model.modules() if not module.training and model.training
        ]
        self.optimizer = self._make_optimizer(named)
        check_made(self.optimizer, named)
        refuse_untrainable(named, self.optimizer, self.numerics)
        refuse_closure(self.optimizer)
        refuse_coupled(self.optimizer, self._make_optimizer, named, self.layout)
        self._was_hooked = has_step_hooks(self.optimizer)
        use_fused_kernels(self.optimizer, self.model)
        self.rates = Rates(self.optimizer, self._schedule)
        if self._compile != "off":
            self._explaining = compiled_calls
        elif any(isinstance(parameter, DTensor) for model in self.models for parameter in model.parameters()):
            self._explaining = weights_read_by_their_modules
        self._gradients = parallel.gradients
        self._counted = parallel.counted
        self._norm_groups = parallel.norm_groups
        self._together = parallel.together
        self._statistics = parallel.statistics
        self._whole_steps = WholeSteps(self.models, self.layout)
        self._showing = Showing()
        self._buffer_copies = BufferCopies([buffer for _, buffer in self.buffers])
        self._forward_buffers = ForwardBuffers(self.models, self.buffers, self._comm)
        self._invariants = Invariants(self.training_state, self._showing, self._comm, self.recovery.config.check_every)
        # A whole compiled model cannot be left between its blocks: it draws from the micro-batch's stream alone.
        for seeded in parallel.seeded if self._compile != "model" else []:
            for number, module in enumerate(seeded):
                module.register_forward_pre_hook(self._seed_module(number))
        self._between = None
        # With zero1 the model is whole on every rank, and the optimizer has rows of it.
        if parallel.skeleton is not None or any(isinstance(stored, DTensor) for _, stored in self.stored):
            self._between = BetweenSteps(parallel, self.optimizer, self._comm, self._showing, self.steps_done)
        self.seed_between_steps()

    def hidden(self) -> AbstractContextManager[None]:
        """Inside, the model is what this rank computes with. Elsewhere it shows whole tensors (parallel/whole)."""
        return self._showing.hidden()

    def when_data_is_known(self, prepare: Callable[[Look], None]) -> None:
        """A model is cut when the first samples are there: then `prepare` makes it, and attaches it."""
        self._prepare = prepare

    def see(self, data: Any) -> None:
        """The first samples are there, as the loss function gets them; every rank sees the same ones."""
        if self._prepare is None:
            return
        prepare, self._prepare = self._prepare, None
        data = self._transfers.send(data).take()
        self.sequence_length = sequence_length(data)
        self._parted(data)  # refuses lengths that cannot be shared out

        def look(model: nn.Module, sequence: Axis | None = None) -> Any:
            parted = data if sequence is None else cut_sequences(data, sequence)
            with self.computing(), torch.random.fork_rng([]):
                return self._checked_loss(self.plain_loss(model, parted))

        prepare(look)

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter or its gradient, as one device has it; every rank that holds a part calls it."""
        if isinstance(tensor, Shown):
            return tensor.whole()
        return gather_whole(self.cut.held[name], tensor)

    @property
    def training_state(self) -> TrainingState:
        """What of this training goes into a checkpoint."""
        return TrainingState(self.cut, self.optimizer, self.rates, self.trainable, self.rest)

    @property
    def is_ready(self) -> bool:
        """Whether the model is there; one that has to be looked at waits for the first samples."""
        return self._prepare is None

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("_prepare"):
            raise UserError(
                f"the engine's {name.lstrip('_')} is not there yet: the model is cut when the first samples are known",
                "make the loader (run.loader) before you use it",
            )
        raise AttributeError(name)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """In the number formats and with the attention kernels of this training."""
        precision = "fp32" if self._is_trial else self.precision
        with compute_in(precision, self.device), attend_with(self.attention):
            yield

    @property
    def lr(self) -> float:
        """The learning rate of the next step (of the first parameter group)."""
        return self.rates.of_step(self.steps_done)[0]

    def step(self, batch: StepBatch) -> StepResult:
        """Do one optimizer step on what `run.loader` yields."""
        if not isinstance(batch, StepBatch):
            raise UserError(f"engine.step was given a {type(batch).__name__}", "give it what run.loader(...) yields")
        assert self.is_ready, "the loader has shown its first samples"
        self._entered()
        beat = self._comm.beat
        beat.step = self.steps_done + 1
        beat.at("forward and backward")
        if self._between is not None:
            self._between.gone_on(self.steps_done + 1)
        with (
            self.hidden(),
            memory_explained(self, beat, max((len(part.ids) for part in batch.micro_batches), default=1)),
        ):
            try:
                result = self._step(batch)
            finally:
                self._statistics.end()
        beat.at("the code between steps")
        return result

    def _step(self, batch: StepBatch) -> StepResult:
        self.settle()
        in_parts = self.layout.tp > 1 or self.layout.pp > 1
        if in_parts and has_step_hooks(self.optimizer) and not self._was_hooked:
            raise UserError(
                f"a hook was registered on the optimizer after run.setup, and under {self.layout} it would see this "
                "rank's part of the model",
                "register it in the function that makes the optimizer, where it is tried out, or use a layout without "
                "tp and pp",
            )
        self._rate = self.rates.begin(self.steps_done)
        if not all(model.training for model in self.models):
            self._train_mode()
        if self.measures_attention:
            self._measure_attention(batch.micro_batches)
        self._streams.clear()
        self._losses.clear()
        self._whole_steps.begin()
        self._forward_buffers.begin()
        self._buffer_copies.take()
        self.is_in_step = True
        self._gradients.rest()
        self.trainable.check()
        self._gradients.begin()
        self._statistics.begin()
        loss_scale = self.loss_scale.scale if self.loss_scale else 1.0
        self._exchange = None
        self._items = batch.items if self._counts else (0, 0)
        # Ranks that compute one loss together derive a share of it each: gradients are sums over all ranks.
        scale = loss_scale / (batch.global_batch * self.layout.team)
        with attend_with(self.attention):  # the backward too: blocks that are computed again need the same kernels
            totals = self.forward_backward(batch.micro_batches, scale)
        exchange = self._exchange or self._start_exchange(totals)
        self._comm.beat.at("summing gradients")
        with self.marked("summing gradients"):
            has_unused = self._gradients.wait()
            loss_sum, weight, bad_ranks, items, padding, unused, *alike = exchange()
            paths, rates, votes = alike[:2], alike[2:4], alike[4:]
        self._requests.agree(votes)
        loss = loss_sum / weight if weight > 0 else math.nan
        alarm = self._alarm_of_loss(loss, bool(bad_ranks), batch)
        self._losses.clear()  # with the samples of the step
        if self._differ(*paths):
            raise UserError(
                "the ranks called different sharded blocks in one step, and so gathered each other's weights",
                "let every forward call the same blocks (multiply by 0 what is left out), or use a dp layout",
            )
        if self._differ(*rates):
            raise UserError(
                "the learning rate is not the same on all ranks",
                "set it, or step the scheduler, on every rank alike, and not only where run.is_main",
            )
        norm, overflowed = torch.zeros((), device=self.device), False
        skipped = alarm is not None or weight <= 0
        if alarm is None:
            self._gradients.finish(has_unused or bool(unused))
            self._forward_buffers.finish()
            self._statistics.combine()
        if not skipped:
            self._invariants.check_gradients(self.steps_done + 1)
            with self._optimizing():
                grads = local_gradients(self.parameters)
                derived_of = weight if self._whole_steps.hook else batch.global_batch
                factor = derived_of / (weight * loss_scale)
                counted = grads if len(self._counted) == len(self.stored) else local_gradients(self._counted)
                norm = global_norm(counted, self._norm_groups, self.device) * factor
                scale_gradients(grads, gradient_scale(norm, factor, self.clip), self.optimizer)
            self._last_norm = HostCopy(norm), batch
            overflowed = self._overflowed(self._last_norm[0])
            if self.device.type == "cpu" or self.recovery.reads_gradients:
                alarm = self._alarm_of_gradient(loss)
            skipped = overflowed or alarm is not None
        if alarm is not None:
            self._put_buffers_back()
        self._count_step(skipped)
        self._invariants.check_values(self.steps_done)
        result = StepResult(
            step=self.steps_done,
            loss=loss,
            weight=weight,
            grad_norm=norm,
            lr=self._rate,
            skipped=skipped,
            loss_scale=loss_scale,
            overflowed=overflowed and alarm is None,
            items=round(items),
            padding=round(padding),
        )
        if self._observe:
            self._observe(result, batch)
        if alarm is not None:
            self.recovery.act(alarm)
        return result

    def _differ(self, total: float, squares: float) -> bool:
        """Whether the numbers that all ranks have added up were not one number: only equal ones have no variance."""
        return self._comm.world_size * squares > total * total * (1 + 1e-12)

    def _count_step(self, skipped: bool) -> None:
        """Update the weights, unless the step is skipped; one more step is done."""
        if skipped:
            self.steps_skipped += 1
        else:
            self.is_sound = False
            self._comm.beat.at("the optimizer")
            with self._optimizing(), self.marked("optimizer"):
                self.optimizer.step()
                self._gradients.updated()
            self.recovery.fine()
        self.steps_done += 1
        self.is_sound, self.is_in_step = True, False
        self.seed_between_steps()

    def _alarm_of_loss(self, loss: float, is_bad: bool, batch: StepBatch) -> Alarm | None:
        """What is wrong with the loss of this step, on every rank alike; raises where the run is to stop."""
        step = self.steps_done + 1
        if not is_bad:
            return self.recovery.spike(loss, step, lambda: self._everybodys_ids(batch))
        error = loss_not_finite(self, self._comm, self._losses, self._buffer_copies.values)
        return self.recovery.nonfinite(error, math.nan)

    def _alarm_of_gradient(self, loss: float) -> Alarm | None:
        """What is wrong with the last gradient, before the update; raises where the run is to stop."""
        if self._last_norm is None:
            return None
        copy, batch = self._last_norm
        self._last_norm = None
        if math.isfinite(copy.read()[0]):
            return None
        # It is a sum over the ranks: nobody knows any more whose it was.
        error = NonFiniteError("gradient", self.steps_done + 1, None, self._everybodys_ids(batch))
        return self.recovery.nonfinite(error, loss)

    def _everybodys_ids(self, batch: StepBatch) -> list[int]:
        """The samples of all ranks in a step, each once."""
        return list(dict.fromkeys(sample for rank in self._comm.gather(batch.ids) for sample in rank))

    def _start_exchange(self, totals: HostCopy) -> Callable[[], list[float]]:
        """Begin to add up loss, weight and what ranks have to agree on.

        On a CPU before the last backward, beside which it then runs; on a GPU after it was launched, because the host
        has to wait for the last forward first.
        """
        loss, weight = totals.read()
        self.check_last_gradient()
        bad = float(not math.isfinite(loss) or not math.isfinite(weight))
        if not self._speaks:
            loss, weight = 0.0, 0.0
        unused = 0 if self._gradients.counts_unused else self._gradients.unused()
        path = float(self._gradients.path)
        alike = (value for one in (path, self.rates.mark) for value in (one, one * one))
        numbers = [loss, weight, bad, *map(float, self._items), float(unused), *alike]
        return self._comm.start_sum([*numbers, *self._requests.votes()])

    def _overflowed(self, norm: HostCopy) -> bool:
        """Whether the gradients of an fp16 step are too large for its loss scale, which learns from it.

        Every rank has the same norm, and with it the same answer. A gradient that is not finite without any scaling is
        no overflow: `check_last_gradient` stops the run.
        """
        if self.loss_scale is None:
            return False
        overflow = not math.isfinite(norm.read()[0])
        if overflow and self.loss_scale.scale > 1:
            self._last_norm = None
        self.loss_scale.update(overflow)
        return overflow

    def check_last_gradient(self) -> None:
        """Stop if the norm of the last gradient is not finite and nobody has asked yet.

        Where the run is to stop, that is asked on a GPU one step later, and before anything is saved, because asking at
        once would let the GPU run dry in every step. The weights are not sound any more then.
        """
        if self._last_norm is None:
            return
        copy, batch = self._last_norm
        self._last_norm = None
        if not math.isfinite(copy.read()[0]):
            self.is_sound = False
            raise NonFiniteError("gradient", self.steps_done, None, self._everybodys_ids(batch))

    def check_replicas(self, again: bool = True) -> None:
        """Stop if ranks that hold the same hold it differently; without `again` only if this step was not looked at.

        Every rank calls it, between steps.
        """
        if again or self._invariants.checked_step < self.steps_done:
            self._invariants.check_all(self.steps_done)

    def undo_half_a_step(self) -> None:
        """A step has failed half-way: buffers as they were before it, which its forward may have changed."""
        if self.is_in_step:
            self._put_buffers_back()
            self.is_in_step = False

    def _put_buffers_back(self) -> None:
        """What forwards have done to buffers does not count."""
        self._forward_buffers.forget()
        self._buffer_copies.put_back()

    def forward_backward(self, micro_batches: list[MicroBatch], scale: float) -> HostCopy:
        """Accumulate the gradients of `scale` times the loss sum; returns this rank's loss sum and weight.

        The two are sent to the host behind the last forward, so that they arrive while the backward still runs.
        """
        self._whole_steps.check(micro_batches)
        if self.pipeline is not None:
            return self._pipelined(micro_batches, scale)
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        on_host = HostCopy(totals)
        if not micro_batches:
            return on_host
        following = map(self._transfers.send, (part.data for part in micro_batches))
        sent = next(following, None)
        for number, micro_batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            assert sent is not None
            data, sent = sent.take(), next(following, None)
            with self.marked("forward"), self._statistics.not_counting() if micro_batch.filler else nullcontext():
                loss_sum, weight = self.forward(micro_batch, data)
            self._check_undrawn()
            self._count(totals, micro_batch, loss_sum, weight)
            if last:
                on_host = HostCopy(totals)
                if self._gradients.counts_unused and self.device.type == "cpu":
                    self._exchange = self._start_exchange(on_host)
            self._gradients.before_backward(last)
            if self._together is not None and not loss_sum.requires_grad and not self._is_trial:
                raise UserError(
                    f"the loss function returned a constant, and {self._together} cannot leave a forward out",
                    "call the model in any case, and multiply the loss by 0 where nothing counts",
                )
            self._whole_steps.try_functions(loss_sum)
            self._whole_steps.check(micro_batches)
            if loss_sum.requires_grad:
                derived = self._derived(loss_sum, weight, 0.0 if micro_batch.filler else scale)
                with self.marked("backward"), self.draws.in_backward_of(micro_batch.index):
                    torch.autograd.backward(derived)
            self.draws.forget()
        return on_host

    def _count(
        self,
        totals: torch.Tensor,
        micro_batch: MicroBatch,
        loss_sum: torch.Tensor,
        weight: int | float | torch.Tensor,
    ) -> None:
        """Add what a micro-batch gives to the loss of its step."""
        if not micro_batch.filler:
            totals[0] += loss_sum.detach()
            totals[1] += weight
            of_part = weight.detach() if isinstance(weight, torch.Tensor) else weight
            self._losses.append(Counted(micro_batch, loss_sum.detach(), of_part))

    def _derived(self, loss_sum: torch.Tensor, weight: int | float | torch.Tensor, scale: float) -> torch.Tensor:
        """What a backward pass begins with: the sum times a constant, or the mean where a hook looks at gradients."""
        if self._whole_steps.hook is None:
            return loss_sum * scale
        counted = weight if isinstance(weight, torch.Tensor) else weight or 1
        return loss_sum * ((self.loss_scale.scale if self.loss_scale else 1.0) / counted)

    def _pipelined(self, micro_batches: list[MicroBatch], scale: float) -> HostCopy:
        """`forward_backward` by a pipeline's timetable; only the rank of its last stage has a loss and a weight."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)

        @contextmanager
        def start(number: int) -> Iterator[None]:
            self._start_micro_batch(micro_batches[number])
            uncounted = self._statistics.not_counting() if micro_batches[number].filler else nullcontext()
            with self._drawing(), uncounted, self._forward_buffers.forward():
                yield
            self._check_undrawn()

        def backward_of(number: int) -> AbstractContextManager[Any]:
            self._gradients.before_backward(False)
            return self.draws.in_backward_of(micro_batches[number].index)

        def loss_of(number: int, result: tuple[torch.Tensor, int | float | torch.Tensor]) -> torch.Tensor:
            loss_sum, weight = result
            self._count(totals, micro_batches[number], loss_sum, weight)
            self._whole_steps.try_functions(loss_sum)
            return loss_sum * (0.0 if micro_batches[number].filler else scale)

        assert self.pipeline is not None
        if not micro_batches:  # the last step of an epoch may have fewer than there are data ranks
            return HostCopy(totals)
        data = [self._transfers.send(part.data).take() for part in micro_batches]
        with self.marked("pipeline"):
            self.pipeline.step(
                MicroBatches("step", self._summed_loss, data, start, self.computing, loss_of, backward_of)
            )
        self.draws.forget()
        return HostCopy(totals)

    @torch.no_grad()
    def evaluate(self, micro_batches: Any, metrics: Mapping[str, MetricFunction] | None = None) -> dict[str, Metric]:
        """Loss and metrics over a dataset's micro-batches: every sample counted once, summed in float64."""
        functions: dict[str, MetricFunction] = {"loss": self._summed_loss, **(metrics or {})}
        sums = {name: torch.zeros(2, dtype=torch.float64, device=self.device) for name in functions}

        def add(name: str, returned: Any) -> None:
            exact = [
                torch.as_tensor(part, dtype=torch.float64, device=self.device) for part in checked_pair(name, returned)
            ]
            sums[name] += torch.stack([part.reshape(()) for part in exact])

        with self.scoring(), self.hidden():
            draws = self.draws_by_sample
            for group in in_groups(micro_batches, 1 if self.pipeline is None else self.pipeline.at_once):
                self._comm.beat.at("scoring")
                size = max((len(part.ids) for part in group), default=1)
                with memory_explained(self, self._comm.beat, size):
                    data = [self._transfers.send(part.data).take() for part in group]
                    self.draws.has_drawn = False
                    for name, function in functions.items():
                        scored = self._score(name, function, group, data, draws)
                        for part, returned in zip(group, scored, strict=False):
                            if not part.filler:
                                add(name, returned)
                    draws = draws and self.draws.has_drawn  # the first ones tell whether to look on
        self.seed_between_steps()
        flat = self._comm.sum((torch.cat(list(sums.values())) * self._speaks).tolist())
        return {name: Metric(*flat[2 * i : 2 * i + 2]) for i, name in enumerate(functions)}

    def _score(
        self, name: str, function: MetricFunction, group: Sequence[MicroBatch], data: Sequence[Any], draws: bool
    ) -> list[Any]:
        """What a metric's function returns for each micro-batch; in a pipeline only its last stage knows."""

        def start(number: int) -> AbstractContextManager[Any]:
            seed_everything(seed_of(self.seed, "evaluate"))
            streams = partial(seed_of, self.seed, "evaluate")
            self.draws.begin(number, group[number].positions, streams, SCORING)
            return self.draws if draws else nullcontext()

        if self.pipeline is not None:
            return self.pipeline.score(MicroBatches(name, function, data, start, self.computing))
        with start(0), self.computing():
            return [call_gathered(self.model, lambda model: function(model, self._parted(data[0])))]

    def synchronise_batch_norm(self, is_on: bool) -> None:
        """Let BatchNorm normalise over the samples of all data ranks, where the model was cut for that, or not."""
        self._statistics.synchronise(is_on)
        if self.is_synchronised:
            self._together = self._together or "a synchronised BatchNorm"

    @property
    def is_synchronised(self) -> bool:
        """Whether BatchNorm normalises over the samples of all data ranks."""
        return self._statistics.is_synchronised

    def would_synchronise(self, is_on: bool) -> bool:
        """Whether BatchNorm would, where that is switched on: there may be none, or it may not be able to."""
        return is_on and self._statistics.can_synchronise

    def try_forward(self, micro_batch: MicroBatch) -> Tried:
        """Loss sum and weight of samples that all ranks have, in training mode and exactly, counting for nothing."""
        data = self._transfers.send(micro_batch.data).take()
        self.rest()
        with self.hidden():
            self.trainable.check()
        if not all(model.training for model in self.models):
            self._train_mode()
        self._forward_buffers.take_in()
        self._forward_buffers.forget()
        self._buffer_copies.take()
        self._is_trial = True
        try:
            try:
                with torch.no_grad():
                    result = self._tried(micro_batch, data)
            except RuntimeError as error:
                is_full = isinstance(error, torch.OutOfMemoryError)
                if is_full or self.pipeline is not None or self.layout.team > 1:  # others are in the middle of it
                    raise
                self._put_buffers_back()
                result = self._tried(micro_batch, data)  # it may derive something itself, a gradient penalty say
            self._forward_buffers.take_in()
            changed = {self.buffers[number][0]: value for number, value in self._buffer_copies.changed()}
        finally:
            self._is_trial = False
            self._put_buffers_back()
            self.draws.forget()
            self.rest()
        drew, flips = self.may_draw or self._has_drawn(micro_batch), self._flips_coins
        speaks = self._speaks and result is not None
        loss, weight = (torch.as_tensor(one).detach().item() for one in result) if speaks and result else (0.0, 0.0)
        own = [0.0] * self._comm.data_size
        own[self.layout.data_rank(self.rank)] = loss
        weight, draws, coins, *losses = self._comm.sum([weight, float(drew), float(flips), *own])
        return Tried(sum(losses) / len(losses), weight / len(losses), draws > 0, coins > 0, losses, changed)

    def change_once(self, buffers: Collection[str]) -> None:
        """Forwards change these buffers, of all ranks, whatever samples they see: once a step."""
        self._forward_buffers.change_once(buffers)
        self._statistics.leave(buffers)

    def _tried(self, micro_batch: MicroBatch, data: Any) -> Any:
        """What `try_forward` computes; in a pipeline only its last stage knows."""

        @contextmanager
        def start(_: int) -> Iterator[None]:
            self._start_micro_batch(micro_batch)
            with self._drawing(), self._forward_buffers.forward():
                yield

        # Not compiled: the trial is over before that would pay, and a compiler cannot follow what watches it.
        with torch.compiler.set_stance("force_eager"), self._whole_steps.seeing_tables():
            if self.pipeline is None:
                with ParametersStay(self.model):
                    return self.forward(micro_batch, data)
            with self.hidden():
                work = MicroBatches("trial", self._summed_loss, [data], start, self.computing)
                return next(iter(self.pipeline.score(work)), None)

    def _has_drawn(self, micro_batch: MicroBatch) -> bool:
        """Whether anybody drew random numbers since a forward began that nothing else seeded."""
        seed = draw_seed(self.seed, self.steps_done)
        own = seed if self.draws_by_sample else draw_seed(self.seed, self.steps_done, micro_batch.first)
        return has_moved(self.device, own) or hosts_have_moved(seed)

    @property
    def _flips_coins(self) -> bool:
        """Whether anybody drew one number for all samples since a forward began."""
        return self.draws.has_drawn_for_all or hosts_have_moved(draw_seed(self.seed, self.steps_done))

    @property
    def needs_whole_steps(self) -> str | None:
        """Why a step has to be one forward although no loss shows it, for people; None: it need not."""
        return self._whole_steps.reason

    def try_gradients(self, micro_batches: list[MicroBatch]) -> list[tuple[str, torch.Tensor]]:
        """This rank's part of the gradients of samples that all ranks have, exactly, counting for nothing."""
        if not all(model.training for model in self.models):
            self._train_mode()
        self._streams.clear()
        self._forward_buffers.begin()
        self._buffer_copies.take()
        self._exchange = None
        self._items, self._rate = (0, 0), 0.0
        self._is_trial = True
        try:
            with self.hidden(), torch.compiler.set_stance("force_eager"), attend_with(self.attention):
                self._whole_steps.begin()
                self._gradients.begin()
                totals = self.forward_backward(micro_batches, 1 / self.layout.team)
                exchange = self._exchange or self._start_exchange(totals)
                has_unused = self._gradients.wait()
                unused = exchange()[5]  # who asks for something by the others is asked again in the first step
                self._gradients.finish(has_unused or bool(unused))
            return [(name, part.clone()) for name, one in self.trained for part in local_gradients([one])]
        finally:
            self._is_trial = False
            self._put_buffers_back()
            self.rest()
            for parameter in self.parameters:
                parameter.grad = None

    @property
    def trial_rounding(self) -> float:
        """By how much two numbers of `try_forward` may differ that are the same but for rounding, relative to them."""
        numerics = self.numerics
        if numerics.storage_dtype != "fp32" or numerics.param_dtype is not None or numerics.tf32:
            return 1e-2
        return 1e-5 if self.device.type == "cpu" else 1e-4

    def rest(self) -> None:
        """Put the model back into its state between steps, after a forward that was not part of one."""
        with self.hidden():
            self._gradients.rest()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """In eval mode inside; afterwards every layer is in the mode it was in, and only shards are held."""
        training = [module for model in self.models for module in model.modules() if module.training]
        for model in self.models:
            model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True
            self.rest()

    def use_attention(self, kernels: str | None) -> None:
        """Compute attention with these kernels, None: as torch chooses."""
        self.attention, self.measures_attention = kernels, False
        process.tag_compiled_code(f"attention={kernels}")

    def _measure_attention(self, micro_batches: list[MicroBatch]) -> None:
        """Before the first step on a GPU: take the fastest attention kernels for what this model does."""

        def forward() -> None:
            with not_counting(batch_norms(self.model)):
                for micro_batch in micro_batches[:1]:
                    self.forward(micro_batch, self._transfers.send(micro_batch.data).take())

        self.use_attention(fastest_kernels(forward, self.device, self._comm))
        self.rest()

    def restored(self) -> None:
        """A checkpoint was put into what this rank stores of the model."""
        self._gradients.restored()

    def settle(self) -> None:
        """Before the first step: what the script has made anew goes on where a checkpoint has it."""
        self.rates.settle()
        self.trainable.settle()

    def seed_between_steps(self) -> None:
        """Code between two steps draws the same numbers on every rank and after a restart."""
        seed_everything(seed_of(self.seed, "between", self.steps_done))

    def _train_mode(self) -> None:
        for model in self.models:
            model.train()
        for module in self._frozen:
            module.training = False

    def forward(self, micro_batch: MicroBatch, data: Any) -> tuple[torch.Tensor, int | float | torch.Tensor]:
        """Loss sum and weight of one micro-batch (`data`: on the device) under the stream of its logical coordinate."""
        self._start_micro_batch(micro_batch)
        counts = self.is_in_step or self._is_trial  # others measure something
        if not counts:
            self._forward_buffers.begin()
            self._buffer_copies.take()
        try:
            with self._drawing(), self.computing(), self.hidden(), self._forward_buffers.forward():
                return self._summed_loss(self.model, self._parted(data))
        finally:
            if not counts:
                self._put_buffers_back()

    def _parted(self, data: Any) -> Any:
        """This rank's part of the sequences of a micro-batch, where the layout cuts those."""
        return data if self._sequence is None else cut_sequences(data, self._sequence)

    def _start_micro_batch(self, micro_batch: MicroBatch) -> None:
        self.forward_begins(micro_batch)
        self._drawn_in = self.steps_done
        self._calls.clear()
        self._comm.beat.tick()
        seed_everything(draw_seed(self.seed, self.steps_done))
        self.draws.begin(micro_batch.index, micro_batch.positions, partial(draw_seed, self.seed, self.steps_done))
        if not self.draws_by_sample:
            seed_torch(draw_seed(self.seed, self.steps_done, micro_batch.first))

    def _drawing(self) -> AbstractContextManager[Any]:
        """Entered around a forward, so that what it draws follows the samples."""
        return self.draws if self.draws_by_sample and self.may_draw else nullcontext()

    def _check_undrawn(self) -> None:
        """After a forward of a training that drew nothing before it began: it still draws nothing.

        Of compiled code nobody knows: it draws to time kernels, and for nothing.
        """
        if self.draws_by_sample and not self.may_draw and has_moved(self.device, draw_seed(self.seed, self.steps_done)):
            raise UserError(
                f"the forward of step {self.steps_done + 1} draws random numbers, and at the start it drew none",
                "let it draw from the first step on, and multiply by 0 what is not wanted yet",
            )

    def _summed_loss(self, model: nn.Module, data: Any) -> tuple[torch.Tensor, int | float | torch.Tensor]:
        with self._explaining(), self._whole_steps.watching(), no_backward():
            returned = call_gathered(model, lambda whole: self._loss(whole, data))
        loss, weight = self._checked_loss(returned)
        check_has_gradient(loss, weight)
        return loss, weight

    def _checked_loss(self, returned: Any) -> tuple[torch.Tensor, int | float | torch.Tensor]:
        """Sum and weight of what a loss function returned."""
        if not isinstance(returned, tuple) or len(returned) != 2:
            what = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
            raise UserError(
                f"the loss function returned {what}",
                "return (sum of the losses, how many of them count), as the README's own script does",
            )
        value, weight = returned
        check_is_tensor(value)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise UserError("the loss function returned a loss that is not one number", 'use reduction="sum"')
        if isinstance(value, DTensor):
            raise read_elsewhere()
        if isinstance(weight, torch.Tensor) and weight.requires_grad:
            raise UserError(
                "the weight that the loss function returns depends on the model's parameters, and a weight counts only",
                "detach it where it is a count; where it belongs to the loss, divide by it there, and return that mean "
                'and a count, with loss_reduction="mean"',
            )
        if self._loss_reduction == "sum":
            return value.float().reshape(()), weight
        # A mean over nothing is NaN, and its gradient too: such a micro-batch is left out, not multiplied by zero.
        if float(weight) > 0:
            return value.float().reshape(()) * weight, weight
        if self._together is not None:
            raise UserError(
                f"a micro-batch of weight 0 has no mean loss, and {self._together} cannot leave it out",
                'return the sum (reduction="sum") and drop loss_reduction="mean"',
            )
        return torch.zeros((), device=self.device), 0

    def _seed_module(self, number: int) -> Callable[[nn.Module, Any], None]:
        def seed(module: nn.Module, _: Any) -> None:
            if not module.training or not self.may_draw:
                return
            key = self.draws.micro_batch, torch.default_generator.initial_seed(), number
            # torch.utils.checkpoint calls a module again in the backward pass, in the stream it was called in first.
            if (again := self._streams.get(key)) is not None and in_backward():
                seed_torch(again)
                return
            call = self._calls[number]  # a module that is called twice draws two masks
            self._calls[number] += 1
            step = self._drawn_in
            self.draws.reseed(lambda position: draw_seed(self.seed, step, position, number, call), (number, call))
            of_all = -1 if self.draws_by_sample else self.draws.positions[0]
            self._streams[key] = own = draw_seed(self.seed, step, of_all, number, call)
            seed_torch(own)

        return seed
