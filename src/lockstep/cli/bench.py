"""`lockstep bench`: how fast the ranks of a layout talk, and which link is slow."""

from __future__ import annotations

import datetime
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import check_output, complain, open_terminal, say, write_output
from lockstep.errors import UserError, unknown

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.checkup.bench import BenchWork
    from lockstep.config.cluster import Cluster
    from lockstep.launch.meeting import Meeting
    from lockstep.links.collective_cost import Collective
    from lockstep.links.expected import ExpectedSpeed, Network
    from lockstep.links.measured import Bench, Pair, Row, Speed

FACTOR = 4
SIZES = {"cpu": "1kB:64MB", "cuda": "1kB:1GB"}
SECONDS_TO_MEET = 300.0
SECONDS_TO_END = 150.0
"""How long other nodes wait for the head's exit code: over NCCL it may take 120 s until a rank misses its peer."""
MOST_SECONDS = 3600.0


def bench_command(
    layout: Annotated[str | None, typer.Option(help="Whose mesh axes to measure. Default: dp over all ranks.")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes on this node. Default: one a GPU, or 2 on CPUs.")
    ] = None,
    nodes: Annotated[str | None, typer.Option(help="Number of nodes; start it on each of them.")] = None,
    node_rank: opt.NodeRank = None,
    head: opt.Head = None,
    device: opt.Device = None,
    share_gpu: opt.ShareGpu = None,
    cluster: Annotated[str | None, typer.Option(help="A profile that says what links should give.")] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Bytes of a buffer, from:to. Default: 1kB:64MB, or 1kB:1GB on GPUs.")
    ] = None,
    collectives: Annotated[str | None, typer.Option(help="Some of them, as in all-reduce,broadcast.")] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Draw bandwidth over size into this SVG file; with several axes one each.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write all results to this JSON file.")] = None,
    as_json: opt.Json = False,
) -> int:
    """Measure every collective over every mesh axis, and every pair of ranks.

    Exit code 1: a link gives less than half of what the others give, or of what it should give.
    """
    from lockstep.config.cluster import find_cluster
    from lockstep.launch.meeting import meet
    from lockstep.launch.nodes import find_nodes
    from lockstep.layout import Layout

    terminal = open_terminal(as_json)
    profile = find_cluster(cluster) if cluster else None
    chosen = _collectives(collectives)
    check_output("--chart", chart, ".svg")
    check_output("--output", output, ".json")
    if sizes:
        parse_sizes(sizes)
    found_nodes = find_nodes(nodes, node_rank, head, resume="auto")
    if found_nodes.least != found_nodes.most:
        raise UserError(f"--nodes {nodes} leaves open how many", "say one number: all of them are measured")
    count, chosen_device, unused = opt.processes(
        nproc or _processes_of(layout, found_nodes.most), device or "auto", bool(share_gpu)
    )
    speaks = found_nodes.is_head
    if speaks and unused:
        terminal.print(unused, style="yellow", soft_wrap=True)
    asked: dict[str, Any] = {"layout": layout, "sizes": sizes or SIZES[chosen_device]}
    asked |= {"collectives": chosen, "device": chosen_device}
    with meet(found_nodes, SECONDS_TO_MEET) as meeting:
        counts = _agree(meeting, {"nproc": count, **asked, "share_gpu": bool(share_gpu)})
        from lockstep.checkup.bench import BenchWork

        work = BenchWork(
            layout=Layout.parse(layout or "dp=auto").resolve(sum(counts)),
            sizes=parse_sizes(asked["sizes"]),
            collectives=chosen,
            device=chosen_device,
            share_gpu=bool(share_gpu),
        )
        results = BenchSoFar(work, profile)
        if speaks:
            ranks, nodes_text = sum(counts), f"{len(counts)} node{'s' if len(counts) > 1 else ''}"
            where = f"{ranks} rank{'s' if ranks > 1 else ''} on {nodes_text}"
            terminal.print(f"layout {work.layout}: {where}, {work.device}, {work.backend}", soft_wrap=True)
            if ranks == 1:
                terminal.print("one rank has nobody to talk to, so only its device is measured: --nproc 2 starts two")
        elif found_nodes.speaks:
            terminal.print(f"node {meeting.rank} of {len(counts)}: node 0 shows what is measured", soft_wrap=True)
        try:
            code = _measure(work, count, meeting, results, terminal if speaks else None)
            if speaks and results.speeds:
                found = _finish(results.bench(complete=code == 0), results, terminal, chart, output, as_json)
                code = code or found
        except UserError:
            _end_alike(meeting, 2)
            raise
        return _end_alike(meeting, code)


