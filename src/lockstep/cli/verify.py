"""`lockstep verify`: prove that a layout gives the numbers one device gives."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as opt
from lockstep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.causes import Verdict
    from lockstep.config import LaunchConfig
    from lockstep.launch.local import Outcome
    from lockstep.layout import Layout
    from lockstep.verify import Comparison

MOST_LINES_OF_A_LOG = 60


def verify_command(
    what: Annotated[
        str | None, typer.Argument(metavar="[RECIPE | config.toml | SCRIPT]", help="Default: the recipe lm.")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, after --.")] = None,
    layout: Annotated[str | None, typer.Option(help="The layout to prove, such as fsdp=2. Default: dp=2.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes; needed where an axis of the layout is auto.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 5,
    blocks: Annotated[int | None, typer.Option(min=2, help="Keep the first N of every list of blocks.")] = None,
    set_: opt.Set = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say how the model would be cut, compare nothing.")
    ] = False,
    as_json: opt.Json = False,
) -> int:
    """Train a few steps under a layout and on one process, on CPUs, and compare every number; nothing is kept."""
    from rich.console import Console as Terminal

    from lockstep.layout import Layout

    terminal = Terminal(stderr=as_json, highlight=False)
    config, wanted, worker = _subject(what, args or [], opt.given(layout=layout, nproc=nproc), set_ or [])
    settings = {"steps": steps, "micro_batch": {}, "blocks": blocks, "explain": explain, "layout": str(wanted)}
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as temporary:
        folders = {name: Path(temporary, name) for name in ("layout", "single")}
        if explain:
            return _explain(folders["single"], config, worker, settings, terminal, as_json)

        from lockstep.causes import judge
        from lockstep.recording import read_recording
        from lockstep.verify import compare

        with terminal.status(f"training {steps} steps under {wanted}"):
            outcome = _launch(folders["layout"], config, wanted, worker, settings)
        if outcome.code:
            return _failed(outcome, f"under {wanted}", as_json)
        ours = read_recording(folders["layout"] / "recording")
        with terminal.status(f"training {steps} steps on one process"):
            settings["micro_batch"] = ours.micro_batch
            outcome = _launch(folders["single"], config, Layout(), worker, settings)
        if outcome.code:
            return _failed(outcome, "on one process", as_json)
        found = compare(ours, read_recording(folders["single"] / "recording"))
        verdict = judge(found)
        _show(found, verdict, terminal)
        if as_json:
            print(json.dumps(_as_json(found, verdict), allow_nan=False))
        return 0 if found.same else 1


def _subject(
    what: str | None, args: list[str], told: dict[str, Any], assignments: list[str]
) -> tuple[LaunchConfig, Layout, list[str]]:
    """What is to be verified: its config, the layout in question, and what the launcher starts.

    Whatever it says about devices, it runs on CPUs; a recipe neither validates nor saves between its steps.
    """
    from lockstep import config as cfg
    from lockstep.layout import Layout

    on_cpus = {"device": "cpu", "backend": "gloo", "share_gpu": False}
    is_script = what is not None and what.endswith(".py")
    if args and not is_script:
        raise UserError(f"{args[0]!r} is one argument too many", "a recipe takes --set; a script ends in .py")
    if is_script and not Path(str(what)).is_file():
        raise UserError(f"there is no script {what}", "check the path")
    config: cfg.LaunchConfig
    if is_script:
        values = {"layout": "dp=2", **told, **cfg.parse_assignments(assignments), **on_cpus}
        config = cfg.script_config({**values, "script": what, "args": args}, "the command line")
        wanted = _resolve_layout(Layout.parse(config.layout), config.nproc)
        return config, wanted, ["script", str(what), *args]

    resolved = cfg.resolve(
        [
            cfg.Layer("default", {"layout": "dp=2"}),
            *opt.named_layer(what),
            cfg.Layer("the command line", told),
            cfg.Layer("--set", cfg.parse_assignments(assignments)),
            cfg.Layer("verify", {**on_cpus, "validate_every": "never", "save_every": "never"}),
        ]
    )
    wanted = _resolve_layout(Layout.parse(resolved.config.layout), resolved.config.nproc)
    return cfg.for_world(resolved, wanted.world_size).config, wanted, ["train"]


def _resolve_layout(layout: Layout, nproc: int | None) -> Layout:
    if layout.auto and nproc is None:
        raise UserError(f"layout {layout} leaves the number of processes open", "say --nproc, or give the axis a size")
    resolved = layout.resolve(nproc or layout.world_size)
    if resolved.world_size == 1:
        raise UserError("layout single is one process, which others are compared with", "say --layout dp=2, say")
    return resolved


def _launch(
    folder: Path,
    config: LaunchConfig,
    layout: Layout,
    worker: list[str],
    settings: dict[str, Any],
    terminal: Terminal | None = None,
) -> Outcome:
    """Run the subject in a folder of its own under a layout; what it prints goes to `terminal`, or nowhere."""
    from rich.console import Console as Terminal

    from lockstep.config import LaunchConfig
    from lockstep.folder import RunFolder, create_folder
    from lockstep.launch.local import launch
    from lockstep.sinks.console import Console

    run = RunFolder(folder, 1)
    config = config.model_copy(update={"layout": str(layout), "nproc": layout.world_size})
    create_folder(run, config)
    (folder / "recording").mkdir()
    given = {key: value for key, value in config.model_dump().items() if key in config.model_fields_set}
    console = Console(terminal or Terminal(file=io.StringIO()))
    try:
        return launch(
            worker if worker[0] == "script" else ["train", str(folder)],
            layout.world_size,
            run,
            console,
            options={key: value for key, value in given.items() if key in LaunchConfig.model_fields and key != "steps"},
            resume="never",
            verify={"folder": str(folder / "recording"), **settings},
        )
    finally:
        console.close()


def _explain(
    folder: Path, config: LaunchConfig, worker: list[str], settings: dict[str, Any], terminal: Terminal, as_json: bool
) -> int:
    """Let one process look at the model, and show how it would be cut."""
    from lockstep.explain import show
    from lockstep.layout import Layout
    from lockstep.recording import PLAN

    with terminal.status("looking at the model"):
        outcome = _launch(folder, config, Layout(), worker, settings)
    if outcome.code:
        return _failed(outcome, "on one process", as_json)
    path = folder / "recording" / PLAN
    if not path.exists():
        raise UserError(
            "the script made no loader, so there was nothing to look at", "call run.setup and run.loader in it"
        )
    plan = json.loads(path.read_text(encoding="utf-8"))
    show(plan, terminal)
    if as_json:
        print(json.dumps(plan, allow_nan=False))
    return 0


def _failed(outcome: Outcome, where: str, as_json: bool) -> int:
    """Say why a run did not come to its end, with what it printed; returns the exit code."""
    from lockstep.launch.worker import END_OF_OUTPUT

    text = outcome.text
    if outcome.code == 1:
        text = f"the run {where} failed: {text}"
        if outcome.log and outcome.log.exists():
            lines = outcome.log.read_text(encoding="utf-8", errors="replace").splitlines()[-MOST_LINES_OF_A_LOG:]
            text += "".join(f"\n  | {line}" for line in lines if line != END_OF_OUTPUT)
        if as_json:
            print(json.dumps({"ok": False, "cause": "failed", "verdict": text}))
    if text:
        print(f"lockstep: {text}", file=sys.stderr)
    return outcome.code


def _show(found: Comparison, verdict: Verdict, terminal: Terminal) -> None:
    from rich.table import Table

    from lockstep.verify import checks

    for line in _remarks(found):
        terminal.print(line, markup=False)
    table = Table("check", "largest difference", "allowed", "", "", box=None, header_style="bold", pad_edge=False)
    for check in checks(found):
        amounts = ["" if amount is None else f"{amount:.1e}" for amount in (check.largest, check.allowed)]
        outcome = "[green]ok[/]" if check.ok else "[bold red]MISMATCH[/]"
        table.add_row(check.name, *amounts, outcome, check.note)
    terminal.print(table)
    terminal.print(f"\n{verdict.text}", style="green" if found.same else "bold red", markup=False, soft_wrap=True)


def _remarks(found: Comparison) -> list[str]:
    """What was not as the recipe or script has it."""
    rank = found.ours.ranks[0]
    remarks = [
        f"computed with {key} = {instead}, not {asked}: what differs is then a mistake, and not rounding"
        for key, (asked, instead) in rank["changed"].items()
    ]
    if len(found.ours.blocks) < rank["blocks_built"]:
        remarks.append(f"{len(found.ours.blocks)} of {rank['blocks_built']} blocks")
    return remarks


def _as_json(found: Comparison, verdict: Verdict) -> dict[str, Any]:
    from lockstep.events import without_non_finite
    from lockstep.verify import checks

    return {
        "ok": found.same,
        "layout": found.layout,
        "steps": len(found.steps),
        "micro_batch": found.ours.micro_batch,
        "remarks": _remarks(found),
        "checks": [without_non_finite(asdict(check)) for check in checks(found)],
        "cause": verdict.cause,
        "step": verdict.step,
        "module": verdict.module,
        "parameter": verdict.parameter,
        "verdict": verdict.text,
    }
