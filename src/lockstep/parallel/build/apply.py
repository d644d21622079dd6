"""The order of cutting, in one place: stages, formats, compile, recompute, shard or replicate, materialise.

A block recomputes its compiled forward. The other way round torch would have to compile the recomputation, which it
does for plain blocks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lockstep.config.schema import SetupConfig
from lockstep.errors import UserError
from lockstep.follow.blocks import ModelPlan, find_blocks, seed_points
from lockstep.follow.values import is_fake
from lockstep.layout import Layout
from lockstep.parallel.build.compile import check_compilable, compile_blocks
from lockstep.parallel.build.formats import accept_rounded, compute_with, store_in
from lockstep.parallel.build.materialise import Built, build_initial, fill, fill_buffers, materialise
from lockstep.parallel.build.recompute import recompute
from lockstep.parallel.pipeline.plan_stages import Planned, plan_pipeline
from lockstep.parallel.pipeline.point_to_point import Links
from lockstep.parallel.pipeline.runner import Pipeline
from lockstep.parallel.pipeline.stage import Stage, cut_model, skeleton_of
from lockstep.parallel.pipeline.ties import Tie
from lockstep.parallel.pipeline.timeline import Stopwatch
from lockstep.parallel.pipeline.timetable import SPLITS_BACKWARD, stages_of
from lockstep.parallel.replicate.batchnorm import SyncBatchNorms
from lockstep.parallel.replicate.gradients import GradientSync, PipelineGradients, whole_gradients
from lockstep.parallel.replicate.shard import ShardedGradients, shard, sharding_units
from lockstep.parallel.replicate.statistics import RunningStatistics
from lockstep.parallel.tensor.context import plan_context
from lockstep.parallel.tensor.modules import Slice, cut_matrices, open_attention
from lockstep.parallel.tensor.plan_matrices import TensorPlan, plan_tensor
from lockstep.parallel.tensor.team_grads import as_a_team
from lockstep.parallel.whole.alone import refuse_hooks, refuse_sparse, refuse_tables
from lockstep.runtime.axis import Axis
from lockstep.runtime.comm import Comm
from lockstep.runtime.torch_private import AnyBatchNorm


class Look(Protocol):
    """Runs the user's loss function once, on a model without data and the first samples, their sequences cut or not."""

    def __call__(self, model: nn.Module, sequence: Axis | None = None, /) -> Any: ...


