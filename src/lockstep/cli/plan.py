"""`lockstep plan`: what fits, how fast it is and which layout is best, before any GPU is taken."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer, check_output, open_terminal, say, write_output
from lockstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console as Terminal

    from lockstep.planner.cost.job import Job
    from lockstep.planner.machine.hardware import Machine
    from lockstep.planner.search.request import Request, Typed
    from lockstep.planner.search.scale import Costs
    from lockstep.planner.trace.dry_run import TracedTraining


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="llama-3-8b, a recipe, config.toml, config.json, module:function, or layers=32,hidden=4096,heads=32.",
        ),
    ] = "lm",
    cluster: Annotated[
        str | None,
        typer.Option(help="A kind of GPU (H100, 64xA100-40), a cluster profile, or here (bench measures it)."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many. Default: as --layout needs, or one node.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="How many, in place of --gpus.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="Only this one: fsdp=8,tp=8 (one axis may be auto). Default: compare all.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Compare all, whatever layout a config names.")] = False,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Samples of a step, over all GPUs.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Samples of one forward.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, or full: computes blocks twice, saves memory.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of a pipeline (pp): 1f1b, zbv, ...")] = None,
    set_: opt.Set = None,
    tokens: Annotated[
        float | None, typer.Option(help="Of the whole training (15e12): its GPU-hours and energy.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the arithmetic, beside that of a course and a paper.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="With --layout: count the memory of the real model, too.")
    ] = False,
    scale: Annotated[
        str | None, typer.Option(metavar="1..16384", help="Scaling curves, from so many GPUs to so many.")
    ] = None,
    mtbf_hours: Annotated[float | None, typer.Option(help="With --scale: hours between failures of a node.")] = None,
    save_seconds: Annotated[
        float | None, typer.Option(help="With --scale: a checkpoint stops training so long.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="With --scale: a run that tells what checkpoints cost.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the Pareto front, or the curves of --scale.")
    ] = None,
    as_json: opt.Json = False,
) -> int:
    """Predict memory, step time and cost of a training, and find the best layout for a cluster. Starts nothing.

    Exit code 0: it fits. 1: it does not, or is too close to say.
    """
    from lockstep.planner.search.request import Typed, check_choice, read_request

    terminal = open_terminal(as_json)
    check_output("--chart", chart, ".svg")
    check_choice("--recompute", recompute, ("none", "full"))
    _check_amount("--tokens", tokens, "say how many, as in --tokens 1e12")
    _check_amount("--save-seconds", save_seconds, "give seconds above 0")
    _check_amount("--mtbf-hours", mtbf_hours, "give hours above 0, of one node")
    values = opt.given(
        global_batch=global_batch,
        micro_batch=micro_batch,
        precision=precision,
        recompute=None if recompute is None else recompute == "full",
        pipeline=None if schedule is None else {"schedule": schedule},
    )
    typed = Typed(model, cluster, gpus, nodes, layout, search, seq, set_ or [], values)
    if scale is not None:
        sizes = {"--layout": layout, "--gpus": gpus, "--nodes": nodes, "--tokens": tokens}
        for name, given in {**sizes, "--explain": explain, "--trace": trace, "--search": search}.items():
            if given:
                raise UserError(f"{name} is about one size, and --scale goes over many", "leave one of them out")
        return _scale(typed, scale, (mtbf_hours, save_seconds, run), chart, as_json, terminal)
    for option, value in (("--mtbf-hours", mtbf_hours), ("--save-seconds", save_seconds), ("--run", run)):
        if value is not None:
            raise UserError(f"{option} goes with --scale", "say that as well, as in --scale 1..1024")
    request = read_request(typed)
    if request.layout is not None:
        if chart is not None:
            raise UserError("--chart draws many layouts, and --layout names one", "leave one of them out")
        return _plan_one(request, tokens, explain, trace, as_json, terminal)
    if trace:
        raise UserError("--trace is about one layout", "name it: --trace --layout fsdp=auto")
    return _search(request, tokens, chart, explain, as_json, terminal)


def _check_amount(option: str, value: float | None, fix: str) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UserError(f"{option} {value:g} is no amount", fix)


def _plan_one(
    request: Request, tokens: float | None, explain: bool, trace: bool, as_json: bool, terminal: Terminal
) -> int:
    """One layout, term by term."""
    from lockstep.planner.cost.checks import check_job, host_remarks, verdict
    from lockstep.planner.cost.estimate import fullest_of
    from lockstep.planner.cost.memory import estimate_memory
    from lockstep.planner.cost.step_time import estimate_time
    from lockstep.planner.search.fitting import ways_to_fit
    from lockstep.planner.show.one_layout import show_command, show_one, show_remarks
    from lockstep.planner.show.results import candidate_json, job_json, memory_json, time_json
    from lockstep.planner.show.search_table import show_enough, show_ways

    job, chosen = _settled(request)
    build = _traceable(request, job) if trace else None
    remarks = [*check_job(job), *request.remarks, *chosen]
    memories, time = estimate_memory(job), estimate_time(job)
    fullest = fullest_of(memories)
    remarks += host_remarks(job, max(memories, key=lambda memory: memory.host))
    says = verdict(fullest, job.machine.gpu)
    show_one(job, memories, time, tokens, terminal)
    show_remarks(remarks, terminal)
    result: dict[str, Any] = {
        **job_json(job),
        "memory": memory_json(job, memories),
        "time": time_json(job, time, tokens),
        "remarks": remarks,
    }
    if says == "fits":
        show_command(job, request.named, terminal)
    else:
        ways = ways_to_fit(job)
        show_ways(job, ways, time, terminal)
        result["ways"] = [{"change": way.text, **candidate_json(way.candidate)} for way in ways]
        if not ways:
            result["enough_gpus"] = show_enough(request.base, request.asked, terminal)
        else:
            show_command(ways[0].candidate.job, request.named, terminal, "the first of them")
    if explain:
        _explain(job, terminal)
    if trace:
        result["trace"] = _trace(job, build, terminal)
    if as_json:
        answer(result)
    return 0 if says == "fits" else 1


def _settled(request: Request) -> tuple[Job, list[str]]:
    """The job of a layout. Where nobody said a micro-batch it is the one that is fastest of those that fit."""
    from dataclasses import replace

    from lockstep.planner.cost.checks import check_job
    from lockstep.planner.search.rank_layouts import search

    asked, base = request.asked, request.base
    assert request.layout is not None
    assert asked.recompute
    assert asked.zero
    assert asked.schedule
    assert asked.stages_per_rank
    job = replace(
        base,
        layout=request.layout,
        micro_batch=asked.micro_batch or 1,
        recompute=asked.recompute,
        zero=asked.zero,
        schedule=asked.schedule,
        stages_per_rank=asked.stages_per_rank,
        sequence_parallel=base.sequence_parallel and request.layout.pp == 1,
    )
    if asked.micro_batch is not None:
        return job, []
    for one in search(base, request.world_size, asked).fitting:
        with suppress(UserError):
            check_job(one.job)
            said = f"a micro-batch of {one.job.micro_batch} is the fastest that fits (--micro-batch sets it)"
            return one.job, [said]
    return job, []


def _search(
    request: Request, tokens: float | None, chart: Path | None, explain: bool, as_json: bool, terminal: Terminal
) -> int:
    """All layouts, ranked."""
    from lockstep.planner.cost.checks import check_job, host_remarks
    from lockstep.planner.search.rank_layouts import search
    from lockstep.planner.show.one_layout import show_command, show_cost, show_remarks, title
    from lockstep.planner.show.results import candidate_json, plan_json, time_json
    from lockstep.planner.show.search_table import draw_front, show_enough, show_found, show_front, show_nothing

    found = search(request.base, request.world_size, request.asked)
    say(terminal, title(request.base, request.world_size))
    remarks = list(request.remarks)
    result: dict[str, Any] = {
        **plan_json(request.base, request.world_size),
        "considered": found.considered,
        "fitting": len(found.fitting),
        "refused": found.refused,
    }
    if found.fitting:
        best = found.fitting[0].job
        remarks += [*check_job(best), *host_remarks(best, found.fitting[0].memory)]
        show_found(found, terminal)
        show_front(found, terminal)
        show_cost(best, found.fitting[0].time, tokens, terminal)
        show_remarks(remarks, terminal)
        show_command(best, request.named, terminal)
        result["time"] = time_json(best, found.fitting[0].time, tokens)
        result["ranked"] = [candidate_json(one) for one in found.best_of_layouts[:50]]
        result["front"] = [candidate_json(one) for one in found.front]
    else:
        show_nothing(found, request.base, terminal)
        remarks += request.base.machine.warnings
        show_remarks(remarks, terminal)
        result["enough_gpus"] = show_enough(request.base, request.asked, terminal)
    if explain and found.best_or_least is not None:
        _explain(found.best_or_least, terminal)
    if chart is not None:
        write_output(chart, draw_front(found, f"{request.base.model.name} on {request.world_size:,} GPUs"))
        say(terminal, f"front drawn in {chart}")
    if as_json:
        answer({**result, "remarks": remarks})
    return 0 if found.fitting else 1


def _explain(job: Job, terminal: Terminal) -> None:
    """The arithmetic of a job's memory, and that of a course and of a paper."""
    from lockstep.planner.show.terms import course_text, explain_text

    for text in (explain_text(job), course_text()):
        say(terminal, f"\n{text}")


