"""Stops that come again and again, every 20 ms until the end, to any process, at any moment of a run's life.

The code is 75 or 130 while the run is not finished, and 0 only where it is, unless Ctrl-C comes twice; nothing starts
again and nobody stays.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.commands import LOCKSTEP, clean_environment, events, listens
from tests.patience import patient, wait_for

MOMENTS = (*("begins", "imports", "builds", "first step", "mid", "saves", "last step", "after", "closes", "report"),)
TARGETS = ("launcher", "group", "ranks", "all")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
FAST = {("mid", "all"), ("after", "ranks")}
SECONDS = 180.0

SCRIPT = """
import os, pathlib, sys, time
import torch, lockstep

def reach(moment):
    if moment == sys.argv[1]:
        pathlib.Path("reached").touch()
        while not pathlib.Path("sent").exists():
            time.sleep(0.01)

def build():
    reach("builds")
    return torch.nn.Linear(4, 1)

def loss(model, batch):
    reach({0: "first step", 7: "last step"}.get(engine.steps_done, ""))
    return model(batch[0]).square().sum(), len(batch[0])

data = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
run = lockstep.init()
engine = run.setup(build, loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
for batch in run.loader(data, 4, micro_batch=2, steps=8, workers=1):
    out = engine.step(batch)
    if out.step == 3:
        reach("mid")
    if out.step == 4:
        reach("saves")
        run.save()
reach("after")
for _ in range(10_000 if sys.argv[1] in ("last step", "after") else 3):  # what the launcher gets reaches ranks in time
    run.evaluate(data, workers=0)
reach("closes")
run.close()
"""


class Storm:
    """Sends a signal every 20 ms until a process has ended."""

    def __init__(self, process: subprocess.Popen[bytes], target: str, number: signal.Signals) -> None:
        self.process, self.target, self.number = process, target, number
        self.seen: set[psutil.Process] = set()
        self._looked = -1.0

    def look(self) -> None:
        if time.monotonic() - self._looked > 0.2:
            self._looked = time.monotonic()
            with suppress(psutil.Error):
                self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))

    def send(self) -> bool:
        """Once; whether somebody was there to get it."""
        self.look()
        if self.target == "group":
            os.killpg(self.process.pid, self.number)
            return True
        pids = [self.process.pid] if self.target in ("launcher", "all") else []
        for process in self.seen:
            with suppress(psutil.Error):
                if process.is_running() and (self.target == "all" or process.name().startswith("lockstep-rank")):
                    pids += [process.pid] if self.target != "launcher" else []
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, self.number)
        return bool(pids)

    def rage(self, sent: Path) -> int:
        while self.process.poll() is None:
            if self.send():
                sent.touch()
            time.sleep(0.02)
        return self.process.wait()


def is_reached(folder: Path, moment: str, storm: Storm) -> bool:
    storm.look()
    if moment == "begins":
        return listens(storm.process.pid)
    if moment == "imports":
        return bool(storm.seen)
    if moment == "report":
        return bool(events(folder / "runs" / "train", "end"))
    return (folder / "reached").exists() or storm.process.poll() is not None


def cases() -> list[object]:
    table: list[object] = []
    for row, moment in enumerate(MOMENTS):
        for column, target in enumerate(TARGETS):
            number = SIGNALS[(row + column) % len(SIGNALS)]
            # CI has each moment once, and every target and signal at several.
            seldom = (
                [pytest.mark.slow]
                if column == (row + row // 4) % len(TARGETS)
                else [pytest.mark.slow, pytest.mark.soak]
            )
            marks = [] if (moment, target) in FAST else seldom
            table.append(pytest.param(moment, target, number, id=f"{moment}-{target}-{number.name}", marks=marks))
    return table


@pytest.mark.limit(2 * SECONDS)
@pytest.mark.parametrize(("moment", "target", "number"), cases())
def test_a_storm_of_stops_ends_a_run_as_one_does(
    moment: str, target: str, number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [*LOCKSTEP, "run", "--nproc", "2", "--device", "cpu", "train.py", moment]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=clean_environment(), stdout=output, stderr=output, start_new_session=True
        )
    storm = Storm(process, target, number)
    wait_for(lambda: is_reached(tmp_path, moment, storm), f"the moment {moment}", SECONDS)
    code = storm.rage(tmp_path / "sent")
    said = (tmp_path / "output").read_text()
    told = events(tmp_path / "runs" / "train")
    finished = any(event["kind"] == "end" for event in told)
    asked = 130 if number == signal.SIGINT else 75
    # A second Ctrl-C ends at once, whatever is still to be written.
    assert code in ((0, 130) if finished and asked == 130 else (0,) if finished else (asked,)), said
    assert not finished or moment in ("closes", "report"), said
    assert {event["attempt"] for event in told} <= {1}, said
    assert not [event for event in told if event["kind"] == "failure"], said
    assert "Traceback" not in said
    assert "starting again" not in said
    _, alive = psutil.wait_procs([one for one in storm.seen if one.is_running()], timeout=patient(20))
    assert not alive, said


@pytest.mark.limit(2 * SECONDS)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_stop_in_the_scripts_own_code_behind_the_loop_counts_under_plain_python(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    script = SCRIPT.replace("workers=1", "workers=0").replace('reach("after")', 'reach("after"); time.sleep(100_000)')
    (tmp_path / "train.py").write_text(script)
    with (tmp_path / "output").open("wb") as output:
        command = [sys.executable, "train.py", "after"]
        process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=output, stderr=output)
    wait_for((tmp_path / "reached").exists, "the last step", SECONDS)
    process.send_signal(number)
    assert process.wait() == code, (tmp_path / "output").read_text()
    told = events(tmp_path / "runs" / "train")
    assert [event["kind"] for event in told if event["kind"] in ("checkpoint", "stop", "end")][-2:] == [
        *("checkpoint", "stop"),
    ]
    assert told[-1]["step"] == 8
