"""The table at the end of a run: short, in 80 columns, of numbers that are known."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from lockstep.page.reading.summary import AttemptSummary, Compared, Summary, TimeSpent
from lockstep.sinks.closing import closing_rows, closing_table, show_closing
from tests.runs import Made, write_run

SUMMARY = Summary(
    name="lm",
    state="finished",
    layout="dp=2",
    world_size=2,
    nodes=1,
    device="NVIDIA H200",
    precision="bf16",
    parameters=812345,
    item="tokens",
    steps=300,
    total_steps=300,
    begin=1000.0,
    end=1200.0,
    attempts=[
        AttemptSummary(1, 1000.0, 1100.0, "failed", "dp=2", 2, 1, 150),
        AttemptSummary(2, 1110.0, 1200.0, "finished", "dp=2", 2, 101, 300),
    ],
    spent=TimeSpent(useful=100, communication=30, input=10, checkpoints=20, repeated=10, starting=20, stopped=10),
    loss=1.8471,
    best_loss=1.9,
    best_step=200,
    test_loss=2.0,
    step_seconds=0.5,
    items_per_second=41_000.0,
    mfu=0.41,
    device_hours=0.11,
    kwh=0.05,
    memory=61_000_000_000,
    predicted_step=Compared(0.45, 0.5, -0.1),
    predicted_memory=Compared(60e9, None, None),
)


def test_the_table_says_how_far_how_well_how_fast_where_the_time_went_and_what_it_cost():
    assert closing_rows(SUMMARY, Path("runs/lm/report.html")) == [
        ("run", "lm, finished"),
        ("steps", "300 of 300 in 3 min 20 s, 2 attempts"),
        ("loss", "1.847 in training, best in validation 1.9 (step 200), test 2"),
        ("speed", "41 k tokens/s, 500 ms a step, MFU 41 %"),
        ("goodput", "70 %: compute 50 %, exposed communication 15 %, input 5 %"),
        ("lost time", "30 %: checkpoint stalls 10 %, starting 10 %, repeated or skipped steps 5 %, stopped 5 %"),
        ("memory", "61 GB on the fullest rank"),
        ("cost", "0.11 GPU-hours, 50 Wh"),
        ("predicted", "a step 500 ms, 11 % more than the predicted 450 ms"),
        ("report", "runs/lm/report.html"),
    ]


def test_what_is_not_known_has_no_line():
    bare = Summary(
        *("lm", "failed", "single", 1, 1, "cpu", "fp32", 100, "samples", 0, None, 1000.0, 1000.0),
        attempts=[AttemptSummary(1, 1000.0, 1000.0, "failed", "single", 1, None, None)],
        spent=TimeSpent(),
    )
    assert closing_rows(bare) == [
        ("run", "lm, failed"),
        ("steps", "0 in 0 s"),
    ]


def test_it_fits_80_columns_and_keeps_a_path_whole():
    path = Path("/a/very/long/" + "folder/" * 12 + "report.html")
    lines = [line.plain for line in closing_table(SUMMARY, path, 80)]
    assert lines[-1] == f"report     {path}"
    assert max(map(len, lines[:-1])) <= 80
    assert [line[:11].strip() for line in lines][4:7] == ["goodput", "lost time", ""]
    assert not any(line.lstrip()[0].isdigit() for line in lines if line.startswith(" ")), "a name keeps its share"


def test_a_hostile_name_cannot_move_the_cursor():
    [(_, text), *_] = closing_rows(replace(SUMMARY, name="a\x1b[2J\nb"))
    assert "\x1b" in text
    assert "\x1b" not in "".join(line.plain for line in closing_table(replace(SUMMARY, name="a\x1b[2Jb"), None, 80))


def shown(folder: Path, *, has_report: bool = True) -> str:
    terminal = Terminal(file=io.StringIO(), _environ={})
    show_closing(folder, terminal, has_report=has_report)
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


def test_it_is_made_from_the_events_of_all_attempts(tmp_path: Path):
    text = shown(write_run(tmp_path, Made(steps=200, fails_after=[75], ending="stop")))
    assert "steps      200 of 200 in" in text
    assert "2 attempts" in text
    assert "repeated or skipped" in " ".join(text.split())
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_very_long_log_is_not_read_without_being_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_run(tmp_path, Made(steps=5))
    monkeypatch.setattr("lockstep.page.report.MOST_BYTES", 10)
    assert shown(folder) == ""


def test_a_report_of_an_earlier_end_is_not_named(tmp_path: Path):
    folder = write_run(tmp_path, Made(steps=5))
    (folder / "report.html").write_text("old")
    assert "report.html" in shown(folder)
    assert "report.html" not in shown(folder, has_report=False)


def test_a_run_that_never_began_has_no_table(tmp_path: Path):
    assert shown(tmp_path) == ""
    (tmp_path / "events.jsonl").write_text("nothing of this is an event\n")
    assert shown(tmp_path) == ""


def test_whatever_is_wrong_here_does_not_fail_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("lockstep.sinks.closing.closing_rows", broken)
    folder = write_run(tmp_path, Made(steps=5))
    assert shown(folder) == "no summary of the run (ZeroDivisionError: of all things)\n"
