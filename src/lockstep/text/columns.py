"""Columns of text that are never squeezed: a number that does not fit a narrow terminal has to wrap, not vanish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def in_columns(rows: Sequence[Sequence[Text]], *, gap: int = 2, left: Sequence[int] = (0,)) -> Text:
    """Rows of cells, one below the other and all columns as wide as they have to be; those in `left` begin at the left.

    A cell may have several lines.
    """
    from rich.text import Text

    split = [[cell.split("\n", allow_blank=True) or [Text("")] for cell in row] for row in rows]
    widths = [
        max((line.cell_len for cell in column for line in cell), default=0) for column in zip(*split, strict=True)
    ]
    lines = []
    for row in split:
        for number in range(max(map(len, row))):
            line = Text()
            for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
                content = cell[number] if number < len(cell) else Text("")
                padding = " " * (width - content.cell_len)
                line.append(" " * gap if column else "")
                line = line + content + padding if column in left else line + padding + content
            line.rstrip()
            lines.append(line)
    return Text("\n").join(lines)
