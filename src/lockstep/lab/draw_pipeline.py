"""Pictures of a pipeline's timetable: a lane for every rank, a box for every piece of its work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lab.play_schedule import Played, TimedAction
from lockstep.text import svg
from lockstep.text.columns import in_columns

if TYPE_CHECKING:
    from rich.text import Text

NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs (I)", "W": "backward, weights (W)"}
STYLES = {"F": "blue", "B": "green", "I": "yellow", "W": "magenta"}
# Light and dark page, for the first stage of a rank and the others: Okabe and Ito's colours, made lighter or darker.
FILLS = {
    "F0": ("#9fcdf0", "#1d5f93"),
    "F1": ("#5aa7de", "#3c8fcb"),
    "F2": ("#d5e9f9", "#123f63"),
    "B0": ("#9fdcc6", "#0f6b51"),
    "B1": ("#4fbf9b", "#1f9d78"),
    "B2": ("#d6f0e6", "#0a4636"),
    "I0": ("#f4cf8e", "#7d560f"),
    "I1": ("#e8ac45", "#b5802a"),
    "I2": ("#fbe9c9", "#523807"),
    "W0": ("#e3b3d0", "#7d3f64"),
    "W1": ("#cc79a7", "#a85e8a"),
    "W2": ("#f3dcea", "#4f2740"),
}
MARGIN = 28
LANE = 46
LABEL = 74


def title_of(played: Played) -> str:
    """What a picture shows."""
    per_rank = len(played.stages[0])
    stages = f"{len(played.lanes) * per_rank} stages" if per_rank > 1 else ""
    parts = [f"{len(played.lanes)} ranks", stages, f"{played.micro_batches} micro-batches"]
    return f"{played.schedule} on {', '.join(part for part in parts if part)}"


def summary(played: Played) -> str:
    """What comes of it."""
    per_rank = len(played.stages[0])
    stage = f"of a stage (1/{per_rank} of a rank's layers) " if per_rank > 1 else ""
    return (
        f"{played.length} units of time, of which a forward pass {stage}takes 1 and a backward pass 2; "
        f"{played.whole_bubble:.1%} of it is bubble, in which a rank has nothing to do."
    )


# ---- In a terminal


def in_terminal(played: Played, columns: int, coloured: bool) -> list[Text]:
    """A line for every rank, and what the step costs it; letters are left out where they do not fit."""
    from rich.text import Text

    digits = len(str(played.micro_batches - 1))
    letters = not coloured or len("rank 00 ") + played.length * (digits + 2) <= columns
    width = digits + 2 if letters else digits + 1 if 8 + played.length * (digits + 1) <= columns else digits
    rows = [[Text(name, style="bold") for name in ("", "bubble", "in flight", "stages")]]
    lines: list[Text] = [Text(title_of(played), style="bold"), Text(summary(played), style="dim"), Text("")]
    for rank, lane in enumerate(played.lanes):
        lines.append(Text(f"rank {rank:<3}", style="bold", no_wrap=True) + _lane(played, lane, width, letters))
        share, stages = f"{played.bubble(rank):.1%}", " ".join(map(str, played.stages[rank]))
        rows.append([Text(text) for text in (f"rank {rank}", share, str(played.in_flight(rank)), stages)])
    legend = Text()
    for kind, name in NAMES.items():
        for order in _orders(played, kind):
            which = ("", ", second stage", ", later stages")[order]
            legend.append(f" {kind} ", _style(kind, order)).append(f" {name}{which}  ")
    legend.append("· bubble; the number is the micro-batch", "dim")
    return [*lines, Text(""), legend, Text(""), in_columns(rows, left=(0, 3))]


def _lane(played: Played, lane: list[TimedAction], width: int, letters: bool) -> Text:
    """Every unit of time is `width` characters wide."""
    from rich.text import Text

    line, now = Text(no_wrap=True), 0
    for piece in [*lane, None]:
        start = piece.start if piece else played.length
        line.append("·".center(width) * (start - now), "dim")
        if piece:
            kind, _, number = piece.action
            shown = f"{kind}{number}" if letters else f"{number}"
            style = _style(kind, min(2, _order(played, piece)))
            line.append(shown.center(width * (piece.end - piece.start)), style)
            now = piece.end
    return line


def _style(kind: str, order: int) -> str:
    """A rank's first stage is bright, its others are darker."""
    return (f"black on bright_{STYLES[kind]}", f"white on {STYLES[kind]}", f"{STYLES[kind]} on black")[order]


