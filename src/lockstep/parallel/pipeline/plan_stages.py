"""From a model and one look at its forward to a plan of its pipeline, and everything that cannot be cut refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.blocks import (
    ModelPlan,
    PipelinePart,
    all_calls,
    choose_cuts,
    find_blocks,
    find_parts,
    record_calls,
    seed_points,
)
from lockstep.follow.rehearsal import PartWatch, rehearse, without_data
from lockstep.follow.values import Rehearsal
from lockstep.parallel.build.materialise import tied_names
from lockstep.parallel.pipeline.stage import skeleton_of
from lockstep.parallel.pipeline.work import measure_work
from lockstep.parallel.replicate.statistics import keeps_statistics
from lockstep.parallel.tensor.plan_matrices import TensorPlan
from lockstep.runtime.comm import Comm


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from: a skeleton of the model, one forward of it, and who was called how often."""

    plan: ModelPlan
    skeleton: nn.Module
    rehearsal: Rehearsal
    calls: Counter[str]
    tensor: TensorPlan | None = None
    gathers: list[str] = field(default_factory=list)
    """Where, outside of blocks, sequences that are cut have to be whole."""


def plan_pipeline(
    model: nn.Module,
    look: Callable[[nn.Module], Any],
    stages: int,
    cuts: list[str] | None,
    comm: Comm,
    device: torch.device,
) -> Planned:
    """Where to cut a model. Every rank comes to the same plan."""
    skeleton = skeleton_of(model, device)
    with (
        without_data() as seen,
        PartWatch(None, -1, look=seen),
    ):  # marks what it makes: nobody may use that in a later forward
        calls = record_calls(skeleton, lambda: look(skeleton))
    found = find_parts(skeleton, calls, stages)
    rehearsal = rehearse_parts(skeleton, [name for name, _ in found], look)
    work = comm.once("measure the parts of the model", lambda: measure_work(rehearsal, device))
    blocks = {name for name, _ in find_blocks(skeleton)}
    parts = [
        PipelinePart(name, type(module).__name__, name in blocks, sum(p.numel() for p in module.parameters()), seconds)
        for (name, module), seconds in zip(found, work, strict=True)
    ]
    chosen, how = choose_cuts(parts, stages, cuts)
    plan = ModelPlan(parts, chosen, {}, {}, tied_names(skeleton), how)
    users, buffer_users = _users(skeleton, plan, rehearsal)
    plan = replace(plan, users=users, buffer_users=buffer_users)
    if not any(parameter.requires_grad for parameter in skeleton.parameters()):
        raise UserError("the model has no parameters to train", "check what build_model returns")
    _refuse_uncuttable(skeleton, plan, rehearsal)
    return Planned(plan, skeleton, rehearsal, Counter(call.name for call in all_calls(calls)))


def rehearse_parts(
    skeleton: nn.Module, parts: list[str], look: Callable[[nn.Module], Any], may_read_at_end: bool = False
) -> Rehearsal:
    """Look at a forward of a model whose parts are known."""
    blocks = [block for _, block in find_blocks(skeleton)]
    modules = [skeleton.get_submodule(name) for name in parts]
    return rehearse(skeleton, modules, seed_points(skeleton, blocks), look, may_read_at_end)


def _users(
    model: nn.Module, plan: ModelPlan, rehearsal: Rehearsal
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The stages that use each parameter, and those that have each buffer; the first has what nobody uses."""
    at: dict[int, set[int]] = {key: {plan.stage_of(part) for part in used} for key, used in rehearsal.uses.items()}
    buffers: dict[int, set[int]] = {}
    for number, part in enumerate(plan.parts):
        module = model.get_submodule(part.name)
        for parameter in module.parameters():
            at.setdefault(id(parameter), set()).add(plan.stage_of(number))
        for buffer in module.buffers():
            buffers.setdefault(id(buffer), set()).add(plan.stage_of(number))
    everywhere = set(range(plan.stages))
    return (
        {name: sorted(at.get(id(parameter), {0})) for name, parameter in model.named_parameters()},
        {name: sorted(buffers.get(id(buffer), everywhere)) for name, buffer in model.named_buffers()},
    )


def _refuse_uncuttable(model: nn.Module, plan: ModelPlan, rehearsal: Rehearsal) -> None:
    for part, seeded, line in rehearsal.random_after:
        # The stream of a module goes on behind it, until the next one that has its own.
        if plan.stages > 1 and part >= plan.cuts[1] and seeded < plan.cuts[plan.stage_of(part)]:
            raise UserError(
                f"{line} draws random numbers outside of any module, after the first stage of the pipeline, where they "
                "would depend on the layout",
                "use a module for it (nn.Dropout), or a dp or fsdp layout",
            )
    for cut in plan.cuts[1:-1]:
        crossing = [rehearsal.values[number] for number in rehearsal.crossing(cut)]
        for value in crossing:
            if value.changed >= cut and sum(1 for other in crossing if other.storage == value.storage) > 1:
                raise UserError(
                    f"a tensor that is changed in place at or after {plan.parts[cut].name} shares its memory with "
                    "another one that crosses the cut there",
                    "write x = x + y rather than x += y, or state other cuts (pipeline.cuts)",
                )
    for cut in plan.cuts[1:-1]:
        region = rehearsal.regions[cut]
        if region is not None and region is rehearsal.regions[cut - 1]:
            raise UserError(
                f"the model recomputes {plan.parts[cut - 1].name} and {plan.parts[cut].name} in one call of "
                "torch.utils.checkpoint, and a stage would begin between them",
                "give checkpoint one block at a time, or leave it out and give run.setup recompute=True",
            )
    for part, number in rehearsal.kept_outside:
        if plan.stage_of(rehearsal.values[number].made) < plan.stage_of(part):
            raise UserError(
                "outside of any module a value of an earlier stage gets a hook (register_hook) or is recomputed "
                "(torch.utils.checkpoint)",
                "do it inside a module that the model calls once, or use a dp or fsdp layout",
            )
    named = dict(model.named_parameters())
    for name, users in plan.users.items():
        if len(users) > 1 and id(named[name]) in rehearsal.changed_parameters:
            raise UserError(
                f"the forward changes the parameter {name}, which several stages of a pipeline hold",
                "change it between steps (no max_norm for a tied embedding), or use a dp or fsdp layout",
            )
    inside = {id(layer) for part in plan.parts for layer in model.get_submodule(part.name).modules()}
    for name in sorted(rehearsal.changed_buffers | _statistics(model)):
        owner = model.get_submodule(name.rpartition(".")[0])
        if plan.stages > 1 and (id(owner) not in inside or len(plan.buffer_users[name]) > 1):
            raise UserError(
                f"the forward changes the buffer {name}, which no single stage of a pipeline owns",
                "change it between steps, use a layer for each call, or use a dp or fsdp layout",
            )


def _statistics(model: nn.Module) -> set[str]:
    """The running statistics of BatchNorm: they change where a rehearsal does not see it."""
    return {
        f"{name}.{leaf}".lstrip(".")
        for name, layer in model.named_modules()
        if keeps_statistics(layer)
        for leaf, _ in layer.named_buffers()
    }
