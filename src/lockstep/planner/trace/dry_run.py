"""One step of a job without data: fake tensors, a fake process group, and a count of every storage alive.

Only a process of its own runs this (planner/trace/count.py).
"""

from __future__ import annotations

import datetime
import resource
import warnings
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from lockstep.config.schema import Format, NumericsConfig, SetupConfig, ShardConfig, TensorConfig
from lockstep.follow.forward import following
from lockstep.layout import Layout
from lockstep.parallel.build.apply import CutFor, cut_built
from lockstep.parallel.build.materialise import Built, Tensors, cut_on_meta, named_tensors
from lockstep.parallel.cut_model import CutModel
from lockstep.parallel.tensor.cut import Following
from lockstep.planner.cost.job import Job
from lockstep.planner.model.parts import Shape
from lockstep.planner.trace import torch_model
from lockstep.planner.trace.storages import Storages
from lockstep.recipes.task import Task
from lockstep.runtime.axis import Axis
from lockstep.runtime.comm import Comm, build_mesh
from lockstep.runtime.dtensors import local_part
from lockstep.runtime.heartbeat import Beat
from lockstep.runtime.rank_env import Place
from lockstep.runtime.torch_private import (
    DataDependentOutputException,
    FakeTensorMode,
    fake_store,
    gathered_parameters,
    run_backward,
    tree_leaves,
    tree_map_only,
)
from lockstep.step.attention import attend_with
from lockstep.step.grads import global_norm, gradient_scale, local_gradients, scale_gradients
from lockstep.step.optim import use_fused_kernels
from lockstep.step.precision import compute_in

DEVICE = torch.device("cpu")
HEADINGS = ("parameters", "gradients", "optimizer", "activations", "communication", "buffers")


@dataclass(frozen=True)
class TracedTraining:
    """What is traced, as a script for one device has it."""

    build_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]
    samples: Callable[[int], Any]
    """A micro-batch of so many samples, as the loss function gets it."""


def training_of_shape(shape: Shape, sequence: int) -> TracedTraining:
    """A transformer that predicts the next token."""

    def samples(count: int) -> Any:
        tokens = torch.zeros(count, sequence, dtype=torch.int64)
        return tokens, tokens.clone()

    return TracedTraining(lambda: torch_model.Transformer(shape, sequence), torch_model.loss, samples)


def training_of_task(task: Task) -> TracedTraining:
    """What a recipe trains."""
    return TracedTraining(task.build_model, task.loss, lambda count: default_collate([task.train[0]] * count))


def training_of_module(build_model: Callable[[], nn.Module], samples: Callable[[int], Any]) -> TracedTraining:
    """A module alone, given its inputs as a tuple: what it returns is summed up, as the loss is not known."""

    def loss(model: nn.Module, inputs: Any) -> tuple[torch.Tensor, int]:
        returned = [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, torch.Tensor)]
        floats = [leaf.float().sum() for leaf in returned if leaf.is_floating_point()]
        return torch.stack(floats).sum(), 1

    return TracedTraining(build_model, loss, samples)


class AbsentWorld(Comm):
    """Rank 0 among ranks that are not there: what it gathers is its own, and every sum is what it gave."""

    def __init__(self, layout: Layout) -> None:
        size = layout.world_size
        self.place = Place(0, size, 0, size, 0, 1, None, "explicit")
        self.beat = Beat()
        self.rank, self.world_size = 0, size
        self.mesh = self.tensor_mesh = None
        self._timeout = datetime.timedelta(minutes=1)
        self._layout = layout
        self._data_control = self._control = self._store = self._given_store = None
        if size == 1:
            return
        dist.init_process_group("fake", store=fake_store(), rank=0, world_size=size)
        self.mesh = build_mesh(layout, "cpu", self._timeout)
        if layout.tp > 1:
            self.tensor_mesh = build_mesh(layout, "cpu", self._timeout, ("pp", "cp", "dp", "tp", "fsdp"))

    def axis_names(self) -> dict[str, str]:
        """The axis that a process group is of, by the group's name."""
        names = () if self.mesh is None else self.mesh.mesh_dim_names or ()
        return {self.mesh.get_group(axis).group_name: axis for axis in names if self.mesh is not None}


IN_FP32 = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.softmax, torch.softmax, torch.Tensor.softmax)


