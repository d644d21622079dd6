"""What `lockstep compare` prints: the scaling table, and what has to be said beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console as Terminal
from rich.measure import Measurement
from rich.table import Table

from lockstep.text.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from lockstep.compare.table import LayoutTable, Spread

BAR_WIDTH = 12


def table_cells(scaling: LayoutTable) -> tuple[list[str], list[list[str]]]:
    """The table's columns and rows as text; epochs are shown where a step is not the same everywhere."""
    rows = scaling.rows
    has_epochs = not scaling.same_training and any(row.epoch for row in rows)
    times = ["step", f"{scaling.item}/s", "speed-up", "efficiency", *["epoch"] * has_epochs]
    columns = ["layout", "processes", *times, "memory", "exposed comm."]
    return columns, [
        [
            str(row.layout),
            str(row.layout.world_size),
            _spread(row.step, seconds_text),
            f"{row.rate.middle:,.0f}" if row.rate else "-",
            _spread(row.speed_up, lambda value: f"{value:.2f}"),
            _percent(row.efficiency),
            *[seconds_text(row.epoch.middle) if row.epoch else "-"] * has_epochs,
            bytes_text(row.memory) if row.memory else "-",
            _percent(row.waiting),
        ]
        for row in rows
    ]


def show_table(scaling: LayoutTable, terminal: Terminal) -> None:
    """A line for every layout, with a bar of its speed-up."""
    rows = scaling.rows
    columns, cells = table_cells(scaling)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(columns[0], no_wrap=True)
    for head in columns[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    most = max((row.speed_up.middle for row in rows if row.speed_up), default=1.0)
    for row, texts in zip(rows, cells, strict=True):
        bar = "█" * max(1, round(BAR_WIDTH * row.speed_up.middle / most)) if row.speed_up else ""
        table.add_row(*texts, bar)
    terminal.print(f"\n{scaling.title}", style="bold", markup=False, soft_wrap=True)
    # Numbers that are cut off help nobody: where it is too narrow the terminal breaks the lines itself.
    needed = Measurement.get(terminal, terminal.options.update(width=1000), table).maximum
    Terminal(file=terminal.file, force_terminal=terminal.is_terminal, width=needed).print(table)
    for row in rows:
        if row.failure:
            terminal.print(f"{row.layout}: {row.failure}", style="red", markup=False, soft_wrap=True)
    for line in scaling.remarks:
        terminal.print(f"- {line}", markup=False, soft_wrap=True)


def _percent(spread: Spread | None) -> str:
    return f"{100 * spread.middle:.0f} %" if spread else "-"


def _spread(spread: Spread | None, text: Callable[[float], str]) -> str:
    """The median, and by how many per cent the repeats lie apart to either side."""
    if spread is None:
        return "-"
    apart = (spread.high - spread.low) / 2 / spread.middle
    return text(spread.middle) + (f" ±{100 * apart:.0f} %" if apart else "")
