"""`lockstep train`: train a recipe."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import open_terminal, plain_table, say
from lockstep.cli.short_runs import choose_layout_for
from lockstep.cli.start_run import Start, choose_run, print_plan, train

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.config.layers import Resolved
    from lockstep.record.folder import RunFolder


@opt.takes_launch_options
def train_command(
    what: opt.Recipe = None,
    *,
    list_: Annotated[bool, typer.Option("--list", help="Show the recipes.")] = False,
    **launch: Any,
) -> int:
    """Train a recipe; without an argument, a small language model on its embedded corpus."""
    if list_:
        from lockstep.config.catalog import RECIPES

        for recipe in RECIPES.values():
            print(f"{recipe.name:10} {recipe.summary}")
        return 0
    from lockstep.checkpoint.disk.code import accept_by_name
    from lockstep.checkpoint.disk.format import steps_on_disk
    from lockstep.config.layers import for_world, resolve
    from lockstep.config.schema import LaunchConfig
    from lockstep.config.selection import ranks_of
    from lockstep.launch.nodes import find_nodes
    from lockstep.layout import AUTO
    from lockstep.record.folder import check_same_training
    from lockstep.sinks.trackers import check_installed

    accept_by_name(launch["accept"])
    terminal = open_terminal(launch["as_json"])
    resolved = resolve(opt.config_layers(what, opt.settings_in(launch), launch["set_"] or []))
    check_installed(resolved.config.log_to)
    count, chosen, unused = opt.processes(resolved.config.nproc, resolved.config.device, resolved.config.share_gpu)
    came_from = resolved.origin["nproc"] if launch["nproc"] else f"{chosen} processes"
    resolved = resolved.with_value("nproc", count, came_from)
    if resolved.config.layout == AUTO:
        alone = for_world(resolved.with_value("layout", "single", "auto"), 1).config
        found = choose_layout_for(alone, ["train"], count, chosen, terminal)
        resolved = resolved.with_value("layout", str(found), f"auto, {resolved.origin.get('layout', 'default')}")
    where = find_nodes(launch["nodes"], launch["node_rank"], launch["head"], launch["resume"])
    asked = resolved.config.layout
    resolved = for_world(resolved, count * where.most)
    ranks_of(resolved.config.profile_ranks, count * where.most)
    if not where.is_alone and "auto" in asked:  # settled at every start, for the nodes that are there
        resolved = resolved.with_value("layout", asked, resolved.origin.get("layout", "default"))
    folder = choose_run(resolved.config.name or resolved.config.recipe, launch, terminal)
    if folder is None:
        return 0
    if folder.continues and steps_on_disk(folder.path):  # else it begins anew, as it pleases
        check_same_training(folder, resolved.config)
    with terminal.status("checking the recipe"):  # a person sees that torch's import takes its seconds
        parameters = check_with_torch(resolved, chosen)
    start = Start(folder, resolved.config, resolved.origin, where, launch, unused, terminal)
    if launch["dry_run"]:
        print_plan(start, formats=_explain(resolved, parameters, chosen, terminal))
        return 0
    launch_keys = LaunchConfig.model_fields
    told = {key: value for key, value in resolved.config.model_dump().items() if key in launch_keys}
    # The trainer reads the steps from the config.
    code = train(start, ["train", str(folder.path)], {**told, "steps": None}, on_oom="shrink")
    if code == 0 and not launch["as_json"]:
        said = [f"--set {shlex.quote(assignment)}" for assignment in launch["set_"] or []]
        said += [f"--steps {launch['steps']}"] if launch["steps"] else []
        other = ("dp=2", "replicas") if "fsdp" in resolved.config.layout else ("fsdp=2", "sharded parameters")
        _next_commands(folder, what, said, other, terminal)
    return code


def check_with_torch(resolved: Resolved, device: str) -> int:
    """What only shows when the recipe is built: data, optimizer, model. Returns the number of parameters."""
    import torch

    from lockstep.config.selection import check_in_reach
    from lockstep.data.loader import dataset_size
    from lockstep.layout import Layout
    from lockstep.parallel.build.compile import check_compilable, check_compile
    from lockstep.recipes.task import task_of
    from lockstep.step.optim import optimizer_factory
    from lockstep.step.precision import DTYPES, check_can_compute, refuse_untrainable

    config = resolved.config
    check_can_compute(config.precision, config.numerics, device)
    check_compile(config.compile, Layout.parse(config.layout), config.shard, config.numerics, config.batch_norm)
    task = task_of(config)
    samples = dataset_size(task.train, "training")
    for dataset, what in ((task.validation, "validation"), (task.test, "test")):
        if dataset is not None:
            dataset_size(dataset, what)
    if config.epochs is not None and config.global_batch is not None:
        per_epoch = -(-samples // config.global_batch)
        check_in_reach(config.profile, config.epochs * per_epoch)
    make_optimizer = optimizer_factory(config.optimizer)
    with torch.device("meta"):
        model = task.build_model().to(DTYPES[config.numerics.storage_dtype])
    check_compilable(config.compile, model, config.recompute)
    named = list(model.named_parameters())
    refuse_untrainable(named, make_optimizer(named), config.numerics)
    return sum(parameter.numel() for _, parameter in named)


def _explain(resolved: Resolved, parameters: int, device: str, terminal: Terminal) -> dict[str, str]:
    """Say what a run would be; returns its number formats."""
    from lockstep.layout import Layout
    from lockstep.step.precision import number_formats

    layout = Layout.parse(resolved.config.layout)
    terminal.print(f"layout {layout}: {layout.explain()}")
    terminal.print(f"model: {parameters:,} parameters\n")
    formats = number_formats(resolved.config.precision, resolved.config.numerics, device)
    table = plain_table("numbers", "format")
    for what, number_format in formats.items():
        table.add_row(what, number_format)
    terminal.print(table, "")
    return formats


def _next_commands(
    folder: RunFolder, what: str | None, said: list[str], other: tuple[str, str], terminal: Terminal
) -> None:
    program, tensorboard = _as_typed("lockstep"), _as_typed("tensorboard")
    curves = folder.path / "tb"
    command = " ".join([program, "train", *([shlex.quote(what)] if what else []), *said])
    run = shlex.quote(str(folder.path))
    tries = (
        (f"{command} --layout {other[0]}", f"the same numbers with {other[1]}"),
        (f"{command} --set seed=1", "change any value; --dry-run shows them all"),
        (f"{program} board {run}", "the run as a page; the next one can be followed live"),
        *[(f"{tensorboard} --logdir {shlex.quote(str(curves))}", "the curves")] * curves.exists(),
        (f"{program} ckpt ls {run}", "what was saved; export makes one file of it"),
        (f"{program} train --list", "the other recipes"),
    )
    width = max(len(text) for text, _ in tries)
    terminal.print("\ntry next:")
    say(terminal, *(f"  {text:{width}}  {why}" for text, why in tries))


def _as_typed(program: str) -> str:
    """A command of this environment as the user can type it: by its name when it is on the PATH, else by its path."""
    beside = Path(sys.argv[0]).with_name(program)
    found = shutil.which(program)
    return str(beside) if beside.exists() and (found is None or Path(found).resolve() != beside.resolve()) else program
