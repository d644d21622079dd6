"""Short runs that commands make to look at a model: launched like any other, in a folder of their own."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.answers import answer, complain, say
from lockstep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.config.schema import LaunchConfig
    from lockstep.launch.supervise import Outcome
    from lockstep.layout import Layout

ON_CPUS = {"device": "cpu", "backend": "gloo", "share_gpu": False}
"""Whatever a config says about devices, they run on CPUs."""

MOST_LINES_OF_A_LOG = 60


def launch_trial(
    folder: Path,
    config: LaunchConfig,
    layout: Layout,
    worker: list[str],
    settings: dict[str, Any],
    terminal: Terminal | None = None,
) -> Outcome:
    """Run the subject in a folder of its own under a layout; what it prints goes to `terminal`, or nowhere."""
    config = config.model_copy(update={"layout": str(layout), "nproc": layout.world_size})
    (folder / "recording").mkdir(parents=True)
    given = {key: value for key, value in config.model_dump().items() if key in config.model_fields_set}
    worker = worker if worker[0] == "script" else ["train", str(folder)]
    verify = {"folder": str(folder / "recording"), **settings}
    return launch_in(folder, config, worker, given, terminal, verify=verify)


def launch_in(
    folder: Path,
    config: LaunchConfig,
    worker: list[str],
    given: dict[str, Any],
    terminal: Terminal | None = None,
    **more: Any,
) -> Outcome:
    """Start `config.nproc` workers in a folder of their own, with what of `given` concerns a launch, and no restart."""
    from rich.console import Console as Terminal

    from lockstep.config.schema import LaunchConfig
    from lockstep.launch.local import launch
    from lockstep.record.folder import RunFolder, create_folder
    from lockstep.sinks.console import Console

    assert config.nproc is not None
    run = RunFolder(folder, 1)
    create_folder(run, config)
    wanted = LaunchConfig.model_fields.keys() - {"steps", "profile", "profile_ranks"}
    options = {key: value for key, value in given.items() if key in wanted}
    options["log_to"] = []  # nobody wants to keep a trial
    console = Console(terminal or Terminal(file=io.StringIO()))
    try:
        return launch(worker, config.nproc, run, console, {"options": options, "resume": "never", **more})
    finally:
        console.close()


def failed(outcome: Outcome, where: str, as_json: bool) -> int:
    """Say why a run did not come to its end, with what it printed; returns the exit code."""
    from lockstep.record.failure import END_OF_OUTPUT, START_OF_OUTPUT

    text = outcome.text
    if outcome.code == 1:
        text = f"the run {where} failed: {text}"
        if outcome.log and outcome.log.exists():
            lines = outcome.log.read_text(encoding="utf-8", errors="replace").splitlines()[-MOST_LINES_OF_A_LOG:]
            text += "".join(f"\n  | {line}" for line in lines if line not in (START_OF_OUTPUT, END_OF_OUTPUT))
        if as_json:
            answer({"ok": False, "cause": "failed", "verdict": text})
    if text:
        complain(text)
    return outcome.code


def look_at(
    folder: Path, config: LaunchConfig, worker: list[str], settings: dict[str, Any]
) -> Outcome | dict[str, Any]:
    """Let one process look at the model of a recipe or script: how it would be cut, or how that failed."""
    from lockstep.layout import Layout
    from lockstep.prove.recording import PLAN

    outcome = launch_trial(folder, config, Layout(), worker, settings)
    if outcome.code:
        return outcome
    path = folder / "recording" / PLAN
    if not path.exists():
        raise UserError(
            "the script made no loader, so there was nothing to look at", "call run.setup and run.loader in it"
        )
    plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return plan


def choose_layout_for(
    config: LaunchConfig, worker: list[str], world_size: int, device: str, terminal: Terminal
) -> Layout:
    """`--layout auto`: let one process look at the model, and choose a layout for it and this machine."""
    from lockstep.planner.search.layout_auto import Facts, choose_layout

    alone = {**ON_CPUS, "layout": "single", "nproc": 1}
    config = config.model_copy(update=alone)
    settings = {"steps": 1, "explain": True, "layout": "single"}
    with tempfile.TemporaryDirectory(prefix="lockstep-look-") as folder, terminal.status("looking at the model"):
        plan = look_at(Path(folder, "look"), config, worker, settings)
    if not isinstance(plan, dict):
        raise UserError(f"no layout could be chosen for this model: {plan.text}", "name one, such as --layout dp=2")
    facts = plan["facts"]
    memory = facts.pop("memory")
    room = memory["cuda"] if device == "cuda" else memory["host"] // world_size
    layout, why = choose_layout(Facts(parameters=plan["parameters"], memory=room, **facts), world_size)
    say(terminal, f"layout {layout}: {why}")
    return layout
