"""A model's plan for people: `lockstep verify --explain` shows it module by module, with the reason."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from lockstep.follow.blocks import ModelPlan, balance
from lockstep.parallel.pipeline.timetable import peak_in_flight, stages_of, timetable
from lockstep.parallel.tensor.modules import parameter_cuts
from lockstep.parallel.tensor.plan_matrices import starred
from lockstep.runtime.axis import Axis

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from torch import nn

    from lockstep.config.schema import PipelineConfig
    from lockstep.layout import Layout
    from lockstep.parallel.pipeline.plan_stages import Planned
    from lockstep.parallel.tensor.modules import Role
    from lockstep.parallel.tensor.plan_matrices import TensorPlan


def describe(planned: Planned, layout: Layout, config: PipelineConfig) -> dict[str, Any]:
    """The plan as JSON."""
    plan, model = planned.plan, planned.skeleton
    return {
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layout": str(layout),
        "schedule": config.schedule if layout.pp > 1 else None,
        "modules": _modules(planned),
        "stages": _stages(planned, layout, config),
        "shared": {name: users for name, users in plan.users.items() if len(users) > 1},
        "ties": plan.ties,
        "imbalance": plan.imbalance,
        "balance": balance(plan),
        "cuts": plan.cut_names,
        "tensor": None if planned.tensor is None else _matrices(planned.tensor, model, layout.tp),
        "gathers": planned.gathers,
    }


def _matrices(plan: TensorPlan, model: nn.Module, tp: int) -> dict[str, Any]:
    """How every matrix is cut over the tp axis, or why not, in the order in which the model holds them."""
    rows = []
    for name, module in model.named_modules():
        if (role := plan.roles.get(name)) is not None:
            cuts = parameter_cuts(module, role, Axis("tp", tp, 0))
            leaf, cut = next((leaf, cut) for leaf, cut in cuts.items() if leaf.endswith("weight"))
            whole = list(module.get_parameter(leaf).shape)
            mine = [len(cut.rows_of(0)) if dim == cut.dim else n for dim, n in enumerate(whole)]
            rows.append(
                {
                    "name": name,
                    "role": role.kind,
                    "whole": whole,
                    "part": mine,
                    "parts": list(role.parts),
                    "why": _pairing(plan, name, role),
                }
            )
        elif name in plan.whole:
            rows.append({"name": name, "role": "whole", "why": plan.whole[name]})
    return {"modules": rows, "sequence": plan.sequence, "why": plan.why}


def _pairing(plan: TensorPlan, name: str, role: Role) -> str:
    """What the results of a matrix are for."""
    if role.kind == "row":
        givers = [giver for giver, takers in plan.partners.items() if name in takers]
        return f"takes in {', '.join(_leaf(giver) for giver in givers)}; results are added up"
    if role.kind in ("vocabulary", "heads"):
        return "results are added up"
    takers = plan.partners.get(name)
    return f"feeds {', '.join(map(_leaf, dict.fromkeys(takers))) if takers else 'the loss'}"


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _modules(planned: Planned) -> list[dict[str, Any]]:
    """The parts, and what is outside of them, in the order in which the model holds them."""
    plan, model = planned.plan, planned.skeleton
    numbers = {part.name: number for number, part in enumerate(plan.parts)}
    rows: list[dict[str, Any]] = []

    def visit(module: nn.Module, name: str) -> None:
        if name in numbers:
            rows.append(_part_row(plan, numbers[name]))
            return
        for leaf, parameter in module.named_parameters(recurse=False):
            users = plan.users.get(f"{name}.{leaf}".lstrip("."), [])
            kind, size = "parameter", parameter.numel()
            rows.append(_row(f"{name}.{leaf}".lstrip("."), kind, users, size, 0.0, "used outside of any module"))
        inner = list(module.named_children())
        times = planned.calls[name]
        if times > 1 or (inner == [] and times == 0 and name):
            users = sorted({s for key, used in plan.users.items() if key.startswith(f"{name}.") for s in used})
            why = f"called {times} times: runs wherever it is called" if times else "not called"
            size = sum(parameter.numel() for parameter in module.parameters())
            rows.append(_row(name, type(module).__name__, users, size, 0.0, why))
            return
        for child_name, child in inner:
            visit(child, f"{name}.{child_name}".lstrip("."))

    visit(model, "")
    return rows


def _part_row(plan: ModelPlan, number: int) -> dict[str, Any]:
    part, stage = plan.parts[number], plan.stage_of(number)
    whole = sum(plan.work()) or 1.0
    why = "a repeated block" if part.is_block else "called once" if part.parameters else "no parameters to begin with"
    if number in plan.cuts[1:-1]:
        why = f"begins stage {stage}: {plan.how}"
    return _row(part.name, part.kind, [stage], part.parameters, part.work / whole, why)


def _row(name: str, kind: str, stages: list[int], parameters: int, work: float, why: str) -> dict[str, Any]:
    return {"name": name, "kind": kind, "stages": stages, "parameters": parameters, "work": work, "why": why}


def _stages(planned: Planned, layout: Layout, config: PipelineConfig) -> list[dict[str, Any]]:
    plan, whole = planned.plan, sum(planned.plan.work()) or 1.0
    by_rank = stages_of(config.schedule, layout.pp, config.per_rank) if layout.pp > 1 else [[0]]
    many = 4 * layout.pp  # micro-batches: with more of them only the schedules that hold all of them hold more
    tables = timetable(config.schedule, layout.pp, config.per_rank, many) if layout.pp > 1 else [[]]
    sizes = {name: parameter.numel() for name, parameter in planned.skeleton.named_parameters()}
    found = []
    for stage, (first, end) in enumerate(itertools.pairwise(plan.cuts)):
        rank = next(rank for rank, own in enumerate(by_rank) if stage in own)
        crossing = [planned.rehearsal.values[n] for n in planned.rehearsal.crossing(first)] if stage else []
        found.append(
            {
                "stage": stage,
                "rank": rank,
                "from": plan.parts[first].name if plan.parts else "",
                "parts": end - first,
                "parameters": sum(sizes[name] for name, users in plan.users.items() if stage in users),
                "work": plan.work()[stage] / whole,
                "in_flight": peak_in_flight(action for action in tables[rank] if action.stage == stage),
                "receives": [_shape_and_dtype(value) for value in crossing],
                "receives_bytes": sum(value.shape.numel() * value.dtype.itemsize for value in crossing),
            }
        )
    return found


def _shape_and_dtype(value: Any) -> str:
    return f"{'x'.join(map(str, value.shape)) or 'one number'} {str(value.dtype).removeprefix('torch.')}"


def show(plan: dict[str, Any], terminal: Terminal) -> None:
    """Print a plan."""
    from rich.table import Table

    is_cut = len(plan["stages"]) > 1
    terminal.print(f"{plan['model']}: {plan['parameters']:,} parameters, layout {plan['layout']}", markup=False)
    table = Table("stage", "module", "kind", "parameters", "work", "why", box=None, header_style="bold", pad_edge=False)
    for row in plan["modules"]:
        where = ", ".join(map(str, row["stages"]))
        size = f"{row['parameters']:,}" if row["parameters"] else ""
        work = f"{row['work']:.1%}" if row["work"] else ""
        style = "bold" if is_cut and row["why"].startswith("begins") else None
        table.add_row(where, row["name"], row["kind"], size, work, row["why"], style=style)
    terminal.print(table)
    if is_cut:
        terminal.print()
        stages = Table("stage", "rank", "from", "parameters", "work", "in flight", "receives", box=None, pad_edge=False)
        for one in plan["stages"]:
            sent = " + ".join(one["receives"])
            text = f"{sent} ({one['receives_bytes'] / 1e6:.3g} MB a micro-batch)" if sent else "the batch alone"
            facts = (f"{one['parameters']:,}", f"{one['work']:.1%}", str(one["in_flight"]), text)
            stages.add_row(str(one["stage"]), str(one["rank"]), one["from"], *facts)
        terminal.print(stages)
        terminal.print()
        terminal.print(f"schedule {plan['schedule']}: {plan['balance']}", markup=False, soft_wrap=True)
    if plan["tensor"] is not None:
        _show_matrices(plan["tensor"], terminal)
    for line in plan["gathers"]:
        terminal.print(f"whole sequences: {line}", markup=False, soft_wrap=True)
    for group in plan["ties"]:
        terminal.print(f"tied: {' = '.join(group)}", markup=False)
    for name, users in plan["shared"].items():
        on = " and ".join(map(str, users))
        terminal.print(f"shared: {name} is on stages {on}, and its gradients are added up", markup=False)


def _show_matrices(plan: dict[str, Any], terminal: Terminal) -> None:
    """Row and column parallelism, matrix by matrix. Blocks that are cut alike are shown once."""
    from rich.table import Table

    table = Table("cut by", "times", box=None, header_style="bold", pad_edge=False)
    table.add_column("module", no_wrap=True)
    for column in ("whole", "a rank has", "why"):
        table.add_column(column)
    shown: dict[tuple[str, ...], list[str]] = {}
    for row in plan["modules"]:
        whole, mine = ("x".join(map(str, row[key])) if key in row else "" for key in ("whole", "part"))
        parts = f" ({len(row['parts'])} parts)" if len(row.get("parts", ())) > 1 else ""
        shown.setdefault((row["role"], starred(row["name"]), whole, mine + parts, row["why"]), []).append(row["name"])
    for (role, pattern, *facts), names in shown.items():
        table.add_row(role, str(len(names)), names[0] if len(names) == 1 else pattern, *facts)
    terminal.print()
    terminal.print(table)
    between = "cut by tokens" if plan["sequence"] else f"whole on every rank: {plan['why']}"
    terminal.print(f"between the matrices, activations are {between}", markup=False, soft_wrap=True)
