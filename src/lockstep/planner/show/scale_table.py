"""What `lockstep plan --scale` prints and draws: both curves, and how often to save."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console as Terminal
from rich.table import Table

from lockstep.planner.search.scale import GPU_WRITES_GB_S, Costs, Point, ScalingCurves
from lockstep.planner.show.one_layout import add_columns, count_text, print_whole, say, schedule_text
from lockstep.text.charts import ChartLine, line_chart, terminal_chart
from lockstep.text.units import percent, seconds_text


def show_scaling(scaling: ScalingCurves, costs: Costs, terminal: Terminal) -> None:
    """Tables, a chart, and the checkpoints."""
    batch, last = scaling.strong[-1].global_batch, scaling.weak[-1]
    _show_curve(f"strong scaling: {batch:,} samples a step on every size", scaling.strong, terminal)
    share = last.global_batch // last.gpus
    _show_curve(f"weak scaling: {share} sample{'s' if share > 1 else ''} a GPU", scaling.weak, terminal)
    series = curves(scaling)
    if series and terminal.encoding.lower().startswith("utf"):
        terminal.print("\nper cent over GPUs: efficiency, and the share of a step that is communication", style="bold")
        chart = terminal_chart(series, min(terminal.width, 90), height=12, log_x=True, x_format=_whole)
        say(terminal, chart)
    _show_savings(scaling, costs, terminal)


def _show_curve(title: str, points: Sequence[Point], terminal: Terminal) -> None:
    say(terminal, f"\n{title}", "bold")
    missing = [point for point in points if point.best is None]
    for point in missing[-1:]:
        sizes = f"{missing[0].gpus:,} to {point.gpus:,} GPUs" if len(missing) > 1 else f"{point.gpus:,} GPUs"
        terminal.print(f"{sizes}: nothing fits; on {point.gpus:,} {point.why}", style="dim", soft_wrap=True)
    if len(missing) == len(points):
        return
    unit = next(point.figures.item for point in points if point.figures)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    add_columns(table, ">GPUs", "layout", ">micro", "recomp", "schedule", ">step", f">{unit}/s", ">MFU")
    add_columns(table, ">efficiency", ">comm.")
    for point in points:
        if point.best is None or point.figures is None or point.efficiency is None:
            continue
        job, found = point.best.job, point.figures
        cells = [f"{point.gpus:,}", str(job.layout), str(job.micro_batch), job.recompute, schedule_text(job)]
        cells += [seconds_text(found.step), count_text(found.items_per_second)]
        table.add_row(*cells, *map(percent, (found.mfu, point.efficiency, found.communication)))
    print_whole(table, terminal)


def curves(scaling: ScalingCurves) -> list[ChartLine]:
    """Efficiency and communication of both, in per cent."""
    found = []
    for name, points in (("strong", scaling.strong), ("weak", scaling.weak)):
        shown = [point for point in points if point.figures is not None and point.efficiency is not None]
        if shown:
            efficiency = [(float(point.gpus), 100 * (point.efficiency or 0.0)) for point in shown]
            waiting = [(float(point.gpus), 100 * point.figures.communication) for point in shown if point.figures]
            found += [ChartLine(f"{name}: efficiency", efficiency), ChartLine(f"{name}: communication", waiting)]
    return found


def draw_scaling(scaling: ScalingCurves, title: str) -> str:
    """The curves as an SVG."""
    return line_chart(title, "GPUs", "per cent", curves(scaling), log_x=True, x_format=_whole)


def _show_savings(scaling: ScalingCurves, costs: Costs, terminal: Terminal) -> None:
    rates = {point.gpus: point.figures.items_per_second for point in scaling.strong if point.figures}
    if not rates:
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    unit = next(point.figures.item for point in scaling.strong if point.figures)
    add_columns(table, ">GPUs", ">a failure every", ">a save", ">save every", ">goodput", f">useful {unit}/s")
    for gpus, saving in scaling.savings.items():
        if gpus not in rates:
            continue
        cells = [f"{gpus:,}", long_text(saving.between_failures), seconds_text(saving.save), long_text(saving.interval)]
        table.add_row(*cells, f"{100 * saving.goodput:.1f} %", count_text(rates[gpus] * saving.goodput))
    terminal.print("\ncheckpoints: how often (Daly), and what failures leave (strong scaling)", style="bold")
    print_whole(table, terminal)
    speed = f"{GPU_WRITES_GB_S:.2g} GB/s a GPU" if costs.node_gb_s is None else f"{costs.node_gb_s:.3g} GB/s a node"
    writes = f"saves are written at {speed}, and training waits {percent(costs.waited)} of that time ({costs.source})"
    if costs.save_seconds is not None:
        writes = f"a save stops the training for {seconds_text(costs.save_seconds)} (--save-seconds)"
    fails = f"one GPU alone would fail every {costs.gpu_hours_between_failures:,.0f} hours ({costs.failures})"
    say(terminal, f"{fails}; {writes}; a restart takes {seconds_text(costs.restart)}", "dim")


def long_text(seconds: float) -> str:
    """Seconds up to years."""
    for unit, name in ((365.25 * 86400, "years"), (86400, "days"), (3600, "hours")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return seconds_text(seconds)


def _whole(value: float) -> str:
    return f"{value:,.0f}"