def _orders(played: Played, kind: str) -> list[int]:
    """Which of a rank's stages, the first, the second and all others, have pieces of a kind."""
    return sorted(
        {min(2, _order(played, piece)) for lane in played.lanes for piece in lane if piece.action.kind == kind}
    )


def _order(played: Played, piece: TimedAction) -> int:
    """Which of its rank's stages a piece belongs to."""
    (own,) = (stages for stages in played.stages if piece.action.stage in stages)
    return own.index(piece.action.stage)


# ---- As SVG


def as_svg(played: Played) -> str:
    """A lane for every rank, with the numbers that follow at its end."""
    unit = max(18.0, min(34.0, 1180 / played.length))
    chart = played.length * unit
    left, right = MARGIN + LABEL, 190
    width = max(left + chart + right + MARGIN, 900)
    lines = svg.wrapped(summary(played), int(width // 8.2))
    top = 70 + 20 * len(lines) + 52
    height = top + LANE * len(played.lanes) + 44
    body = [svg.text(MARGIN, 44, title_of(played), 24, "ink strong")]
    body += [svg.text(MARGIN, 70 + 20 * row, line, 15, "quiet") for row, line in enumerate(lines)]
    body += _legend(played, MARGIN, 70 + 20 * len(lines) + 2)
    body.append(svg.text(left + chart + 76, top - 8, "bubble", 13, "quiet end"))
    body.append(svg.text(left + chart + 160, top - 8, "in flight", 13, "quiet end"))
    for rank, lane in enumerate(played.lanes):
        y = top + rank * LANE
        body.append(svg.text(MARGIN, y + 25, f"rank {rank}", 15, "ink strong"))
        body.append(svg.box(left, y, chart, LANE - 8, "empty", 4))
        body += [_box(played, rank, piece, left, y, unit) for piece in lane]
        body.append(svg.text(left + chart + 76, y + 25, f"{played.bubble(rank):.1%}", 15, "ink end"))
        body.append(svg.text(left + chart + 160, y + 25, f"{played.in_flight(rank)}", 15, "ink end"))
    step = max(1, round(60 / unit))
    for time in range(0, played.length + 1, step):
        body.append(svg.text(left + time * unit, top + LANE * len(played.lanes) + 12, f"{time}", 12, "quiet mid"))
    body.append(svg.text(left, height - 10, "time", 12, "quiet"))
    used = {f"{piece.action.kind}{min(2, _order(played, piece))}" for lane in played.lanes for piece in lane}
    colours = {name: pair for name, pair in FILLS.items() if name in used}
    return svg.picture(width, height, title_of(played), _story(played), body, colours)


def _box(played: Played, rank: int, piece: TimedAction, left: float, y: float, unit: float) -> str:
    kind, stage, number = piece.action
    x, width = left + piece.start * unit, (piece.end - piece.start) * unit
    body = [svg.box(x + 0.75, y + 1, width - 1.5, LANE - 10, f"{kind}{min(2, _order(played, piece))}")]
    body.append(svg.text(x + width / 2, y + 24, f"{number}", 14, "ink mid"))
    tip = f"rank {rank}, {NAMES[kind]}: stage {stage}, micro-batch {number}, time {piece.start} to {piece.end}"
    data = {"kind": kind, "stage": stage, "micro_batch": number, "start": piece.start, "end": piece.end}
    return svg.group(body, tip, rank=rank, **data)


def _legend(played: Played, x: float, y: float) -> list[str]:
    body = []
    for kind, name in NAMES.items():
        for order in _orders(played, kind):
            which = ("", ", second stage", ", later stages")[order]
            body.append(svg.box(x, y, 22, 16, f"{kind}{order}"))
            body.append(svg.text(x + 29, y + 13, f"{name}{which}", 13, "quiet"))
            x += 46 + 7 * len(f"{name}{which}")
    body.append(svg.box(x, y, 22, 16, "empty"))
    body.append(svg.text(x + 29, y + 13, "bubble", 13, "quiet"))
    return body


def _story(played: Played) -> str:
    ranks = [
        f"Rank {rank}: bubble {played.bubble(rank):.1%}, at most {played.in_flight(rank)} activations in flight."
        for rank in range(len(played.lanes))
    ]
    return f"{summary(played)} {' '.join(ranks)}"
