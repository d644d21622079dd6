"""Options that mean the same in every command, and the layer of config values they make."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.config import LaunchConfig, Layer
    from lockstep.folder import RunFolder

Layout = Annotated[str | None, typer.Option(help="Mesh axes, such as dp=2,fsdp=4; one may be auto.")]
Nproc = Annotated[int | None, typer.Option(help="Processes on this node. Default: one a GPU, or 2 on CPUs.")]
ShareGpu = Annotated[bool | None, typer.Option("--share-gpu", help="Let several ranks use one GPU, over gloo.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="One config value: a.b=c. May be repeated.")]
Name = Annotated[str | None, typer.Option(help="The run's name under runs/. An unfinished one is continued.")]
RunDir = Annotated[Path | None, typer.Option(help="The run folder itself, instead of a name.")]
Resume = Annotated[str, typer.Option(help="auto, never, or the path of a checkpoint.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps to do in all.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda when there is a GPU.")]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout, text for people on stderr.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Resolve, check and print; start nothing, write nothing.")]


def given(**options: Any) -> dict[str, Any]:
    """The options the user really gave."""
    return {key: value for key, value in options.items() if value is not None}


def named_layer(what: str | None) -> list[Layer]:
    """The config values that naming a recipe or a TOML file gives."""
    from lockstep.config import Layer
    from lockstep.toml import read_toml

    if what is None:
        return []
    if what.endswith(".toml"):
        return [Layer(what, {"name": Path(what).stem, **read_toml(Path(what))})]
    return [Layer("the command line", {"recipe": what})]


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


def check_resume(resume: str) -> None:
    """`--resume` is auto, never or a whole checkpoint."""
    if resume not in ("auto", "never"):
        from lockstep.checkpoint.resume import check_whole

        check_whole(Path(resume))


def check_can_continue(folder: RunFolder, layout: str) -> None:
    """Refuse a layout the run's last checkpoint cannot be loaded into."""
    from lockstep.checkpoint.format import step_folder, steps_on_disk
    from lockstep.checkpoint.load import check_layout
    from lockstep.layout import Layout

    if folder.continues and (steps := steps_on_disk(folder.path)):
        check_layout(step_folder(folder.path, steps[-1]), Layout.parse(layout))


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

    from lockstep.config import flatten

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
) -> int:
    """Create the run folder, launch the workers, show the run to its end; returns the exit code."""
    from lockstep.folder import create_folder, hold, take_back
    from lockstep.launch.local import launch
    from lockstep.sinks.console import Console

    made = create_folder(folder, config)
    assert config.nproc is not None
    with hold(folder.path):
        terminal.print(folder.announce())
        if unused_gpus:
            terminal.print(unused_gpus, style="yellow")
        console = Console(terminal)
        try:
            outcome = launch(worker, config.nproc, folder, console, options=told, resume=resume)
        finally:
            console.close()
    if outcome.code == 2:
        take_back(folder, made)
    if outcome.text:
        log = f"\n  log: {outcome.log}" if outcome.log else ""
        print(f"lockstep: {outcome.text}{log}", file=sys.stderr)
    return outcome.code


def result(folder: RunFolder, code: int) -> dict[str, Any]:
    """What `--json` prints of a run: where it is, how it ended, its last scores."""
    from lockstep.events import read_events, without_non_finite

    result: dict[str, Any] = {"run": str(folder.path), "exit": code}
    last = {event["kind"]: event for event in read_events(folder.events)} if folder.events.exists() else {}
    if "end" in last:
        wanted = ("step", "loss", "best_loss", "best_step", "metrics", "seconds")
        result |= {key: last["end"][key] for key in wanted}
    if "test" in last:
        result["test"] = {key: last["test"][key] for key in ("step", "loss", "metrics", "samples")}
    finite: dict[str, Any] = without_non_finite(result)
    return finite
