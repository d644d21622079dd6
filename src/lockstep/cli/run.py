"""`lockstep run`: launch a user's own script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import complain, open_terminal
from lockstep.cli.short_runs import choose_layout_for
from lockstep.cli.start_run import Start, choose_run, print_plan, train
from lockstep.errors import UserError
from lockstep.text.units import listed


@opt.takes_launch_options
def run_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that calls lockstep.init().")],
    args: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    **launch: Any,
) -> int:
    """Launch your own training script on all devices of this machine; options stand before the script."""
    from lockstep.checkpoint.disk.code import accept_by_name, check_code_on_disk, check_same_script
    from lockstep.config.layers import parse_assignments
    from lockstep.config.schema import script_config
    from lockstep.config.selection import ranks_of
    from lockstep.launch.nodes import find_nodes
    from lockstep.layout import AUTO, Layout
    from lockstep.record.folder import name_after
    from lockstep.sinks.trackers import check_installed

    accept_by_name(launch["accept"])
    if not script.is_file():
        raise UserError(f"there is no script {script}", "check the path; options of lockstep stand before it")
    known = [option for parameter in context.command.params for option in parameter.opts]
    if line := _given_to_the_script(script, args or [], known):
        complain(line)
    terminal = open_terminal(launch["as_json"])
    # A script has no optimizer of the config's.
    told = opt.settings_in(launch) | parse_assignments(launch["set_"] or [], "seed=1")
    origin = dict.fromkeys(["script", *(["args"] if args else []), *told], "the command line")
    config = script_config({**told, "script": str(script), "args": args or []}, "the command line")
    check_installed(config.log_to)
    count, chosen, unused = opt.processes(config.nproc, config.device, config.share_gpu)
    origin.setdefault("nproc", f"{chosen} processes")
    config = config.model_copy(update={"nproc": count})
    worker = ["script", str(script), *(args or [])]
    where = find_nodes(launch["nodes"], launch["node_rank"], launch["head"], launch["resume"])
    ranks_of(config.profile_ranks, count * where.most)
    if config.layout == AUTO:
        resolved = choose_layout_for(config, worker, count, chosen, terminal)
        origin["layout"] = "auto, on the command line"
    else:
        parsed = Layout.parse(config.layout)
        resolved = parsed.resolve(count) if where.is_alone else parsed  # only when they meet, all processes are known
    folder = choose_run(config.name or name_after(script), launch, terminal)
    if folder is None:
        return 0
    check_same_script(folder, script)
    check_code_on_disk(folder.path, script)
    if "layout" in told:  # else the script may say
        told["layout"] = str(resolved)
        config = config.model_copy(update={"layout": str(resolved)})
    start = Start(folder, config, origin, where, launch, unused, terminal)
    if launch["dry_run"]:
        print_plan(start)
        return 0
    return train(start, worker, told, on_oom="stop")


def _given_to_the_script(script: Path, args: Sequence[str], known: Sequence[str]) -> str:
    """What to say of arguments behind a script that are spelled like options before it; nothing where it knows them."""
    text = script.read_text(encoding="utf-8", errors="replace")
    names = dict.fromkeys(word.partition("=")[0] for word in args)
    meant = [name for name in names if name in known and not re.search(f"[\"']{name}[\"']", text)]
    if not meant:
        return ""
    stand, them = ("stands", "it") if len(meant) == 1 else ("stand", "them")
    are = "is" if len(meant) == 1 else "are"
    given = f"{listed(meant)} {stand} behind {script} and {are} given to it"
    return f"{given}; write {them} before the script to mean Lockstep's"
