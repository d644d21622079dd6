"""The page of `lockstep compare`: its scaling table, its speed-ups with the ideal line, and its remarks."""

from __future__ import annotations

from lockstep import __version__
from lockstep.compare.show import table_cells
from lockstep.compare.table import Comparison
from lockstep.page.panels import Page, Panel, Section, Table, Text
from lockstep.page.sections.comparison import kind_of, speed_up_lines


def comparison_page(comparison: Comparison, made: float) -> Page:
    """All that the terminal shows, as a page without a run of its own."""
    columns, rows = table_cells(comparison)
    table = Table("scaling", "Scaling", columns, rows, [column != "layout" for column in columns])
    panels: list[Panel] = [table]
    base = comparison.rows[0].contender
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in comparison.rows[1:]:
        if row.speed_up is not None:
            one = row.contender
            kind = one.name if one.is_baseline else kind_of(str(one.layout))
            lines.setdefault(kind, []).append((one.devices, row.speed_up.middle))
    if lines:
        title = f"Speed-up against {base.name}"
        panels.append(speed_up_lines("speed-up", title, base.devices, lines, "medians; ranks are devices here"))
    failures = [f"{row.contender.name}: {row.failure}" for row in comparison.rows if row.failure]
    if said := [*failures, *comparison.remarks]:
        panels.append(Text("remarks", "What has to be said", "\n".join(said)))
    section = Section("comparison", "Side by side", panels)
    return Page(comparison.title, made, __version__, runs=[], comparison=[section])
