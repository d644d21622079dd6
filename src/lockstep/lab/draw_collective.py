"""Pictures of a collective: per round who sends what to whom, and what every rank holds then."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.lab.algorithms import describe
from lockstep.lab.collectives import GOALS, Chunks, ShownCollective, Sources
from lockstep.lab.wire import Transfer
from lockstep.text import svg
from lockstep.text.columns import in_columns

if TYPE_CHECKING:
    from rich.text import Text

CELL_HEIGHT = 30
HEAD = 34
GAP = 40
MARGIN = 28
WIDE = 1.7
"""How much wider than high a picture should be, about: as a screen is."""
MOST_NUMBERS = 3


def numbers(chunk: list[float]) -> str:
    """The numbers of a chunk: all, or the first and the last."""
    if len(chunk) > MOST_NUMBERS:
        return f"{svg.number(chunk[0])}…{svg.number(chunk[-1])}"
    return " ".join(map(svg.number, chunk))


def title_of(shown: ShownCollective) -> str:
    """What a picture shows."""
    ranks = f"{shown.ranks} rank{'' if shown.ranks == 1 else 's'}"
    return f"{shown.collective}, {shown.algorithm}, on {ranks}: {len(shown.after)} rounds"


def _about(shown: ShownCollective) -> str:
    return f"{GOALS[shown.collective]}. {describe(shown.collective, shown.algorithm)}"


def messages(shown: ShownCollective, round_: int) -> list[Transfer]:
    """The messages of a round."""
    return [transfer for transfer in shown.transfers if transfer.round == round_]


# ---- In a terminal


def in_terminal(shown: ShownCollective) -> list[Text]:
    """A table for the start and one for every round, a line a rank."""
    from rich.text import Text

    parts: list[Text] = [
        Text(title_of(shown), style="bold"),
        Text(_about(shown), style="dim"),
        Text(""),
        Text("before", style="bold"),
        _table(shown, shown.before, shown.sources_before, []),
    ]
    for round_, held in enumerate(shown.after):
        parts += [
            Text(""),
            Text(f"after round {round_ + 1} of {len(shown.after)}", style="bold"),
            _table(shown, held, shown.sources[round_], messages(shown, round_)),
        ]
    return parts


def _table(shown: ShownCollective, held: list[Chunks], sources: list[Sources], came: list[Transfer]) -> Text:
    from rich.text import Text

    names = ["", *(f"[{chunk}]" for chunk in range(shown.ranks)), *(("sent", "received") if came else ())]
    rows = [[Text(name, style="dim") for name in names]]
    for rank in range(shown.ranks):
        fresh = {chunk for transfer in came if transfer.receiver == rank for chunk in transfer.chunks}
        row = [Text(f"rank {rank}", style="bold")]
        for chunk in range(shown.ranks):
            has = sources[rank][chunk]
            style = "bold yellow" if chunk in fresh else "green" if is_done(shown, rank, chunk, has) else ""
            row.append(Text(numbers(held[rank][chunk]) if has else "·", style=style))
        if came:
            sent = [
                f"{_what(shown, transfer)} → rank {transfer.receiver}" for transfer in came if transfer.sender == rank
            ]
            got = [
                f"{'+ ' if transfer.added else ''}{_what(shown, transfer)} ← rank {transfer.sender}"
                for transfer in came
                if transfer.receiver == rank
            ]
            row += [Text(_joined(sent)), Text(_joined(got), style="yellow")]
        rows.append(row)
    return in_columns(rows, left=(0, shown.ranks + 1, shown.ranks + 2))


def _joined(lines: list[str]) -> str:
    return ", ".join(lines) if len(lines) < 3 else f"{len(lines)} messages, {lines[0]} ... {lines[-1].split()[-1]}"


def _what(shown: ShownCollective, transfer: Transfer) -> str:
    """Which chunks a message carries, as their sender calls them."""
    if shown.collective == "all-to-all":
        return f"[{transfer.receiver}]"
    filled = [chunk for chunk in range(shown.ranks) if shown.before[transfer.receiver][chunk]]
    if len(transfer.chunks) == len(filled) > 1:
        return "all"
    first, last = transfer.chunks[0], transfer.chunks[-1]
    return f"[{first}]" if first == last else f"[{first}-{last}]"


def is_done(shown: ShownCollective, rank: int, chunk: int, has: frozenset[int]) -> bool:
    """Whether a chunk is part of the result, and complete."""
    if shown.collective in ("reduce", "all-reduce", "reduce-scatter"):
        return shown.is_result[rank][chunk] and len(has) == shown.ranks
    return has == {chunk} if shown.collective == "all-to-all" else bool(has)


# ---- As SVG


def as_svg(shown: ShownCollective) -> str:
    """The whole story as one picture: a frame for the start and one for every round."""
    widest = max(len(numbers(c)) for held in (shown.before, *shown.after) for rank in held for c in rank)
    adds = any(transfer.added for transfer in shown.transfers)
    cell = max(40, 10 + 9 * widest + (16 if adds else 0))
    frame_width = shown.ranks * (cell + 6) - 6
    reach = max((abs(transfer.sender - transfer.receiver) for transfer in shown.transfers), default=0)
    arcs = _arc_height(reach) + 22
    frame_height = 26 + arcs + HEAD + shown.ranks * CELL_HEIGHT
    frames = len(shown.after) + 1

    def misfit(across: int) -> float:
        """How far from the shape of a screen a picture is, and how many places in its last row stay empty."""
        down = -(-frames // across)
        return abs(math.log(across * (frame_width + GAP) / down / (frame_height + GAP) / WIDE)) + 0.1 * (
            -frames % across
        )

    across = min(range(1, frames + 1), key=misfit)
    down = -(-frames // across)
    width = max(2 * MARGIN + across * (frame_width + GAP) - GAP, 1020)
    lines = svg.wrapped(_about(shown), int(width // 8.2))
    top = 62 + 20 * len(lines) + 56
    height = top + down * (frame_height + GAP) - GAP + MARGIN
    body = [svg.text(MARGIN, 44, title_of(shown), 24, "ink strong")]
    body += [svg.text(MARGIN, 70 + 20 * row, line, 15, "quiet") for row, line in enumerate(lines)]
    body += _legend(MARGIN, 70 + 20 * len(lines) + 4, shown)
    for number in range(frames):
        x = MARGIN + number % across * (frame_width + GAP)
        y = top + number // across * (frame_height + GAP)
        body.append(_frame(shown, number, x, y, cell, arcs))
    return svg.picture(width, height, title_of(shown), _story(shown), body)


def _frame(shown: ShownCollective, number: int, x: float, y: float, cell: float, arcs: float) -> str:
    """`number` 0 is the start, others the state after a round."""
    held = shown.after[number - 1] if number else shown.before
    sources = shown.sources[number - 1] if number else shown.sources_before
    came = messages(shown, number - 1) if number else []
    name = f"round {number}" if number else "before"
    body = [svg.text(x, y + 14, name, 16, "ink strong")]
    heads = y + 26 + arcs + 12
    centre = [x + rank * (cell + 6) + cell / 2 for rank in range(shown.ranks)]
    body += [_arrow(shown, transfer, centre, heads - 14) for transfer in came]
    for rank in range(shown.ranks):
        body.append(svg.text(centre[rank], heads + 5, f"{rank}", 15, "ink strong mid"))
        for chunk in range(shown.ranks):
            fresh = [transfer for transfer in came if transfer.receiver == rank and chunk in transfer.chunks]
            sent = any(transfer.sender == rank and chunk in _chunks_at_sender(shown, transfer) for transfer in came)
            at = (x + rank * (cell + 6), y + 26 + arcs + HEAD + chunk * CELL_HEIGHT)
            body.append(
                _cell(shown, (number, rank, chunk), held[rank][chunk], sources[rank][chunk], fresh, sent, at, cell)
            )
    return svg.group(body, frame=number)


def _cell(
    shown: ShownCollective,
    where: tuple[int, int, int],
    chunk: list[float],
    has: frozenset[int],
    fresh: list[Transfer],
    sent: bool,
    at: tuple[float, float],
    width: float,
) -> str:
    round_, rank, number = where
    (x, y), height = at, CELL_HEIGHT - 5
    kind = "new" if fresh else "done" if is_done(shown, rank, number, has) else "cell" if has else "empty"
    body = [svg.box(x, y, width, height, kind)]
    if fresh:
        body.append(svg.box(x + 0.75, y + 0.75, width - 1.5, height - 1.5, "newline-edge"))
    elif sent:
        edge = svg.box(x + 0.75, y + 0.75, width - 1.5, height - 1.5, "arrow-edge")
        body.append(edge.replace("/>", ' stroke-dasharray="4 3"/>'))
    if has and chunk:
        body.append(svg.text(x + width / 2, y + 16, numbers(chunk), 14, "ink mid strong" if fresh else "ink mid"))
        if fresh and fresh[0].added:
            body.append(svg.text(x + 3, y + 14, "+", 13, "ink strong"))
        body += [_marks(shown.ranks, has, x + 4, y + height - 3.75, width - 8)]
    said = " ".join(map(svg.number, chunk)) if has else ""
    whose = f"from rank{'s' * (len(has) > 1)} {', '.join(map(str, sorted(has)))}" if has else "empty"
    tip = f"rank {rank}, chunk {number}: {said} ({whose})"
    data = {"round": round_, "rank": rank, "chunk": number, "values": said, "from": " ".join(map(str, sorted(has)))}
    return svg.group(body, tip, **data)


def _marks(ranks: int, has: frozenset[int], x: float, y: float, width: float) -> str:
    """A dash for every rank, dark where its numbers are in."""
    step = width / ranks
    dashes = {
        edge: "".join(f"M{x + rank * step:.1f} {y:g}h{max(1.5, step - 1):.3g}" for rank in which)
        for edge, which in (("line", sorted(set(range(ranks)) - has)), ("ink", sorted(has)))
    }
    return "".join(
        f'<path d="{path}" class="{edge}-edge" stroke-width="2.5"/>' for edge, path in dashes.items() if path
    )


def _chunks_at_sender(shown: ShownCollective, transfer: Transfer) -> tuple[int, ...]:
    """What of its buffer the sender sent; in an all-to-all it has another buffer than the one that is drawn."""
    return () if shown.collective == "all-to-all" else transfer.chunks


def _arc_height(distance: int) -> float:
    return 12 + 7 * min(distance, 8)


def _arrow(shown: ShownCollective, transfer: Transfer, centre: list[float], y: float) -> str:
    """An arc from the head of one rank to that of another; the way back is drawn a little higher."""
    way = 1 if transfer.receiver > transfer.sender else -1
    start, end = centre[transfer.sender] + 5 * way, centre[transfer.receiver] - 5 * way
    rise = (_arc_height(abs(transfer.receiver - transfer.sender)) + (10 if way < 0 else 0)) * 4 / 3
    path = f"M {start:g} {y:g} C {start:g} {y - rise:g} {end:g} {y - rise:g} {end:g} {y - 4:g}"
    head = f"M {end - 4.5:g} {y - 7:g} L {end + 4.5:g} {y - 7:g} L {end:g} {y + 1:g} Z"
    body = [f'<path d="{path}" class="arrow-edge" stroke-width="2"/>', f'<path d="{head}" class="arrow"/>']
    doing = "adds" if transfer.added else "takes"
    tip = f"rank {transfer.sender} to rank {transfer.receiver}: {_what(shown, transfer)}, which it {doing}"
    return svg.group(
        body,
        tip,
        sender=transfer.sender,
        receiver=transfer.receiver,
        sent_in=transfer.round + 1,
        chunks=" ".join(map(str, transfer.chunks)),
        added=str(transfer.added).lower(),
    )


def _legend(x: float, y: float, shown: ShownCollective) -> list[str]:
    entries = [("arrow-edge", "sent"), ("new", "just received"), ("done", "as it is in the end")]
    entries += [("cell", "held")] if shown.collective in ("reduce", "all-reduce", "reduce-scatter") else []
    body = []
    for kind, name in entries:
        body.append(
            svg.box(x + 0.75, y, 22, 14, kind).replace("/>", ' stroke-dasharray="4 3"/>' if "-" in kind else "/>")
        )
        body.append(svg.text(x + 29, y + 12, name, 13, "quiet"))
        x += 48 + 6.6 * len(name)
    added = "; +: added" if any(transfer.added for transfer in shown.transfers) else ""
    body.append(
        svg.text(x, y + 12, f"columns: ranks, rows: chunks; dashes: the ranks that are in a number{added}", 13, "quiet")
    )
    return body


def _story(shown: ShownCollective) -> str:
    """The picture in words, for those who hear it."""
    rounds = []
    for number in range(len(shown.after)):
        said = [
            f"rank {transfer.sender} sends {_what(shown, transfer)} to rank {transfer.receiver}"
            for transfer in messages(shown, number)
        ]
        rounds.append(f"Round {number + 1}: {', '.join(said) or 'nothing is sent'}.")
    return f"{GOALS[shown.collective]}. {' '.join(rounds)}"
