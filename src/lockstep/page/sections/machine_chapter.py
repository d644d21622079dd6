"""The chapter on the machine: what hosts, GPUs and processes did over time, also GPUs that no rank uses."""

from __future__ import annotations

from typing import Literal

import numpy as np

from lockstep.page.panels import Curve, Lines, Panel
from lockstep.page.reading.run_data import Digest
from lockstep.page.reading.series import Array, Grid, numbers, places
from lockstep.page.sections.rank_chapter import heat

MOST_CURVES = 16
"""In one chart; more are drawn as a heat map, or as lowest, mean and highest."""
Unit = Literal["", "s", "B", "B/s", "share", "W", "flop/s", "/s"]

GPUS: tuple[tuple[str, str, str, Unit], ...] = (
    ("busy", "GPU busy", "share of the time that a kernel ran", "share"),
    ("memory", "GPU memory", "bytes held, by whomever", "B"),
    ("watts", "GPU power", "watts", "W"),
    ("celsius", "GPU temperature", "degrees Celsius", ""),
)
HOSTS: tuple[tuple[str, str, str, Unit], ...] = (
    ("cpu", "CPU busy", "share of all cores of the host, whoever used them", "share"),
    ("memory", "Host memory", "bytes in use", "B"),
    ("watts", "CPU power", "watts", "W"),
)
TRAFFIC: tuple[tuple[str, str, tuple[str, str]], ...] = (
    ("network", "Network", ("sent", "received")),
    ("disk", "Disks", ("read", "written")),
)
RANKS: tuple[tuple[str, str, str, Unit], ...] = (
    ("cores", "Cores kept busy by each rank", "cores, with data workers", ""),
    ("memory", "Memory of each rank's process", "bytes on its host", "B"),
)


def machine(digest: Digest) -> list[Panel]:
    """GPUs first: they cost the most."""
    grid = digest.machines.grid
    panels = _gpus(digest)
    for what, title, y, unit in HOSTS:
        panels += _lines(f"host_{what}", title, y, unit, grid, {"": grid.of(f"host {what}")})
    for id, title, ways in TRAFFIC:
        panels += _lines(id, title, "bytes a second", "B/s", grid, {way: grid.of(f"host {way}") for way in ways})
    if len(grid.of("rank cores")) > MOST_CURVES:
        layers = [("cores", "", grid.of("rank cores")), ("memory", "B", grid.of("rank memory"))]
        note = "What each rank's process used of its host, with its data workers."
        panels.append(heat("rank_processes", "Processes of the ranks", "time", grid, "rank", layers, note))  # type: ignore[arg-type]
        return panels
    for what, title, y, unit in RANKS:
        rows = {f"rank {rank}": row for rank, row in grid.of(f"rank {what}").items()}
        panels += _lines(f"rank_{what}", title, y, unit, grid, {"": rows})
    return panels


def _gpus(digest: Digest) -> list[Panel]:
    grid = digest.machines.grid
    hosts = {name.rpartition(" GPU ")[0] for name in grid.of("gpu busy")}
    named = {what: _named(grid.of(f"gpu {what}"), digest, len(hosts) == 1) for what, *_ in GPUS}
    if len(named["busy"]) > MOST_CURVES:
        units = {"share": "share", "B": "B"}
        layers = [(title, units.get(unit, ""), named[what]) for what, title, _, unit in GPUS]
        note = "Every GPU of the nodes, also those that no rank uses."
        return [heat("gpu_heat", "GPUs over time", "time", grid, "", layers, note)]  # type: ignore[arg-type]
    panels: list[Panel] = []
    for what, title, y, unit in GPUS:
        panels += _lines(f"gpu_{what}", title, y, unit, grid, {"": named[what]})
    return panels


def _named(rows: dict[str, int], digest: Digest, one_host: bool) -> dict[str, int]:
    """The same rows under names for people: who uses the GPU, or did so last, and its host where there are several."""
    result = {}
    for name, row in rows.items():
        users = digest.machines.users.get(name, ())
        who = f"rank{'s' * (len(users) > 1)} {', '.join(map(str, users[:8]))}" if users else "no rank"
        short = f"GPU {name.rpartition(' GPU ')[2]}" if one_host else name
        result[f"{short} ({who})"] = row
    return result


def _lines(id: str, title: str, y: str, unit: Unit, grid: Grid, groups: dict[str, dict[str, int]]) -> list[Panel]:
    """A curve for every row of each group, or lowest, mean and highest of it where they are many."""
    mean, low, high = grid.mean(), grid.low(), grid.high()
    x = places(grid.at)
    curves: list[Curve] = []
    note = ""
    together = sum(map(len, groups.values())) > MOST_CURVES
    for group, rows in groups.items():
        known = {name: row for name, row in rows.items() if np.isfinite(mean[row]).any()}
        if together and known:
            at = list(known.values())
            with np.errstate(all="ignore"):
                own = [
                    _over_rows(np.nanmin, low[at]),
                    _over_rows(np.nanmean, mean[at]),
                    _over_rows(np.nanmax, high[at]),
                ]
            name = f"{group}, mean of {len(at)}".removeprefix(", ")
            curves.append(Curve(name, x, numbers(own[1]), numbers(own[0]), numbers(own[2])))
            note = "Mean over all, with the lowest and the highest of any."
        elif len(known) > 0:
            for name, row in known.items():
                label = f"{name}, {group}".removesuffix(", ")
                if np.array_equal(low[row], high[row], equal_nan=True):
                    curves.append(Curve(label, x, numbers(mean[row], 6)))
                else:
                    ends = (numbers(low[row], 6), numbers(high[row], 6))
                    curves.append(Curve(label, x, numbers(mean[row], 6), *ends))
    if not curves:
        return []
    most = 1.0 if unit == "share" else None
    return [Lines(id, title, "time", y, curves, note, unit=unit, most=most, from_zero=True)]


def _over_rows(join: object, values: Array) -> Array:
    """Of every column; NaN where no row has a number."""
    result = np.full(values.shape[1], np.nan)
    known = np.isfinite(values).any(axis=0)
    assert callable(join)
    result[known] = join(values[:, known], axis=0)
    return result
