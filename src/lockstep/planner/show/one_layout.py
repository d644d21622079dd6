"""What `lockstep plan` prints: one layout term by term, what to paste, and what all tables have in common."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console as Terminal
from rich.measure import Measurement
from rich.table import Table

from lockstep.planner.cost.checks import Verdict, capacity, verdict
from lockstep.planner.cost.estimate import TIME_TERMS, Memory, Time, fullest_of
from lockstep.planner.cost.figures import figures
from lockstep.planner.cost.job import Job
from lockstep.planner.show.paste import PLACEHOLDER, options
from lockstep.text.units import ROUNDED_UP, bytes_text, percent, seconds_text

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
SHORT = {"interleaved-1f1b": "1f1b", "interleaved-zero-bubble": "zero-bubble"}
"""Names that a table has room for; the number of stages a rank tells them apart."""


def say(terminal: Terminal, text: str, style: str = "") -> None:
    """A line for people, that the terminal may break and that means what it says."""
    terminal.print(text, style=style, markup=False, soft_wrap=True)


def count_text(number: float) -> str:
    """A large number in a few letters."""
    for unit, name in ((1e15, "Q"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= ROUNDED_UP * unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.3g}"


def holder(job: Job) -> str:
    """What has memory of its own."""
    return "process" if job.machine.gpu.is_cpu else "GPU"


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
    number = f"{many:,} micro-batches" if many > 1 else "one micro-batch"
    pieces = [f"{number} of {job.micro_batch} sample{'s' if job.micro_batch > 1 else ''}"]
    if layout.data_size > 1:
        pieces[0] += f" on each of the {layout.data_size:,} data ranks"
    pieces.append("blocks recomputed" if job.recompute == "full" else "nothing recomputed")
    if layout.fsdp > 1:
        pieces.append(f"zero{job.effective_zero}")
    if layout.pp > 1:
        stages = f" with {job.stages_per_rank} stages a rank" if job.stages_per_rank > 1 else ""
        pieces.append(f"schedule {job.schedule}{stages}")
    return f"{layout.explain()}\n{', '.join(pieces)}"


def show_one(job: Job, memories: Sequence[Memory], time: Time, items: float | None, terminal: Terminal) -> None:
    """Memory and time term by term."""
    say(terminal, title(job, job.layout.world_size))
    terminal.print(_describe(job), markup=False)
    _show_memory(job, memories, terminal)
    _show_time(job, time, items, terminal)


def _show_memory(job: Job, memories: Sequence[Memory], terminal: Terminal) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    fullest = fullest_of(memories)
    unit, name = (1e9, "GB") if fullest.total >= 1e9 else (1e6, "MB")
    heads = [""] if len(memories) == 1 else [_stage(memory, job) for memory in memories]
    add_columns(table, f"memory of one {holder(job)}, {name}", *(f">{head}" for head in heads))
    for term, text in TERMS.items():
        values = [getattr(memory, term) / unit for memory in memories]
        if any(values):
            table.add_row(text, *(f"{value:,.2f}" for value in values))
    if any(memory.shared for memory in memories):
        table.add_row("gradients in place of activations", *(f"{-memory.shared / unit:,.2f}" for memory in memories))
    table.add_row("total", *(f"{memory.total / unit:,.2f}" for memory in memories), style="bold")
    terminal.print()
    terminal.print(table)
    says = verdict(fullest, job.machine.gpu)
    low, high = ((1 + sign * fullest.band) * fullest.total / unit for sign in (-1, 1))
    terminal.print(
        f"[{COLOURS[says]}]{says}[/]: {low:,.1f} to {high:,.1f} {name} (± {percent(fullest.band)}) of the "
        f"{bytes_text(capacity(job.machine.gpu))} that a {holder(job)} has",
        soft_wrap=True,
    )
    if fullest.host:
        host = bytes_text(fullest.host)
        say(terminal, f"beside that, {host} of the host's memory for each while a checkpoint is written", "dim")


def _stage(memory: Memory, job: Job) -> str:
    return "first stage" if memory.stage == 0 else "last stage" if memory.stage >= job.layout.pp - 1 else "middle"


def _show_time(job: Job, time: Time, items: float | None, terminal: Terminal) -> None:
    found = figures(job, time)
    table = Table(box=None, header_style="bold", pad_edge=False)
    add_columns(table, f"a step: {seconds_text(time.total)}", ">", ">", "")
    for name, term in TIME_TERMS.items():
        seconds = getattr(time, name)
        if seconds > 0:
            bar = "█" * round(BAR_WIDTH * seconds / time.total) or "▏"
            table.add_row(term.text, seconds_text(seconds), percent(seconds / time.total), bar)
    terminal.print()
    terminal.print(table)
    if time.hidden:
        shown = ((TIME_TERMS[axis].short, seconds) for axis, seconds in time.hidden.items() if seconds > 0)
        if told := "; ".join(f"{axis} {seconds_text(seconds)}" for axis, seconds in shown):
            say(terminal, f"hidden behind compute, and not in the sum: {told}")
    rate = found.items_per_second
    each = f"{rate / job.layout.world_size:,.0f} for each {holder(job)}"
    peak = f"{job.machine.gpu.tflops[job.precision]:.3g} TFLOP/s ({job.precision})"
    say(terminal, f"\n{rate:,.0f} {found.item}/s ({each}), MFU {percent(found.mfu)} of {peak}")
    show_cost(job, time, items or found.usual_amount, terminal)
    say(terminal, f"bottleneck: {found.bottleneck}")


def show_cost(job: Job, time: Time, amount: float | None, terminal: Terminal) -> None:
    """How long so many tokens or samples take, in GPU-hours and energy."""
    if amount is None:
        return
    found = figures(job, time)
    hours = found.gpu_hours(job, amount)
    wall = amount / found.items_per_second
    energy = ""
    if job.machine.gpu.watts:
        used = _energy(found.kilowatt_hours(job, amount))
        energy = f", {used} ({found.watts:,.0f} W for each GPU with its part of the node)"
    say(terminal, f"{count_text(amount)} {found.item}: {_duration(wall)}, {_amount(hours)} GPU-hours{energy}")


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
        say(terminal, f"- {remark}", style="yellow")


def show_command(job: Job, named: str, terminal: Terminal, what: str = "it") -> None:
    """What to paste."""
    yours = ", with a config of yours" if named == PLACEHOLDER else ""
    terminal.print(f"\nto run {what}{yours}:", style="bold")
    say(terminal, f"lockstep train {named} {options(job)}")


def add_columns(table: Table, *heads: str) -> None:
    """Columns by their heads; one that begins with > has numbers."""
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left", no_wrap=True)


def print_whole(table: Table, terminal: Terminal) -> None:
    """Numbers that are cut off help nobody: where it is too narrow the terminal breaks the lines itself."""
    needed = Measurement.get(terminal, terminal.options.update(width=1000), table).maximum
    Terminal(file=terminal.file, force_terminal=terminal.is_terminal, width=max(needed, 20)).print(table)
