"""What `lockstep plan` prints: one layout term by term, a ranked table of many, and ways out where one does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console as Terminal
from rich.measure import Measurement
from rich.table import Table

from lockstep.amounts import bytes_text, seconds_text
from lockstep.charts import Series, line_chart, terminal_chart
from lockstep.planner.checks import Verdict, capacity, verdict
from lockstep.planner.estimate import Memory, Time
from lockstep.planner.figures import SHARES, figures
from lockstep.planner.fitting import Way
from lockstep.planner.job import Job
from lockstep.planner.search import Candidate, Found
from lockstep.planner.settings import options

TERMS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits",
    "communication": "communication buffers",
    "slack": "allocator and libraries",
}
COLOURS: dict[Verdict, str] = {"fits": "bold green", "too close to say": "bold yellow", "does not fit": "bold red"}
BAR_WIDTH = 24
MOST_ROWS = 10
SHORT = {"interleaved-1f1b": "1f1b", "interleaved-zero-bubble": "zero-bubble"}
"""Names that a table has room for; the number of stages a rank tells them apart."""
AXIS = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "data", "memory_bound": "memory"}


def count_text(number: float) -> str:
    """A large number in a few letters."""
    for unit, name in ((1e15, "Q"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.3g}"


def percent(share: float) -> str:
    """Whole per cents, but for small ones."""
    return f"{100 * share:.0f} %" if share >= 0.0095 or share == 0 else f"{100 * share:.1f} %"


def schedule_text(job: Job) -> str:
    """The schedule of a pipeline in a few letters."""
    if job.layout.pp == 1:
        return "-"
    short = SHORT.get(job.schedule, job.schedule)
    return short if job.stages_per_rank == 1 else f"{short} x{job.stages_per_rank}"


def title(job: Job, gpus: int) -> str:
    """What is planned, and for what."""
    model, machine = job.model, job.machine
    item = f"samples of {model.sequence:,} tokens" if model.sequence > 1 else "samples"
    nodes = -(-gpus // machine.gpus_per_node)
    where = f"{nodes:,} nodes of {machine.gpus_per_node}" if nodes > 1 else "one node"
    return (
        f"{model.name}, {count_text(model.parameters)} parameters, on {gpus:,} x {machine.gpu.name} ({where})\n"
        f"a step: {job.global_batch:,} {item} in {job.precision}"
    )


def _describe(job: Job) -> str:
    """How a layout does it."""
    layout, many = job.layout, job.micro_batches
    pieces = [f"{many:,} micro-batches of {job.micro_batch}" if many > 1 else f"one micro-batch of {job.micro_batch}"]
    pieces[0] += " a data rank"
    pieces.append("blocks recomputed" if job.recompute == "full" else "nothing recomputed")
    if layout.fsdp > 1:
        pieces.append(f"zero{job.effective_zero}")
    if layout.pp > 1:
        stages = f" with {job.stages_per_rank} stages a rank" if job.stages_per_rank > 1 else ""
        pieces.append(f"schedule {job.schedule}{stages}")
    return f"{layout.explain()}\n{', '.join(pieces)}"


def show_one(job: Job, memories: Sequence[Memory], time: Time, items: float | None, terminal: Terminal) -> None:
    """Memory and time term by term."""
    terminal.print(title(job, job.layout.world_size), markup=False, soft_wrap=True)
    terminal.print(_describe(job), markup=False)
    _show_memory(job, memories, terminal)
    _show_time(job, time, items, terminal)


def _show_memory(job: Job, memories: Sequence[Memory], terminal: Terminal) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    fullest = max(memories, key=lambda memory: memory.total)
    unit, name = (1e9, "GB") if fullest.total >= 1e9 else (1e6, "MB")
    table.add_column(f"memory of a rank, {name}", no_wrap=True)
    heads = [""] if len(memories) == 1 else [_stage(memory, job) for memory in memories]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for term, text in TERMS.items():
        values = [getattr(memory, term) / unit for memory in memories]
        if any(values):
            table.add_row(text, *(f"{value:,.2f}" for value in values))
    if any(memory.shared for memory in memories):
        table.add_row(
            "gradients that come as activations go", *(f"{-memory.shared / unit:,.2f}" for memory in memories)
        )
    table.add_row("total", *(f"{memory.total / unit:,.2f}" for memory in memories), style="bold")
    terminal.print()
    terminal.print(table)
    says = verdict(fullest, job.machine.gpu)
    low, high = ((1 + sign * fullest.band) * fullest.total / unit for sign in (-1, 1))
    terminal.print(
        f"[{COLOURS[says]}]{says}[/]: {low:,.1f} to {high:,.1f} {name} (± {percent(fullest.band)}) of the "
        f"{bytes_text(capacity(job.machine.gpu))} that a rank has",
        soft_wrap=True,
    )
    if fullest.host:
        terminal.print(
            f"the host keeps {bytes_text(fullest.host)} a rank while a checkpoint is written in the background",
            style="dim",
            soft_wrap=True,
        )


def _stage(memory: Memory, job: Job) -> str:
    return "first stage" if memory.stage == 0 else "last stage" if memory.stage >= job.layout.pp - 1 else "middle"


def _show_time(job: Job, time: Time, items: float | None, terminal: Terminal) -> None:
    found = figures(job, time)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(f"a step: {seconds_text(time.total)}", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, text in SHARES.items():
        seconds = getattr(time, name)
        if seconds > 0:
            bar = "█" * round(BAR_WIDTH * seconds / time.total) or "▏"
            table.add_row(text, seconds_text(seconds), percent(seconds / time.total), bar)
    terminal.print()
    terminal.print(table)
    if time.hidden:
        hidden = ", ".join(f"{axis} {seconds_text(seconds)}" for axis, seconds in time.hidden.items() if seconds > 0)
        if hidden:
            terminal.print(f"behind compute, and not in the sum: {hidden}", markup=False, soft_wrap=True)
    rate = found.items_per_second
    terminal.print(
        f"\n{rate:,.0f} {found.item}/s, {rate / job.layout.world_size:,.0f} a GPU; MFU {percent(found.mfu)} of "
        f"{job.machine.gpu.tflops[job.precision]:.3g} TFLOP/s ({job.precision})",
        markup=False,
        soft_wrap=True,
    )
    amount = items or (1e9 if found.item == "tokens" else 1e6)
    hours = found.gpu_hours(job, amount)
    wall = amount / rate
    energy = ""
    if job.machine.gpu.watts:
        energy = (
            f", {_energy(found.kilowatt_hours(job, amount))} ({found.watts:,.0f} W a GPU with its part of the node)"
        )
    terminal.print(
        f"{count_text(amount)} {found.item}: {_duration(wall)}, {_amount(hours)} GPU-hours{energy}",
        markup=False,
        soft_wrap=True,
    )
    terminal.print(f"bottleneck: {found.bottleneck}", markup=False, soft_wrap=True)


def _energy(kilowatt_hours: float) -> str:
    is_much = kilowatt_hours >= 1000
    return f"{_amount(kilowatt_hours / 1000)} MWh" if is_much else f"{_amount(kilowatt_hours)} kWh"


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _duration(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.3g} days"
    return f"{seconds / 3600:.3g} hours" if seconds >= 2 * 3600 else seconds_text(seconds)


def show_remarks(remarks: Sequence[str], terminal: Terminal) -> None:
    """What has to be said beside the numbers."""
    for remark in dict.fromkeys(remarks):
        terminal.print(f"- {remark}", style="yellow", markup=False, soft_wrap=True)


def show_command(job: Job, named: str, terminal: Terminal, what: str = "it") -> None:
    """What to paste."""
    terminal.print(f"\nto run {what}:", style="bold")
    terminal.print(f"lockstep train {named} {options(job)}", markup=False, soft_wrap=True)


# ---- a search


def show_found(found: Found, terminal: Terminal) -> None:
    """The best of each layout, and the Pareto front."""
    best = found.best_of_kinds[:MOST_ROWS]
    has_pp = any(one.job.layout.pp > 1 for one in best)
    has_fsdp = any(one.job.layout.fsdp > 1 for one in best)
    heads = ["micro", "recomp", *["schedule"] * has_pp, *["shard"] * has_fsdp]
    unit = figures(best[0].job, best[0].time).item
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layout", no_wrap=True)
    for head in heads:
        table.add_column(head, no_wrap=True, justify="right" if head == "micro" else "left")
    for head in ("memory", "step", f"{unit}/s", "MFU"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("waits for", no_wrap=True)
    for number, one in enumerate(best):
        job, numbers = one.job, figures(one.job, one.time)
        cells = [str(job.micro_batch), job.recompute]
        cells += [schedule_text(job)] * has_pp
        cells += [f"zero{job.effective_zero}" if job.layout.fsdp > 1 else "-"] * has_fsdp
        cells += [bytes_text(one.memory.total), seconds_text(one.time.total), count_text(numbers.items_per_second)]
        table.add_row(
            str(job.layout), *cells, percent(numbers.mfu), waits_for(one.time), style="bold" if number == 0 else ""
        )
    terminal.print()
    print_whole(table, terminal)
    terminal.print(counted(found), style="dim", markup=False, soft_wrap=True)


def counted(found: Found) -> str:
    """How many were looked at, and what became of them."""
    reasons = "; ".join(f"{count:,} {_reason(reason)}" for reason, count in found.refused.most_common())
    layouts = len(found.best_of_layouts)
    return f"{found.considered:,} candidates: {len(found.fitting):,} fit, of {layouts} layouts" + (
        f"; {reasons}" if reasons else ""
    )


def _reason(reason: str) -> str:
    return {"does not fit": "do not fit", "too close to say": "are too close to say"}.get(
        reason, f"not possible: {reason}"
    )


def waits_for(time: Time) -> str:
    """The largest term besides products, in a word, with its share."""
    name = max((name for name in SHARES if name != "compute"), key=lambda name: float(getattr(time, name)))
    share = getattr(time, name) / time.total
    return f"{AXIS.get(name, name)} {percent(share)}"


def show_front(found: Found, terminal: Terminal) -> None:
    """The Pareto front: what less memory costs."""
    front = found.front
    if len(front) < 2:
        return
    terminal.print("\nPareto front: seconds of a step over memory of a rank, on a logarithmic scale", style="bold")
    if terminal.encoding.lower().startswith("utf"):
        series, width = [Series("front", front_points(front))], min(terminal.width, 76)
        chart = terminal_chart(series, width, height=7, log_x=True, x_format=bytes_text)
        terminal.print(chart, markup=False, soft_wrap=True)
    chosen = front if len(front) <= 5 else [front[round(i * (len(front) - 1) / 4)] for i in range(5)]
    for one in chosen:
        job = one.job
        words = [f"micro-batch {job.micro_batch}", "recompute" if job.recompute == "full" else "no recompute"]
        words += [schedule_text(job)] if job.layout.pp > 1 else []
        words += [f"zero{job.effective_zero}"] if job.layout.fsdp > 1 else []
        sizes = f"{bytes_text(one.memory.total):>8} {seconds_text(one.time.total):>8}"
        terminal.print(f"{sizes}  {job.layout}, {', '.join(words)}", markup=False, soft_wrap=True)


def front_points(front: Sequence[Candidate]) -> list[tuple[float, float]]:
    """Bytes and seconds, from the smallest on."""
    return [(one.memory.total, one.time.total) for one in reversed(front)]


def draw_front(found: Found, title: str) -> str:
    """The front as an SVG."""
    series = [Series("Pareto front", front_points(found.front))]
    return line_chart(title, "memory of a rank", "seconds of a step", series, log_x=True, x_format=bytes_text)


# ---- when it does not fit


def show_ways(job: Job, ways: Sequence[Way], before: Time, terminal: Terminal) -> None:
    """Changes after which it fits, with what they cost."""
    if not ways:
        return
    terminal.print("\nways to make it fit, the fastest first:", style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for _ in range(3):
        table.add_column("", justify="right", no_wrap=True)
    for number, way in enumerate(ways, start=1):
        one = way.candidate
        change = one.time.total / before.total - 1
        times = f"{100 * change:+.0f} % time"
        if one.job.layout.world_size != job.layout.world_size:
            hours = one.time.total * one.job.layout.world_size / (before.total * job.layout.world_size) - 1
            times += f", {100 * hours:+.0f} % GPU-hours"
        table.add_row(f"{number}.", way.text, bytes_text(one.memory.total), seconds_text(one.time.total), times)
    terminal.print(table)
    terminal.print(
        f"time is against what this layout would take on a GPU with enough memory ({seconds_text(before.total)})",
        style="dim",
        markup=False,
        soft_wrap=True,
    )


def print_whole(table: Table, terminal: Terminal) -> None:
    """Numbers that are cut off help nobody: where it is too narrow the terminal breaks the lines itself."""
    needed = Measurement.get(terminal, terminal.options.update(width=1000), table).maximum
    Terminal(file=terminal.file, force_terminal=terminal.is_terminal, width=max(needed, 20)).print(table)
