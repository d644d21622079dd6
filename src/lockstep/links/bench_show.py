"""What `lockstep bench` prints: tables for people, the matrix of pairs, and the charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from lockstep.links.collective_cost import bus_factor
from lockstep.links.measured import Bench, Fit, Pair, Row, Speed, medians
from lockstep.links.slow_links import SLOW, good_speed, node_names
from lockstep.text.charts import ChartLine, line_chart, terminal_chart
from lockstep.text.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from lockstep.links.expected import ExpectedSpeed

MOST_IN_MATRIX = 16
WORST_PAIRS = 5


class Rows:
    """Prints rows as they come: a headline and a head of columns for every collective and axis."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._now: tuple[str, str] | None = None

    def show(self, row: Row) -> None:
        """One line."""
        if self._now != (row.axis, row.collective):
            self._now = (row.axis, row.collective)
            among = "all ranks" if row.axis == "world" else f"axis {row.axis}"
            self._print(f"\n[bold]{row.collective}[/] over {among}, {row.ranks} ranks")
            self._print(f"{'size':>9}{'time':>11}{'algbw':>9}{'busbw':>9} GB/s   spread of the time")
        if row.seconds is None or row.fastest is None or row.slowest is None:
            self._print(f"{bytes_text(row.bytes):>9}   {row.note}", markup=False)
            return
        spread = f"{seconds_text(row.fastest)} to {seconds_text(row.slowest)}"
        self._print(
            f"{bytes_text(row.bytes):>9}{seconds_text(row.seconds):>11}{row.algbw_gb_s:>9.3g}{row.busbw_gb_s:>9.3g}"
            f"        {spread}"
        )

    def _print(self, text: str, markup: bool = True) -> None:
        self._terminal.print(text, soft_wrap=True, markup=markup)


def show_speeds(speeds: Sequence[Speed], terminal: Terminal) -> None:
    """One line for every rank."""
    kinds = list(speeds[0].matmul_tflops)
    table = Table("rank", "device", *(f"{kind} TFLOP/s" for kind in kinds), "copy GB/s", box=None, pad_edge=False)
    for speed in speeds:
        products = [f"{speed.matmul_tflops[kind]:.3g}" for kind in kinds]
        table.add_row(str(speed.rank), speed.device, *products, f"{speed.copy_gb_s:.3g}")
    terminal.print("\n[bold]what a device does by itself[/] (matrix products; bytes read and written)")
    terminal.print(table)


def show_fits(fits: Sequence[Fit], terminal: Terminal) -> None:
    """Seconds to begin and bytes a second, for every collective and axis."""
    table = Table("collective", "axis", "alpha", "1/beta", "as busbw", "farthest from a row", box=None, pad_edge=False)
    for fit in fits:
        rate = 1e-9 / fit.beta if fit.beta else None
        table.add_row(
            fit.collective,
            fit.axis,
            seconds_text(fit.alpha) if fit.alpha else "0",
            "-" if rate is None else f"{rate:.3g} GB/s",
            "-" if rate is None else f"{rate * bus_factor(fit.collective, fit.ranks):.3g} GB/s",
            f"{fit.worst_miss:.0%}",
        )
    terminal.print("\n[bold]time = alpha + beta x bytes[/]")
    terminal.print(table)


def show_pairs(
    pairs: Sequence[Pair],
    nodes: Sequence[int],
    hosts: Sequence[str],
    expected: Mapping[bool, ExpectedSpeed],
    terminal: Terminal,
) -> None:
    """The matrix of pairs, and what is usual inside a node and between nodes."""
    if not pairs:
        return
    names = node_names(nodes, hosts)
    usual = medians(pairs, nodes)
    good = {inside: good_speed([p.gb_s for p in pairs if (nodes[p.a] == nodes[p.b]) is inside]) for inside in usual}
    speeds = {(pair.a, pair.b): pair.gb_s for pair in pairs}
    ranks = sorted({rank for pair in speeds for rank in pair})
    terminal.print("\n[bold]pairs of ranks, GB/s one way[/]")
    if len(ranks) <= MOST_IN_MATRIX:
        table = Table("", *map(str, ranks), box=None, pad_edge=False)
        for a in ranks:
            cells = []
            for b in ranks:
                speed = speeds.get((min(a, b), max(a, b)))
                share = speed / good[nodes[a] == nodes[b]] if speed else 1.0
                colour = "bold red" if share < SLOW else "yellow" if share < 0.8 else "green"
                cells.append("." if speed is None else f"[{colour}]{speed:.3g}{'!' if share < SLOW else ''}[/]")
            table.add_row(f"{a} {names[nodes[a]]}", *cells)
        terminal.print(table)
    else:
        for pair in sorted(pairs, key=lambda pair: pair.gb_s)[:WORST_PAIRS]:
            terminal.print(f"slowest: {pair.a} and {pair.b}, {pair.gb_s:.3g} GB/s", soft_wrap=True)
    for inside, (gb_s, latency, count) in usual.items():
        where = "inside a node" if inside else "between nodes"
        wanted = expected.get(inside)
        should = f"; expected: {wanted.gb_s:.3g} GB/s ({wanted.source})" if wanted else ""
        line = f"{where}: median {gb_s:.3g} GB/s, {seconds_text(latency)} ({count} pair{'s' if count > 1 else ''})"
        terminal.print(line + should, soft_wrap=True, markup=False)


def show_chart(bench: Bench, terminal: Terminal) -> None:
    """The bus bandwidth of the all-reduce, in characters, where the terminal has them."""
    series = [ChartLine(axis, points) for axis, points in _bandwidths(bench, "all-reduce").items() if len(points) > 1]
    if series and terminal.encoding.lower().startswith("utf"):
        over = f"axis {series[0].name}" if len(series) == 1 else "each axis"
        terminal.print(f"\n[bold]all-reduce over {over}, busbw in GB/s[/]")
        width = min(terminal.width, 76)
        chart = terminal_chart(series, width, log_x=True, x_format=bytes_text)
        terminal.print(chart, soft_wrap=True, markup=False)


def draw_charts(bench: Bench, path: Path) -> dict[Path, str]:
    """The bus bandwidth of all collectives over the size, as SVG: one file, or one for every axis beside it."""
    axes = list(dict.fromkeys(row.axis for row in bench.rows)) or ["dp"]
    found = {}
    for axis in axes:
        lines = {
            name: _bandwidths(bench, name).get(axis, []) for name in dict.fromkeys(r.collective for r in bench.rows)
        }
        series = [ChartLine(name, points) for name, points in lines.items() if points]
        title = f"Bus bandwidth of {bench.layout} over {bench.backend}" + (f": {axis}" if len(axes) > 1 else "")
        own = path.with_stem(f"{path.stem}-{axis}") if len(axes) > 1 else path
        found[own] = line_chart(title, "bytes of a buffer", "GB/s", series, log_x=True, x_format=bytes_text)
    return found


def _bandwidths(bench: Bench, collective: str) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in bench.rows:
        if row.collective == collective and row.busbw_gb_s is not None:
            found.setdefault(row.axis, []).append((float(row.bytes), row.busbw_gb_s))
    return found