def _traceable(request: Request, job: Job) -> Callable[[], TracedTraining] | None:
    """What builds the model that is traced, None: its numbers do; refuses what cannot be, before anything is shown."""
    from lockstep.planner.trace.count import refuse_untraceable
    from lockstep.planner.trace.subject import training_of

    build = training_of(request.typed.model, request.told, request.typed.sequence)
    refuse_untraceable(job, build is not None)
    return build


def _trace(job: Job, build: Callable[[], TracedTraining] | None, terminal: Terminal) -> dict[str, Any]:
    """The formulas beside what the real model, cut for real, would hold."""
    from dataclasses import asdict

    from lockstep.planner.cost.memory import estimate_memory
    from lockstep.planner.trace.count import cross_check, cross_check_text, trace_memory
    from lockstep.text.units import bytes_text

    with terminal.status("cutting the model and running a step without data"):
        traced = trace_memory(job, build)
    terminal.print("\nformulas beside the real model, cut for real and run without data", style="bold")
    say(terminal, cross_check_text(cross_check(traced, estimate_memory(job))))
    terminal.print(
        f"fullest in the {traced.moment} of rank {traced.rank}; found in {traced.seconds:.1f} s, in a process of "
        f"{bytes_text(traced.process_bytes)}",
        style="dim",
        markup=False,
        soft_wrap=True,
    )
    return {**asdict(traced), "total": traced.total}


