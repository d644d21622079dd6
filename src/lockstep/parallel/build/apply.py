"""The order of cutting, in one place (`cut_built`), for models with and without pipeline stages.

A block recomputes its compiled forward. The other way round torch would have to compile the recomputation, which it
does for plain blocks only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from lockstep.parallel.cut_model import CutModel
from lockstep.parallel.held import describe_parts
from lockstep.parallel.pipeline.calls import answer_calls
from lockstep.parallel.pipeline.look import Rehearsals
from lockstep.parallel.pipeline.plan_stages import Planned, plan_pipeline
from lockstep.parallel.pipeline.point_to_point import Links
from lockstep.parallel.pipeline.runner import Pipeline
from lockstep.parallel.pipeline.stage import Stage, skeleton_of, stage_model
from lockstep.parallel.pipeline.ties import Tie
from lockstep.parallel.pipeline.timeline import Stopwatch
from lockstep.parallel.pipeline.timetable import SPLITS_BACKWARD, stages_of
from lockstep.parallel.replicate.batchnorm import SyncBatchNorms
from lockstep.parallel.replicate.gradient_sync import GradientSync
from lockstep.parallel.replicate.gradients import Named, PipelineGradients, whole_gradients
from lockstep.parallel.replicate.shard import ShardedGradients, shard, sharding_units
from lockstep.parallel.replicate.statistics import RunningStatistics
from lockstep.parallel.tensor.context import plan_context
from lockstep.parallel.tensor.cut import Along
from lockstep.parallel.tensor.modules import cut_matrices, open_attention
from lockstep.parallel.tensor.plan_matrices import TensorPlan, plan_tensor
from lockstep.parallel.tensor.team_grads import team_gradients
from lockstep.parallel.whole.alone import refuse_hooks, refuse_sparse, refuse_tables
from lockstep.runtime.axis import Axis
from lockstep.runtime.comm import Comm
from lockstep.runtime.torch_private import AnyBatchNorm

GiveValues = Callable[[Built, Callable[[nn.Module], None], torch.device], nn.Module]


class Look(Protocol):
    """Runs the user's loss function once, on a model without data and the first samples, their sequences cut or not."""

    def __call__(self, model: nn.Module, sequence: Axis | None = None, /) -> Any: ...


@dataclass(frozen=True)
class CutFor:
    """What a model is cut for: a layout, this rank of it, its device, and how."""

    layout: Layout
    comm: Comm
    device: torch.device
    cutting: SetupConfig
    seed: int

    @property
    def place(self) -> int:
        """This rank's place in the pipeline."""
        return self.layout.coordinate(self.comm.rank)["pp"]

    @property
    def is_fully_sharded(self) -> bool:
        """Whether fsdp shards the weights themselves, and not only the optimizer's state (zero1)."""
        return self.layout.fsdp > 1 and self.cutting.shard.level != "zero1"


@dataclass(frozen=True)
class OwnModels:
    """The model of this rank, or its stages of one, changed and with values: what is left is to collect it."""

    models: list[nn.Module]
    named: list[Named]
    """The parameters that each of them has, as it has them."""
    buffers: list[tuple[str, torch.Tensor]]
    modules: list[tuple[str, nn.Module]]
    """The modules that this rank computes."""
    blocks: list[str]
    seeded: list[list[nn.Module]]
    sharded: list[ShardedGradients]
    sync: SyncBatchNorms | None = None
    pipeline: Pipeline | None = None


def cut_model(build_model: Callable[[], nn.Module], look: Look | None, to: CutFor) -> CutModel:
    """Build the model as if on one device and cut it for this rank's place on the mesh.

    A layout with pp, tp or cp has to `look` at a forward first.
    """
    return cut_built(build(build_model, to), look, to)


def plan_model(build_model: Callable[[], nn.Module], look: Look, to: CutFor) -> Planned:
    """How a layout would cut a model, to be explained."""
    return plan_stages(build(build_model, to), look, to)


