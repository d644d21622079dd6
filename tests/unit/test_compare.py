"""The scaling table: what it makes of event logs, and what it says beside its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.compare import table as compare
from lockstep.compare.table import (
    Conditions,
    LayoutTable,
    ScalingRow,
    Spread,
    Timed,
    draw_chart,
    read_run,
    remarks,
    tabulate,
    to_json,
)
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.text.charts import ChartLine
from tests.events import Event

SINGLE, DP2, DP4 = (Layout(dp=count) for count in (1, 2, 4))


def timed(step: float, items: float = 1000, **others: Any) -> Timed:
    usual = {"item": "tokens", "loss": 2.0, "memory": 5, "waiting": 0.1, "steps_per_epoch": 50}
    return Timed(step, items, **{**usual, **others})


def table(*layouts: Layout, same_training: bool = True, **runs: list[Timed]) -> list[ScalingRow]:
    named = {str(layout): runs.get(str(layout).replace("=", ""), []) for layout in layouts}
    return tabulate(layouts, named, {}, same_training=same_training)


def log(steps: int, world: int = 2) -> list[Event]:
    """A run of which the first steps are slow; from step 8 on ranks wait a tenth and three tenths of their time."""

    def ranks(step: int, count: int, waits: float) -> Event:
        wait = [waits, 3 * waits][:world]
        return {"kind": "ranks", "step": step, "steps": count, "seconds": 0.2, "wait": wait, "memory": [7, step]}

    start = {"kind": "start", "item": "tokens", "steps_per_epoch": 90}
    done = [
        {"kind": "step", "step": n, "seconds": 9.0 if n <= 5 else 0.1 * n, "items": 64, "loss": 1 / n}
        for n in range(1, steps + 1)
    ]
    return [start, *done, ranks(7, 6, 0.19), ranks(steps, steps - 7, 0.02)]


# ---- One run


def test_a_run_is_its_median_step_after_the_warm_up() -> None:
    run = read_run(log(20))
    assert run.step == pytest.approx(1.3), "of 0.6 to 2.0 s"
    assert (run.items, run.item, run.loss, run.steps_per_epoch) == (64, "tokens", 1 / 20, 90)
    assert run.rate == pytest.approx(64 / 1.3)
    assert run.memory == 20, "the most of any rank"


def test_waiting_is_the_mean_share_over_the_ranks_after_the_warm_up() -> None:
    assert read_run(log(20)).waiting == pytest.approx(0.2)


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(UserError, match="no step"):
        read_run(log(20)[:1])


# ---- The table


def test_speed_up_is_the_ratio_of_runs_of_one_turn_and_efficiency_its_share_of_the_devices() -> None:
    """The machine is twice as slow in the second turn: times spread, ratios do not."""
    single, dp2 = table(SINGLE, DP2, single=[timed(1.0), timed(2.0)], dp2=[timed(0.625), timed(1.25)])
    assert single.speed_up == Spread(1, 1, 1)
    assert single.efficiency == Spread(1, 1, 1)
    assert dp2.step == Spread(0.9375, 0.625, 1.25)
    assert dp2.rate == Spread(1200, 800, 1600)
    assert dp2.speed_up == Spread(1.6, 1.6, 1.6)
    assert dp2.efficiency == Spread(0.8, 0.8, 0.8)


def test_efficiency_counts_from_the_first_layout_whatever_its_size() -> None:
    _, dp4 = table(DP2, DP4, dp2=[timed(1.0)], dp4=[timed(0.8)])
    assert dp4.efficiency is not None
    assert dp4.efficiency.middle == pytest.approx(1.25 / 2)


def test_with_a_batch_per_device_faster_is_more_samples_a_second_and_losses_are_not_compared() -> None:
    """Twice the samples in a step that takes a tenth longer."""
    runs = {"single": [timed(1.0)], "dp2": [timed(1.1, items=2000, steps_per_epoch=25, loss=3.0)]}
    single, dp2 = table(SINGLE, DP2, same_training=False, **runs)
    assert dp2.speed_up is not None
    assert dp2.speed_up.middle == pytest.approx(2 / 1.1)
    assert single.epoch is not None
    assert dp2.epoch is not None
    assert [single.epoch.middle, dp2.epoch.middle] == pytest.approx([50, 27.5])
    assert dp2.same_loss is None
    told = " ".join(remarks([single, dp2], Conditions(8, on_cpu=False, threads=1), same_training=False))
    assert "different trainings" in told
    assert "92, 25 and 14 minutes" in told


@pytest.mark.parametrize(
    ("loss", "precision", "same"), [(2.0001, "fp32", True), (2.01, "fp32", False), (2.01, "bf16", True)]
)
def test_losses_have_to_agree_at_the_same_global_batch(loss: float, precision: str, same: bool) -> None:
    runs = {"single": [timed(1.0)], "dp=2": [timed(1.0, loss=loss)]}
    rows = tabulate([SINGLE, DP2], runs, {}, same_training=True, precision=precision)
    assert [row.same_loss for row in rows] == [None, same]
    told = " ".join(remarks(rows, Conditions(8, on_cpu=False, threads=1), same_training=True))
    assert ("the losses agree: 2 after the last step" if same else "others differ: dp=2 2.01; lockstep verify") in told


def test_a_layout_that_failed_says_why_and_without_the_first_there_is_no_speed_up() -> None:
    rows = tabulate([SINGLE, DP2], {"dp=2": [timed(1.0)]}, {"single": "out of memory"}, same_training=True)
    assert (rows[0].failure, rows[0].step) == ("out of memory", None)
    assert rows[1].speed_up is None
    assert rows[1].step == Spread(1, 1, 1)
    told = remarks(rows, Conditions(8, on_cpu=False, threads=1), same_training=True)
    assert told == ["the losses are not compared: single failed, and has none"]


@pytest.mark.parametrize(
    ("losses", "same", "said"),
    [
        ([None, 2.0], False, "the last loss of single is not finite, and others differ: dp=2 2;"),
        ([2.0, None], False, "the last loss of single is 2, and others differ: dp=2 not finite;"),
        ([None, None], None, "the losses are not compared: the last one of single is not finite"),
    ],
)
def test_a_loss_that_is_no_number_is_said(losses: list[float | None], same: bool | None, said: str) -> None:
    rows = table(SINGLE, DP2, single=[timed(1.0, loss=losses[0])], dp2=[timed(1.0, loss=losses[1])])
    assert rows[1].same_loss is same
    (told,) = remarks(rows, Conditions(8, on_cpu=False, threads=1), same_training=True)
    assert told.startswith(said)


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
def test_a_loss_that_the_log_has_not_is_none(loss: float | None) -> None:
    events = log(20)
    events[20] = {**events[20], "loss": loss}
    assert read_run(events).loss is None


def test_nothing_is_said_of_losses_where_only_the_first_has_one() -> None:
    rows = tabulate([SINGLE, DP2], {"single": [timed(1.0)]}, {"dp=2": "out of memory"}, same_training=True)
    assert remarks(rows, Conditions(8, on_cpu=False, threads=1), same_training=True) == []


def test_fewer_cores_than_ranks_are_said() -> None:
    rows = table(SINGLE, DP4, single=[timed(1.0)], dp4=[timed(1.0)])
    said = "2 cores for 4 ranks: speed-ups here say nothing about more cores"
    assert said in remarks(rows, Conditions(2, on_cpu=True, threads=1), same_training=True)
    assert said not in remarks(rows, Conditions(4, on_cpu=True, threads=1), same_training=True)
    assert said not in remarks(rows, Conditions(2, on_cpu=False, threads=1), same_training=True)


def test_a_machine_that_others_use_is_said() -> None:
    rows = table(SINGLE, DP2, single=[timed(1.0)], dp2=[timed(1.0)])
    quiet, busy = (
        remarks(rows, Conditions(2, on_cpu=True, threads=1, busy=share), same_training=True) for share in (0.05, 0.6)
    )
    assert set(busy) - set(quiet) == {"other programs used 60 % of the cores when this began: ask again when they rest"}


def test_the_chart_has_a_line_for_each_kind_of_layout_and_the_ideal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[ChartLine]] = []

    def draw(_title: str, x_label: str, _y: str, series: list[ChartLine]) -> str:
        assert x_label == "devices"
        drawn.append(series)
        return "<svg/>"

    monkeypatch.setattr(compare, "line_chart", draw)
    fsdp2 = Layout(fsdp=2)
    rows = tabulate(
        [SINGLE, DP4, DP2, fsdp2],
        {"single": [timed(1.0)], "dp=4": [timed(0.4)], "dp=2": [timed(0.625)]},
        {"fsdp=2": "broken"},
        same_training=True,
    )
    assert draw_chart(LayoutTable("lm", True, "tokens", 2, rows, [])) == "<svg/>"
    assert drawn == [[ChartLine("dp", [(1, 1.0), (2, 1.6), (4, 2.5)]), ChartLine("ideal", [(1, 1.0), (4, 4.0)])]]


def test_programs_get_all_of_it() -> None:
    rows = table(SINGLE, DP2, single=[timed(1.0)], dp2=[timed(0.625)])
    _, dp2 = to_json(LayoutTable("lm", True, "tokens", 2, rows, []))["rows"]
    assert dp2["layout"] == "dp=2"
    assert dp2["tokens_per_second"] == [1600, 1600, 1600]
    assert dp2["speed_up"] == [1.6, 1.6, 1.6]
    assert dp2["same_loss"] is True
