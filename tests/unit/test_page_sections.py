"""The chapters of a run's page: what each panel shows, and that none is there without data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.page.panels import Mark, RunPage, as_json
from lockstep.page.reading.moments import MOST_MOMENTS, Moments
from lockstep.page.reading.reader import RunReader
from tests.events import Event
from tests.runs import BEGIN, GB, Made, run_events, write_run

LATER = BEGIN + 1e6
PLAIN = Made(steps=200, ranks=4)
AT = {"time": BEGIN + 34, "attempt": 1}
"""Just before the end of the plain run."""

pytestmark = pytest.mark.usefixtures("plain_sentences")


def page_of(folder: Path, made: Made, more: Iterable[Event] = ()) -> RunPage:
    reader = RunReader(write_run(folder, made, [json.dumps(event) + "\n" for event in more]))
    reader.read()
    page = reader.page(LATER)
    json.dumps(as_json(page), allow_nan=False)
    assert page.unreadable == []
    return page


def panel(page: RunPage, id: str) -> Any:
    found = [panel for section in page.sections for panel in section.panels if panel.id == id]
    assert len(found) == 1, f"{id}: {len(found)}"
    return found[0]


def panels(page: RunPage) -> set[str]:
    return {panel.id for section in page.sections for panel in section.panels}


def test_chapters_come_in_order_and_every_panel_has_a_name_of_its_own(tmp_path: Path) -> None:
    page = page_of(tmp_path, replace(PLAIN, fails_after=(60,), gpus=2, metrics=True, samples=True))
    order = ["training", "speed", "time", "ranks", "machine", "checkpoints", "events", "settings"]
    assert [section.id for section in page.sections] == order
    ids = [panel.id for section in page.sections for panel in section.panels]
    assert len(ids) == len(set(ids))


def test_the_loss_has_its_curves_and_marks(tmp_path: Path) -> None:
    made = replace(PLAIN, fails_after=(60,), not_finite=(7, 8, 100))
    loss = panel(page_of(tmp_path, made), "loss")
    names = {curve.name: curve for curve in loss.curves}
    assert set(names) == {"training", "done again later", "validation", "bigram (baseline)"}
    training = names["training"]
    assert training.x == list(range(1, 201))
    assert training.y[6] is None
    assert training.y[76] == pytest.approx(made.loss(77), rel=1e-4)
    assert names["done again later"].x == list(range(51, 61))
    assert names["validation"].x == [50, 100, 150, 200]
    assert (names["bigram (baseline)"].x, names["bigram (baseline)"].style) == ([1, 200], "dashed")
    assert Mark(51, "attempt 2 goes on at step 51", "warning") in loss.marks
    assert Mark(7, "loss not finite: steps 7 to 8", "error") in loss.marks
    assert Mark(100, "skipped: step 100", "warning") in loss.marks
    assert loss.note == "3 of 200 losses are not finite numbers. They are marked and not drawn."


def test_scores_and_own_metrics_are_charts(tmp_path: Path) -> None:
    page = page_of(tmp_path, replace(PLAIN, metrics=True))
    assert panel(page, "score_0").title == "Validation: accuracy"
    assert panel(page, "metric_0").curves[0].y[:2] == [1, 0.5]


def test_speed_has_a_curve_for_each_attempt(tmp_path: Path) -> None:
    page = page_of(tmp_path, replace(PLAIN, fails_after=(60,)))
    first, second = panel(page, "rate").curves
    assert (first.name, first.x[-1], second.name, second.x[0]) == ("attempt 1", 60, "attempt 2", 51)
    assert set(first.y) == {20480}
    assert set(panel(page, "mfu").curves[0].y) == {0.08}
    assert "mfu" not in panels(page_of(tmp_path, replace(PLAIN, peak=1e9)))


def test_many_attempts_do_not_make_many_curves(tmp_path: Path) -> None:
    page = page_of(tmp_path, replace(PLAIN, steps=40, fails_after=(5,) * 600, save_every=None))
    assert len(panel(page, "rate").curves) == 12
    assert "Left out: the first 589 of 601 attempts." in panel(page, "rate").note
    timeline = panel(page, "timeline")
    assert len(timeline.moments) == MOST_MOMENTS
    assert {moment.level for moment in timeline.moments} == {"error"}
    assert "100 of 600 with level error" in timeline.note
    assert len(timeline.spans) == 200
    assert len(json.dumps(as_json(page))) < 500_000


def test_the_parts_of_a_step_add_up(tmp_path: Path) -> None:
    made = replace(PLAIN, slow_compute={1: 0.04}, validate_every=None, save_every=40, stall=0.4)
    stack = panel(page_of(tmp_path, made), "step_time")
    last = {part.name: part.y[-1] for part in stack.parts}
    assert last["compute"] == pytest.approx(0.07 + 0.04 / 4)
    assert last["exposed communication"] == pytest.approx(0.01 + 0.04 * 3 / 4)
    assert (last["optimizer"], last["input"], last["between steps"]) == pytest.approx((0.01, 0.005, 0.005))
    in_steps = sum(value for name, value in last.items() if name not in ("checkpoint stall", "idle"))
    assert in_steps == pytest.approx(0.14, rel=1e-3)
    stalls = next(part for part in stack.parts if part.name == "checkpoint stall")
    assert max(stalls.y) > 0
    assert "idle" not in last
    assert stack.at == stack.parts[0].x
    assert stack.begin == 0


def test_the_first_column_of_a_log_that_begins_later_begins_there(tmp_path: Path) -> None:
    made = replace(PLAIN, fails_after=(60,), save_every=50)
    lines = [json.dumps(event) for event in run_events(made) if event["attempt"] == 2]
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    reader = RunReader(tmp_path / "later")
    reader.read()
    stack = panel(reader.page(LATER), "step_time")
    assert (stack.begin, stack.at[0]) == (50, 55)


def test_the_whole_run_is_one_bar(tmp_path: Path) -> None:
    spent = panel(page_of(tmp_path, replace(PLAIN, fails_after=(60,))), "spent")
    amounts = {part.name: part.amount for part in spent.parts}
    assert amounts["stopped"] == pytest.approx(20)
    assert amounts["repeated or skipped steps"] == pytest.approx(1)
    assert sum(part.amount for part in spent.parts if part.good) == pytest.approx(20)
    assert "1 min 6 s, in 2 attempts" in spent.note
    assert "30.3 %" in spent.note


def test_writing_traces_is_no_idle_time_of_a_step(tmp_path: Path) -> None:
    made = replace(PLAIN, profile=(50, 52), profile_slows=0.2, profile_writes=10.0)
    page = page_of(tmp_path, made)
    assert {part.name for part in panel(page, "step_time").parts} == {
        part.name for part in panel(page_of(tmp_path, PLAIN), "step_time").parts
    }
    (share,) = [part for part in panel(page, "spent").parts if part.name == "profiling"]
    assert (share.amount, share.good) == (pytest.approx(10.6), False)


def test_predicted_and_measured_are_in_a_table(tmp_path: Path) -> None:
    rows = panel(page_of(tmp_path, replace(PLAIN, predicted_step=0.12)), "predicted").rows
    assert rows == [["step", "120 ms", "100 ms", "+20 %"], ["memory", "1 GB", "-", "-"]]


def test_every_rank_is_a_row_of_the_heat_map(tmp_path: Path) -> None:
    heat = panel(page_of(tmp_path, replace(PLAIN, slow_compute={2: 0.05})), "rank_heat")
    assert heat.rows == ["rank 0", "rank 1", "rank 2", "rank 3"]
    compute, wait = heat.layers[0], heat.layers[1]
    assert [row[-1] for row in compute.values] == pytest.approx([0.07, 0.07, 0.12, 0.07])
    assert [row[-1] for row in wait.values] == pytest.approx([0.06, 0.06, 0.01, 0.06])
    assert len(heat.at) == len(compute.values[0])


def test_a_thousand_ranks_are_shown_in_groups_with_the_slowest_of_each(tmp_path: Path) -> None:
    made = replace(PLAIN, steps=60, ranks=1000, hosts=125, gpus=8, slow_compute={777: 0.05}, save_every=None)
    page = page_of(tmp_path, made)
    heat = panel(page, "rank_heat")
    assert len(heat.rows) == 63
    assert heat.rows[48] == "rank 768 to 783"
    assert [row for row, values in zip(heat.rows, heat.layers[0].values, strict=True) if values[-1] > 0.1] == [
        "rank 768 to 783"
    ]
    assert "1000 rows are shown 16 at a time, with the highest of each." in heat.note
    assert len(panel(page, "gpu_heat").rows) == 63
    assert len(panel(page, "host_cpu").curves) == 1
    assert len(json.dumps(as_json(page))) < 600_000


def test_stragglers_and_the_mesh_name_who_is_slow(tmp_path: Path) -> None:
    slow = {"kind": "straggler", "step": 9, "rank": 3, "host": "node2", "cause": "compute", "seconds": 0.3, **AT}
    made = replace(PLAIN, hosts=2, layout="fsdp=2,tp=2")
    page = page_of(tmp_path, made, [{**slow, "others": 0.1, "text": "rank 3 (node2) is slow"}])
    assert panel(page, "stragglers").rows[0][:6] == ["rank 3", "node2", "compute", "300 ms", "100 ms", "1"]
    mesh = panel(page, "mesh")
    assert [(axis.name, axis.size) for axis in mesh.axes] == [("fsdp", 2), ("tp", 2)]
    assert (mesh.hosts, mesh.slow) == (["node1", "node1", "node2", "node2"], [3])
    assert "all-gather" in mesh.axes[0].talk


def test_the_timetable_of_a_pipeline_is_shown(tmp_path: Path) -> None:
    lanes = [[["F", 0, 0, 0.0, 0.1], ["B", 0, 0, 0.3, 0.4]], [["F", 1, 0, 0.1, 0.2], ["B", 1, 0, 0.2, 0.3]]]
    event = {"kind": "timetable", "step": 6, "seconds": 0.4, "busy": [0.5, 0.5], "lanes": lanes, **AT}
    found = panel(page_of(tmp_path, replace(PLAIN, layout="pp=2,dp=2"), [event]), "timetable")
    assert found.lanes[1][0] == ("F", 1, 0, 0.1, 0.2)


def test_unused_gpus_are_shown_by_name(tmp_path: Path) -> None:
    page = page_of(tmp_path, replace(PLAIN, ranks=2, gpus=4))
    busy = panel(page, "gpu_busy")
    assert [curve.name for curve in busy.curves] == [
        "GPU 0 (rank 0)",
        "GPU 1 (rank 1)",
        "GPU 2 (no rank)",
        "GPU 3 (no rank)",
    ]
    assert [curve.y[0] for curve in busy.curves] == [0.9, 0.9, 0, 0]
    assert (busy.unit, busy.most) == ("share", 1)
    assert panel(page, "gpu_memory").curves[3].y[0] == GB // 2
    assert [curve.name for curve in panel(page, "network").curves] == ["node1, sent", "node1, received"]
    assert [curve.name for curve in panel(page, "rank_cores").curves] == ["rank 0", "rank 1"]


def test_a_gpu_that_an_earlier_attempt_used_is_not_called_unused(tmp_path: Path) -> None:
    """The job was requeued: attempt 1 ran on node1, attempt 2 on another node."""
    folder = write_run(tmp_path, replace(PLAIN, ranks=1, gpus=2, fails_after=(60,)))
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    moved = [line.replace("node1", "node2") if '"attempt": 2' in line else line for line in lines]
    (folder / "events.jsonl").write_text("".join(moved))
    reader = RunReader(folder)
    reader.read()
    assert [curve.name for curve in panel(reader.page(LATER), "gpu_busy").curves] == [
        "node1 GPU 0 (rank 0)",
        "node1 GPU 1 (no rank)",
        "node2 GPU 0 (rank 0)",
        "node2 GPU 1 (no rank)",
    ]


def test_checkpoints_are_a_table_and_curves(tmp_path: Path) -> None:
    page = page_of(tmp_path, PLAIN)
    assert panel(page, "checkpoint_table").rows[0] == [
        "50",
        "1",
        "checkpoints/step-00000050",
        "9.81 MB",
        "400 ms",
        "100 ms",
        "best",
    ]
    assert panel(page, "checkpoint_seconds").curves[1].y == [0.1] * 4


def test_a_profile_is_digested(tmp_path: Path) -> None:
    seconds = {"whole": 0.96, "compute": 0.8, "communication": 0.3, "overlapped": 0.2, "idle": 0.06}
    event = {
        "kind": "profile",
        "rank": 0,
        "host": "node1",
        "first_step": 10,
        "last_step": 12,
        "path": "profile/trace.json.gz",
        "seconds": seconds,
        "kernels": [["aten::mm", 120, 0.48]],
        "gaps": [[0.1, 0.02, "aten::mm", "aten::add"]],
        "memory": [[0.0, 1000000], [0.3, 2500000]],
        "tensors": [[1048576, "512x512 float32", "lm.py:88"]],
        "text": "rank 0 computed 83 % of the time",
        **AT,
    }
    page = page_of(tmp_path, PLAIN, [event])
    amounts = [part.amount for part in panel(page, "profile0").parts]
    assert amounts == pytest.approx([0.6, 0.2, 0.1, 0.06])
    assert sum(amounts) == pytest.approx(0.96)
    assert panel(page, "profile0").note == (
        "Rank 0 computed 83 % of the time. The trace for Perfetto and TensorBoard is profile/trace.json.gz."
    )
    assert panel(page, "profile0_kernels").rows == [["aten::mm", "120", "480 ms", "50 %"]]
    memory = panel(page, "profile0_memory")
    assert (memory.x, memory.curves[0].x, memory.curves[0].y) == ("seconds", [0, 0.3], [1e6, 2.5e6])
    assert panel(page, "profile0_tensors").rows == [["1.05 MB", "512x512 float32", "lm.py:88"]]


def test_the_timeline_tells_what_happened(tmp_path: Path) -> None:
    warning = {"kind": "message", "level": "warning", "text": "careful", "time": BEGIN + 66, "attempt": 2}
    timeline = panel(page_of(tmp_path, replace(PLAIN, fails_after=(60,), not_finite=(7,)), [warning]), "timeline")
    what = [moment.what for moment in timeline.moments]
    assert set(what) == {
        *("start", "alarm", "validation", "checkpoint", "stop", "failure", "recovered", "warning", "end"),
    }
    assert [moment.time for moment in timeline.moments] == sorted(moment.time for moment in timeline.moments)
    assert [(span.attempt, span.state) for span in timeline.spans] == [(1, "failed"), (2, "finished")]
    assert timeline.note == ""


def test_settings_show_the_config_formats_versions_and_samples(tmp_path: Path) -> None:
    page = page_of(tmp_path, replace(PLAIN, samples=True))
    assert panel(page, "config").text == 'recipe = "lm"\nsteps = 200\n'
    assert panel(page, "formats").rows[0] == ["weights", "fp32"]
    assert ["torch", "2.13.0"] in panel(page, "versions").rows
    assert "To be| or not to be, at step 200" in panel(page, "samples").text


def test_one_step_without_validation_makes_a_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, Made(steps=1, ranks=1, validate_every=None, save_every=None, tells_machine=False))
    assert panel(page, "loss").curves[0].x == [1]
    assert not panels(page) & {"mesh", "stragglers", "timetable", "score_0", "checkpoint_table", "gpu_busy"}
    assert [section.id for section in page.sections] == ["training", "speed", "time", "ranks", "events", "settings"]


def test_losses_that_are_never_numbers_make_a_page(tmp_path: Path) -> None:
    loss = panel(page_of(tmp_path, replace(PLAIN, not_finite=range(1, 201))), "loss")
    assert set(loss.curves[0].y) == {None}
    assert loss.note == "200 of 200 losses are not finite numbers. None of them is drawn."


def test_a_run_that_failed_at_once_makes_a_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, Made(steps=0, ending="failed"))
    assert [section.id for section in page.sections] == ["time", "ranks", "events", "settings"]
    assert panels(page) == {"spent", "predicted", "mesh", "timeline", "config", "formats", "versions"}


def test_a_long_run_is_thinned_without_losing_its_peak(tmp_path: Path) -> None:
    made = replace(PLAIN, steps=10_000, tell_every=10.0, validate_every=10, save_every=1000)
    page = page_of(tmp_path, made)
    training = panel(page, "loss").curves[0]
    assert len(training.x) <= 800
    assert max(training.high) == pytest.approx(made.loss(77), rel=1e-4)
    assert len(json.dumps(as_json(page))) < 400_000
    made_events = sum(1 for event in run_events(made) if event["kind"] == "ranks")
    assert len(panel(page, "rank_heat").at) == made_events


def test_a_curve_of_many_validations_or_own_metrics_has_no_more_points_than_others(tmp_path: Path) -> None:
    page = page_of(tmp_path, replace(PLAIN, steps=1_500, validate_every=1, save_every=None, metrics=True))
    for id in ("loss", "score_0", "metric_0"):
        assert all(len(curve.x) <= 800 for curve in panel(page, id).curves)


def test_a_stop_that_only_follows_a_failure_elsewhere_is_no_error_of_its_own() -> None:
    moments = Moments()
    moments.add(5.0, 1, 20, "info", "checkpoint", "saved")
    moments.add(7.0, 1, 20, "error", "stop", "failed: Connection closed by peer")
    moments.only_followed(1)
    moments.add(7.0, 1, 20, "error", "failure", "rank 1 failed: ValueError")
    told, _ = moments.chosen()
    assert [(one.what, one.level) for one in told] == [("checkpoint", "info"), ("stop", "info"), ("failure", "error")]