def cut_built(built: Built, look: Look | None, to: CutFor, give_values: GiveValues = materialise) -> CutModel:
    """The order of cutting: stages, matrices; formats, recompute, compile, shards; values; what comes of it.

    `give_values` cuts a model without stages for good and gives it values, which a dry run has none of.
    """
    stages, tensor, skeleton, notes = None, None, None, list[str]()
    if look is not None and to.layout.pp > 1:
        stages = plan_stages(built, look, to)
        skeleton, tensor = stages.skeleton, stages.tensor
    elif look is not None:
        make_ready_to_look(built, to)
        skeleton = skeleton_of(built.model, to.device)
        tensor, gathers = plan_team(skeleton, look, to)
        notes += [f"whole sequences are gathered: {line}" for line in gathers]
    elif to.is_fully_sharded and give_values is materialise:
        skeleton = skeleton_of(built.model, to.device)
    built, matrices = cut_for_team(built, tensor, to.comm, notes)
    own = own_stages(built, stages, to) if stages is not None else own_model(built, to, give_values)
    return collect(own, skeleton, matrices, to, notes)


def build(build_model: Callable[[], nn.Module], to: CutFor) -> Built:
    """The model as one device would build it, and what this layout cannot train refused."""
    check_goes_together(to.layout, to.cutting)
    by_name = to.cutting.init == "by-name"
    built = build_initial(build_model, comm=to.comm, device=to.device, seed=to.seed, by_name=by_name)
    refuse_hooks(built.model, to.layout)
    refuse_tables(built.model, to.layout)
    return built


def make_ready_to_look(built: Built, to: CutFor) -> None:
    """A forward without data needs the buffers' values, and cut sequences need torch's attention opened up."""
    fill_buffers(built)
    if to.layout.cp > 1:
        open_attention(built.model)


def plan_stages(built: Built, look: Look, to: CutFor) -> Planned:
    """How a layout cuts a model; without a pipeline it is one stage."""
    config, pp = to.cutting.pipeline, to.layout.pp
    make_ready_to_look(built, to)
    store_in(built.model, to.cutting.numerics)
    stages, cuts = (pp * config.per_rank, config.cuts) if pp > 1 else (1, None)
    planned = plan_pipeline(built.model, look, stages, cuts, to.comm, to.device)
    borders = [part.name for part in planned.plan.parts] if pp > 1 else []
    tensor, gathers = plan_team(planned.skeleton, look, to, borders)
    return replace(planned, tensor=tensor, gathers=gathers)


def plan_team(
    skeleton: nn.Module, look: Look, to: CutFor, borders: Sequence[str] = ()
) -> tuple[TensorPlan | None, list[str]]:
    """How ranks that compute together share the matrices of a model, and where they need whole sequences."""
    layout = to.layout
    if layout.team > 1:
        refuse_sparse(skeleton, "summed over ranks that compute together", "a dp layout")
    gathers = plan_context(skeleton, look, layout.cp) if layout.cp > 1 else []
    if layout.tp == 1:
        return None, gathers
    tokens = cuts_tokens(to.cutting, to.device)
    return plan_tensor(skeleton, look, to.cutting.tensor.roles, layout.tp, borders, tokens), gathers


def cut_for_team(built: Built, plan: TensorPlan | None, comm: Comm, notes: list[str]) -> tuple[Built, dict[str, Along]]:
    """Leave of the matrices what a plan gives this rank, and note that."""
    axis = comm.cut_axis("tp")
    if plan is None or axis is None:
        return built, {}
    notes.append(plan.describe(axis.size))
    return cut_matrices(built, plan.roles, axis._replace(sequence=plan.sequence))