@dataclass(frozen=True)
class ParallelModel:
    """A model that was cut for this rank, and what the engine needs to know of the cut.

    `models` is the model, or one for each stage of a pipeline that this rank has, `seeded` their modules with a random
    stream of their own. `parameters` is what this rank holds of every parameter: the optimizer works on it, and
    checkpoints keep it. `counted` are those that enter the gradient norm here, summed over `norm_groups`: each
    parameter once. `together` says why every rank has to do every forward and backward, where they have to. `skeleton`
    is the whole model without data, where no rank has all of it.
    """

    models: list[nn.Module]
    blocks: list[str]
    seeded: list[list[nn.Module]]
    parameters: list[tuple[str, nn.Parameter]]
    buffers: list[tuple[str, torch.Tensor]]
    gradients: GradientSync
    statistics: RunningStatistics
    counted: list[nn.Parameter]
    norm_groups: list[dist.ProcessGroup]
    is_sharded: bool
    together: str | None
    pipeline: Pipeline | None = None
    skeleton: nn.Module | None = None
    slices: dict[str, Slice] = field(default_factory=dict)
    """The parameters that are cut over the tp axis."""
    notes: list[str] = field(default_factory=list)
    """What people should know of how the model was cut."""

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer is given."""
        return [(name, parameter) for name, parameter in self.parameters if parameter.requires_grad]


def parallelize(
    build_model: Callable[[], nn.Module],
    look: Look | None,
    layout: Layout,
    comm: Comm,
    device: torch.device,
    cutting: SetupConfig,
    seed: int,
) -> ParallelModel:
    """Build the model as if on one device and cut it for this rank's place on the mesh, which has no pipeline.

    A layout with tp or cp has to `look` at a forward first.
    """
    built = build_initial(build_model, comm=comm, device=device, seed=seed, by_name=cutting.init == "by-name")
    return parallelize_built(built, look, layout, comm, device, cutting)


def parallelize_built(
    built: Built,
    look: Look | None,
    layout: Layout,
    comm: Comm,
    device: torch.device,
    cutting: SetupConfig,
    give_values: Callable[[Built, Callable[[nn.Module], None], torch.device], nn.Module] = materialise,
) -> ParallelModel:
    """Cut a model that is built; `give_values` cuts it for good and gives it values, which a dry run has none of."""
    numerics = cutting.numerics
    fully_sharded = layout.fsdp > 1 and cutting.shard.level != "zero1"
    blocks: list[tuple[str, nn.Module]] = []
    seeded: list[nn.Module] = []
    sharded: list[ShardedGradients] = []
    synchronised: list[SyncBatchNorms] = []

    def cut(model: nn.Module) -> None:
        check_compilable(cutting.compile, model, cutting.recompute)
        store_in(model, numerics)
        blocks.extend(find_blocks(model))
        has_batch_norm = any(isinstance(layer, AnyBatchNorm) for layer in model.modules())
        if synchronises(layout, cutting) and (
            has_batch_norm or layout.pp > 1
        ):  # a stage may have none, all make groups
            synchronised.append(SyncBatchNorms(model, comm, cutting.batch_norm == "sync"))
        if (computed_with := numerics.param_dtype or numerics.storage_dtype) != "fp32":
            accept_rounded(model, computed_with, device)
        if numerics.param_dtype is not None and not fully_sharded:  # else shards are gathered in it
            compute_with(model, blocks, numerics.param_dtype)
        modules = [block for _, block in blocks]
        seeded.extend(seed_points(model, modules))
        change_forwards(cutting, modules, modules or [model], layout.team > 1)
        if fully_sharded:
            units = sharding_units(model, modules, cutting.shard)
            sharded.append(shard(model, units, comm, cutting.shard, numerics))

    refuse_hooks(built.model, layout)
    refuse_tables(built.model, layout)
    slices: dict[str, Slice] = {}
    notes: list[str] = []
    skeleton: nn.Module | None = None
    if fully_sharded and give_values is materialise:
        skeleton = skeleton_of(built.model, device)
    if look is not None:
        fill_buffers(built)
        if layout.cp > 1:
            open_attention(built.model)
        skeleton = skeleton_of(built.model, device)
        plan, gathers = plan_team(skeleton, look, layout, cutting, device)
        notes += [f"whole sequences are gathered: {line}" for line in gathers]
        built, slices = cut_for_team(built, plan, comm, notes)
    model = give_values(built, cut, device)
    parameters = list(model.named_parameters())
    gradients: GradientSync
    if sharded:
        gradients = sharded[0]
        sharded[0].with_whole(parameters)
    else:
        gradients, parameters = whole_gradients(parameters, layout, comm, numerics)
    gradients, parameters, counted = as_a_team(gradients, parameters, slices, layout, comm)
    counted = count_once(counted, layout, comm)
    return ParallelModel(
        [model],
        [name for name, _ in blocks],
        [seeded],
        parameters,
        list(model.named_buffers()),
        gradients,
        RunningStatistics(
            model.named_modules(),
            comm,
            comm.data_group() if layout.team > 1 else None,
            sync=synchronised[0] if synchronised else None,
        ),
        counted,
        comm.groups("fsdp", "tp"),
        layout.fsdp > 1,
        "a sharded layout" if layout.fsdp > 1 else None,
        skeleton=skeleton,
        slices=slices,
        notes=notes,
    )


def parallelize_pipeline(
    build_model: Callable[[], nn.Module],
    look: Look,
    layout: Layout,
    comm: Comm,
    device: torch.device,
    cutting: SetupConfig,
    seed: int,
) -> ParallelModel:
    """Build the model as if on one device, look at its forward, and cut it into the stages of this rank."""
    numerics, config = cutting.numerics, cutting.pipeline
    built, planned = build_and_plan(build_model, look, layout, comm, device, cutting, seed)
    plan, skeleton = planned.plan, planned.skeleton
    notes: list[str] = []
    built, slices = cut_for_team(built, planned.tensor, comm, notes)
    rank = layout.coordinate(comm.rank)["pp"]
    links = Links(rank, comm.pipeline_ranks(), comm.pipeline_groups(), device)
    fully_sharded = layout.fsdp > 1 and cutting.shard.level != "zero1"
    sharding = cutting.shard
    if config.schedule in SPLITS_BACKWARD:
        # The second half of a backward pass reads the weights again, when torch has given them back already.
        sharding = sharding.model_copy(update={"level": "zero2"})

    stages: list[Stage] = []
    seeded: list[list[nn.Module]] = []
    sharded: list[ShardedGradients] = []
    taken: dict[int, nn.Parameter] = {}
    taken_buffers: dict[int, torch.Tensor] = {}
    for number in stages_of(config.schedule, layout.pp, config.per_rank)[rank]:
        owned = {name for name, users in plan.users.items() if number in users}
        buffers = {name for name, users in plan.buffer_users.items() if number in users}
        model = cut_model(built.model, owned, buffers, device, {} if fully_sharded else taken, taken_buffers)
        if numerics.storage_dtype != "fp32":
            accept_rounded(model, numerics.storage_dtype, device)
        # Before sharding, which gives modules other classes.
        seeded.append(seed_points(model, [block for _, block in find_blocks(model)]))
        first, end = plan.cuts[number], plan.cuts[number + 1]
        own = [model.get_submodule(part.name) for part in plan.parts[first:end]]
        blocks = [module for module, part in zip(own, plan.parts[first:end], strict=True) if part.is_block]
        change_forwards(cutting, blocks, blocks or own, layout.team > 1)
        stage = Stage(model, [part.name for part in plan.parts], number, first, end)
        if fully_sharded:
            units = sharding_units(stage, blocks, sharding)
            without_data = [parameter for parameter in stage.parameters() if is_fake(parameter)]
            sharded.append(shard(stage, units, comm, sharding, numerics, without_data))
        stages.append(stage)

    held: dict[str, list[nn.Parameter]] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if stage.number in plan.users[name] and not any(parameter is one for one in held.get(name, [])):
                held.setdefault(name, []).append(parameter)
    if built.tensors is not None:
        for name, full in built.tensors(None):
            for copy in held.get(name, ()):
                fill([(name, copy)], iter([(name, full)]))
    for stage in stages:
        stage.wire()
    pipeline = Pipeline(stages, plan, config.schedule, layout.pp, rank, links, Stopwatch(device))
    parameters = [(name, copies[0]) for name, copies in held.items()]
    for stage, shards in zip(stages, sharded, strict=False):
        named = stage.model.named_parameters()
        shards.with_whole((name, parameter) for name, parameter in named if stage.number in plan.users[name])
    inner: list[GradientSync] = list(sharded)
    if not sharded:
        one, parameters = whole_gradients(parameters, layout, comm, numerics)
        inner = [one]
    ties = _ties(pipeline, dict(parameters), held, comm)
    gradients: GradientSync = PipelineGradients(inner, ties)
    gradients, parameters, counted = as_a_team(gradients, parameters, slices, layout, comm)
    counted = count_once(counted, layout, comm)
    first_here = {id(p) for name, p in parameters if pipeline.rank_of[plan.users[name][0]] == rank}
    return ParallelModel(
        [stage.model for stage in stages],
        [part.name for part in plan.parts if part.is_block],
        seeded,
        parameters,
        _own_buffers(stages),
        gradients,
        RunningStatistics(_own_modules(plan, stages), comm, comm.data_group()),
        [parameter for parameter in counted if id(parameter) in first_here],
        comm.groups("fsdp", "pp", "tp"),
        layout.fsdp > 1,
        "a sharded layout" if layout.fsdp > 1 else "a pipeline",
        pipeline,
        skeleton,
        slices,
        notes,
    )


def build_and_plan(
    build_model: Callable[[], nn.Module],
    look: Look,
    layout: Layout,
    comm: Comm,
    device: torch.device,
    cutting: SetupConfig,
    seed: int,
) -> tuple[Built, Planned]:
    """The model as one device would build it, and how a layout cuts it; without a pipeline it is one stage."""
    config, stages, cuts = cutting.pipeline, 1, None
    if layout.pp > 1:
        check_goes_together(layout, cutting)
        stages, cuts = layout.pp * config.per_rank, config.cuts
    built = build_initial(build_model, comm=comm, device=device, seed=seed, by_name=cutting.init == "by-name")
    refuse_hooks(built.model, layout)
    refuse_tables(built.model, layout)
    fill_buffers(built)
    store_in(built.model, cutting.numerics)
    if layout.cp > 1:
        open_attention(built.model)
    planned = plan_pipeline(built.model, look, stages, cuts, comm, device)
    borders = [part.name for part in planned.plan.parts] if layout.pp > 1 else []
    tensor, gathers = plan_team(planned.skeleton, look, layout, cutting, device, borders)
    return built, replace(planned, tensor=tensor, gathers=gathers)


def plan_team(
    skeleton: nn.Module,
    look: Look,
    layout: Layout,
    cutting: SetupConfig,
    device: torch.device,
    borders: Sequence[str] = (),
) -> tuple[TensorPlan | None, list[str]]:
    """How ranks that compute together share the matrices of a model, and where they need whole sequences."""
    if layout.team > 1:
        refuse_sparse(skeleton, "summed over ranks that compute together", "a dp layout")
    gathers = plan_context(skeleton, look, layout.cp) if layout.cp > 1 else []
    if layout.tp == 1:
        return None, gathers
    tokens = cuts_tokens(cutting, device)
    return plan_tensor(skeleton, look, cutting.tensor.roles, layout.tp, borders, tokens), gathers


def cut_for_team(built: Built, plan: TensorPlan | None, comm: Comm, notes: list[str]) -> tuple[Built, dict[str, Slice]]:
    """Leave of the matrices what a plan gives this rank, and note that."""
    axis = comm.cut_axis("tp")
    if plan is None or axis is None:
        return built, {}
    notes.append(plan.describe(axis.size))
    return cut_matrices(built, plan.roles, axis._replace(sequence=plan.sequence))


def count_once(counted: list[nn.Parameter], layout: Layout, comm: Comm) -> list[nn.Parameter]:
    """Without what all ranks of the fsdp axis hold whole, parameters of a single number, but on the first of them."""
    first = layout.coordinate(comm.rank)["fsdp"] == 0
    return counted if first else [parameter for parameter in counted if parameter.dim() > 0]


def cuts_tokens(cutting: SetupConfig, device: torch.device) -> bool:
    """Whether tokens are to be cut between matrices: on GPUs, where it saves memory at no cost in traffic."""
    asked = cutting.tensor.sequence
    return asked == "on" or (asked == "auto" and device.type == "cuda")


def synchronises(layout: Layout, cutting: SetupConfig) -> bool:
    """Whether BatchNorm can normalise over the samples of all data ranks."""
    alone = layout.pp == 1 and layout.team == 1 and cutting.compile == "off"
    return layout.world_size > 1 and (cutting.batch_norm == "sync" or (cutting.batch_norm == "auto" and alone))


def check_goes_together(layout: Layout, cutting: SetupConfig, on_cuda: bool = False) -> None:
    """Refuse what a pipeline, or ranks that compute together, cannot do, before anything is built."""
    if cutting.batch_norm == "sync" and layout.team > 1:
        raise UserError("batch_norm = sync does not go with tp or cp", "use batch_norm = micro-batch")
    if cutting.compile != "off" and layout.team > 1 and on_cuda and dist.get_backend() == "gloo":
        raise UserError(
            "compile with tp or cp needs nccl on GPUs, and this run communicates by gloo (share_gpu)",
            "use compile = off, or a GPU for every rank",
        )
    if layout.pp == 1:
        return
    stages_of(cutting.pipeline.schedule, layout.pp, cutting.pipeline.per_rank)
    if cutting.compile == "model":
        raise UserError(
            "compile = model does not go with a pipeline, which leaves the model half-way", "use compile = blocks"
        )
    if cutting.compile != "off" and cutting.pipeline.schedule in SPLITS_BACKWARD:
        raise UserError(
            f"schedule {cutting.pipeline.schedule} splits the backward of a block, which compiled code cannot do",
            "use compile = off, or a schedule such as 1f1b or interleaved-1f1b",
        )
    if cutting.batch_norm == "sync":
        raise UserError("batch_norm = sync does not go with a pipeline", "use batch_norm = micro-batch, or no pp axis")
    sharded = layout.fsdp > 1 and cutting.shard.level != "zero1"
    if cutting.numerics.param_dtype is not None and not sharded:
        raise UserError(
            "numerics.param_dtype goes with a pipeline only where fsdp shards the weights",
            "use precision = bf16 alone, or numerics.storage_dtype, or an fsdp axis with shard.level zero2 or zero3",
        )
    if sharded and cutting.shard.units == "size":
        raise UserError("shard.units = size does not go with a pipeline", "use shard.units = auto")


def _own_modules(plan: ModelPlan, stages: list[Stage]) -> list[tuple[str, nn.Module]]:
    """The modules inside the parts that this rank computes."""
    return [
        (f"{part.name}.{name}".rstrip("."), module)
        for stage in stages
        for part in plan.parts[stage.first : stage.end]
        for name, module in stage.model.get_submodule(part.name).named_modules()
    ]


def _own_buffers(stages: list[Stage]) -> list[tuple[str, torch.Tensor]]:
    """The buffers this rank has: its stages share those that are outside of parts."""
    buffers = {name: buffer for stage in stages for name, buffer in stage.model.named_buffers() if not is_fake(buffer)}
    return list(buffers.items())


def _ties(
    pipeline: Pipeline, trained: dict[str, nn.Parameter], held: dict[str, list[nn.Parameter]], comm: Comm
) -> list[Tie]:
    """The parameters of this rank that other stages have too."""
    ranks_of = {name: sorted({pipeline.rank_of[s] for s in users}) for name, users in pipeline.plan.users.items()}
    together = sorted({tuple(ranks) for ranks in ranks_of.values() if len(ranks) > 1})
    groups = {ranks: comm.groups_of(ranks) for ranks in together}
    return [
        Tie(name, trained[name], held[name][1:], groups.get(tuple(ranks_of[name])))
        for name in sorted(held)  # in one order on every rank
        if len(ranks_of[name]) > 1 or len(held[name]) > 1
    ]


def change_forwards(
    cutting: SetupConfig, blocks: Iterable[nn.Module], recomputed: Iterable[nn.Module], cut: bool
) -> None:
    """Compile the blocks and let modules recompute themselves, where that was asked for."""
    if cutting.compile == "blocks":
        compile_blocks(list(blocks), cut)
    if cutting.recompute:
        for module in recomputed:
            recompute(module)
