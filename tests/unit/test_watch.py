"""`lockstep watch`: what it shows of a run that waits, runs, fails, goes on, ends, or falls silent."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.page.panels import Advice
from lockstep.sinks.watch_view import Screen, view
from lockstep.sinks.watched import MOST_POINTS, Watched
from tests import runs
from tests.cli.commands import in_this_process
from tests.events import Event
from tests.runs import Made, run_events, write_run

LATER = runs.BEGIN + 1e6


def watched(made: Made, until: str = "", extra: tuple[Any, ...] = ()) -> Watched:
    """A run as it is known after its events, up to the first of a kind."""
    run = Watched()
    for event in run_events(made):
        run.take(event)
        if event["kind"] == until:
            break
    for event in extra:
        run.take(event)
    return run


def lines(run: Watched, now: float | None = None, screen: Screen | None = None, **more: Any) -> list[str]:
    at = run.last_time if now is None else now
    return [line.plain for line in view("runs/made", run, at or 0.0, screen or Screen(100), **more)]


def last_of(kind: str, made: Made) -> Event:
    return [event for event in run_events(made) if event["kind"] == kind][-1]


def test_a_run_that_has_not_begun_is_waited_for():
    run = Watched()
    assert lines(run) == ["runs/made  queued", "no event yet"]
    job = {"id": "4711", "restart": 0, "reason": "", "nodes": "", "partition": "", "account": "", "exit_code": ""}
    run.take({"time": 1.0, "kind": "job", "attempt": 1, "state": "PENDING", **job})
    assert lines(run) == ["runs/made  queued", "job 4711 is pending"]
    assert not run.is_over(LATER)


def test_a_running_run_says_how_far_how_fast_and_how_well_it_is():
    """Step 100 of 200, each 0.1 s; of the 100 so far two validations and two checkpoints took 2.2 s."""
    run, half = watched(Made(steps=200)), Watched()
    for event in run_events(Made(steps=200)):
        half.take(event)
        if event["kind"] == "checkpoint" and event["step"] == 100:
            break
    shown = lines(half)
    assert shown[0] == "runs/made  running  step 100/200 (50 %)  0:12 left"
    assert shown[1].count("█") == 50
    assert shown[3] == "loss 1.946  20.5 k tokens/s  100 ms a step  lr 0.0003  grad norm 1.086  epoch 0.83"
    assert shown[4] == "step 100:  validation loss 2.046  accuracy 55.6 % (100/180)  best 2.046 at step 100"
    assert any(line.startswith("last checkpoint: step 100, 9.81 MB in 400 ms, 0:00 ago") for line in shown)
    assert run.is_over(LATER)
    assert lines(run)[0] == "runs/made  finished  step 200/200 (100 %)"


def test_every_rank_has_a_bar_of_compute_input_and_wait():
    shown = lines(watched(Made(steps=5, slow_compute={1: 0.1})), screen=Screen(60))
    [first] = [number for number, line in enumerate(shown) if line.startswith("4 ranks, 200 ms a step")]
    ranks = shown[first + 1 : first + 5]
    assert [line[:6] for line in ranks] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert ranks[0].endswith("  43 %   3 %  55 %")
    assert ranks[1].endswith("  93 %   3 %   5 %")
    bar = ranks[1][7:-18]
    assert (bar.count("█"), len(bar)) == (31, 34)  # of 34, 92.5 %


def test_of_many_ranks_the_slowest_are_named():
    shown = lines(watched(Made(steps=5, ranks=64, hosts=8, gpus=8, slow_input={17: 0.1})))
    [first] = [number for number, line in enumerate(shown) if line.startswith("the 8 slowest of 64 ranks")]
    assert shown[first + 1].startswith("rank 17 node3 ")
    assert "64 GPUs 90 % busy" in shown


def test_a_gpu_that_nobody_uses_is_named():
    shown = lines(watched(Made(steps=5, ranks=1, gpus=2)))
    assert "GPU 0  █████████░  90 %  60 GB of 150 GB  300 W" in shown
    assert "GPU 1  ░░░░░░░░░░   0 %  500 MB of 150 GB  60 W  no rank uses it" in shown


def test_how_busy_a_host_is_and_how_much_of_it_is_the_runs_are_told_apart():
    """The share is that of all its cores, of which the run may use a few."""
    shown = lines(watched(Made(steps=5, ranks=1, cores=8)))
    assert "CPUs of node1  13 % busy  10 GB of 64 GB  the run may use 8 cores" in shown


def test_a_failure_a_restart_and_the_end_are_told_apart():
    made = Made(steps=200, fails_after=[75])
    run = watched(made, until="stop")
    assert run.last_time is not None
    assert run.run.state(run.last_time) == "failed"
    assert not run.is_over(run.last_time + 1)  # the launcher may still say that it goes on
    assert run.is_over(LATER)
    run = watched(made, until="failure")
    assert run.last_time is not None
    assert (run.run.state(run.last_time + 20), run.is_over(run.last_time + 20)) == ("restarting", False)
    assert (run.run.state(LATER), run.is_over(LATER)) == ("failed", True), "the launcher has gone too"
    assert lines(run)[2] == "rank 0 on node1 raised ValueError: something broke"
    assert lines(watched(made))[0] == "runs/made  finished  step 200/200 (100 %)  attempt 2"
    assert watched(Made(steps=60, ending="failed")).run.state(LATER) == "failed"
    stopped = watched(Made(steps=60, ending="stop"))
    assert (stopped.run.state(LATER), stopped.is_over(LATER)) == ("stopped", True)
    assert "out of time; the same command goes on" in lines(stopped)


def test_a_run_that_died_is_said_to_be_silent():
    run = watched(Made(steps=60, ending="killed"))
    assert run.last_time is not None
    assert run.silence(run.last_time + 50) == ""
    assert lines(run, run.last_time + 90)[2] == "no event for 1:30: it may have died, or its host"
    assert "running" in lines(run, run.last_time + 590)[0]
    assert "lost" in lines(run, run.last_time + 610)[0], "as the report would say"
    slow = watched(Made(steps=3, compute=30.0, ending="killed"))  # 20 of its steps are ten minutes
    assert slow.last_time is not None
    assert slow.silence(slow.last_time + 500) == ""
    assert not run.is_over(LATER)


@pytest.mark.parametrize(("width", "height"), [(60, 24), (80, 30), (140, 50), (30, 8), (80, 3)])
def test_a_live_view_fits_its_screen(width: int, height: int):
    run = watched(Made(steps=200, ranks=16, gpus=8, fails_after=[75], not_finite=[20]))
    advice = [Advice("give rank 2 more data workers " * 5, "it waits 0.1 s of 0.2 s a step")]
    shown = lines(run, screen=Screen(width, height), advice=advice)
    assert len(shown) <= height
    assert max(map(len, shown)) <= width
    assert shown[0].startswith("runs/made  finished")
    if height > 30:
        assert any(line.startswith("to change: give rank 2") for line in shown)


def test_where_there_is_no_room_for_a_chart_there_is_a_line_of_it():
    run = watched(Made(steps=70, ranks=4))  # falls, without the peak at step 77
    [line] = [line for line in lines(run, screen=Screen(60, 16)) if line.startswith(("loss ▁", "loss █"))]
    assert line.startswith("loss █")
    assert line.rstrip()[-1] in "▁▂"


def test_without_unicode_everything_is_ascii():
    run = watched(Made(steps=200, gpus=2))
    assert "\n".join(lines(run, screen=Screen(80, is_unicode=False))).isascii()
    assert "\n".join(lines(run, screen=Screen(80, 24, is_unicode=False))).isascii()


def test_the_curve_of_a_million_steps_is_small_and_keeps_its_extremes():
    curve = Watched().losses
    for step in range(1, 100_001):
        curve.add(step, 9.0 if step == 77_777 else 0.001 if step == 5 else 1.0)
    points = curve.spans()
    assert len(points) <= MOST_POINTS
    assert max(high for _, _, high in points) == 9.0
    assert min(low for _, low, _ in points) == 0.001
    assert [step for step, _, _ in points] == list(range(1, 100_001, int(points[1][0] - points[0][0])))


def test_of_a_step_that_is_done_again_the_later_loss_counts():
    curve = Watched().losses
    for step, loss in [(1, 5.0), (2, 4.0), (3, float("nan")), (4, 3.0), (2, 4.5), (3, 3.5)]:
        curve.add(step, loss)
    assert curve.spans() == [(1, 5.0, 5.0), (2, 4.5, 4.5), (3, 3.5, 3.5)]


def test_what_cannot_be_read_is_counted_and_hostile_text_is_harmless():
    hostile = {"time": LATER, "kind": "message", "attempt": 1, "level": "warning", "text": "a\x1b[2Jb\nc [bold]"}
    strange = {"time": LATER, "kind": "weather", "attempt": 1}
    run = watched(Made(steps=5), extra=(hostile, strange, "not JSON", "without a kind"))
    shown = lines(run)
    assert "warning: a [2Jb c [bold]" in shown
    assert shown[-1] == "2 lines of the log could not be read"
    assert "\x1b" not in "".join(shown)


@pytest.mark.parametrize(
    ("kind", "change", "line"),
    [
        ("ranks", {"compute": []}, ""),
        ("ranks", {"wait": [0.01]}, "1 rank, 100 ms a step   █ compute ▒ input ░ wait"),
        ("ranks", {"compute": [float("inf")] * 4}, "4 ranks, 100 ms a step   █ compute ▒ input ░ wait"),
        ("step", {"step": 4, "seconds": float("inf")}, "runs/made  running  step 4/5 (80 %)  inf left"),
    ],
)
def test_strange_numbers_are_shown_as_far_as_they_go(kind: str, change: dict[str, Any], line: str):
    made = Made(steps=5, ending="killed")
    run = watched(made, extra=({**last_of(kind, made), **change},))
    shown = lines(run)
    assert line in shown or not line
    assert len(lines(run, screen=Screen(80, 12))) <= 12


# The command


def test_once_shows_the_state_and_says_by_its_code_whether_the_run_failed(tmp_path: Path):
    write_run(tmp_path / "runs" / "good", Made(steps=100))
    write_run(tmp_path / "runs" / "bad", Made(steps=100, ending="failed"))
    done = in_this_process(tmp_path, "watch", "runs/good", "--once")
    assert done.returncode == 0
    assert "runs/good  finished  step 100/100 (100 %)" in done.stdout
    assert "steps      100 of 100 in" in done.stdout
    assert "\x1b" not in done.stdout
    assert in_this_process(tmp_path, "watch", "runs/bad", "--once").returncode == 1


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda event: event.pop(name)


DAMAGES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "ranks without lists": ("ranks", without("compute")),
    "ranks that did text": ("ranks", lambda event: event.update(compute=["long"])),
    "start without nodes": ("start", without("nodes")),
    "host without GPUs": ("machine", lambda event: event["hosts"][0].pop("gpus")),
    "checkpoint without bytes": ("checkpoint", without("bytes")),
    "validation without metrics": ("validation", without("metrics")),
    "metric of text": ("metric", lambda event: event["values"].update(temperature="high")),
    "step of text": ("step", lambda event: event.update(step="seven")),
    "kind that is a list": ("step", lambda event: event.update(kind=[])),
    "time of text": ("status", lambda event: event.update(time="noon")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_line_that_lacks_something_is_passed_over_counted_and_named(tmp_path: Path, damage: str):
    kind, spoil = DAMAGES[damage]
    made = Made(steps=50, metrics=True, gpus=1)
    event = last_of(kind, made)
    spoil(event)
    write_run(tmp_path / "runs" / "lm", made, more=[json.dumps(event) + "\n"])
    for arguments in (["--once"], []):
        done = in_this_process(tmp_path, "watch", "runs/lm", *arguments)
        assert done.returncode == 0
        assert "1 line of the log could not be read" in done.stdout.splitlines()
        assert "run        made, finished" in done.stdout.splitlines()


def test_a_line_that_is_nested_too_deeply_is_passed_over(tmp_path: Path):
    write_run(tmp_path / "runs" / "lm", Made(steps=5), more=["[" * 5000 + "]" * 5000 + "\n"])
    done = in_this_process(tmp_path, "watch", "runs/lm", "--once")
    assert done.returncode == 0
    assert "1 line of the log could not be read" in done.stdout.splitlines()


def test_a_pipe_gets_the_lines_of_the_console_and_ends_with_the_run(tmp_path: Path):
    write_run(tmp_path / "runs" / "lm", Made(steps=100, fails_after=[60]), more=["not an event\n"])
    done = in_this_process(tmp_path, "watch", "runs/lm")
    shown = done.stdout.splitlines()
    assert done.returncode == 0
    assert [line[:14] for line in shown if line.startswith("step") and "left" in line] == [
        "step   1/100 |",
        "step  51/100 |",
    ]
    assert "warning: rank 0 on node1 raised ValueError: something broke; it is started again" in shown
    assert any(line.startswith("done: 100 steps") for line in shown)
    assert "run        made, finished" in shown


def test_an_unknown_run_is_refused_with_the_nearest_one(tmp_path: Path):
    write_run(tmp_path / "runs" / "wikitext", Made(steps=1))
    (tmp_path / "runs" / "empty").mkdir()
    for name, fix in [
        ("runs/wikitxt", "there is no run runs/wikitxt: did you mean runs/wikitext?"),
        ("wikitext", "there is no run wikitext: did you mean runs/wikitext?"),
        ("runs/zzz", "there is no run runs/zzz: there is runs/wikitext"),
        ("runs/empty", "runs/empty is not a run folder (it has no events.jsonl): give a folder such as runs/lm"),
    ]:
        done = in_this_process(tmp_path, "watch", name, "--once")
        assert (done.returncode, done.stderr) == (2, f"lockstep: {fix}\n")


def test_a_terminal_gets_the_whole_screen_and_ctrl_c_ends_without_a_traceback(tmp_path: Path):
    """The run begins while it is watched; torch is not imported."""
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "job.sbatch").touch()
    ours, theirs = pty.openpty()
    code = "import sys; from lockstep.cli import main; sys.modules['torch'] = None; main()"
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "watch", "lm"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env=environment,
    )
    os.close(theirs)
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(ours, 65536).decode(errors="ignore")  # a read may end inside of a character

    until("no event yet")
    write_run(tmp_path / "lm", Made(steps=60, ending="killed"))
    until("step 60/60")
    until("no event for")
    process.send_signal(signal.SIGINT)
    until("not shown any more; the run goes on as it was")
    assert process.wait() == 0
    os.close(ours)
    assert "\x1b[?1049h" in seen  # another screen, which it leaves
    assert "\x1b[?1049l" in seen
    assert "Traceback" not in seen
