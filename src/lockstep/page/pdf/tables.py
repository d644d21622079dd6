"""Tables and plain text on paper."""

from __future__ import annotations

from lockstep.page.panels import Table, Text
from lockstep.page.pdf.paper import INK, LINE, PALE, QUIET, Paper

SIZE, TALL = 7.5, 3.8
GAP = 3.0
LEAST_WIDTH = 8.0
MOST_ROWS = 80
MOST_LINES_OF_A_CELL = 6
MOST_LETTERS_OF_A_CELL = 300
MOST_LINES = 400


def draw_table(paper: Paper, panel: Table) -> None:
    """Columns as wide as what they hold, or as there is room for; the head is repeated on every page."""
    rows = panel.rows[:MOST_ROWS]
    widths = _widths(paper, panel, rows)
    _draw_head(paper, panel, widths)
    for number, row in enumerate(rows):
        paper.pen(SIZE, INK)
        cells = [
            paper.lines_of(cell[:MOST_LETTERS_OF_A_CELL], width)[:MOST_LINES_OF_A_CELL]
            for cell, width in zip(row, widths, strict=False)
        ]
        height = TALL * max(map(len, cells), default=1) + 0.8
        if paper.room < height:
            paper.add_page()
            _draw_head(paper, panel, widths)
        y = paper.get_y()
        if number % 2:
            paper.filled(paper.left, y, paper.wide, height, PALE)
        x = paper.left
        for column, (lines, width) in enumerate(zip(cells, widths, strict=False)):
            paper.pen(SIZE, INK)
            for line, text in enumerate(lines):
                _cell(paper, text, x, y + 3.0 + TALL * line, width, _is_right(panel, column))
            x += width + GAP
        paper.set_y(y + height)
    if len(panel.rows) > len(rows):
        paper.pen(SIZE, QUIET)
        paper.paragraph(f"{len(panel.rows) - len(rows):,} more rows are on the page", 4.5)


def draw_text(paper: Paper, panel: Text) -> None:
    """Text as it is, in a box."""
    lines = panel.text.splitlines() or [""]
    drawn = 0
    for line in lines:
        paper.pen(7, INK, mono=True)
        for piece in paper.lines_of(line[:4000], paper.wide - 4) or [""]:
            if drawn >= MOST_LINES:
                paper.pen(SIZE, QUIET)
                paper.paragraph(f"the rest of {len(lines):,} lines is on the page", 4.5)
                return
            paper.need(3.4)
            y = paper.get_y()
            paper.filled(paper.left, y, paper.wide, 3.45, PALE)
            paper.pen(7, INK, mono=True)
            paper.text(paper.left + 2, y + 2.5, piece)
            paper.set_y(y + 3.4)
            drawn += 1


def _draw_head(paper: Paper, panel: Table, widths: list[float]) -> None:
    paper.need(2 * TALL + 3)
    x, y = paper.left, paper.get_y() + 3.0
    for column, (name, width) in enumerate(zip(panel.columns, widths, strict=True)):
        paper.pen(SIZE, QUIET, bold=True)
        _cell(paper, name, x, y, width, _is_right(panel, column))
        x += width + GAP
    paper.stroke(LINE, 0.2)
    paper.line(paper.left, y + 1.3, paper.left + paper.wide, y + 1.3)
    paper.set_y(y + 1.8)


def _cell(paper: Paper, text: str, x: float, y: float, width: float, right: bool) -> None:
    paper.word(x + width if right else x, y, text, "right" if right else "left", most=width + 0.1)


def _is_right(panel: Table, column: int) -> bool:
    return column < len(panel.right) and panel.right[column]


def _widths(paper: Paper, panel: Table, rows: list[list[str]]) -> list[float]:
    """What the columns want, or where that is too much, less for the widest."""
    wanted = []
    for column, name in enumerate(panel.columns):
        paper.pen(SIZE, INK, bold=True)
        widest = paper.get_string_width(paper.clean(name[:200]))
        paper.pen(SIZE, INK)
        cells = (row[column] for row in rows if column < len(row))
        lines = (line for cell in cells for line in cell[:MOST_LETTERS_OF_A_CELL].splitlines())
        wanted.append(max([widest, LEAST_WIDTH, *(paper.get_string_width(paper.clean(line)) for line in lines)]) + 0.2)
    room = paper.wide - GAP * (len(wanted) - 1)
    if sum(wanted) <= room:
        return wanted
    most = max(wanted)
    for _ in range(40):  # narrower and narrower, until all columns have room
        fits = sum(min(width, most) for width in wanted) <= room
        if fits:
            break
        most *= 0.9
    widths = [min(width, most) for width in wanted]
    scale = min(1.0, room / sum(widths))
    return [width * scale for width in widths]
