"""The chapter on the ranks: a heat map of all of them, who is slow, the mesh, and the timetable of a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np

from lockstep.errors import UserError
from lockstep.layout import AXES, Layout
from lockstep.page.panels import Heat, HeatLayer, Mesh, MeshAxis, Panel, Table
from lockstep.page.reading.run_data import Digest
from lockstep.page.reading.series import Array, Grid, numbers, places
from lockstep.page.reading.summary import Summary
from lockstep.text.units import seconds_text

MOST_HEAT_ROWS = 64
TALK = {
    "pp": "Stages of the model: each sends activations to the next one and gets their gradients back, one micro-batch "
    "after the other.",
    "dp": "Replicas of the model: they add up their gradients once a step (all-reduce).",
    "fsdp": "Each keeps a shard of the model: they gather weights when these are needed (all-gather), and hand every "
    "gradient to the rank that keeps it (reduce-scatter).",
    "cp": "Each has a part of every sequence: in attention they gather each other's keys and values.",
    "tp": "Each has a part of every matrix: in every block they add up the parts of its results "
    "(all-reduce), forward and backward.",
}
RANK_LAYERS: tuple[tuple[str, str, Literal["s", "B"]], ...] = (
    ("compute", "compute", "s"),
    ("wait", "waiting in collectives", "s"),
    ("input", "waiting for samples", "s"),
    ("memory", "memory", "B"),
)


def ranks(digest: Digest, summary: Summary) -> list[Panel]:
    """Everything about who."""
    panels: list[Panel] = []
    grid = digest.ranks.grid
    if grid.of("rank compute"):
        layers = [(name, unit, grid.of(f"rank {what}")) for what, name, unit in RANK_LAYERS]
        note = "Seconds of a mean step."
        if summary.world_size > 1:
            note += " All ranks take equally long over a step: the slow one is the one that waits least."
        panels.append(heat("rank_heat", "Ranks over steps", "step", grid, "rank", layers, note))
    if digest.stragglers:
        panels.append(_stragglers(summary))
    if (mesh := _mesh(digest, summary)) is not None:
        panels.append(mesh)
    if digest.timetable is not None and digest.timetable.lanes:
        panels.append(digest.timetable)
    return panels


def heat(
    id: str,
    title: str,
    x: Literal["step", "time"],
    grid: Grid,
    what: str,
    layers: Sequence[tuple[str, Literal["", "s", "B", "share"], dict[str, int]]],
    note: str,
) -> Heat:
    """The highest of each row and column; with many rows, the highest of neighbours together."""
    names = list(dict.fromkeys(name for _, _, rows in layers for name in rows))
    together = -(-len(names) // MOST_HEAT_ROWS)
    high = grid.high()
    shown = []
    for name, unit, rows in layers:
        values = np.full((len(names), high.shape[1]), np.nan)
        for place, row in enumerate(names):
            if row in rows:
                values[place] = high[rows[row]]
        if np.isfinite(values).any():
            shown.append(HeatLayer(name, unit, [numbers(line, 6) for line in _grouped(values, together)]))
    if together > 1:
        groups = [names[at : at + together] for at in range(0, len(names), together)]
        labels = [f"{what} {group[0]} to {group[-1]}" if len(group) > 1 else f"{what} {group[0]}" for group in groups]
        note += f" {len(names)} rows are shown {together} at a time, with the highest of each."
    else:
        labels = [f"{what} {name}".strip() for name in names]
    if grid.looks_of_each > 1:
        note += f" A column is the highest of {grid.looks_of_each} reports."
    return Heat(id, title, x, places(grid.at), labels, shown, note)


def _grouped(values: Array, together: int) -> Array:
    if together == 1:
        return values
    missing = -len(values) % together
    padded = np.concatenate([values, np.full((missing, values.shape[1]), np.nan)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where nobody of a group told anything
        result: Array = np.nanmax(padded.reshape(-1, together, values.shape[1]), axis=1)
    return result


def _stragglers(summary: Summary) -> Panel:
    found = sorted(summary.stragglers, key=lambda straggler: -straggler.times)[:50]
    rows = [
        [
            "all ranks" if straggler.rank is None else f"rank {straggler.rank}",
            straggler.host or "",
            straggler.cause,
            seconds_text(straggler.seconds),
            "" if straggler.others is None else seconds_text(straggler.others),
            str(straggler.times),
            straggler.text,
        ]
        for straggler in found
    ]
    columns = ["who", "host", "cause", "of a step", "others", "times", "what the run said last"]
    right = [False, False, False, True, True, True, False]
    return Table("stragglers", "Who held the steps up", columns, rows, right)


def _mesh(digest: Digest, summary: Summary) -> Panel | None:
    try:
        layout = Layout.parse(summary.layout)
    except UserError:  # of another version, or damaged
        return None
    if layout.world_size != summary.world_size or layout.world_size == 1:
        return None
    axes = [MeshAxis(axis, layout.size(axis), TALK[axis]) for axis in AXES if layout.size(axis) > 1]
    told = digest.ranks.hosts
    hosts = told if len(told) == layout.world_size and all(told) else []
    slow = sorted(
        {
            straggler.rank
            for straggler in summary.stragglers
            if straggler.rank is not None and straggler.rank < layout.world_size
        }
    )
    note = "Rank numbers count along the last axis first, so that those who talk most are neighbours."
    return Mesh("mesh", "Who talks to whom", axes, hosts, slow, note)
