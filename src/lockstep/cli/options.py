"""Options that mean the same in every command, the config values they make, and how commands answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.errors import UserError, nearest, reason

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.config.schema import LaunchConfig, Layer
    from lockstep.launch.nodes import Nodes as NodesOfRun
    from lockstep.record.folder import RunFolder

Layout = Annotated[str | None, typer.Option(help="Mesh axes, such as dp=2,fsdp=4; one may be auto.")]
Nodes = Annotated[str | None, typer.Option(help="Nodes of the run, 2 or 3:4 (at least 3); start it on each of them.")]
NodeRank = Annotated[int | None, typer.Option(help="Which node this is; node 0 is the head.")]
Head = Annotated[str | None, typer.Option(help="HOST:PORT of the head node, where the others find it.")]
Restarts = Annotated[int | None, typer.Option(help="Failures in a row, without a checkpoint between, to try again.")]
OnOom = Annotated[str | None, typer.Option(help="Out of memory: shrink the micro-batch and go on, or stop.")]
MaxTime = Annotated[str | None, typer.Option(help="Save and stop before this is over: 2h, 90m, 1-12:00:00.")]
Nproc = Annotated[int | None, typer.Option(help="Processes on this node. Default: one a GPU, or 2 on CPUs.")]
ShareGpu = Annotated[bool | None, typer.Option("--share-gpu", help="Let several ranks use one GPU, over gloo.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="One config value: a.b=c. May be repeated.")]
Name = Annotated[str | None, typer.Option(help="The run's name under runs/. An unfinished one is continued.")]
RunDir = Annotated[Path | None, typer.Option(help="The run folder itself, instead of a name.")]
Resume = Annotated[str, typer.Option(help="auto, never, or the path of a checkpoint.")]
Accept = Annotated[
    list[str] | None, typer.Option(help="Go on although: changed-script, the code is another one. May be repeated.")
]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps to do in all.")]
Profile = Annotated[str | None, typer.Option(metavar="STEPS", help="Record a trace of these steps: 10-12, or 10.")]
ProfileRanks = Annotated[str | None, typer.Option(help="Ranks that record it: 0,3, or all. Default: rank 0.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda when there is a GPU.")]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout, text for people on stderr.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Resolve, check and print; start nothing, write nothing.")]


def given(**options: Any) -> dict[str, Any]:
    """The options the user really gave."""
    return {key: value for key, value in options.items() if value is not None}


def named_layer(what: str | None) -> list[Layer]:
    """The config values that naming a recipe or a TOML file gives."""
    from lockstep.config.schema import Layer
    from lockstep.config.toml import read_toml
    from lockstep.record.folder import name_after

    if what is None:
        return []
    if what.endswith(".toml"):
        return [Layer(what, {"name": name_after(Path(what)), **read_toml(Path(what))})]
    return [Layer("the command line", {"recipe": what})]


def find_run(run: Path) -> Path:
    """The folder of a run, which may have no events yet; else a sentence with the nearest one that is there."""
    from lockstep.record.folder import CONFIG, EVENTS, JOB_SCRIPT

    def is_run(path: Path) -> bool:
        return any((path / name).exists() for name in (EVENTS, CONFIG, JOB_SCRIPT))

    if is_run(run):
        return run
    if run.exists():
        raise UserError(f"{run} is not a run folder (it has no {EVENTS})", "give a folder such as runs/lm")
    places = dict.fromkeys((run.parent, Path("runs")))
    known = {path.name: path for place in places if place.is_dir() for path in place.iterdir() if is_run(path)}
    close = nearest(run.name, known)
    some = (
        f"there {'is' if len(known) == 1 else 'are'} {', '.join(map(str, sorted(known.values())[:10]))}"
        if known
        else "give a folder such as runs/lm"
    )
    raise UserError(f"there is no run {run}", f"did you mean {known[close]}?" if close else some)


def parse_size(text: str) -> int:
    """A number of bytes that a user wrote, as in 500MB."""
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    number, unit = text[:-2].strip(), text[-2:].upper()
    try:
        count = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        count = 0
    if count <= 0:
        raise UserError(f"{text!r} is not a size", "write 500MB or 5GB")
    return count


def check_output(option: str, path: Path | None, suffix: str) -> None:
    """Refuse a file that cannot be written before there is anything to write."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder", f"name a file in it, as in {path / f'name{suffix}'}")
    if path.suffix != suffix:
        raise UserError(f"{option} {path} is not a {suffix} file", f"call it {path.with_suffix(suffix)}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path} would be in a folder that is not there", f"make {path.parent} first")
    if not all(os.access(place, os.W_OK) for place in (path.parent, path) if place.exists()):
        raise UserError(f"{option} {path} cannot be written", "name a file in a folder of your own")