def _costs(mtbf_hours: float | None, save_seconds: float | None, run: Path | None, machine: Machine) -> Costs:
    """What is known of failures and saving."""
    from dataclasses import replace

    from lockstep.planner.search.scale import Costs, measured_costs
    from lockstep.record.log import read_events

    costs = Costs()
    if run is not None:
        log = run / "events.jsonl"
        if not log.is_file():
            raise UserError(f"{run} is not a run folder: it has no events.jsonl", "name one, as in --run runs/lm")
        costs = measured_costs(read_events(log), costs, str(run))
    if save_seconds is not None:
        costs = replace(costs, save_seconds=save_seconds)
    if mtbf_hours is not None:
        node = (machine.whole or machine).gpus_per_node
        costs = replace(costs, gpu_hours_between_failures=mtbf_hours * node, failures="--mtbf-hours")
    return costs


def _scale(
    typed: Typed,
    sizes: str,
    known: tuple[float | None, float | None, Path | None],
    chart: Path | None,
    as_json: bool,
    terminal: Terminal,
) -> int:
    """Both scaling curves."""
    from dataclasses import replace

    from lockstep.planner.search.request import read_request
    from lockstep.planner.search.scale import parse_sizes
    from lockstep.planner.search.scale import scale as scaled
    from lockstep.planner.show.one_layout import show_remarks, title
    from lockstep.planner.show.results import plan_json, scaling_json
    from lockstep.planner.show.scale_table import draw_scaling, show_scaling

    counts = parse_sizes(sizes)
    request = read_request(typed, largest=counts[-1])
    base = replace(request.base, machine=request.base.machine.with_gpus(counts[-1]))
    costs = _costs(*known, base.machine)
    with terminal.status("searching"):
        scaling = scaled(base, counts, request.asked, costs)
    say(terminal, title(base, counts[-1]))
    show_scaling(scaling, costs, terminal)
    show_remarks([*request.remarks, *base.machine.warnings], terminal)
    if chart is not None:
        write_output(chart, draw_scaling(scaling, f"{base.model.name} on {base.machine.gpu.name}"))
        say(terminal, f"curves drawn in {chart}")
    if as_json:
        plan = plan_json(base, counts[-1])
        answer({**plan, **scaling_json(scaling)})
    return 0 if any(point.best for point in scaling.strong) else 1
