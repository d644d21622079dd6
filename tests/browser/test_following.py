"""`lockstep board` and `lockstep report` as people use them: a run that goes on, and one whose log is damaged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.record.log import without_non_finite
from tests.browser.conftest import OpenPage
from tests.browser.looking import drag, draw_all, panel
from tests.cli.commands import events
from tests.patience import patient, wait_for
from tests.runs import BEGIN, Made, run_events, write_run

pytestmark = pytest.mark.browser

LOCKSTEP = (sys.executable, "-m", "lockstep.cli")
BETWEEN_QUESTIONS = 2.0
HOSTILE = "</script><img src=x onerror=\"window.hacked='host'\">"


@contextmanager
def started(*arguments: str, stdout: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # the browser needs a core too
    process = subprocess.Popen([*LOCKSTEP, *arguments], stdout=stdout, env=alone, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def board(run: Path) -> Iterator[str]:
    """The address of a board of this run."""
    with started("board", str(run), "--port", "0", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found, said
        yield found.group()


class Feeder:
    """Writes a run that never ran as one that runs now: `feed(step)` appends its events up to this step."""

    def __init__(self, run: Path, made: Made) -> None:
        self._events = list(run_events(made))
        self._later = time.time() - BEGIN
        self._file = run / "events.jsonl"
        run.mkdir()

    def feed(self, last: int | None = None) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            while self._events and (last is None or self._events[0].get("step", 0) <= last):
                event = self._events.pop(0)
                file.write(json.dumps(without_non_finite({**event, "time": event["time"] + self._later})) + "\n")


def last_step(tab: Any) -> int:
    """Of the curve of the training loss, as the chart tells those who hear it."""
    label = panel(tab, "Loss").get_by_role("img").get_attribute("aria-label")
    return int(re.search(r"training: .*? at step ([\d,]+)", label).group(1).replace(",", ""))  # type: ignore[union-attr]


def check_that_it_ends(tab: Any, seconds: float) -> None:
    tab.locator(".state", has_text="finished").wait_for(timeout=1000 * patient(seconds))
    tab.locator(".live", has_text="The run is over").wait_for()
    count = len(tab.asked)
    tab.wait_for_timeout(1000 * (BETWEEN_QUESTIONS + 0.5))
    assert len(tab.asked) == count, "nobody asks any more"
    assert sum(not url.endswith("data.json") for url in tab.asked) == 1, "never loaded anew"


def test_a_board_shows_the_run_grow_without_loading_anew(open_page: OpenPage, tmp_path: Path) -> None:
    feeder = Feeder(tmp_path / "fed", Made(steps=200, ranks=2))
    feeder.feed(80)
    with board(tmp_path / "fed") as url:
        tab = open_page(url=url)
        assert tab.locator(".state").inner_text().strip() == "▶ running"
        assert last_step(tab) == 80
        loss = panel(tab, "Loss")
        picture = loss.locator("canvas").screenshot()
        feeder.feed(150)
        wait_for(lambda: last_step(tab) == 150, "step 150")
        assert loss.locator("canvas").screenshot() != picture
        drag(tab, loss, 0.2, 0.6)
        feeder.feed()
        check_that_it_ends(tab, 30)
        assert last_step(tab) == 200
        assert loss.get_by_role("button", name="Reset zoom").is_visible()


@pytest.mark.slow
@pytest.mark.limit(180)
def test_a_board_follows_a_real_training_to_its_end(open_page: OpenPage, tmp_path: Path) -> None:
    run = tmp_path / "digits"
    settings = ("--nproc", "1", "--device", "cpu", "--steps", "800")
    with started("train", "digits", "--run-dir", str(run), *settings) as training:
        wait_for(lambda: events(run, "step"), "the first step")
        with board(run) as url:
            tab = open_page(url=url)
            assert tab.locator(".state").inner_text().strip() == "▶ running"
            before = last_step(tab)
            drag(tab, panel(tab, "Loss"), 0.1, 0.8)
            wait_for(lambda: last_step(tab) > before, "another step")
            assert training.poll() is None, "it grew while the training went on"
            check_that_it_ends(tab, 90)
            assert last_step(tab) > 790
            assert panel(tab, "Loss").get_by_role("button", name="Reset zoom").is_visible()
        assert training.wait() == 0


def test_a_report_of_a_damaged_log_with_hostile_names_opens_executes_nothing_and_says_what_is_lost(
    open_page: OpenPage, tmp_path: Path
) -> None:
    made = Made(steps=400, ranks=64, hosts=8, gpus=8, name=HOSTILE, fails_after=(150,), samples=True)
    damaged = ['{"time": 1, "kind": "st\n', "\x00\x01 no JSON\n", '{"time": "now", "kind": "step", "step": "<b>"}\n']
    log = write_run(tmp_path / "run", made, damaged) / "events.jsonl"
    log.write_text(log.read_text(encoding="utf-8").replace('"node3"', json.dumps(HOSTILE)), encoding="utf-8")
    subprocess.run([*LOCKSTEP, "report", str(tmp_path / "run")], check=True, stdout=subprocess.DEVNULL)
    tab = open_page(url=(tmp_path / "run" / "report.html").as_uri())
    draw_all(tab)
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("img").count() == 0
    assert tab.get_by_role("heading", level=1).inner_text() == HOSTILE
    assert HOSTILE in panel(tab, "Who talks to whom").locator(".hosts").inner_text()
    unreadable = tab.locator(".unreadable")
    assert unreadable.is_visible()
    lines = len(log.read_text(encoding="utf-8").splitlines())
    assert unreadable.locator("li").all_inner_texts() == [
        f"2 lines are not JSON (the first in line {lines - 2})",
        f"1 line is without a time that can be (line {lines})",
    ]
