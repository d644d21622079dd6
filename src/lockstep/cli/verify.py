"""`lockstep verify`: prove that a layout gives the numbers one device gives."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer, open_terminal, plain_table, say
from lockstep.cli.short_runs import ON_CPUS, failed, launch_trial, look_at
from lockstep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.config.schema import LaunchConfig
    from lockstep.launch.supervise import Outcome
    from lockstep.layout import Layout
    from lockstep.prove.causes import ProofVerdict
    from lockstep.prove.verify import LayoutComparison


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
    terminal = open_terminal(as_json)
    config, wanted, worker = _subject(what, args or [], opt.given(layout=layout, nproc=nproc), set_ or [])
    settings = {"steps": steps, "blocks": blocks, "explain": explain, "layout": str(wanted)}
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as temporary:
        if explain:
            return _explain(Path(temporary, "single"), config, worker, settings, terminal, as_json)

        from lockstep.prove.causes import judge
        from lockstep.prove.recording import Recording, read_recording
        from lockstep.prove.verify import prove

        def record(where: str, layout: Layout, more: dict[str, Any]) -> Recording:
            folder = Path(temporary, where.replace(" ", "-"))
            with terminal.status(f"training {steps} steps {where}"):
                outcome = launch_trial(folder, config, layout, worker, {**settings, **more})
            if outcome.code:
                raise _FailedError(outcome, where)
            return read_recording(folder / "recording")

        try:
            found, other = prove(wanted, record)
        except _FailedError as error:
            return failed(error.outcome, error.where, as_json)
        verdict = judge(found, other)
        _show(found, other, verdict, terminal)
        if as_json:
            answer(_as_json(found, other, verdict))
        return 0 if verdict.cause is None else 1


class _FailedError(Exception):
    """A run that did not come to its end."""

    def __init__(self, outcome: Outcome, where: str) -> None:
        super().__init__(where)
        self.outcome = outcome
        self.where = where


def _subject(
    what: str | None, args: list[str], told: dict[str, Any], assignments: list[str]
) -> tuple[LaunchConfig, Layout, list[str]]:
    """What is to be verified: its config, the layout in question, and what the launcher starts.

    Whatever it says about devices, it runs on CPUs; a recipe neither validates nor saves between its steps.
    """
    from lockstep.config.layers import Layer, for_world, parse_assignments, resolve
    from lockstep.config.schema import script_config
    from lockstep.layout import Layout

    is_script = what is not None and what.endswith(".py")
    if args and not is_script:
        raise UserError(f"{args[0]!r} is one argument too many", "a recipe takes --set; a script ends in .py")
    if is_script and not Path(str(what)).is_file():
        raise UserError(f"there is no script {what}", "check the path")
    config: LaunchConfig
    if is_script:
        values = {"layout": "dp=2", **told, **parse_assignments(assignments), **ON_CPUS}
        config = script_config({**values, "script": what, "args": args}, "the command line")
        wanted = _resolve_layout(Layout.parse(config.layout), config.nproc)
        return config, wanted, ["script", str(what), *args]

    resolved = resolve(
        [
            Layer("default", {"layout": "dp=2"}),
            *opt.named_layer(what),
            Layer("the command line", told),
            Layer("--set", parse_assignments(assignments)),
            Layer("verify", {**ON_CPUS, "validate_every": "never", "save_every": "never"}),
        ]
    )
    wanted = _resolve_layout(Layout.parse(resolved.config.layout), resolved.config.nproc)
    return for_world(resolved, wanted.world_size).config, wanted, ["train"]


def _resolve_layout(layout: Layout, nproc: int | None) -> Layout:
    if layout.auto and nproc is None:
        raise UserError(f"layout {layout} leaves the number of processes open", "say --nproc, or give the axis a size")
    resolved = layout.resolve(nproc or layout.world_size)
    if resolved.world_size == 1:
        raise UserError("layout single is one process, which others are compared with", "say --layout dp=2, say")
    return resolved


def _explain(
    folder: Path, config: LaunchConfig, worker: list[str], settings: dict[str, Any], terminal: Terminal, as_json: bool
) -> int:
    """Let one process look at the model, and show how it would be cut."""
    from lockstep.prove.explain import show

    with terminal.status("looking at the model"):
        plan = look_at(folder, config, worker, settings)
    if not isinstance(plan, dict):
        return failed(plan, "on one process", as_json)
    show(plan, terminal)
    if as_json:
        answer(plan)
    return 0


def _show(found: LayoutComparison, other: LayoutComparison | None, verdict: ProofVerdict, terminal: Terminal) -> None:
    from lockstep.prove.verify import checks

    for line in _remarks(found):
        terminal.print(line, markup=False)
    table = plain_table("check", "largest difference", "allowed", "", "")
    for check in checks(found, other):
        amounts = ["" if amount is None else f"{amount:.1e}" for amount in (check.largest, check.allowed)]
        outcome = "[green]ok[/]" if check.ok else "[bold red]MISMATCH[/]"
        table.add_row(check.name, *amounts, outcome, check.note)
    terminal.print(table)
    say(terminal, f"\n{verdict.text}", style="bold red" if verdict.cause else "green")


def _remarks(found: LayoutComparison) -> list[str]:
    """What was not as the recipe or script has it."""
    rank = found.ours.ranks[0]
    remarks = [
        f"computed with {key} = {instead}, not {asked}: what differs is then a mistake, and not rounding"
        for key, (asked, instead) in rank["changed"].items()
    ]
    if len(found.ours.blocks) < rank["blocks_built"]:
        remarks.append(f"{len(found.ours.blocks)} of {rank['blocks_built']} blocks")
    return remarks


def _as_json(found: LayoutComparison, other: LayoutComparison | None, verdict: ProofVerdict) -> dict[str, Any]:
    from lockstep.prove.verify import checks
    from lockstep.record.log import without_non_finite

    return {
        "ok": verdict.cause is None,
        "layout": found.layout,
        "steps": len(found.steps),
        "micro_batch": found.ours.micro_batch,
        "remarks": _remarks(found),
        "checks": [without_non_finite(asdict(check)) for check in checks(found, other)],
        "cause": verdict.cause,
        "step": verdict.step,
        "module": verdict.module,
        "parameter": verdict.parameter,
        "verdict": verdict.text,
    }