def as_on_gpus(in_fp32: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Norms and attention keep what they keep on a GPU.

    Norms are computed by one kernel, and like softmax under autocast (`in_fp32`) in fp32: autocast on CPUs has another
    list (ATen/autocast_mode.h), and an RMSNorm is a handful of operations there. The flash kernel of a GPU can drop,
    that of a CPU cannot; what it keeps is the same with dropout and without.
    """
    if func is F.scaled_dot_product_attention:
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
        return func(**{**given, **kwargs, "dropout_p": 0.0})
    if func not in IN_FP32:
        return func(*args, **kwargs)
    if in_fp32:
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs))
    if func in (F.rms_norm, torch.rms_norm):
        weight = args[2] if len(args) > 2 else kwargs.get("weight")
        if weight is not None:
            return FusedRmsNorm.apply(args[0], weight)
    return func(*args, **kwargs)


class FusedRmsNorm(torch.autograd.Function):
    """What torch's kernel keeps for its backward: its input, its weight, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values, weight, values.new_empty(values.shape[:-1]))
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, weight, _rows = ctx.saved_tensors
        return torch.empty_like(values), torch.empty_like(weight)


def dry_run(job: Job, training: TracedTraining, numerics: NumericsConfig) -> dict[str, Any]:
    """The fullest moment of rank 0 in a step of this job, under the names of `planner.trace.Traced`."""
    torch.set_num_threads(1)  # more would wait for ever for threads that a fork leaves behind
    warnings.filterwarnings("ignore", message="Set timeout is now only supported")
    comm = AbsentWorld(job.layout)
    with torch.device("meta"):
        model = training.build_model()
    sample = training.samples(job.micro_batch)
    precision = cast(Format, job.precision)  # others are refused
    watch = Storages(comm.axis_names())
    count = min(job.micro_batches, 2)

    def loss_of(model: nn.Module) -> torch.Tensor:
        with compute_in(precision, DEVICE), attend_with(None if job.flash else "math"):
            return training.loss(model, sample)[0].float()

    def look(model: nn.Module, _: Axis | None = None) -> Any:
        return loss_of(model), 1

    with ExitStack() as without_data:

        def shapes_alone(built: Built, cut_for_good: Callable[[nn.Module], None], device: torch.device) -> nn.Module:
            def cut_and_begin(model: nn.Module) -> None:
                cut_for_good(model)  # torch would be some ten times slower at this with fake tensors
                without_data.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                without_data.enter_context(following(operation=watch.note, resizes=watch.resized))

            cut_on_meta(built.model, cut_and_begin, device)
            return built.model

        cutting = SetupConfig(
            precision=precision,
            recompute=job.recompute == "full",
            numerics=numerics,
            shard=ShardConfig.model_validate({"level": f"zero{job.zero}"}),
            tensor=TensorConfig(sequence="on" if job.sequence_parallel else "off"),
            batch_norm="micro-batch",
        )
        built = Built(model, lambda names: _zeros(model, names))
        seen = look if job.layout.team > 1 else None
        # What is made beside the model there are the buckets that gradients are summed in.
        watch.heading = "gradients"
        to = CutFor(job.layout, comm, DEVICE, cutting, seed=0)
        cut = cut_built(built, seen, to, shapes_alone)
        if not job.machine.gpu.is_cpu:
            without_data.enter_context(following(function=partial(as_on_gpus, precision != "fp32")))
        _step(cut, watch, loss_of, count)
    return {
        **{name: watch.peak.get(name, 0) for name in HEADINGS},
        "moment": watch.peak_moment,
        "rank": 0,
        "stage": 0,
        "micro_batches": count,
        "collectives": [
            {"kind": kind, "axis": axis, "count": number, "bytes": size}
            for (kind, axis), (number, size) in sorted(watch.collectives.items())
        ],
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _step(cut: CutModel, watch: Storages, loss_of: Callable[[nn.Module], torch.Tensor], micro_batches: int) -> None:
    """What engine.Engine does in a step that is not the first: the optimizer has its state already."""
    model, gradients = cut.models[0], cut.gradients
    for parameter in model.parameters():
        watch.see(local_part(parameter.data), "parameters")
    for buffer in model.buffers():
        watch.see(buffer, "buffers")
    parameters = [parameter for _, parameter in cut.trained]
    optimizer = torch.optim.AdamW(cut.trained)
    use_fused_kernels(optimizer, model)
    watch.heading = watch.moment = "optimizer"
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    watch.heading = "communication"
    gradients.begin()
    watch.forget_peak()
    _mark_gradients(model, watch)
    for number in range(micro_batches):
        watch.heading, watch.moment = "activations", "forward"
        with Following():  # in the backward too, where blocks are computed again
            loss = loss_of(model)
            gradients.before_backward(number == micro_batches - 1)
            watch.moment = "backward"
            loss = loss * 1.0
            # loss.backward() does this outside of the modes.
            run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            del loss
    watch.heading, watch.moment = "communication", "summing gradients"
    with suppress(DataDependentOutputException):  # replicas ask at last whether a parameter was left out
        gradients.wait()
    gradients.finish(False)
    watch.heading = watch.moment = "optimizer"
    own = local_gradients(parameters)
    norm = global_norm(local_gradients(cut.counted), cut.norm_groups, DEVICE)
    scale_gradients(own, gradient_scale(norm, 1.0, 1.0), optimizer)
    # Its fused kernel works in place: a second step would take a while, and nothing more.
    gradients.updated()


def _mark_gradients(model: nn.Module, watch: Storages) -> None:
    """Have every gradient counted as one, also those of weights that are gathered for a while."""

    def arrived(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            watch.see(local_part(parameter.grad), "gradients")

    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(arrived)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            for gathered in gathered_parameters(unit):
                gathered.register_post_accumulate_grad_hook(arrived)


def _zeros(model: nn.Module, names: Collection[str] | None) -> Tensors:
    """Values for buffers, of which the plan of a cut wants to know some."""
    for name, tensor in named_tensors(model):
        if names is not None and name in names:
            yield name, torch.zeros_like(tensor, device=DEVICE)
