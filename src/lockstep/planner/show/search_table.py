"""What `lockstep plan` prints of a search: a ranked table, the Pareto front, and ways out where nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console as Terminal
from rich.table import Table

from lockstep.planner.cost.checks import capacity
from lockstep.planner.cost.estimate import TIME_TERMS, Time
from lockstep.planner.cost.figures import figures, largest_loss
from lockstep.planner.cost.job import Job
from lockstep.planner.search.fitting import Way, enough_gpus
from lockstep.planner.search.rank_layouts import Asked, Candidate, SearchResult
from lockstep.planner.show.one_layout import add_columns, count_text, holder, print_whole, say, schedule_text
from lockstep.text.charts import ChartLine, line_chart, terminal_chart
from lockstep.text.units import bytes_text, percent, seconds_text

MOST_ROWS = 10


def show_found(found: SearchResult, terminal: Terminal) -> None:
    """The best of each layout, and the Pareto front."""
    best = found.best_of_kinds[:MOST_ROWS]
    has_pp = any(candidate.job.layout.pp > 1 for candidate in best)
    has_fsdp = any(candidate.job.layout.fsdp > 1 for candidate in best)
    heads = [">micro", "recomp", *["schedule"] * has_pp, *["shard"] * has_fsdp]
    unit = figures(best[0].job, best[0].time).item
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    add_columns(table, "layout", *heads, ">memory", ">step", f">{unit}/s", ">MFU", "most lost to")
    for number, candidate in enumerate(best):
        job, numbers = candidate.job, figures(candidate.job, candidate.time)
        cells = [str(job.micro_batch), job.recompute]
        cells += [schedule_text(job)] * has_pp
        cells += [f"zero{job.effective_zero}" if job.layout.fsdp > 1 else "-"] * has_fsdp
        cells += [
            bytes_text(candidate.memory.total),
            seconds_text(candidate.time.total),
            count_text(numbers.items_per_second),
        ]
        cells += [percent(numbers.mfu), lost_to(candidate.time)]
        table.add_row(str(job.layout), *cells, style="bold" if number == 0 else "")
    terminal.print()
    print_whole(table, terminal)
    say(terminal, counted(found), "dim")


def counted(found: SearchResult) -> str:
    """How many were looked at, and what became of them."""
    reasons = "; ".join(f"{count:,} {_reason(reason)}" for reason, count in found.refused.most_common())
    layouts = len(found.best_of_layouts)
    several = f", in {layouts} layouts" if layouts > 1 else ""
    told = f"{found.considered:,} candidates: {len(found.fitting):,} fit{several}"
    return f"{told}; {reasons}" if reasons else told


def show_nothing(found: SearchResult, job: Job, terminal: Terminal) -> None:
    """That nothing fits, and by how much."""
    terminal.print("\nnothing fits", style="bold red")
    if found.least is not None:
        needed, least = found.least
        has = f"a {holder(job)} has {bytes_text(capacity(job.machine.gpu))}"
        say(terminal, f"the least that any takes is {bytes_text(needed)} ({least.layout}), and {has}")
    say(terminal, counted(found), "dim")


def _reason(reason: str) -> str:
    return {"does not fit": "do not fit", "too close to say": "are too close to say"}.get(
        reason, f"not possible: {reason}"
    )


def lost_to(time: Time) -> str:
    """The largest term besides products, in a word, with its share."""
    name, share = largest_loss(time)
    return f"{TIME_TERMS[name].short} {percent(share)}"


def show_front(found: SearchResult, terminal: Terminal) -> None:
    """The Pareto front: what less memory costs."""
    front = found.front
    if len(front) < 2:
        return
    terminal.print(
        "\nwhat less memory costs (Pareto front): seconds of a step over memory, which is logarithmic", style="bold"
    )
    if terminal.encoding.lower().startswith("utf"):
        series, width = [ChartLine("front", front_points(front))], min(terminal.width, 76)
        chart = terminal_chart(series, width, height=7, log_x=True, x_format=bytes_text)
        say(terminal, chart)
    chosen = front if len(front) <= 5 else [front[round(i * (len(front) - 1) / 4)] for i in range(5)]
    for candidate in chosen:
        job = candidate.job
        words = [f"micro-batch {job.micro_batch}", "recompute" if job.recompute == "full" else "no recompute"]
        words += [schedule_text(job)] if job.layout.pp > 1 else []
        words += [f"zero{job.effective_zero}"] if job.layout.fsdp > 1 else []
        sizes = f"{bytes_text(candidate.memory.total):>8} {seconds_text(candidate.time.total):>8}"
        say(terminal, f"{sizes}  {job.layout}, {', '.join(words)}")


def front_points(front: Sequence[Candidate]) -> list[tuple[float, float]]:
    """Bytes and seconds, from the smallest on."""
    return [(candidate.memory.total, candidate.time.total) for candidate in reversed(front)]


def draw_front(found: SearchResult, title: str) -> str:
    """The front as an SVG."""
    series = [ChartLine("Pareto front", front_points(found.front))]
    return line_chart(title, "memory of a GPU", "seconds of a step", series, log_x=True, x_format=bytes_text)


# ---- when it does not fit


def show_ways(job: Job, ways: Sequence[Way], before: Time, terminal: Terminal) -> None:
    """Changes after which it fits, with what they cost."""
    if not ways:
        return
    terminal.print("\nways to make it fit, the fastest first, those with more GPUs last:", style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    add_columns(table, "")
    table.add_column("", overflow="fold")
    add_columns(table, ">", ">", ">")
    for number, way in enumerate(ways, start=1):
        candidate = way.candidate
        change = candidate.time.total / before.total - 1
        times = f"{100 * change:+.0f} % time"
        if candidate.job.layout.world_size != job.layout.world_size:
            hours = candidate.time.total * candidate.job.layout.world_size / (before.total * job.layout.world_size) - 1
            times += f", {100 * hours:+.0f} % GPU-hours"
        table.add_row(
            f"{number}.", way.text, bytes_text(candidate.memory.total), seconds_text(candidate.time.total), times
        )
    terminal.print(table)
    against = f"what this layout would take on a GPU with enough memory ({seconds_text(before.total)})"
    say(terminal, f"time is against {against}", "dim")


def show_enough(base: Job, asked: Asked, terminal: Terminal) -> int | None:
    """How many GPUs would do, where these do not."""
    name, asked = base.machine.gpu.name, replace(asked, layout=None)
    found = enough_gpus(base, asked)
    batch = f"--global-batch {base.global_batch}"
    if found is None:
        says = f"no number of {name} was found on which it fits: a larger --global-batch or a shorter --seq may help"
    else:
        least = "the smallest number on which it does" if found.is_least else "a smaller number may do as well"
        says = f"it fits on {found.gpus:,} x {name} ({least}): --gpus {found.gpus} {_asked_for(found.job)} {batch}"
    say(terminal, says)
    fewer = enough_gpus(base, asked, at_once=True)
    if fewer is not None and (found is None or fewer.gpus < found.gpus):
        batch = f"--global-batch {fewer.job.global_batch}"
        options = f"--gpus {fewer.gpus} {_asked_for(fewer.job)} {batch} (gradients are then sharded as they come)"
        say(terminal, f"with a smaller batch, of one micro-batch a step, it fits on {fewer.gpus:,}: {options}")
    return None if found is None else found.gpus


def _asked_for(job: Job) -> str:
    """The options of this command that mean that job."""
    schedule = f" --schedule {job.schedule}" if job.layout.pp > 1 else ""
    return f"--layout {job.layout} --micro-batch {job.micro_batch} --recompute {job.recompute}{schedule}"
