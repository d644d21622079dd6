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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.attention import attend_with, fastest_kernels
from lockstep.config import Attention, Compile, Format, NumericsConfig, RecoverConfig
from lockstep.data.loader import MicroBatch, StepBatch, in_groups
from lockstep.data.transfer import HostCopy, Transfers
from lockstep.errors import NonFiniteError, UserError
from lockstep.faults.invariants import Invariants
from lockstep.faults.memory import memory_explained
from lockstep.faults.recover import Alarm, BufferCopies, Recovery
from lockstep.faults.requests import Requests
from lockstep.grads import global_norm, gradient_scale, local_gradients, scale_gradients
from lockstep.layout import Layout
from lockstep.optim import refuse_not_elementwise, use_fused_kernels
from lockstep.parallel.apply import Look, ParallelModel
from lockstep.parallel.calls import PipelinedCalls
from lockstep.parallel.compile import compile_whole, compiled_calls, tag_compiled_code
from lockstep.parallel.context import cut_sequences, sequence_length
from lockstep.parallel.materialise import named_tensors
from lockstep.parallel.names import refuse_extra_state, state_dict_names
from lockstep.parallel.shard import weights_read_by_their_modules
from lockstep.parallel.statistics import batch_norms, not_counting
from lockstep.parallel.team import in_order
from lockstep.precision import LossScale, apply_tf32, compute_in, refuse_untrainable
from lockstep.runtime.axis import Axis
from lockstep.runtime.comm import Comm
from lockstep.runtime.seeds import in_backward, seed_everything, seed_of, seed_torch
from lockstep.scoring import Metric, MetricFunction, checked_pair

