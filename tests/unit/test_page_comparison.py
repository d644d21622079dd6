"""Runs side by side: the scaling table of a course, and nothing divided that is not the same training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.compare.table import LayoutTable, ScalingRow, Spread
from lockstep.layout import Layout
from lockstep.page.panels import Curve, Lines, Panel, Table, Text, as_json
from lockstep.page.reading.summary import Summary, TimeSpent
from lockstep.page.sections.compared import scaling_page
from lockstep.page.sections.comparison import compare_runs
from lockstep.page.sections.headline import UNKNOWN
from tests.summaries import healthy


def run_on(ranks: int, rate: float | None, name: str = "", **changes: Any) -> Summary:
    """A run of steps of 8000 tokens."""
    return replace(
        healthy(),
        name=name or f"on-{ranks}",
        world_size=ranks,
        layout=f"dp={ranks}" if ranks > 1 else "single",
        items_per_second=rate,
        step_seconds=None if rate is None else 8000 / rate,
        **changes,
    )


COURSE = [run_on(8, 70_000.0), run_on(1, 10_000.0), run_on(4, 36_000.0)]
"""Speed-ups of 7 and 3.6, efficiencies of 87.5 % and 90 %; in no order."""


def panels(*runs: Summary) -> dict[str, Panel]:
    (section,) = compare_runs(runs)
    return {panel.id: panel for panel in section.panels}


def scaling(*runs: Summary, id: str = "scaling") -> Table:
    table = panels(*runs)[id]
    assert isinstance(table, Table)
    assert all(len(row) == len(table.columns) == len(table.right) for row in table.rows)
    return table


def columns(table: Table, *names: str) -> list[list[str]]:
    return [[row[table.columns.index(name)] for name in names] for row in table.rows]


def test_the_scaling_table_of_a_course() -> None:
    table = scaling(*COURSE)
    assert columns(table, "run", "ranks", "a step", "an epoch", "throughput", "speed-up", "efficiency") == [
        ["on-1", "1", "800 ms", "6 min 40 s", "10 k tokens/s", "1.00", "100 %"],
        ["on-4", "4", "222 ms", "1 min 51 s", "36 k tokens/s", "3.60", "90 %"],
        ["on-8", "8", "114 ms", "57 s", "70 k tokens/s", "7.00", "87.5 %"],
    ]
    assert columns(table, "time")[0] == ["7 min 20 s"]
    costs = scaling(*COURSE, id="costs")
    assert columns(costs, "run", "goodput", "MFU", "loss", "memory", "cost", "energy")[0] == [
        "on-1", "90.9 %", "40 %", "1.847", "80 GB", "0.489 GPU-hours", "0.3 kWh",
    ]  # fmt: skip
    assert "not the same training" not in table.note
    assert "weak scaling" not in table.note


def test_efficiency_counts_how_many_times_the_ranks_of_the_smallest_run_there_are() -> None:
    table = scaling(run_on(16, 90_000.0), run_on(4, 30_000.0), run_on(8, 60_000.0))
    assert columns(table, "ranks", "speed-up", "efficiency") == [
        ["4", "1.00", "100 %"],
        ["8", "2.00", "100 %"],
        ["16", "3.00", "75 %"],
    ]
    assert "over 100 %" not in table.note


def test_speed_ups_are_drawn_over_ranks_with_the_ideal_line() -> None:
    chart = panels(*COURSE)["speed-up"]
    assert isinstance(chart, Lines)
    assert (chart.x, chart.title) == ("ranks", "Speed-up against on-1 (1 rank)")
    assert chart.curves == [
        Curve("dp", [1, 4, 8], [1, 3.6, 7]),
        Curve("ideal", [1, 8], [1, 8], style="dashed"),
    ]


def test_kinds_of_layouts_are_lines_of_their_own_from_the_base_on() -> None:
    base, dp = run_on(2, 10.0), run_on(4, 18.0)
    fsdp, fsdp_small = replace(dp, layout="fsdp=4", items_per_second=14.0), replace(base, layout="fsdp=2")
    chart = panels(base, dp, fsdp)["speed-up"]
    assert isinstance(chart, Lines)
    assert [(curve.name, curve.x, curve.y) for curve in chart.curves] == [
        ("dp", [2, 4], [1, 1.8]),
        ("fsdp", [2, 4], [1, 1.4]),
        ("ideal", [2, 4], [1, 2]),
    ]
    chart = panels(base, fsdp, replace(fsdp_small, items_per_second=8.0))["speed-up"]
    assert isinstance(chart, Lines)
    assert chart.curves[0].y == [0.8, 1.4], "it has a point of its own on two ranks"


def test_other_trainings_are_said_to_be_so_and_not_divided() -> None:
    other = run_on(4, 50_000.0, "large", parameters=70_000_000_000)
    table = scaling(COURSE[1], other, COURSE[2])
    assert columns(table, "run", "speed-up") == [["on-1", "1.00"], ["on-4", "3.60"], ["large", UNKNOWN]]
    assert (
        "not the same training, and are not divided by each other: on-1, on-4: 812 k parameters, tokens, bf16 on "
        "NVIDIA H200; large: 70 G parameters, tokens, bf16 on NVIDIA H200."
    ) in table.note
    assert "speed-up-2" not in panels(COURSE[1], other, COURSE[2])


@pytest.mark.parametrize("changes", [{"item": "samples"}, {"precision": "fp32"}, {"device": "cpu"}])
def test_other_items_precisions_or_devices_are_not_divided_either(changes: dict[str, Any]) -> None:
    table = scaling(run_on(1, 10.0), run_on(4, 40.0, **changes))
    assert columns(table, "speed-up", "efficiency") == [[UNKNOWN, UNKNOWN], [UNKNOWN, UNKNOWN]]
    assert "speed-up" not in panels(run_on(1, 10.0), run_on(4, 40.0, **changes))


def test_steps_that_grow_with_the_ranks_are_weak_scaling() -> None:
    grown = replace(run_on(4, 36_000.0), step_seconds=32_000 / 36_000)
    assert "different trainings with other losses (weak scaling)" in scaling(COURSE[1], grown).note


def test_an_efficiency_over_a_hundred_per_cent_is_remarked_upon() -> None:
    table = scaling(run_on(1, 10.0), run_on(2, 24.0))
    assert table.rows[1][-1] == "120 % !"
    assert "An efficiency over 100 % (marked !) is an error" in table.note
    usual = scaling(run_on(1, 10.0), run_on(2, 19.0))
    assert usual.rows[1][-1] == "95 %"
    assert "marked" not in usual.note


def test_a_run_without_steps_is_in_the_table_and_nobodys_base() -> None:
    table = scaling(run_on(1, None), run_on(2, 20.0), run_on(4, 30.0))
    assert columns(table, "run", "throughput", "speed-up") == [
        ["on-1", UNKNOWN, UNKNOWN],
        ["on-2", "20 tokens/s", "1.00"],
        ["on-4", "30 tokens/s", "1.50"],
    ]


def test_time_leaves_out_what_passed_in_the_queue() -> None:
    queued = run_on(2, 20.0, spent=TimeSpent(useful=100, stopped=9000))
    assert columns(scaling(queued, run_on(4, 30.0)), "time")[0] == ["1 min 40 s"]


def test_what_differs_is_a_table_and_what_does_not_a_note() -> None:
    table = panels(run_on(1, 10.0), run_on(4, 40.0, precision="fp32"))["differences"]
    assert isinstance(table, Table)
    assert table.columns == ["", "on-1", "on-4"]
    assert table.rows == [["layout", "single", "dp=4"], ["ranks", "1", "4"], ["precision", "bf16", "fp32"]]
    assert table.note.startswith("The same in all: nodes 1, device NVIDIA H200, parameters 812,345,")


def test_one_run_is_no_comparison() -> None:
    assert compare_runs([healthy()]) == []
    assert compare_runs([]) == []


# ---- The page of `lockstep compare`

SINGLE, DP4, PP2 = Layout(), Layout(dp=4), Layout(pp=2)


def spread(middle: float) -> Spread:
    return Spread(middle, middle, middle)


def row(layout: Layout, step: float, speed_up: float) -> ScalingRow:
    efficiency = spread(speed_up / layout.world_size)
    return ScalingRow(layout, 3, spread(step), spread(1000 / step), spread(speed_up), efficiency)


def test_the_page_of_a_comparison_has_what_the_terminal_shows() -> None:
    rows = [row(SINGLE, 1.0, 1.0), row(DP4, 0.3125, 3.2), row(PP2, 1.25, 0.8)]
    found = LayoutTable("lm, 64 samples a step", True, "tokens", 2, rows, ["the losses agree"])
    page = scaling_page(found, made=5.0)
    assert (page.title, page.made, page.runs) == ("lm, 64 samples a step", 5.0, [])
    table, chart, remarks = page.comparison[0].panels
    assert isinstance(table, Table)
    assert columns(table, "layout", "step", "tokens/s", "speed-up", "efficiency") == [
        ["single", "1 s", "1,000", "1.00", "100 %"],
        ["dp=4", "313 ms", "3,200", "3.20", "80 %"],
        ["pp=2", "1.25 s", "800", "0.80", "40 %"],
    ]
    assert isinstance(chart, Lines)
    assert [(curve.name, curve.x, curve.y, curve.style) for curve in chart.curves] == [
        ("dp", [1, 4], [1, 3.2], "line"),
        ("pp", [1, 2], [1, 0.8], "line"),
        ("ideal", [1, 4], [1, 4], "dashed"),
    ]
    assert isinstance(remarks, Text)
    assert remarks.text == "the losses agree"
    assert as_json(page)["comparison"][0]["panels"][1]["kind"] == "lines"


def test_a_comparison_whose_layouts_failed_still_has_a_page() -> None:
    rows = [ScalingRow(SINGLE, failure="out of memory"), ScalingRow(DP4, failure="out of memory")]
    page = scaling_page(LayoutTable("lm", True, "tokens", 2, rows, []), made=5.0)
    table, said = page.comparison[0].panels
    assert isinstance(table, Table)
    assert isinstance(said, Text)
    assert said.text == "single: out of memory\ndp=4: out of memory"