def own_model(built: Built, to: CutFor, give_values: GiveValues) -> OwnModels:
    """The whole model, changed for this rank, with its values."""
    cutting = to.cutting
    blocks: list[tuple[str, nn.Module]] = []
    found: list[tuple[list[nn.Module], list[ShardedGradients]]] = []
    sync: list[SyncBatchNorms] = []

    def cut(model: nn.Module) -> None:
        check_compilable(cutting.compile, model, cutting.recompute)
        store_in(model, cutting.numerics)
        blocks.extend(find_blocks(model))
        if synchronises(to.layout, cutting) and any(isinstance(layer, AnyBatchNorm) for layer in model.modules()):
            sync.append(SyncBatchNorms(model, to.comm, cutting.batch_norm == "sync"))
        modules = [block for _, block in blocks]
        found.append(change_forwards(model, model, modules, modules or [model], to))

    model = give_values(built, cut, to.device)
    (seeded, sharded), names = found[0], [name for name, _ in blocks]
    named, buffers, modules = list(model.named_parameters()), list(model.named_buffers()), list(model.named_modules())
    return OwnModels([model], [named], buffers, modules, names, [seeded], sharded, sync[0] if sync else None)


def own_stages(built: Built, planned: Planned, to: CutFor) -> OwnModels:
    """The stages of this rank, each a copy of the model that has data for its own parts only."""
    plan, config = planned.plan, to.cutting.pipeline
    stages: list[Stage] = []
    seeded: list[list[nn.Module]] = []
    sharded: list[ShardedGradients] = []
    taken: dict[int, nn.Parameter] = {}
    taken_buffers: dict[int, torch.Tensor] = {}
    for number in stages_of(config.schedule, to.layout.pp, config.per_rank)[to.place]:
        owned = {name for name, users in plan.users.items() if number in users}
        buffers = {name for name, users in plan.buffer_users.items() if number in users}
        again = {} if to.is_fully_sharded else taken
        model = stage_model(built.model, owned, buffers, to.device, again, taken_buffers)
        first, end = plan.cuts[number], plan.cuts[number + 1]
        parts = [model.get_submodule(part.name) for part in plan.parts[first:end]]
        blocks = [module for module, part in zip(parts, plan.parts[first:end], strict=True) if part.is_block]
        stage = Stage(model, [part.name for part in plan.parts], number, first, end)
        of_stage, shards = change_forwards(stage, model, blocks, blocks or parts, to)
        stages.append(stage)
        seeded.append(of_stage)
        sharded += shards
    named = [
        [(name, parameter) for name, parameter in stage.model.named_parameters() if stage.number in plan.users[name]]
        for stage in stages
    ]
    if built.tensors is not None:
        for name, full in built.tensors(None):
            copies = {id(parameter): parameter for own in named for other, parameter in own if other == name}
            for copy in copies.values():
                fill([(name, copy)], iter([(name, full)]))
    for stage in stages:
        stage.wire()
    links = Links(to.place, to.comm.pipeline_ranks(), to.comm.pipeline_groups(), to.device)
    looks = Rehearsals(planned.skeleton, [part.name for part in plan.parts], to.device)
    pipeline = Pipeline(stages, plan, config.schedule, to.layout.pp, to.place, links, Stopwatch(to.device), looks)
    answer_calls(pipeline, to.comm, to.device)
    own_buffers = {name: one for stage in stages for name, one in stage.model.named_buffers() if not is_fake(one)}
    blocks_of_all = [part.name for part in plan.parts if part.is_block]
    return OwnModels(
        [stage.model for stage in stages],
        named,
        list(own_buffers.items()),
        _own_modules(plan, stages),
        blocks_of_all,
        seeded,
        sharded,
        pipeline=pipeline,
    )