LossFunction = Callable[[nn.Module, Any], tuple[torch.Tensor, int | float | torch.Tensor]]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Schedule = Callable[[int], float]


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
        if layout.team > 1:  # torch's own layers would hand parts of matrices to a kernel that takes them for whole
            torch.backends.mha.set_fastpath_enabled(False)
        self._make_optimizer = optimizer
        self._schedule = schedule or (lambda _: 1.0)
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
        self._explaining: Callable[[], AbstractContextManager[None]] = nullcontext
        self._transfers = Transfers(device)
        self.use_attention(None if attention == "auto" else attention)
        self.measures_attention = attention == "auto" and device.type == "cuda" and layout.pp == 1
        self._last_norm: tuple[HostCopy, StepBatch] | None = None
        self._exchange: Callable[[], list[float]] | None = None
        self._coordinate: tuple[int, int] = (0, 0)
        self._calls: Counter[int] = Counter()
        self._streams: dict[tuple[int, int], int] = {}
        self._prepare: Callable[[Look], None] | None = None
        self._together: str | None = "a pipeline" if layout.pp > 1 else None
        self._sequence = comm.cut_axis("cp")
        at = layout.coordinate(comm.rank)
        self._speaks = at["tp"] == at["cp"] == 0  # of ranks that compute one loss together, one reports it
        self._counts = self._speaks and at["pp"] == 0  # and of those that read the same samples, one counts them
        self._items = (0, 0)

    def attach(self, parallel: ParallelModel) -> None:
        """Take over a model that was cut for this rank, and make its optimizer."""
        self.models = parallel.models
        self.model = parallel.models[0]
        self.blocks = parallel.blocks
        self.pipeline = parallel.pipeline
        self.stored = parallel.parameters
        whole = parallel.skeleton or self.model
        refuse_extra_state(whole)
        self.state_dict_names = state_dict_names(whole)
        self.tensor_names = [name for name, _ in named_tensors(whole)]
        self.slices = parallel.slices
        self.buffers = parallel.buffers
        named = parallel.trained
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
        refuse_untrainable(named, self.optimizer, self.numerics)
        if parallel.is_sharded or parallel.slices:
            refuse_not_elementwise(self.optimizer, self.layout)
        use_fused_kernels(self.optimizer, self.model)
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        if self._compile != "off":
            self._explaining = compiled_calls
        elif parallel.is_sharded:
            self._explaining = weights_read_by_their_modules
        self._gradients = parallel.gradients
        self._counted = parallel.counted
        self._norm_groups = parallel.norm_groups
        self._together = parallel.together
        self._statistics = parallel.statistics
        self._buffer_copies = BufferCopies([buffer for _, buffer in self.buffers])
        self._invariants = Invariants(self, self._comm, self.recovery.config.check_every)
        # A whole compiled model cannot be left between its blocks: it draws from the micro-batch's stream alone.
        for seeded in parallel.seeded if self._compile != "model" else []:
            for number, module in enumerate(seeded):
                module.register_forward_pre_hook(self._seed_module(number))
        if self.pipeline is not None:
            assert parallel.skeleton is not None
            self._stages = PipelinedCalls(self.pipeline, parallel.skeleton, self._comm, self.device, self.computing)
        self.seed_between_steps()

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
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return in_order(full, self.slices.get(name), self.layout.tp)

    def is_first_with(self, name: str) -> bool:
        """Whether of the stages that have a parameter or buffer, the first is one of this rank's."""
        return self.pipeline is None or self.places_with(name)[0] == self.pipeline.rank

    def places_with(self, name: str) -> list[int]:
        """The places in the pipeline of the stages that have a parameter or buffer, the first one's first."""
        assert self.pipeline is not None
        plan = self.pipeline.plan
        users = plan.users[name] if name in plan.users else plan.buffer_users[name]
        return [self.pipeline.rank_of[stage] for stage in users]

    @property
    def micro_batch(self) -> int:
        """The logical number, in its step, of the micro-batch that is computed."""
        return self._coordinate[1]

    @property
    def parameter_count(self) -> int:
        """How many numbers the whole model has."""
        count = 0
        for name, parameter in self.model.named_parameters():
            how = self.slices.get(name)
            shared = 1 if how is None else sum(how.parts) / parameter.shape[how.dim]
            count += round(parameter.numel() * shared)
        return count

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
        with compute_in(self.precision, self.device), attend_with(self.attention):
            yield

    @property
    def lr(self) -> float:
        """The learning rate of the next step (of the first parameter group)."""
        return self.base_lrs[0] * self._schedule(self.steps_done)

    def step(self, batch: StepBatch) -> StepResult:
        """Do one optimizer step on what `run.loader` yields."""
        if not isinstance(batch, StepBatch):
            raise UserError(f"engine.step was given a {type(batch).__name__}", "give it what run.loader(...) yields")
        assert self.is_ready, "the loader has shown its first samples"
        self._entered()
        beat = self._comm.beat
        beat.step = self.steps_done + 1
        beat.at("forward and backward")
        with memory_explained(self, beat, max((len(part.ids) for part in batch.micro_batches), default=1)):
            result = self._step(batch)
        beat.at("the code between steps")
        return result

    def _step(self, batch: StepBatch) -> StepResult:
        lr = self.lr
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self._schedule(self.steps_done)
        if not all(model.training for model in self.models):
            self._train_mode()
        if self.measures_attention:
            self._measure_attention(batch.micro_batches)
        self._streams.clear()
        self._buffer_copies.take()
        self.is_in_step = True
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
            loss_sum, weight, bad_ranks, items, padding, unused, paths, squares, *votes = exchange()
        self._requests.agree(votes)
        loss = loss_sum / weight if weight > 0 else math.nan
        alarm = self._alarm_of_loss(loss, bool(bad_ranks), totals, batch)
        if self._comm.world_size * squares > paths * paths * (1 + 1e-12):  # only equal numbers have no variance
            raise UserError(
                "the ranks called different sharded blocks in one step, and so gathered each other's weights",
                "let every forward call the same blocks (multiply by 0 what is left out), or use a dp layout",
            )
        norm, overflowed = torch.zeros((), device=self.device), False
        skipped = alarm is not None or weight <= 0
        if alarm is None:
            self._gradients.finish(has_unused or bool(unused))
            self._statistics.combine()
        if not skipped:
            self._invariants.check_gradients()
            with self._optimizing():
                grads = local_gradients(self.parameters)
                factor = batch.global_batch / (weight * loss_scale)
                counted = grads if len(self._counted) == len(self.stored) else local_gradients(self._counted)
                norm = global_norm(counted, self._norm_groups, self.device) * factor
                scale_gradients(grads, gradient_scale(norm, factor, self.clip), self.optimizer)
            self._last_norm = HostCopy(norm), batch
            overflowed = self._overflowed(self._last_norm[0])
            if self.device.type == "cpu" or self.recovery.reads_gradients:
                alarm = self._alarm_of_gradient(loss)
            skipped = overflowed or alarm is not None
        if alarm is not None:
            self._buffer_copies.put_back()
        self._count_step(skipped)
        self._invariants.check_values()
        result = StepResult(
            step=self.steps_done,
            loss=loss,
            weight=weight,
            grad_norm=norm,
            lr=lr,
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

    def _alarm_of_loss(self, loss: float, is_bad: bool, totals: HostCopy, batch: StepBatch) -> Alarm | None:
        """What is wrong with the loss of this step, on every rank alike; raises where the run is to stop."""
        step = self.steps_done + 1
        if not is_bad:
            return self.recovery.spike(loss, step, lambda: self._everybodys_ids(batch))
        reports = self._comm.gather(None if all(map(math.isfinite, totals.read())) else batch.ids)
        rank = next(rank for rank, report in enumerate(reports) if report is not None)
        return self.recovery.nonfinite("loss", step, rank, reports[rank], math.nan)

    def _alarm_of_gradient(self, loss: float) -> Alarm | None:
        """What is wrong with the last gradient, before the update; raises where the run is to stop."""
        if self._last_norm is None:
            return None
        copy, batch = self._last_norm
        self._last_norm = None
        if math.isfinite(copy.read()[0]):
            return None
        # It is a sum over the ranks: nobody knows any more whose it was.
        return self.recovery.nonfinite("gradient", self.steps_done + 1, None, self._everybodys_ids(batch), loss)

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
        numbers = [loss, weight, bad, *map(float, self._items), float(unused), path, path * path]
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

    def undo_half_a_step(self) -> None:
        """A step has failed half-way: buffers as they were before it, which its forward may have changed."""
        if self.is_in_step:
            self._buffer_copies.put_back()
            self.is_in_step = False

    def forward_backward(self, micro_batches: list[MicroBatch], scale: float) -> HostCopy:
        """Accumulate the gradients of `scale` times the loss sum; returns this rank's loss sum and weight.

        The two are sent to the host behind the last forward, so that they arrive while the backward still runs.
        """
        if self.pipeline is not None:
            return self._pipelined(micro_batches, scale)
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        on_host = HostCopy(totals)
        following = map(self._transfers.send, (part.data for part in micro_batches))
        sent = next(following, None)
        for number, micro_batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            assert sent is not None
            data, sent = sent.take(), next(following, None)
            with self.marked("forward"), self._statistics.not_counting() if micro_batch.filler else nullcontext():
                loss_sum, weight = self.forward(micro_batch, data)
            if not micro_batch.filler:
                totals[0] += loss_sum.detach()
                totals[1] += weight
            if last:
                on_host = HostCopy(totals)
                if self._gradients.counts_unused and self.device.type == "cpu":
                    self._exchange = self._start_exchange(on_host)
            self._gradients.before_backward(last)
            if self._together is not None and not loss_sum.requires_grad:
                raise UserError(
                    f"the loss function returned a constant, and {self._together} cannot leave a forward out",
                    "call the model in any case, and multiply the loss by 0 where nothing counts",
                )
            if loss_sum.requires_grad:
                with self.marked("backward"):
                    (loss_sum * (0.0 if micro_batch.filler else scale)).backward()
        return on_host

    def _pipelined(self, micro_batches: list[MicroBatch], scale: float) -> HostCopy:
        """`forward_backward` by a pipeline's timetable; only the rank of its last stage has a loss and a weight."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)

        def start(number: int) -> AbstractContextManager[None]:
            self._start_micro_batch(micro_batches[number])
            return self._statistics.not_counting() if micro_batches[number].filler else nullcontext()

        def loss_of(number: int, result: tuple[torch.Tensor, int | float | torch.Tensor]) -> torch.Tensor:
            loss_sum, weight = result
            if not micro_batches[number].filler:
                totals[0] += loss_sum.detach()
                totals[1] += weight
            return loss_sum * (0.0 if micro_batches[number].filler else scale)

        if not micro_batches:  # the last step of an epoch may have fewer than there are data ranks
            return HostCopy(totals)
        data = [self._transfers.send(part.data).take() for part in micro_batches]
        before_backward = partial(self._gradients.before_backward, False)
        with self.marked("pipeline"):
            self._stages.step(data, self._summed_loss, start, loss_of, before_backward)
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

        with self.scoring():
            for group in in_groups(micro_batches, 1 if self.pipeline is None else self._stages.at_once):
                self._comm.beat.at("scoring")
                size = max((len(part.ids) for part in group), default=1)
                with memory_explained(self, self._comm.beat, size):
                    data = [self._transfers.send(part.data).take() for part in group]
                    for name, function in functions.items():
                        for part, returned in zip(group, self._score(name, function, group, data), strict=False):
                            if not part.filler:
                                add(name, returned)
        self.seed_between_steps()
        flat = self._comm.sum((torch.cat(list(sums.values())) * self._speaks).tolist())
        return {name: Metric(*flat[2 * i : 2 * i + 2]) for i, name in enumerate(functions)}

    def _score(
        self, name: str, function: MetricFunction, group: Sequence[MicroBatch], data: Sequence[Any]
    ) -> list[Any]:
        """What a metric's function returns for each micro-batch; in a pipeline only its last stage knows."""

        def start(number: int) -> AbstractContextManager[None]:
            seed_everything(seed_of(self.seed, "evaluate", group[number].index))
            return nullcontext()

        if self.pipeline is not None:
            return self._stages.score(name, data, function, start)
        start(0)
        with self.computing():
            return [function(self.model, self._parted(data[0]))]

    def rest(self) -> None:
        """Put the model back into its state between steps, after a forward that was not part of one."""
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
        tag_compiled_code(f"attention={kernels}")

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
        with self.computing():
            return self._summed_loss(self.model, self._parted(data))

    def _parted(self, data: Any) -> Any:
        """This rank's part of the sequences of a micro-batch, where the layout cuts those."""
        return data if self._sequence is None else cut_sequences(data, self._sequence)

    def _start_micro_batch(self, micro_batch: MicroBatch) -> None:
        self._coordinate = (self.steps_done, micro_batch.index)
        self._calls.clear()
        self._comm.beat.tick()
        seed_everything(seed_of(self.seed, "forward", *self._coordinate))

    def _summed_loss(self, model: nn.Module, data: Any) -> tuple[torch.Tensor, int | float | torch.Tensor]:
        with self._explaining():
            returned = self._loss(model, data)
        return self._checked_loss(returned)

    def _checked_loss(self, returned: Any) -> tuple[torch.Tensor, int | float | torch.Tensor]:
        """Sum and weight of what a loss function returned."""
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise UserError(
                f"the loss function returned {type(returned).__name__}",
                "return (sum of the losses, how many of them count), as the README's own script does",
            )
        value, weight = returned
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise UserError("the loss function returned a loss that is not one number", 'use reduction="sum"')
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
            if not module.training:
                return
            stream = torch.default_generator.initial_seed()
            # torch.utils.checkpoint calls a module again in the backward pass, in the stream it was called in first.
            if (again := self._streams.get((stream, number))) is not None and in_backward():
                seed_torch(again)
                return
            call = self._calls[number]  # a module that is called twice draws two masks
            self._calls[number] += 1
            self._streams[stream, number] = own = seed_of(self.seed, "block", *self._coordinate, number, call)
            seed_torch(own)

        return seed
