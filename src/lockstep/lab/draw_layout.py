"""Pictures of who holds what: a column for every rank, a row for every moment of a step, matrices as they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lab.layouts import AXIS, EXPLAINED, HeldByRanks, HeldMatrix
from lockstep.text import svg
from lockstep.text.columns import in_columns

if TYPE_CHECKING:
    from rich.text import Text

MARGIN = 28
CELL_HEIGHT = 24
LABEL = 150


def title_of(held: HeldByRanks) -> str:
    """What a picture shows."""
    ranks = f"{held.ranks} rank{'' if held.ranks == 1 else 's'}"
    return f"{held.topic}: one step of a tiny model on {ranks}, layout {AXIS[held.topic]}={held.ranks}"


def moments(held: HeldByRanks) -> list[str]:
    """The moments of the step, in order."""
    return list(dict.fromkeys(part.moment for part in held.parts[0]))


def parts_of(held: HeldByRanks, rank: int, moment: str) -> list[HeldMatrix]:
    """What a rank held at a moment, the first matrix first."""
    found = [part for part in held.parts[rank] if part.moment == moment]
    return sorted(found, key=lambda part: ["x", "up", "relu(up x)", "down", "y"].index(part.name))


def number_at(part: HeldMatrix, row: int, column: int) -> float | None:
    """The number that a rank has at a place of the whole, None where another rank has it."""
    row, column = row - part.at[0], column - part.at[1]
    inside = 0 <= row < len(part.values) and 0 <= column < len(part.values[0])
    return part.values[row][column] if inside else None


# ---- In a terminal


def in_terminal(held: HeldByRanks) -> list[Text]:
    """For every moment, what the ranks have, side by side; a dot stands for what other ranks have."""
    from rich.text import Text

    texts = [Text(title_of(held), style="bold"), Text(EXPLAINED[held.topic], style="dim")]
    heads = [Text(f"rank {rank}", style="bold") for rank in range(held.ranks)]
    for moment in moments(held):
        cells = [Text("\n").join(_matrix(part) for part in parts_of(held, rank, moment)) for rank in range(held.ranks)]
        texts += [
            Text(""),
            Text(moment, style="bold yellow"),
            in_columns([heads, cells], gap=5, left=range(held.ranks)),
        ]
    return [*texts, Text(""), Text(loss_line(held))]


def loss_line(held: HeldByRanks) -> str:
    """What the step says of itself."""
    return f"loss {svg.number(held.loss)}, the mean over all samples of the step"


def _matrix(part: HeldMatrix) -> Text:
    from rich.text import Text

    numbers = [
        [
            "·" if (value := number_at(part, row, column)) is None else svg.number(value)
            for column in range(part.shape[1])
        ]
        for row in range(part.shape[0])
    ]
    widths = [max(map(len, column)) for column in zip(*numbers, strict=True)]
    text = Text()
    for row, line in enumerate(numbers):
        name = part.name if row == 0 else ""
        text.append(f"{name:<{len(part.name)}} ", "dim")
        text.append(" ".join(number.rjust(width) for number, width in zip(line, widths, strict=True)))
        text.append("\n" if row + 1 < len(numbers) else "")
    return text


# ---- As SVG


def as_svg(held: HeldByRanks) -> str:
    """A column for every rank, a row for every moment; what other ranks have is left empty."""
    widest = max(
        len(svg.number(value)) for parts in held.parts for part in parts for row in part.values for value in row
    )
    cell = max(34, 12 + 7.6 * widest)
    rows = {moment: parts_of(held, 0, moment) for moment in moments(held)}
    across = max(sum(_width(part, cell) + 34 for part in parts) for parts in rows.values())
    width = 2 * MARGIN + LABEL + held.ranks * across
    lines = svg.wrapped(EXPLAINED[held.topic], int((width - 2 * MARGIN) // 7.6))
    top = 70 + 21 * len(lines) + 44
    body = [svg.text(MARGIN, 44, title_of(held), 24, "ink strong")]
    body += [svg.text(MARGIN, 72 + 21 * row, line, 15, "quiet") for row, line in enumerate(lines)]
    for rank in range(held.ranks):
        x = MARGIN + LABEL + rank * across
        body.append(svg.text(x, top - 14, f"rank {rank}", 17, "ink strong"))
    y = top
    for moment, parts in rows.items():
        tall = 22 + max(part.shape[0] for part in parts) * CELL_HEIGHT
        body.append(f'<path d="M {MARGIN} {y:g} H {width - MARGIN:g}" class="line-edge"/>')
        for row, line in enumerate(svg.wrapped(moment, 18)):
            body.append(svg.text(MARGIN, y + 30 + 18 * row, line, 14, "ink strong"))
        for rank in range(held.ranks):
            x = MARGIN + LABEL + rank * across
            for part in parts_of(held, rank, moment):
                body.append(_drawn(part, rank, x, y + 12, cell))
                x += _width(part, cell) + 34
        y += tall + 16
    share = ", orange: a share of it" if any(_colour(part) == "new" for part in held.parts[0]) else ""
    said = f"{loss_line(held)}; green: what came from all ranks{share}"
    body.append(svg.text(MARGIN, y + 14, said, 14, "quiet"))
    return svg.picture(width, y + 36, title_of(held), EXPLAINED[held.topic], body)


def _width(part: HeldMatrix, cell: float) -> float:
    return part.shape[1] * cell


def _drawn(part: HeldMatrix, rank: int, x: float, y: float, cell: float) -> str:
    body = [svg.text(x, y + 8, part.name, 12, "quiet")]
    for row in range(part.shape[0]):
        for column in range(part.shape[1]):
            value = number_at(part, row, column)
            left, top = x + column * cell, y + 14 + row * CELL_HEIGHT
            inside = [
                svg.box(left + 1, top + 1, cell - 2, CELL_HEIGHT - 2, "empty" if value is None else _colour(part))
            ]
            if value is None:
                body += inside
                continue
            inside.append(svg.text(left + cell / 2, top + 17, svg.number(value), 13, "ink mid"))
            tip = f"rank {rank}, {part.moment}, {part.name}, row {row}, column {column}"
            body.append(svg.group(inside, tip, row=row, column=column, value=value))
    return svg.group(body, rank=rank, moment=part.moment, tensor=part.name)


def _colour(part: HeldMatrix) -> str:
    if "gathered" in part.moment or "after the all-reduce" in part.moment or "reduce-scatter" in part.moment:
        return "done"
    return "new" if part.moment in ("own gradient", "its partial sums") else "cell"