def change_forwards(
    root: nn.Module, model: nn.Module, blocks: Sequence[nn.Module], recomputed: Sequence[nn.Module], to: CutFor
) -> tuple[list[nn.Module], list[ShardedGradients]]:
    """Number formats, then compiled and recomputed blocks, then shards: of a model, or of a stage (`root`).

    Returns its modules with a random stream of their own, and how its shards come together, if it has any.
    """
    cutting, numerics = to.cutting, to.cutting.numerics
    rounded = numerics.storage_dtype if to.layout.pp > 1 else numerics.param_dtype or numerics.storage_dtype
    if rounded != "fp32":
        accept_rounded(model, rounded, to.device)
    if numerics.param_dtype is not None and not to.is_fully_sharded:  # else shards are gathered in it
        compute_with(model, find_blocks(model), numerics.param_dtype)
    # Before sharding, which gives modules other classes.
    seeded = seed_points(model, [block for _, block in find_blocks(model)])
    if cutting.compile == "blocks":
        compile_blocks(list(blocks), to.layout.team > 1)
    if cutting.recompute:
        for module in recomputed:
            recompute(module)
    if not to.is_fully_sharded:
        return seeded, []
    config = cutting.shard
    if to.layout.pp > 1 and cutting.pipeline.schedule in SPLITS_BACKWARD:
        # The second half of a backward pass reads the weights again, when torch has given them back already.
        config = config.model_copy(update={"level": "zero2"})
    units = sharding_units(root, blocks, config)
    elsewhere = [parameter for parameter in root.parameters() if is_fake(parameter)]
    return seeded, [shard(root, units, to.comm, config, numerics, elsewhere)]


def collect(
    own: OwnModels, skeleton: nn.Module | None, matrices: dict[str, Along], to: CutFor, notes: list[str]
) -> CutModel:
    """How gradients come together, what the optimizer is given, and what this rank holds of every tensor."""
    layout, comm, pipeline = to.layout, to.comm, own.pipeline
    held = describe_parts(skeleton or own.models[0], matrices, _places(pipeline), comm, to.place)
    copies: dict[str, list[nn.Parameter]] = {}
    for name, parameter in (pair for named in own.named for pair in named):
        if not any(parameter is copy for copy in copies.get(name, [])):
            copies.setdefault(name, []).append(parameter)
    parameters = [(name, several[0]) for name, several in copies.items()]
    for shards, named in zip(own.sharded, own.named, strict=False):
        shards.with_whole(named)
    inner: list[GradientSync] = list(own.sharded)
    if not inner:
        gradients, parameters = whole_gradients(parameters, held, comm, to.cutting.numerics)
        inner = [gradients]
    gradients = inner[0]
    if pipeline is not None:
        gradients = PipelineGradients(inner, _ties(pipeline, dict(parameters), copies, comm))
    gradients, parameters = team_gradients(gradients, parameters, held, comm)
    stored = {name: replace(held[name], stored=tensor) for name, tensor in (*parameters, *own.buffers)}
    at = layout.coordinate(comm.rank)
    counted = [  # in the gradient norm: of ranks that hold the same, on the first
        parameter
        for name, parameter in parameters
        if held[name].is_first and all(at[axis] == 0 or held[name].is_cut_over(axis) for axis in ("fsdp", "tp"))
    ]
    data_ranks = comm.data_group() if layout.team * layout.pp > 1 else None
    return CutModel(
        layout=layout,
        rank=comm.rank,
        models=own.models,
        blocks=own.blocks,
        seeded=own.seeded,
        held={**stored, **{name: one for name, one in held.items() if name not in stored}},
        gradients=gradients,
        statistics=RunningStatistics(own.modules, comm, data_ranks, own.sync),
        counted=counted,
        norm_groups=comm.groups("fsdp", "pp", "tp"),
        together="a sharded layout" if layout.fsdp > 1 else "a pipeline" if layout.pp > 1 else None,
        pipeline=pipeline,
        skeleton=skeleton,
        notes=notes,
    )


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


def _places(pipeline: Pipeline | None) -> dict[str, list[int]]:
    """The places in a pipeline that have each parameter and buffer, the first stage's first."""
    if pipeline is None:
        return {}
    users = {**pipeline.plan.buffer_users, **pipeline.plan.users}
    return {name: [pipeline.rank_of[stage] for stage in stages] for name, stages in users.items()}


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
