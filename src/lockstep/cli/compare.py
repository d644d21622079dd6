"""`lockstep compare`: one recipe under several layouts, each run for real, as a scaling table."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer, check_output, complain, open_terminal, say, write_output
from lockstep.cli.short_runs import launch_in
from lockstep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.compare.table import Conditions, LayoutTable, Timed
    from lockstep.config.layers import Resolved
    from lockstep.layout import Layout

    Entrants = Mapping[Layout, Resolved]
    """What is compared, the first with all others, and the config that each runs with."""


def compare_command(
    what: opt.Recipe = None,
    layouts: Annotated[
        str | None, typer.Option(help='What to compare, the first with all others: "single; dp=2; fsdp=2".')
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps of a run; the first few are left out.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of every layout, in turns with the others.")] = 3,
    batch_per_device: Annotated[
        int | None,
        typer.Option(min=1, help="Another experiment: so many samples a replica (dp x fsdp), so that a step grows."),
    ] = None,
    set_: opt.Set = None,
    device: opt.Device = None,
    share_gpu: opt.ShareGpu = None,
    chart: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the speed-ups.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Table, speed-ups and remarks as a page of its own.")
    ] = None,
    as_json: opt.Json = False,
) -> int:
    """Train a few steps under every layout, in turns, and print time, speed-up, efficiency, memory and waiting."""
    import psutil

    from lockstep.compare.table import Conditions

    terminal = open_terminal(as_json)
    check_output("--chart", chart, ".svg")
    check_output("--page", page, ".html")
    told = opt.given(device=device, share_gpu=share_gpu, batch_per_device=batch_per_device)
    entrants, chosen = _entrants(what, layouts, {**told, "steps": steps}, set_ or [])
    cores = len(os.sched_getaffinity(0))
    threads = _threads_of_a_process(entrants, cores)
    with terminal.status("checking the recipe"):
        busy = psutil.cpu_percent(interval=0.5) / 100
        _check_with_torch(entrants, chosen)
    runs = _run_all(entrants, repeats, threads, terminal)
    scaling = _compared(entrants, runs, Conditions(cores, chosen == "cpu", threads, busy))
    return _finish(scaling, runs.code, chart, page, as_json, terminal)


def _entrants(
    what: str | None, layouts: str | None, told: dict[str, Any], assignments: list[str]
) -> tuple[Entrants, str]:
    """All of what is to be compared, checked before anything starts; and the device it runs on."""
    from lockstep.compare.contenders import read_contenders, settle
    from lockstep.config.layers import Layer, parse_assignments, resolve

    layers = [
        *opt.named_layer(what),
        Layer("--set", parse_assignments(assignments)),
        Layer("the command line", told),
        Layer("compare", {"validate_every": "never", "save_every": "never", "profile": None}),
    ]
    first = resolve(layers).config
    usual, chosen, _ = opt.processes(None, first.device, first.share_gpu)
    contenders = read_contenders(_names(layouts, usual))
    for layout in contenders:
        opt.processes(layout.world_size, first.device, first.share_gpu)
    return dict(zip(contenders, settle(contenders, layers), strict=True)), chosen


def _names(layouts: str | None, usual: int) -> list[str]:
    if layouts is None:
        if usual == 1:
            raise UserError("there is one device, and nothing to compare by itself", 'say --layouts "single; dp=2"')
        return ["single", f"dp={usual}", f"fsdp={usual}"]
    names = [name.strip() for name in layouts.split(";") if name.strip()]
    if len(names) < 2:
        raise UserError(
            f"--layouts {layouts!r} is nothing to compare",
            'name at least two, with ; between them: --layouts "single; dp=2"',
        )
    return names


def _check_with_torch(entrants: Entrants, device: str) -> None:
    """What only shows when the recipe is built, or cut."""
    from lockstep.cli.train import check_with_torch
    from lockstep.parallel.build.compile import check_compile

    check_with_torch(next(iter(entrants.values())), device)
    for layout, resolved in entrants.items():
        config = resolved.config
        check_compile(config.compile, layout, config.shard, config.numerics, config.batch_norm)


def _threads_of_a_process(entrants: Entrants, cores: int) -> int:
    """As many for every process of every layout: else one process would have all cores, and nothing could be faster."""
    share = cores // max(layout.world_size for layout in entrants)
    said = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(share, int(said)) if said.isdigit() else share)


@dataclass
class TimedRuns:
    """What was measured so far, by the names of layouts."""

    timed: dict[str, list[Timed]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    code: int = 0
    """130 or 75 where somebody had enough."""


def _run_all(entrants: Entrants, repeats: int, threads: int, terminal: Terminal) -> TimedRuns:
    """Run all in turns."""
    from lockstep.compare.table import read_run
    from lockstep.record.log import read_events

    found = TimedRuns()
    turns = [(turn, *entrant) for turn in range(1, repeats + 1) for entrant in entrants.items()]
    with tempfile.TemporaryDirectory(prefix="lockstep-compare-") as temporary:
        for number, (turn, layout, resolved) in enumerate(turns, start=1):
            name = str(layout)
            if name in found.failures:
                continue
            folder = Path(temporary, f"run-{number}")
            try:
                with terminal.status(f"{name}: run {number} of {len(turns)}"), _own_environment(threads):
                    worker = ["time", str(folder)]
                    outcome = launch_in(folder, resolved.config, worker, resolved.config.model_dump())
            except KeyboardInterrupt:
                found.code = 130
                return found
            gc.collect()  # torch's agent has timers whose thread must not be the one that finds them unused
            if outcome.code in (75, 130):
                found.code = outcome.code
                return found
            if outcome.code:
                found.failures[name] = outcome.text or f"exit code {outcome.code}"
                say(terminal, f"{name}: failed: {found.failures[name]}", style="red")
                continue
            timed = read_run(read_events(folder / "events.jsonl"))
            found.timed.setdefault(name, []).append(timed)
            terminal.print(f"{name}: {timed.step:.4g} s a step (turn {turn} of {repeats})", style="dim", markup=False)
    return found


@contextmanager
def _own_environment(threads: int) -> Iterator[None]:
    """What a launch sets is not for the next one."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _compared(entrants: Entrants, runs: TimedRuns, had: Conditions) -> LayoutTable:
    """What follows from the runs."""
    from lockstep.compare.table import LayoutTable, remarks, tabulate

    layouts, configs = list(entrants), [resolved.config for resolved in entrants.values()]
    config = configs[0]
    same_training = len({config.global_batch for config in configs}) == 1
    rows = tabulate(layouts, runs.timed, runs.failures, same_training=same_training, precision=config.precision)
    assert config.global_batch is not None
    samples = f"{config.global_batch} samples a step: the same training on every layout"
    if not same_training:
        per_replica = config.global_batch // layouts[0].data_size
        samples = f"{per_replica} samples a replica a step: another training on every layout (weak scaling)"
    item = next((run.item for timed in runs.timed.values() for run in timed), "samples")
    notes = remarks(rows, had, same_training=same_training)
    return LayoutTable(f"{config.recipe}, {samples}", same_training, item, had.cores, rows, notes)


def _finish(
    scaling: LayoutTable, stopped: int, chart: Path | None, page: Path | None, as_json: bool, terminal: Terminal
) -> int:
    """Show the table, with what it does not say by itself; returns the exit code."""
    from lockstep.compare.print_table import show_table
    from lockstep.compare.table import draw_chart, to_json

    show_table(scaling, terminal)
    code = stopped or int(any(row.failure or row.same_loss is False for row in scaling.rows))
    if as_json:
        answer({"ok": code == 0, **to_json(scaling)})
    elif code == 130:
        complain("interrupted; the table has what was measured so far")
    if chart is not None:
        write_output(chart, draw_chart(scaling))
        terminal.print(f"speed-ups drawn in {chart}", markup=False)
    if page is not None:
        from lockstep.page.html import page_html
        from lockstep.page.sections.compared import scaling_page

        write_output(page, page_html(scaling_page(scaling, time.time())))
        terminal.print(f"the page is {page}", markup=False)
    return code
