"""Several runs side by side: the scaling table, speed-ups with the ideal line, and what differs between them.

Runs are divided by each other only where they do the same training on the same kind of device: so many parameters,
the same items, the same precision. The others stand in the table, and a note says why they have no speed-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.compare.table import kind_of
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.page.panels import Chapter, Curve, Lines, Table
from lockstep.page.reading.summary import Summary
from lockstep.page.sections.headline import UNKNOWN
from lockstep.text.units import (
    bytes_text,
    count_text,
    device_time_text,
    duration_text,
    energy_text,
    loss_text,
    seconds_text,
    share_text,
)

SAME_STEP = 0.01
"""By how much the items of a step may differ, relative, before more ranks are another training."""
TOO_GOOD = 1.0005
"""An efficiency above this, which is written as more than 100 %, says more of the smallest run than of the others."""

COLUMNS: Mapping[str, Callable[[Summary], str]] = {
    "ranks": lambda run: str(run.world_size),
    "layout": lambda run: run.layout,
    "time": lambda run: duration_text(run.spent.whole - run.spent.stopped),
    "an epoch": lambda run: _known(_epoch_seconds(run), duration_text),
    "a step": lambda run: _known(run.step_seconds, seconds_text),
    "throughput": lambda run: _known(run.items_per_second, lambda rate: f"{count_text(rate)} {run.item}/s"),
}
COSTS: Mapping[str, Callable[[Summary], str]] = {
    "goodput": lambda run: _known(run.spent.goodput, share_text),
    "MFU": lambda run: _known(run.mfu, share_text),
    "loss": lambda run: _known(run.loss, loss_text),
    "memory": lambda run: _known(run.memory, bytes_text),
    "cost": lambda run: device_time_text(run.device_hours, run.device),
    "energy": lambda run: _known(run.kwh, energy_text),
}
DIFFERENCES: Mapping[str, Callable[[Summary], str]] = {
    "layout": lambda run: run.layout,
    "ranks": lambda run: str(run.world_size),
    "nodes": lambda run: str(run.nodes),
    "device": lambda run: run.device,
    "precision": lambda run: run.precision,
    "parameters": lambda run: f"{run.parameters:,}",
    "throughput counts": lambda run: run.item,
    "global batch": lambda run: _known(run.global_batch, str),
    "micro-batch": lambda run: _known(run.micro_batch, str),
    "steps": lambda run: _known(run.total_steps, str),
    "threads of a rank": lambda run: _of_ranks([rank.threads for rank in run.ranks]),
    "data workers of a rank": lambda run: _of_ranks([rank.workers for rank in run.ranks]),
}


@dataclass(frozen=True)
class SameTraining:
    """Runs of one training; `base`, the smallest that has a throughput, is what the others are divided by."""

    runs: list[Summary]
    base: Summary | None

    def speed_up(self, run: Summary) -> float | None:
        """How many times as many items a second as the base."""
        if self.base is None or run.items_per_second is None or len(self.runs) < 2:
            return None
        assert self.base.items_per_second is not None
        return run.items_per_second / self.base.items_per_second

    def efficiency(self, run: Summary) -> float | None:
        """The speed-up over how many times as many ranks there are."""
        speed_up = self.speed_up(run)
        if speed_up is None or self.base is None or not run.world_size:
            return None
        return speed_up * self.base.world_size / run.world_size


def compare_runs(summaries: Sequence[Summary]) -> list[Chapter]:
    """What is said of several runs together; nothing of fewer than two."""
    if len(summaries) < 2:
        return []
    groups = group_runs(summaries)
    charts = [
        _chart(number, group)
        for number, group in enumerate(groups, start=1)
        if group.base is not None and len({run.world_size for run in group.runs}) > 1
    ]
    return [Chapter("comparison", "Side by side", [_scaling(groups), *charts, _costs(groups), _differences(summaries)])]


def group_runs(summaries: Sequence[Summary]) -> list[SameTraining]:
    """The runs by training, smallest first, in the order in which each training was named first."""
    found: dict[tuple[int, str, str, str], list[Summary]] = {}
    for run in summaries:
        found.setdefault((run.parameters, run.item, run.precision, run.device), []).append(run)
    groups = []
    for runs in found.values():
        ordered = sorted(runs, key=lambda run: run.world_size)
        groups.append(
            SameTraining(ordered, next((run for run in ordered if run.items_per_second and run.world_size), None))
        )
    return groups


def _kind(layout: str) -> str:
    try:
        return kind_of(Layout.parse(layout))
    except UserError:  # of another version, or damaged
        return layout


def speed_up_lines(
    id: str, title: str, base: int, lines: Mapping[str, Sequence[tuple[int, float]]], note: str
) -> Lines:
    """Speed-ups over ranks, a line for each kind of layout from the base on, and the ideal line."""
    curves = []
    for name, points in lines.items():
        begins = [] if any(ranks == base for ranks, _ in points) else [(base, 1.0)]
        placed = sorted([*begins, *points])
        curves.append(Curve(name, [float(ranks) for ranks, _ in placed], [gained for _, gained in placed]))
    most = max((ranks for points in lines.values() for ranks, _ in points), default=base)
    curves.append(Curve("ideal", [float(base), float(most)], [1.0, most / base], style="dashed"))
    return Lines(id, title, "ranks", "speed-up", curves, note)


def _scaling(groups: Sequence[SameTraining]) -> Table:
    rows = [
        [
            run.name,
            *(text(run) for text in COLUMNS.values()),
            _known(group.speed_up(run), lambda value: f"{value:.2f}"),
            _known(group.efficiency(run), _efficiency_text),
        ]
        for group in groups
        for run in group.runs
    ]
    columns = ["run", *COLUMNS, "speed-up", "efficiency"]
    right = [column not in ("run", "layout") for column in columns]
    return Table("scaling", "Scaling", columns, rows, right, " ".join(_remarks(groups)))


def _costs(groups: Sequence[SameTraining]) -> Table:
    rows = [[run.name, *(text(run) for text in COSTS.values())] for group in groups for run in group.runs]
    note = "Goodput is the share of the time in steps whose result was kept; memory is that of the fullest rank."
    return Table("costs", "What it took", ["run", *COSTS], rows, [False, *[True] * len(COSTS)], note)


def _remarks(groups: Sequence[SameTraining]) -> list[str]:
    """What has to be said beside the table, for it to be honest."""
    told = []
    if any(len(group.runs) > 1 and group.base is not None for group in groups):
        told.append(
            "A speed-up is the throughput over that of the run with the fewest ranks of the same training; efficiency "
            "is the speed-up over how many times as many ranks there are."
        )
    told.append("Time leaves out what passed between attempts; a step is the median step.")
    if len(groups) > 1:
        each = "; ".join(f"{', '.join(run.name for run in group.runs)}: {_training(group.runs[0])}" for group in groups)
        told.append(f"These are not the same training, and are not divided by each other: {each}.")
    for group in groups:
        efficiencies = [share for run in group.runs if (share := group.efficiency(run)) is not None]
        if not _have_equal_steps(group.runs):
            told.append(
                f"A step does not have the same {group.runs[0].item} in all of "
                f"{', '.join(run.name for run in group.runs)}: these are different trainings with other losses (weak "
                "scaling)."
            )
        if max(efficiencies, default=0.0) > TOO_GOOD:
            assert group.base is not None
            told.append(
                "An efficiency over 100 % (marked !) is an error of the comparison and no gain of the layout: "
                f"{group.base.name}, which the others are divided by, was slower than it had to be. Its ranks had "
                "fewer threads, its data did not fit into caches, or the machine was busy: see what differs, and its "
                "page."
            )
    return told


def _training(run: Summary) -> str:
    return f"{count_text(run.parameters)} parameters, {run.item}, {run.precision} on {run.device}"


def _have_equal_steps(runs: Sequence[Summary]) -> bool:
    sizes = [run.items_per_second * run.step_seconds for run in runs if run.items_per_second and run.step_seconds]
    return all(math.isclose(size, sizes[0], rel_tol=SAME_STEP) for size in sizes)


def _chart(number: int, group: SameTraining) -> Lines:
    assert group.base is not None
    lines: dict[str, list[tuple[int, float]]] = {}
    for run in group.runs:
        gained = group.speed_up(run)
        if run is not group.base and gained is not None:
            lines.setdefault(_kind(run.layout), []).append((run.world_size, gained))
    id = "speed-up" if number == 1 else f"speed-up-{number}"
    title = f"Speed-up against {group.base.name} ({group.base.world_size} rank{'s' * (group.base.world_size != 1)})"
    return speed_up_lines(id, title, group.base.world_size, lines, _training(group.base))


def _differences(summaries: Sequence[Summary]) -> Table:
    """What of the configuration is not the same in all runs."""
    values = {name: [text(run) for run in summaries] for name, text in DIFFERENCES.items()}
    rows = [[name, *texts] for name, texts in values.items() if len(set(texts)) > 1]
    same = [f"{name} {texts[0]}" for name, texts in values.items() if len(set(texts)) == 1 and texts[0] != UNKNOWN]
    note = f"The same in all: {', '.join(same)}." if same else ""
    columns = ["", *(run.name for run in summaries)]
    return Table("differences", "What differs", columns, rows, [False] * len(columns), note)


def _epoch_seconds(run: Summary) -> float | None:
    if run.step_seconds is None or run.steps_per_epoch is None:
        return None
    return run.step_seconds * run.steps_per_epoch


def _of_ranks(counts: Sequence[int | None]) -> str:
    known = sorted({count for count in counts if count is not None})
    return UNKNOWN if not known else str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _efficiency_text(share: float) -> str:
    return share_text(share) + (" !" if share > TOO_GOOD else "")


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else text(value)
