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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lockstep.attention import attend_with, fastest_kernels
from lockstep.config import Attention, Compile, Format, NumericsConfig
from lockstep.data.loader import MicroBatch, StepBatch
from lockstep.data.transfer import HostCopy, Transfers
from lockstep.errors import NonFiniteError, UserError
from lockstep.faults.requests import Requests
from lockstep.grads import global_norm, gradient_scale, local_gradients, scale_gradients
from lockstep.layout import Layout
from lockstep.optim import use_fused_kernels
from lockstep.parallel.apply import ParallelModel
from lockstep.parallel.compile import compile_whole, compiled_calls, tag_compiled_code
from lockstep.parallel.shard import weights_read_by_their_modules
from lockstep.parallel.statistics import batch_norms, not_counting
from lockstep.precision import LossScale, apply_tf32, compute_in, refuse_untrainable
from lockstep.runtime.comm import Comm
from lockstep.runtime.seeds import seed_everything, seed_of, seed_torch
from lockstep.scoring import Metric, MetricFunction

LossFunction = Callable[[nn.Module, Any], tuple[torch.Tensor, int | float | torch.Tensor]]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Schedule = Callable[[int], float]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on every rank.

    `loss` is the mean over everything that counted in the step, `weight` how much that was. `grad_norm` is the norm
    before clipping, still on the device. A step in which nothing counted, or whose gradients overflowed in fp16, is
    skipped: the weights stay as they were. `loss_scale` is what the step ran with, 1 unless in fp16.
    """

    step: int
    loss: float
    weight: float
    grad_norm: torch.Tensor
    lr: float
    skipped: bool
    loss_scale: float


class Engine:
    """A model, its loss and its optimizer, cut for a layout. `step` is one optimizer step, whatever the layout."""

    def __init__(
        self,
        parallel: ParallelModel,
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
        observe: Callable[[StepResult, StepBatch], None] | None = None,
    ) -> None:
        self.model = parallel.model
        self.blocks = parallel.blocks
        self.layout = layout
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
        self.stored = parallel.parameters
        named = parallel.trained
        if not named:
            raise UserError("the model has no parameters to train", "check what build_model returns")
        apply_tf32(self.numerics, device)
        self.parameters = [parameter for _, parameter in named]
        # A layer that build_model put into eval mode, a frozen BatchNorm say, stays there; a whole model does not.
        self._frozen = [module for module in self.model.modules() if not module.training and self.model.training]
        self.optimizer = optimizer(named)
        refuse_untrainable(named, self.optimizer, self.numerics)
        use_fused_kernels(self.optimizer, self.model)
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._schedule = schedule or (lambda _: 1.0)
        self._loss = compile_whole(loss) if compile_ == "model" else loss
        self._loss_reduction = loss_reduction
        self._comm = comm
        self._requests = requests
        self._observe = observe
        self._explaining: Callable[[], AbstractContextManager[None]] = nullcontext
        if compile_ != "off":
            self._explaining = compiled_calls
        elif parallel.shard_group is not None:
            self._explaining = weights_read_by_their_modules
        self._transfers = Transfers(device)
        self.use_attention(None if attention == "auto" else attention)
        self.measures_attention = attention == "auto" and device.type == "cuda"
        self._last_norm: tuple[HostCopy, StepBatch] | None = None
        self._exchange: Callable[[], list[float]] | None = None
        self._gradients = parallel.gradients
        self._shard_group = parallel.shard_group
        self._together = parallel.together
        self._statistics = parallel.statistics
        self._coordinate: tuple[int, int] = (0, 0)
        self._calls: Counter[int] = Counter()
        # A whole compiled model cannot be left between its blocks: it draws from the micro-batch's stream alone.
        for number, (_, block) in enumerate(self.blocks if compile_ != "model" else []):
            block.register_forward_pre_hook(self._seed_block(number))
        self.seed_between_steps()

    @property
    def lr(self) -> float:
        """The learning rate of the next step (of the first parameter group)."""
        return self.base_lrs[0] * self._schedule(self.steps_done)

    def step(self, batch: StepBatch) -> StepResult:
        """Do one optimizer step on what `run.loader` yields."""
        if not isinstance(batch, StepBatch):
            raise UserError(f"engine.step was given a {type(batch).__name__}", "give it what run.loader(...) yields")
        lr = self.lr
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self._schedule(self.steps_done)
        if not self.model.training:
            self._train_mode()
        if self.measures_attention:
            self._measure_attention(batch.micro_batches)
        self._gradients.begin()
        self._statistics.begin()
        loss_scale = self.loss_scale.scale if self.loss_scale else 1.0
        self._exchange = None
        totals = self.forward_backward(batch.micro_batches, loss_scale / batch.global_batch)
        exchange = self._exchange or self._start_exchange(totals)
        has_unused = self._gradients.wait()
        loss_sum, weight, bad_ranks, unused, *votes = exchange()
        self._requests.agree(votes)
        if bad_ranks:
            reports = self._comm.gather(None if all(map(math.isfinite, totals.read())) else _sample_ids(batch))
            rank = next(rank for rank, report in enumerate(reports) if report is not None)
            raise NonFiniteError("loss", self.steps_done + 1, rank, reports[rank])

        self._gradients.finish(has_unused or bool(unused))
        self._statistics.combine()
        norm = torch.zeros((), device=self.device)
        skipped = weight <= 0
        if not skipped:
            grads = local_gradients(self.parameters)
            factor = batch.global_batch / (weight * loss_scale)
            norm = global_norm(grads, self._shard_group, self.device) * factor
            scale_gradients(grads, gradient_scale(norm, factor, self.clip), self.optimizer)
            self._last_norm = HostCopy(norm), batch
            skipped = self._overflowed(self._last_norm[0])
            if self.device.type == "cpu":
                self.check_last_gradient()
        if skipped:
            self.steps_skipped += 1
        else:
            self.optimizer.step()
            self._gradients.updated()
        self.steps_done += 1
        self.seed_between_steps()
        result = StepResult(
            step=self.steps_done,
            loss=loss_sum / weight if weight > 0 else math.nan,
            weight=weight,
            grad_norm=norm,
            lr=lr,
            skipped=skipped,
            loss_scale=loss_scale,
        )
        if self._observe:
            self._observe(result, batch)
        return result

    def _start_exchange(self, totals: HostCopy) -> Callable[[], list[float]]:
        """Begin to add up loss, weight and what ranks have to agree on.

        On a CPU before the last backward, beside which it then runs; on a GPU after it was launched, because the host
        has to wait for the last forward first.
        """
        loss, weight = totals.read()
        self.check_last_gradient()
        bad = float(not math.isfinite(loss) or not math.isfinite(weight))
        unused = 0 if self._gradients.counts_unused else self._gradients.unused()
        return self._comm.start_sum([loss, weight, bad, float(unused), *self._requests.votes()])

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
        """Stop if the last gradient norm is not finite.

        On the CPU that is asked before the optimizer runs. On a GPU it is asked one step later, and before anything is
        saved, because asking at once would let the GPU run dry in every step.
        """
        if self._last_norm is None:
            return
        copy, batch = self._last_norm
        self._last_norm = None
        if not math.isfinite(copy.read()[0]):
            step = self.steps_done + (self.device.type == "cpu")
            # It is a sum over the ranks: nobody knows any more whose it was.
            ids = [sample for rank in self._comm.gather(_sample_ids(batch)) for sample in rank]
            raise NonFiniteError("gradient", step, None, ids)

    def forward_backward(self, micro_batches: list[MicroBatch], scale: float) -> HostCopy:
        """Accumulate the gradients of `scale` times the loss sum; returns this rank's loss sum and weight.

        The two are sent to the host behind the last forward, so that they arrive while the backward still runs.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        on_host = HostCopy(totals)
        following = map(self._transfers.send, (part.data for part in micro_batches))
        sent = next(following, None)
        for number, micro_batch in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            assert sent is not None
            data, sent = sent.take(), next(following, None)
            with self._statistics.not_counting() if micro_batch.filler else nullcontext():
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
                (loss_sum * (0.0 if micro_batch.filler else scale)).backward()
        return on_host

    @torch.no_grad()
    def evaluate(self, micro_batches: Any, metrics: Mapping[str, MetricFunction] | None = None) -> dict[str, Metric]:
        """Loss and metrics over a dataset's micro-batches: every sample counted once, summed in float64."""
        functions: dict[str, MetricFunction] = {"loss": self._summed_loss, **(metrics or {})}
        sums = {name: torch.zeros(2, dtype=torch.float64, device=self.device) for name in functions}
        with self.scoring():
            for micro_batch in micro_batches:
                data = self._transfers.send(micro_batch.data).take()
                seed_everything(seed_of(self.seed, "evaluate", micro_batch.index))
                with compute_in(self.precision, self.device), attend_with(self.attention):
                    for name, function in functions.items():
                        pair = _checked_pair(name, function(self.model, data))
                        if not micro_batch.filler:
                            exact = [torch.as_tensor(part, dtype=torch.float64, device=self.device) for part in pair]
                            sums[name] += torch.stack([part.reshape(()) for part in exact])
        self.seed_between_steps()
        flat = self._comm.sum(torch.cat(list(sums.values())).tolist())
        return {name: Metric(*flat[2 * i : 2 * i + 2]) for i, name in enumerate(functions)}

    def rest(self) -> None:
        """Put the model back into its state between steps, after a forward that was not part of one."""
        self._gradients.rest()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """In eval mode inside; afterwards every layer is in the mode it was in, and only shards are held."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
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
        self.model.train()
        for module in self._frozen:
            module.training = False

    def forward(self, micro_batch: MicroBatch, data: Any) -> tuple[torch.Tensor, int | float | torch.Tensor]:
        """Loss sum and weight of one micro-batch (`data`: on the device) under the stream of its logical coordinate."""
        self._coordinate = (self.steps_done, micro_batch.index)
        self._calls.clear()
        seed_everything(seed_of(self.seed, "forward", *self._coordinate))
        with compute_in(self.precision, self.device), attend_with(self.attention):
            return self._summed_loss(self.model, data)

    def _summed_loss(self, model: nn.Module, data: Any) -> tuple[torch.Tensor, int | float | torch.Tensor]:
        with self._explaining():
            returned = self._loss(model, data)
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

    def _seed_block(self, number: int) -> Callable[[nn.Module, Any], None]:
        def seed(module: nn.Module, _: Any) -> None:
            if module.training:
                call = self._calls[number]  # a block that is called twice draws two masks
                self._calls[number] += 1
                seed_torch(seed_of(self.seed, "block", *self._coordinate, number, call))

        return seed


def _checked_pair(name: str, returned: Any) -> tuple[Any, Any]:
    """A metric's sum and count; anything else is refused by its name."""
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not is_pair or any(isinstance(part, torch.Tensor) and part.numel() != 1 for part in returned):
        what = f"{len(returned)} values" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
        raise UserError(
            f"the metric {name} returned {'numbers that are not single ones' if is_pair else what}",
            "return (sum, count), two numbers: how much, of how many",
        )
    return returned[0], returned[1]


def _sample_ids(batch: StepBatch) -> list[int]:
    return [sample for part in batch.micro_batches if not part.filler for sample in part.ids]
