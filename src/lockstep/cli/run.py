"""`lockstep run`: launch a user's own script."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options as opt
from lockstep.cli.short_runs import choose_layout_for
from lockstep.errors import UserError
from lockstep.text.units import listed


def run_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that calls lockstep.init().")],
    args: Annotated[list[str] | None, typer.Argument(help="Its own arguments.")] = None,
    layout: opt.Layout = None,
    nproc: opt.Nproc = None,
    nodes: opt.Nodes = None,
    node_rank: opt.NodeRank = None,
    head: opt.Head = None,
    restarts: opt.Restarts = None,
    on_oom: opt.OnOom = None,
    max_time: opt.MaxTime = None,
    steps: opt.Steps = None,
    profile: opt.Profile = None,
    profile_ranks: opt.ProfileRanks = None,
    set_: opt.Set = None,
    name: opt.Name = None,
    run_dir: opt.RunDir = None,
    resume: opt.Resume = "auto",
    accept: opt.Accept = None,
    device: opt.Device = None,
    share_gpu: opt.ShareGpu = None,
    dry_run: opt.DryRun = False,
    as_json: opt.Json = False,
) -> int:
    """Launch your own training script on all devices of this machine; options stand before the script."""
    from rich.console import Console as Terminal

    from lockstep.checkpoint.disk.code import accept_by_name, check_code_on_disk
    from lockstep.config import schema as cfg
    from lockstep.config.selection import ranks_of
    from lockstep.launch.nodes import find_nodes
    from lockstep.layout import AUTO, Layout
    from lockstep.record.folder import check_same_script, choose_folder, name_after
    from lockstep.sinks.trackers import check_installed

    accept_by_name(accept)
    if not script.is_file():
        raise UserError(f"there is no script {script}", "check the path; options of lockstep stand before it")
    known = [option for parameter in context.command.params for option in parameter.opts]
    if line := _given_to_the_script(script, args or [], known):
        print(f"lockstep: {line}", file=sys.stderr)
    terminal = Terminal(stderr=as_json, highlight=False)
    told = opt.given(layout=layout, nproc=nproc, steps=steps, name=name, device=device, share_gpu=share_gpu)
    told |= opt.given(restarts=restarts, on_oom=on_oom, max_time=max_time)
    told |= opt.given(profile=profile, profile_ranks=profile_ranks)
    told |= cfg.parse_assignments(set_ or [], "seed=1")  # a script has no optimizer of the config's
    origin = dict.fromkeys(["script", *(["args"] if args else []), *told], "the command line")
    config = cfg.script_config({**told, "script": str(script), "args": args or []}, "the command line")
    check_installed(config.log_to)
    count, chosen, unused = opt.processes(config.nproc, config.device, config.share_gpu)
    origin.setdefault("nproc", f"{chosen} processes")
    config = config.model_copy(update={"nproc": count})
    worker = ["script", str(script), *(args or [])]
    where = find_nodes(nodes, node_rank, head, resume)
    ranks_of(config.profile_ranks, count * where.most)
    if config.layout == AUTO:
        resolved = choose_layout_for(config, worker, count, chosen, terminal)
        origin["layout"] = "auto, on the command line"
    else:
        parsed = Layout.parse(config.layout)
        resolved = parsed.resolve(count) if where.is_alone else parsed  # only when they meet, all processes are known
    if opt.is_done(run_dir):
        terminal.print(f"{run_dir} is finished", soft_wrap=True)
        return 0
    folder = choose_folder(config.name or name_after(script), run_dir, resume)
    opt.check_resume(resume, folder)
    check_same_script(folder, script)
    check_code_on_disk(folder.path, script)
    if "layout" in told:  # else the script may say
        told["layout"] = str(resolved)
        config = config.model_copy(update={"layout": str(resolved)})
    if dry_run:
        opt.print_plan(config, origin, folder, terminal, as_json)
        return 0
    code = opt.train_in(
        folder, config, worker, terminal, told=told, resume=resume, unused_gpus=unused, nodes=where, on_oom="stop"
    )
    if as_json:
        print(json.dumps(opt.result(folder, code), allow_nan=False))
    return code


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