def write_output(path: Path, text: str) -> None:
    """Write a file that `check_output` had nothing against; a disk may be full all the same."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({reason(error)})", "name a file somewhere else") from None


def processes(nproc: int | None, device: str, share_gpu: bool) -> tuple[int, str, str | None]:
    """How many processes to start, on which device, and one line when GPUs are visible but unused."""
    from lockstep.runtime.device import visible_gpus

    gpus = visible_gpus()
    if device == "cuda" and gpus == 0:
        raise UserError(
            "--device cuda was asked for but no GPU is visible", "use --device cpu, or check CUDA_VISIBLE_DEVICES"
        )
    chosen = "cuda" if gpus and device != "cpu" else "cpu"
    count = nproc or (gpus if chosen == "cuda" else 2)
    if chosen == "cuda" and count > gpus and not share_gpu:
        raise UserError(
            f"--nproc {count} but {gpus} visible GPU{'s' if gpus > 1 else ''}",
            f"use --nproc {gpus}, or --share-gpu to let ranks share them, or --device cpu",
        )
    used = min(count, gpus) if chosen == "cuda" else 0
    unused = None
    if used < gpus:
        unused = f"{gpus} GPU{'s are' if gpus > 1 else ' is'} visible and {used or 'none'} used: "
        unused += f"--nproc {gpus} uses all" if chosen == "cuda" else "leave --device cpu out to use GPUs"
    return count, chosen, unused


def is_done(run_dir: Path | None) -> bool:
    """Whether this is a later start of a job whose run is finished, by a start that Slurm had lost sight of."""
    from lockstep.record.folder import look_back
    from lockstep.runtime.slurm_env import find_allocation

    job = find_allocation()
    return run_dir is not None and job is not None and job.restart > 0 and look_back(run_dir).kind == "end"


def check_resume(resume: str, folder: RunFolder) -> None:
    """`--resume` is auto, never or a whole checkpoint; one that only began the run may be gone since."""
    from lockstep.checkpoint.disk.format import steps_on_disk

    if resume not in ("auto", "never") and not (folder.continues and steps_on_disk(folder.path)):
        from lockstep.checkpoint.resume import given_checkpoint

        given_checkpoint(Path(resume))


def print_plan(
    config: LaunchConfig,
    origin: Mapping[str, str],
    folder: RunFolder,
    terminal: Terminal,
    as_json: bool,
    **more: Mapping[str, str],
) -> None:
    """What `--dry-run` shows: every value, where it came from, and which run it would be; `more` goes into its JSON."""
    from rich.table import Table

    from lockstep.config.schema import flatten

    values = dict(flatten(config.model_dump(mode="json")))
    if as_json:
        plan = {key: {"value": value, "from": origin.get(key, "default")} for key, value in values.items()}
        print(json.dumps({"run": str(folder.path), "continues": folder.continues, "config": plan, **more}))
        return
    table = Table("key", "value", "from", box=None, header_style="bold", pad_edge=False)
    for key, value in values.items():
        table.add_row(key, "unset" if value is None else str(value), origin.get(key, "default"))
    terminal.print(table)
    terminal.print(f"\nwould be: {folder.announce()}; nothing was started or written")


def train_in(
    folder: RunFolder,
    config: LaunchConfig,
    worker: list[str],
    terminal: Terminal,
    *,
    told: dict[str, Any],
    resume: str,
    unused_gpus: str | None,
    nodes: NodesOfRun,
    on_oom: str,
) -> int:
    """Create the run folder, launch the workers, show the run to its end; returns the exit code."""
    from lockstep.launch.follow_job import note_start
    from lockstep.launch.local import launch
    from lockstep.launch.nodes import settle_head
    from lockstep.page.reading.reader import RunReader
    from lockstep.page.report import leave_report
    from lockstep.record.folder import EXIT_CODE, create_folder, hold, is_held, take_back
    from lockstep.runtime import stop_signals
    from lockstep.runtime.slurm_env import find_allocation
    from lockstep.sinks.closing import show_closing
    from lockstep.sinks.console import Console

    made = create_folder(folder, config) if nodes.is_head else []
    nodes = settle_head(nodes, folder.path)
    assert config.nproc is not None
    with hold(folder.path) if nodes.is_head else nullcontext() as lock:
        if nodes.is_head:
            note_start(folder)
        if nodes.speaks:
            terminal.print(folder.announce(), soft_wrap=True)
            if unused_gpus:
                terminal.print(unused_gpus, style="yellow", soft_wrap=True)
        console = Console(terminal)
        try:
            outcome = launch(
                worker,
                config.nproc,
                folder,
                console,
                options=told,
                resume=resume,
                nodes=nodes,
                restarts=config.restarts,
                on_oom=config.on_oom or on_oom,
                is_ours=partial(is_held, folder.path, lock) if lock else None,
            )
            stop_signals.ignore()  # its code is known
        finally:
            console.close()
        is_ours = lock is not None and is_held(folder.path, lock)
        if is_ours and find_allocation():
            (folder.path / EXIT_CODE).write_text(str(outcome.code), encoding="ascii")
    reader = RunReader(folder.path) if folder.events.exists() else None  # of both: a long log is read once
    missing = leave_report(folder.path, reader) if is_ours and outcome.code != 2 and reader else ""
    if outcome.code != 2 and nodes.speaks:
        show_closing(folder.path, terminal, reader, has_report=not missing)
    if missing:
        terminal.print(missing, markup=False, soft_wrap=True)
    if outcome.code == 2 and nodes.is_head:
        take_back(folder, made)
    if outcome.text:
        log = f"\n  log: {outcome.log}" if outcome.log else ""
        print(f"lockstep: {outcome.text}{outcome.more}{log}", file=sys.stderr)
    return outcome.code


def result(folder: RunFolder, code: int) -> dict[str, Any]:
    """What `--json` prints of a run: where it is, how it ended, its last scores."""
    from lockstep.record.log import read_events, without_non_finite

    result: dict[str, Any] = {"run": str(folder.path), "exit": code}
    last = {event["kind"]: event for event in read_events(folder.events)} if folder.events.exists() else {}
    if "end" in last:
        wanted = ("step", "loss", "best_loss", "best_step", "metrics", "seconds")
        result |= {key: last["end"][key] for key in wanted}
    if "test" in last:
        result["test"] = {key: last["test"][key] for key in ("step", "loss", "metrics", "samples")}
    finite: dict[str, Any] = without_non_finite(result)
    return finite