@dataclass
class BenchSoFar:
    """What rank 0 has told so far."""

    work: BenchWork
    profile: Cluster | None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)

    @property
    def hosts(self) -> list[str]:
        """Of every rank."""
        return [rank["host"] for rank in self.ranks]

    @property
    def nodes(self) -> list[int]:
        """Of every rank."""
        return [rank["node"] for rank in self.ranks]

    def networks(self) -> list[Network]:
        """Of every node."""
        from lockstep.links.expected import Network

        return [Network.from_json(told) for told in {rank["node"]: rank["network"] for rank in self.ranks}.values()]

    def expected(self) -> dict[bool, ExpectedSpeed]:
        """What pairs inside a node and between nodes should give."""
        from lockstep.links.expected import expect

        return expect(self.profile, self.networks() if len(set(self.nodes)) > 1 else [], self.work.backend)

    def bench(self, complete: bool) -> Bench:
        """All of it, with what follows from it."""
        import torch

        import lockstep
        from lockstep.links.expected import find_disappointments
        from lockstep.links.measured import Bench, fits_of, medians
        from lockstep.links.slow_links import find_slow

        usual = {inside: found[0] for inside, found in medians(self.pairs, self.nodes).items()}
        findings = find_slow(self.pairs, self.nodes, self.hosts)
        findings += find_disappointments(usual, self.expected(), self.networks(), self.work.backend)
        return Bench(
            lockstep=lockstep.__version__,
            torch=torch.__version__,
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            complete=complete,
            layout=str(self.work.layout),
            device="cuda" if self.work.device == "cuda" else "cpu",
            backend=self.work.backend,
            hosts=self.hosts,
            nodes=self.nodes,
            rows=self.rows,
            pairs=self.pairs,
            speeds=self.speeds,
            fits=fits_of(self.rows),
            findings=findings,
        )


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes that `1kB:64MB` means: by factors of four up to the last, which is among them."""
    first, colon, last = text.partition(":")
    try:
        low, high = opt.parse_size(first), opt.parse_size(last if colon else first)
    except UserError:
        raise UserError(f"--sizes {text} cannot be read", "write from:to, as in 1kB:64MB, or one size") from None
    if low > high:
        raise UserError(f"--sizes {text} ends below where it begins", f"write {last}:{first}")
    found = [low]
    while found[-1] * FACTOR <= high:
        found.append(found[-1] * FACTOR)
    if found[-1] * FACTOR**0.5 <= high:
        found.append(high)
    elif len(found) > 1:
        found[-1] = high
    return tuple(found)


def _collectives(text: str | None) -> tuple[Collective, ...]:
    from lockstep.links.collective_cost import Collective

    known = get_args(Collective)
    if text is None:
        return known
    asked = [name.strip().lower().replace("_", "-") for name in text.split(",")]
    for name in asked:
        if name not in known:
            raise unknown("collective", name, known)
    return tuple(name for name in known if name in asked)


def _processes_of(layout: str | None, nodes: int) -> int | None:
    """How many processes of this node a layout means, where it says."""
    from lockstep.layout import Layout

    wanted = Layout.parse(layout) if layout else None
    if wanted is None or wanted.auto or wanted.world_size % nodes:
        return None
    return wanted.world_size // nodes


def _agree(meeting: Meeting, asked: dict[str, Any]) -> list[int]:
    """The processes of every node; nodes that were asked for different things would wait for one another for ever."""
    told = meeting.share("bench", asked, SECONDS_TO_MEET)
    if None in told:
        raise UserError(
            f"{told.count(None)} of {len(told)} nodes did not come for {SECONDS_TO_MEET:.0f} s",
            "start lockstep bench on every node, with the same --head",
        )
    for key in told[0]:
        for node, other in enumerate(told):
            if key != "nproc" and other[key] != told[0][key]:
                raise UserError(
                    f"node 0 was given {key} {told[0][key]} and node {node} {other[key]}",
                    "give all nodes the same options, but for --node-rank and --nproc",
                )
    return [node["nproc"] for node in told]


def _measure(work: BenchWork, count: int, meeting: Meeting, results: BenchSoFar, terminal: Terminal | None) -> int:
    """Have the ranks measure, and show rows as they come; returns the exit code as far as it is known then."""
    from lockstep.checkup.bench import measure
    from lockstep.launch.probe import CONSEQUENCE, first_trouble, run_ranks
    from lockstep.links.bench_show import Rows, show_speeds

    rows = Rows(terminal) if terminal else None

    def hear(_rank: int, message: tuple[str, Any]) -> None:
        kind, what = message
        if kind in ("row", "pair"):
            getattr(results, f"{kind}s").append(what)
        else:
            setattr(results, kind, what)
        if rows and kind == "row":
            rows.show(what)
        elif terminal and kind == "speeds":
            show_speeds(what, terminal)

    try:
        answers = run_ranks(partial(measure, work), count, meeting, hear=hear, seconds=MOST_SECONDS)
    except KeyboardInterrupt:
        so_far = "; this was measured so far" if results.speeds and terminal else ""
        print(f"\nlockstep: interrupted{so_far}", file=sys.stderr)
        return 130
    trouble = first_trouble(answers)
    if trouble is None:
        return 0
    text = f"rank {trouble.rank} on {socket.gethostname()}: {trouble.trouble}\n{trouble.log}"
    if meeting.nodes > 1 and CONSEQUENCE.search(trouble.trouble):
        text = f"rank {trouble.rank} on {socket.gethostname()} has lost a rank of another node: see what that one says"
    complain(f"{text.rstrip()}")
    return 1


def _end_alike(meeting: Meeting, code: int) -> int:
    """The exit code of the head on every node, but for one that was itself refused or interrupted."""
    if meeting.store is None or (meeting.rank > 0 and code in (2, 130)):
        return code
    with suppress(RuntimeError):  # the head is gone, and its store with it
        if (said := meeting.from_head("exit code", code, SECONDS_TO_END)) is not None:
            return int(said)
    complain("node 0 has not said how it ended")
    return 1


def _finish(
    bench: Bench, results: BenchSoFar, terminal: Terminal, chart: Path | None, output: Path | None, as_json: bool
) -> int:
    """Show what follows from all rows, and write it; returns 1 where something was found."""
    from lockstep.links.bench_show import draw_charts, show_chart, show_fits, show_pairs
    from lockstep.links.measured import write_bench

    if bench.fits:
        show_fits(bench.fits, terminal)
    show_chart(bench, terminal)
    show_pairs(bench.pairs, bench.nodes, bench.hosts, results.expected(), terminal)
    terminal.print()
    for finding in bench.findings:
        say(terminal, finding.evidence, style="bold red")
        say(terminal, f"  fix: {finding.fix}")
    if bench.pairs and not bench.findings:
        terminal.print("no link is far below the others, or below what it should give", style="green")
    say(terminal, _keep(bench))
    if as_json:
        print(bench.model_dump_json(), flush=True)
    if output:
        write_bench(bench, output)
        say(terminal, f"results: {output}")
    for path, drawing in draw_charts(bench, chart).items() if chart else ():
        write_output(path, drawing)
        say(terminal, f"chart: {path}")
    return 1 if bench.findings else 0


def _keep(bench: Bench) -> str:
    """Leave the results where they can be found again; says in a line where that is."""
    from lockstep.data.sets import cache_folder
    from lockstep.links.measured import file_name, is_better, write_bench

    path = cache_folder() / "bench" / file_name(bench)
    if not is_better(bench, path):
        return f"not kept: {path} has more sizes or collectives; remove it to keep this instead"
    try:
        write_bench(bench, path)
    except UserError as error:
        return f"not kept: {error.cause}"
    return f"kept in {path}"
