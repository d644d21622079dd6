"""The page of `lockstep compare`: its scaling table, its speed-ups with the ideal line, and its remarks."""

from __future__ import annotations

from lockstep import __version__
from lockstep.compare.print_table import table_cells
from lockstep.compare.table import LayoutTable, speed_ups
from lockstep.page.panels import Chapter, Page, Panel, Table, Text
from lockstep.page.sections.comparison import speed_up_lines


def scaling_page(scaling: LayoutTable, made: float) -> Page:
    """All that the terminal shows, as a page without a run of its own."""
    columns, rows = table_cells(scaling)
    table = Table("scaling", "Scaling", columns, rows, [column != "layout" for column in columns])
    panels: list[Panel] = [table]
    base = scaling.rows[0].layout
    if lines := speed_ups(scaling):
        title = f"Speed-up against {base}"
        panels.append(speed_up_lines("speed-up", title, base.world_size, lines, "medians; ranks are devices here"))
    failures = [f"{row.layout}: {row.failure}" for row in scaling.rows if row.failure]
    if said := [*failures, *scaling.remarks]:
        panels.append(Text("remarks", "What has to be said", "\n".join(said)))
    section = Chapter("comparison", "Side by side", panels)
    return Page(scaling.title, made, __version__, runs=[], comparison=[section])
