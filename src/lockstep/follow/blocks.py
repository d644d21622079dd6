"""What can be cut in a plain model: its repeated blocks, the parts of a pipeline's stages, and where to cut."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.errors import UserError, nearest
from lockstep.follow.forward import following
from lockstep.runtime.torch_private import AnyDropout

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are never called themselves."""

DRAWING = (AnyDropout, nn.RReLU, nn.MultiheadAttention, nn.RNNBase)
"""torch's own modules that draw random numbers."""

STATED = "pipeline.cuts says so"

WELL_BALANCED = 1.15
"""A pipeline is balanced when its slowest stage does at most this much of the mean work."""


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated layers, in order: children of one class in an outermost list of at least two.

    A block is the unit of sharding, of recompute and of random streams. A model without repeated layers has none
    and is treated as a whole.
    """
    blocks: list[tuple[str, nn.Module]] = []

    def visit(module: nn.Module, name: str) -> None:
        children = list(module.named_children())
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        same_class = len({type(child) for _, child in children}) == 1
        if is_list and len(children) >= 2 and same_class and all(list(c.parameters()) for _, c in children):
            for child_name, child in children:
                take(child, f"{name}{child_name}")
            return
        for child_name, child in children:
            visit(child, f"{name}{child_name}.")

    def take(module: nn.Module, name: str) -> None:
        if not isinstance(module, CONTAINERS):
            blocks.append((name, module))
            return
        for inner, child in module.named_children():  # a container is never called: what it holds is repeated
            if list(child.parameters()):
                take(child, f"{name}.{inner}")

    visit(model, "")
    return blocks


def seed_points(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that get a random stream of their own, so that what they draw follows from nothing before them.

    The blocks come first. Then, outside of them, the outermost modules without blocks, and torch's dropout layers.
    Those of torch that never draw are left out.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    points = list(blocks)

    def visit(module: nn.Module, is_outermost: bool) -> None:
        for child in module.children():
            if id(child) in inside:
                continue
            has_blocks = any(id(inner) in inside for inner in child.modules())
            divided = has_blocks or isinstance(child, (*CONTAINERS, nn.Sequential))
            of_torch = type(child).__module__.startswith("torch.nn.")
            draws = isinstance(child, DRAWING) or (is_outermost and not divided and not of_torch)
            if draws and not any(child is point for point in points):
                points.append(child)
            visit(child, is_outermost and divided)

    visit(model, True)
    return points


# ---- The parts of a pipeline


@dataclass(frozen=True)
class PipelinePart:
    """A module that is called once in a forward, so that a stage can begin with it. `work` is measured, in seconds."""

    name: str
    kind: str
    is_block: bool
    parameters: int
    work: float = 0.0

    @property
    def can_begin(self) -> bool:
        """Whether a stage may begin here: not with a layer that has nothing to train or hold."""
        return self.parameters > 0


@dataclass(frozen=True)
class ModelPlan:
    """How a model is cut into the stages of a pipeline: stage s has the parts from `cuts[s]` up to `cuts[s + 1]`."""

    parts: list[PipelinePart]
    cuts: list[int]
    users: dict[str, list[int]]
    """The stages that use each parameter, the first of them first."""
    buffer_users: dict[str, list[int]]
    ties: list[list[str]]
    how: str
    """Why the cuts are where they are."""

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.cuts) - 1

    @property
    def cut_names(self) -> list[str]:
        """The parts that the stages after the first begin with."""
        return [self.parts[cut].name for cut in self.cuts[1:-1]]

    def stage_of(self, part: int) -> int:
        """The stage a part belongs to; what runs before the first part belongs to the first stage."""
        return next(s for s in range(self.stages) if max(part, 0) < self.cuts[s + 1])

    def work(self) -> list[float]:
        """The measured work of every stage."""
        return [sum(p.work for p in self.parts[a:b]) for a, b in itertools.pairwise(self.cuts)]

    @property
    def imbalance(self) -> float:
        """The work of the slowest stage, in units of the mean."""
        work = self.work()
        return max(work) * len(work) / total if (total := sum(work)) > 0 else 1.0


def balance(plan: ModelPlan) -> str:
    """How evenly the stages share the work, and why not more evenly where they do not."""
    work, count = plan.work(), plan.stages
    said = f"the slowest stage does {plan.imbalance:.2f} x the mean of the measured work"
    if plan.imbalance <= WELL_BALANCED:
        return said
    worst = work.index(max(work))
    parts = plan.parts[plan.cuts[worst] : plan.cuts[worst + 1]]
    largest = max(parts, key=lambda part: part.work)
    if plan.how == STATED:
        return f"{said}: {plan.how}"
    if largest.work * count > WELL_BALANCED * sum(work):
        alone = f"{largest.name} alone is {largest.work / sum(work):.0%} of it"
        return f"{said}, because {alone}, and {count} stages should have {1 / count:.0%} each"
    return f"{said}, because its parts cannot be shared out more evenly: {len(plan.parts)} of them over {count} stages"


@dataclass(frozen=True)
class Call:
    """One call of a module in a forward, and the calls inside it."""

    name: str
    module: nn.Module
    inside: list[Call]


def record_calls(model: nn.Module, call: Callable[[], Any]) -> Call:
    """The calls of all modules while `call` runs, as a tree."""
    root = Call("", model, [])
    stack = [root]
    names = {id(module): name for name, module in model.named_modules()}

    def enter(module: nn.Module, _: Any) -> None:
        made = Call(names[id(module)], module, [])
        stack[-1].inside.append(made)
        stack.append(made)

    def leave(*_: Any) -> None:
        stack.pop()

    with following(model.modules(), enters=enter, leaves=leave):
        call()
    return root


def find_parts(model: nn.Module, calls: Call, stages: int) -> list[tuple[str, nn.Module]]:
    """The modules a pipeline can be cut at, in the order of their calls.

    Blocks, and outside of them the outermost modules without blocks; of an nn.Sequential its children. Where these are
    too few, the largest of them are divided further. What a forward calls more than once is no part.
    """
    blocks = find_blocks(model)
    block_ids = {id(block) for _, block in blocks}
    times = Counter(id(call.module) for call in all_calls(calls))
    if (often := times[id(model)]) > 1:
        raise UserError(
            f"the loss function calls the model {often} times, and a pipeline's stages run through it once",
            "call it once, on all inputs together (torch.cat, then chunk the result), or use a dp or fsdp layout",
        )
    for name, block in blocks:
        if times[id(block)] > 1:
            raise UserError(
                f"the block {name} is called {times[id(block)]} times in one forward, and a stage of a pipeline runs "
                "each of its blocks once",
                "use a dp or fsdp layout for this model",
            )

    def divided(call: Call) -> bool:
        if id(call.module) in block_ids:
            return False
        if call.module is model:
            return True
        return isinstance(call.module, nn.Sequential) or any(
            id(module) in block_ids for module in call.module.modules()
        )

    def frontier(call: Call) -> list[Call]:
        found: list[Call] = []
        for inner in call.inside:
            found += frontier(inner) if divided(inner) else [inner]
        return found

    parts = [call for call in frontier(calls) if times[id(call.module)] == 1]
    while sum(1 for part in parts if any(True for _ in part.module.parameters())) < stages:
        larger = [part for part in parts if sum(1 for call in part.inside if times[id(call.module)] == 1) > 1]
        if not larger:
            break
        largest = max(larger, key=lambda part: sum(p.numel() for p in part.module.parameters()))
        at = next(number for number, part in enumerate(parts) if part is largest)
        parts[at : at + 1] = [call for call in largest.inside if times[id(call.module)] == 1]
    return [(call.name, call.module) for call in parts]


def all_calls(call: Call) -> Iterator[Call]:
    """Every call inside a call."""
    for inner in call.inside:
        yield inner
        yield from all_calls(inner)


# ---- Where to cut


def choose_cuts(parts: Sequence[PipelinePart], stages: int, stated: Sequence[str] | None) -> tuple[list[int], str]:
    """The first part of every stage, and the number of parts at the end; and why they are there.

    `stated` are the names of the modules that stages begin with, from the second stage on.
    """
    candidates = [number for number, part in enumerate(parts) if part.can_begin][1:]
    most = len(candidates) + 1
    if most < stages:
        raise UserError(
            f"a pipeline of {stages} stages was asked for, and this model can be cut into at most {most} "
            f"({', '.join(part.name or part.kind for part in parts if part.can_begin)})",
            f"use at most {most} stages (ranks of pp x stages per rank)" if most > 1 else "use a dp or fsdp layout",
        )
    if stated is not None:
        return _stated_cuts(parts, stages, stated), STATED
    first = [0, *candidates]
    ends = [*candidates, len(parts)]
    work = [sum(part.work for part in parts[a:b]) for a, b in zip(first, ends, strict=True)]
    chosen = _least_worst(work, stages)
    return [first[at] for at in chosen] + [len(parts)], "the measured work is shared out"


def _stated_cuts(parts: Sequence[PipelinePart], stages: int, stated: Sequence[str]) -> list[int]:
    names = [part.name for part in parts]
    if len(stated) != stages - 1:
        raise UserError(
            f"pipeline.cuts names {len(stated)} modules, and {stages} stages have {stages - 1} cuts between them",
            f"name the {stages - 1} modules that the stages after the first begin with",
        )
    for name in stated:
        if name not in names:
            close = nearest(name, names)
            raise UserError(
                f"pipeline.cuts names {name!r}, which is no part of this model that a stage can begin with",
                f"did you mean {close}?" if close else f"use some of {', '.join(names[1:])}",
            )
    cuts = [0, *(names.index(name) for name in stated), len(parts)]
    if sorted(set(cuts)) != cuts:
        raise UserError(
            f"pipeline.cuts names {', '.join(stated)}, which is not the order in which the model calls them",
            "name each once, in the order of the forward, and not the first part",
        )
    return cuts


def _least_worst(work: Sequence[float], stages: int) -> list[int]:
    """Where each of `stages` runs of neighbours begins, so that the largest sum is the smallest possible."""
    sums = [0.0, *itertools.accumulate(work)]
    count = len(work)
    best = {(0, 0): (0.0, 0)}
    for stage in range(1, stages + 1):
        for end in range(stage, count - (stages - stage) + 1):
            # Of equally good cuts the earlier one: the first stages of a pipeline hold the most micro-batches.
            best[stage, end] = min(
                (max(best[stage - 1, start][0], sums[end] - sums[start]), start)
                for start in range(stage - 1, end)
                if (stage - 1, start) in best
            )
    starts, end = [], count
    for stage in range(stages, 0, -1):
        end = best[stage, end][1]
        starts.append(end)
    return starts[::-1]
