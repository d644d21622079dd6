"""`lockstep lab`: see how it works, on real ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer, check_output, complain, open_terminal, plain_table, write_output
from lockstep.errors import UserError
from lockstep.text.units import bytes_text

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.lab.collectives import ShownCollective
    from lockstep.lab.layouts import Topic
    from lockstep.lab.timing import MeasuredTimes
    from lockstep.links.collective_cost import Algorithm, Collective

app = typer.Typer(
    name="lab",
    help="See how it works, on real ranks, as a picture in the terminal or an SVG file.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Ranks = Annotated[int, typer.Option(help="Processes, 1 to 16.")]
Few = Annotated[int, typer.Option(help="Processes, 1 to 4.")]
Algo = Annotated[
    str | None, typer.Option(help="ring, tree, naive or halving-doubling. Default: draw the first, time all.")
]
Elements = Annotated[int | None, typer.Option(min=1, help="Numbers in the buffer that is drawn. Default: one a rank.")]
Draw = Annotated[Path | None, typer.Option(metavar="FILE.svg", help="The picture as a file too.")]
NoMeasure = Annotated[bool, typer.Option("--no-measure", help="Predict the times only.")]

COLLECTIVES: dict[str, tuple[str, str, str, str]] = {
    "broadcast": ("broadcast", "5MB", "1MB/s", "5 MB to 7 friends: 35 s one by one, 15 s by a tree."),
    "reduce": ("reduce", "2MB", "5MB/s", "The sum of all buffers, on one rank."),
    "allreduce": ("all-reduce", "2MB", "5MB/s", "The sum of all buffers, on every rank: what gradients need."),
    "allgather": ("all-gather", "2MB", "5MB/s", "Every rank's chunk, on every rank: what sharded weights need."),
    "reducescatter": ("reduce-scatter", "2MB", "5MB/s", "One chunk of the sum each: what sharded gradients need."),
    "alltoall": ("all-to-all", "2MB", "5MB/s", "Every rank has something for every other one."),
}
"""By topic: the collective, the size and the rate that it is timed with, and the line in the list of topics."""


@dataclass(frozen=True)
class CollectiveQuestion:
    """What a user wants to know of a collective."""

    collective: Collective
    ranks: int
    algorithm: Algorithm | None
    """None: the first is drawn, and all are timed."""
    elements: int | None
    size: int
    bytes_per_second: float
    draw: Path | None
    measures: bool
    as_json: bool


def _collective_command(topic: str) -> Callable[..., int]:
    collective, usual_size, usual_rate, about = COLLECTIVES[topic]

    def command(
        ranks: Ranks = 8,
        algo: Algo = None,
        elements: Elements = None,
        size: Annotated[str, typer.Option(help="Bytes of the buffer that is timed.")] = usual_size,
        rate: Annotated[str, typer.Option(help="What each rank's cable carries, each way.")] = usual_rate,
        draw: Draw = None,
        no_measure: NoMeasure = False,
        as_json: opt.Json = False,
    ) -> int:
        timed = (opt.parse_size(size), _parse_rate(rate))
        asked = CollectiveQuestion(collective, ranks, algo, elements, *timed, draw, not no_measure, as_json)  # type: ignore[arg-type]
        return _unless_a_rank_fails(partial(_show_collective, asked))

    command.__doc__ = about
    return command


for _topic, (_name, *_) in COLLECTIVES.items():
    app.command(_topic)(_collective_command(_topic))
    if _name != _topic:
        app.command(_name, hidden=True)(_collective_command(_topic))


def _unless_a_rank_fails(show: Callable[[], int]) -> int:
    """The exit code; a rank that fails is one sentence."""
    from lockstep.lab.ranks import RankFailedError

    try:
        return show()
    except RankFailedError as error:
        complain(f"{error}")
        return 1


def _show_collective(asked: CollectiveQuestion) -> int:
    from lockstep.lab.collectives import check_ranks
    from lockstep.links.collective_cost import ALGORITHMS, check_algorithm

    check_ranks(asked.ranks)
    if asked.algorithm is not None:
        check_algorithm(asked.collective, asked.algorithm, asked.ranks)
    algorithms, left_out = _possible(asked.collective, asked.ranks)
    chosen = asked.algorithm or ALGORITHMS[asked.collective][0]
    check_output("--draw", asked.draw, ".svg")

    from lockstep.lab.collectives import show
    from lockstep.lab.draw_collective import as_svg, in_terminal

    terminal = open_terminal(asked.as_json)
    everything = show(asked.collective, [asked.algorithm] if asked.algorithm else algorithms, asked.ranks, asked.ranks)
    (drawn,) = (one for one in everything if one.algorithm == chosen)
    if asked.elements not in (None, asked.ranks):
        (drawn,) = show(asked.collective, [chosen], asked.ranks, asked.elements)
    for part in in_terminal(drawn):
        terminal.print(part, soft_wrap=True)
    _write(asked.draw, as_svg(drawn), terminal)
    _show_agreement(everything, terminal)
    measured, why_not = _measured(asked, everything, terminal)
    rows = _rows(asked, everything, measured)
    _show_times(asked, rows, measured, terminal)
    for line in (*(left_out if asked.algorithm is None else ()), *([why_not] if why_not else ())):
        terminal.print(line, style="dim", soft_wrap=True)
    if asked.as_json:
        answer(_as_json(asked, rows, measured, why_not, drawn))
    return 0 if all(one.agrees for one in everything) else 1


def _show_agreement(everything: list[ShownCollective], terminal: Terminal) -> None:
    terminal.print()
    given = f"what gloo's own {everything[0].collective} gives"
    for one in everything:
        if not one.agrees:
            terminal.print(f"{one.algorithm}: NOT {given}", style="bold red")
    if agreeing := [one.algorithm for one in everything if one.agrees]:
        terminal.print(f"{', '.join(agreeing)}: {given}, to the bit", style="green", soft_wrap=True)


def _possible(collective: Collective, ranks: int) -> tuple[list[Algorithm], list[str]]:
    """The algorithms that so many ranks can do, and a line for each that they cannot."""
    from lockstep.links.collective_cost import ALGORITHMS, check_algorithm

    possible, left_out = [], []
    for algorithm in ALGORITHMS[collective]:
        try:
            check_algorithm(collective, algorithm, ranks)
            possible.append(algorithm)
        except UserError as error:
            left_out.append(f"without {algorithm}: {error.cause}")
    return possible, left_out


def _measured(
    asked: CollectiveQuestion, everything: list[ShownCollective], terminal: Terminal
) -> tuple[MeasuredTimes | None, str | None]:
    """Time the algorithms over slow cables; None and why, where that cannot be."""
    from rich.progress import BarColumn, Progress, TextColumn

    from lockstep.lab.cables import NotHereError
    from lockstep.lab.timing import measure

    if not asked.measures or asked.ranks == 1:
        return None, "nothing is measured: one rank sends nothing" if asked.ranks == 1 else None
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    # Without a thread that refreshes it: ranks are forked, and would inherit the locks it holds.
    with Progress(*columns, console=terminal, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("plugging in cables", total=None, left="")

        def hear(algorithm: Algorithm, seconds: float, expected: float) -> None:
            left = f"{max(0.0, expected - seconds):.0f} s"
            progress.update(
                task, description=f"timing {algorithm}", total=expected, completed=min(seconds, expected), left=left
            )
            progress.refresh()

        try:
            algorithms = [one.algorithm for one in everything]
            return measure(asked.collective, algorithms, asked.ranks, asked.size, asked.bytes_per_second, hear), None
        except NotHereError as error:
            return None, f"nothing is measured, because a slow network cannot be made here: {error}"


def _rows(
    asked: CollectiveQuestion, everything: list[ShownCollective], measured: MeasuredTimes | None
) -> list[dict[str, Any]]:
    from lockstep.lab.collectives import cost_of
    from lockstep.links.collective_cost import Link, predict

    link = measured.link if measured else Link(0.0, 1 / asked.bytes_per_second)
    rows = []
    for one in everything:
        cost = cost_of(one)
        rows.append(
            {
                "algorithm": one.algorithm,
                "agrees": one.agrees,
                "rounds": cost.rounds,
                "messages": cost.messages,
                "busiest_sends": round(cost.busiest / one.elements * asked.size),
                "predicted": predict(one.collective, one.algorithm, one.ranks, asked.size, link),
                "measured": measured.seconds[one.algorithm] if measured else None,
            }
        )
    return rows


def _show_times(
    asked: CollectiveQuestion, rows: list[dict[str, Any]], measured: MeasuredTimes | None, terminal: Terminal
) -> None:
    alpha = f", {1e6 * measured.link.alpha:.0f} µs a message (measured)" if measured else ""
    on = f"{asked.ranks} rank{'s' if asked.ranks > 1 else ''}"
    about = f"{bytes_text(asked.size)} on {on}, {bytes_text(asked.bytes_per_second)}/s each way"
    terminal.print(f"\n{about}{alpha}", style="bold")
    table = plain_table()
    table.add_column("algorithm")
    for name in ("rounds", "messages", "busiest sends", "predicted", *(("measured", "") if measured else ())):
        table.add_column(name, justify="right")
    for row in rows:
        times = [f"{row['predicted']:.3g} s"]
        if measured:
            times.append(f"{row['measured']:.3g} s")
            times.append(f"{row['measured'] / row['predicted'] - 1:+.0%}")
        table.add_row(
            row["algorithm"], str(row["rounds"]), str(row["messages"]), bytes_text(row["busiest_sends"]), *times
        )
    terminal.print(table)


def _as_json(
    asked: CollectiveQuestion,
    rows: list[dict[str, Any]],
    measured: MeasuredTimes | None,
    why_not: str | None,
    drawn: ShownCollective,
) -> dict[str, Any]:
    return {
        "collective": asked.collective,
        "ranks": asked.ranks,
        "size": asked.size,
        "bytes_per_second": asked.bytes_per_second,
        "alpha": measured.link.alpha if measured else None,
        "algorithms": rows,
        "not_measured": why_not,
        "drawn": {
            "algorithm": drawn.algorithm,
            "before": drawn.before,
            "after": drawn.after,
            "transfers": [transfer._asdict() for transfer in drawn.transfers],
        },
    }


def _parse_rate(text: str) -> float:
    match = re.fullmatch(r"(.+?)\s*(?:/s|ps)", text.strip(), re.IGNORECASE)
    if match is None:
        raise UserError(f"{text!r} is not a rate", "write 1MB/s or 500KB/s")
    try:
        return float(opt.parse_size(match[1]))
    except UserError:
        raise UserError(f"{text!r} is not a rate", "write 1MB/s or 500KB/s") from None


def _write(draw: Path | None, picture: str, terminal: Terminal) -> None:
    if draw is None:
        return
    write_output(draw, picture)
    terminal.print(f"\ndrawn in {draw}", soft_wrap=True)


@app.command("pipeline")
def pipeline_command(
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved-1f1b, looped-bfs, zbv, ...")] = "1f1b",
    stages: Annotated[int, typer.Option(min=1, help="Ranks of the pipeline.")] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 8,
    per_rank: Annotated[int | None, typer.Option(min=1, help="Stages on each rank. Default: the fewest.")] = None,
    draw: Draw = None,
    as_json: opt.Json = False,
) -> int:
    """Who does what when: the timetable that a pipeline runs by, its bubble, and what is in flight."""
    from lockstep.lab.draw_pipeline import as_svg, in_terminal
    from lockstep.lab.play_schedule import play
    from lockstep.parallel.pipeline.timetable import ONE_STAGE

    check_output("--draw", draw, ".svg")
    played = play(schedule, stages, per_rank or (1 if schedule in ONE_STAGE else 2), micro_batches)  # type: ignore[arg-type]
    terminal = open_terminal(as_json)
    for part in in_terminal(played, terminal.width, terminal.is_terminal):
        terminal.print(part, soft_wrap=True)
    if as_json:
        lanes = [
            [{**piece.action._asdict(), "start": piece.start, "end": piece.end} for piece in lane]
            for lane in played.lanes
        ]
        ranks = [
            {"rank": rank, "bubble": played.bubble(rank), "in_flight": played.in_flight(rank), "actions": lane}
            for rank, lane in enumerate(lanes)
        ]
        answer({"schedule": schedule, "length": played.length, "bubble": played.whole_bubble, "ranks": ranks})
    _write(draw, as_svg(played), terminal)
    return 0


def _layout_command(topic: str, about: str) -> Callable[..., int]:
    def command(ranks: Few = 2, draw: Draw = None, as_json: opt.Json = False) -> int:
        return _unless_a_rank_fails(partial(_show_layout, topic, ranks, draw, as_json))  # type: ignore[arg-type]

    command.__doc__ = about
    return command


for _topic, _about in {
    "ddp": "Replicas: what each rank holds, and how gradients come together.",
    "fsdp": "Shards: who keeps what, and when it is gathered.",
    "tp": "Parts of matrices: who computes what, and what is added up.",
}.items():
    app.command(_topic)(_layout_command(_topic, _about))


def _show_layout(topic: Topic, ranks: int, draw: Path | None, as_json: bool) -> int:
    from lockstep.lab.draw_layout import as_svg, in_terminal
    from lockstep.lab.layouts import hold

    check_output("--draw", draw, ".svg")
    held = hold(topic, ranks)
    terminal = open_terminal(as_json)
    for part in in_terminal(held):
        terminal.print(part, soft_wrap=True)
    if as_json:
        answer(asdict(held))
    _write(draw, as_svg(held), terminal)
    return 0
