"""`lockstep doctor`: is this machine, or this allocation, fit to train?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer, open_terminal, say
from lockstep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.checkup.doctor import DoctorReport


def doctor_command(
    layout: Annotated[str | None, typer.Option(help="The layout whose axes are tried. Default: dp=auto.")] = None,
    nproc: opt.Nproc = None,
    nodes: opt.Nodes = None,
    node_rank: opt.NodeRank = None,
    head: opt.Head = None,
    device: opt.Device = None,
    share_gpu: opt.ShareGpu = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Loader processes of each rank, as in data.workers.")
    ] = None,
    run_dir: Annotated[Path, typer.Option(help="Where runs are written.")] = Path("runs"),
    as_json: opt.Json = False,
) -> int:
    """Look at this machine, or at all nodes of an allocation (srun), and name what would break or slow a training.

    Exit code 0: fit to train; 1: something is named that is not.
    """
    from lockstep.launch.nodes import find_nodes
    from lockstep.layout import Layout
    from lockstep.runtime.host.slurm_env import find_allocation
    from lockstep.runtime.rank_env import expand_hostlist

    terminal = open_terminal(as_json)
    count, chosen, _ = opt.processes(nproc, device or "auto", bool(share_gpu))
    where = find_nodes(nodes, node_rank, head, "auto")
    if where.least != where.most:
        raise UserError(f"--nodes {nodes} leaves open which nodes to look at", f"say how many: --nodes {where.most}")
    wanted = layout or ("dp=auto" if count * where.most > 1 else "single")
    parsed = Layout.parse(wanted)
    if not parsed.auto:
        parsed.resolve(count * where.most)
    job = find_allocation()
    names = expand_hostlist(job.node_list) if where.meeting and job and job.node_list else []
    names = names if len(names) == where.most else [f"node {number}" for number in range(where.most)]

    with terminal.status("loading torch") as shown:
        from lockstep.checkup.doctor import Wanted, examine

        def show(text: str) -> None:
            shown.update(text) if text else shown.stop()

        asked = Wanted(wanted, count, "cuda" if chosen == "cuda" else "cpu", bool(share_gpu), workers, run_dir)
        report = examine(where, names, asked, show)
    if where.is_head or not report.nodes:  # a node that does not reach the head speaks for itself
        if as_json:
            findings = [asdict(finding) for finding in report.findings]
            nodes_told = [node.model_dump() for node in report.nodes]
            answer({"ok": report.is_fit, "findings": findings, "nodes": nodes_told})
        else:
            _show(report, terminal)
    return 0 if report.is_fit else 1


MARKS = {"ok": "[green]ok[/]", "note": "note", "slow": "[yellow]SLOW[/]", "broken": "[bold red]BROKEN[/]"}


def _show(report: DoctorReport, terminal: Terminal) -> None:
    from rich.markup import escape
    from rich.table import Table

    from lockstep.links.topology import draw

    for node in report.nodes:
        say(terminal, "\n".join(draw(node)))
        terminal.print()
    several = len(report.nodes) > 1
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for finding in report.findings:
        fix = f"\n[bold]fix:[/] {escape(finding.fix)}" if finding.fix else ""
        cells = [MARKS[finding.level], finding.check, *([finding.where] if several else [])]
        table.add_row(*cells, escape(finding.evidence) + fix)
    terminal.print(table)
    broken, slow = (sum(finding.level == level for finding in report.findings) for level in ("broken", "slow"))
    counts = [f"{number} would {what} a training" for number, what in ((broken, "break"), (slow, "slow")) if number]
    verdict = f"{' and '.join(counts)}: see the fixes above" if counts else "fit to train"
    terminal.print(f"\n{verdict}", style="bold red" if broken else "yellow" if slow else "green")
