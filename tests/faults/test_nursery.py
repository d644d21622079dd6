"""Workers are forks of a process that has imported torch: they are there at once, and end like any other process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.runtime.nursery import Nursery
from lockstep.runtime.rank_env import LAUNCH
from tests.cli.commands import clean_environment
from tests.patience import wait_for

SCRIPT = """
import pathlib, sys
pathlib.Path("known").write_text(str("torch" in sys.modules))
import os, signal, time
def variables(): return vars(os)["env" + "iron"]
task = variables()["TASK"]
if task == "look":
    import torch
    own = os.getsid(0) == os.getpid()
    pathlib.Path("seen").write_text(f"{torch.get_num_threads()} {variables().get('GONE')} {own}")
if task == "exit":
    sys.exit(3)
if task == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if task == "sleep":
    pathlib.Path("asleep").touch()
    time.sleep(100_000)
"""
SETS_THREADS = "import os\nos.environ['OMP_NUM_THREADS'] = '2'\n"

Start = Callable[..., Nursery]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    begun: list[Nursery] = []
    monkeypatch.chdir(tmp_path)

    def begin(script: str = SCRIPT) -> Nursery:
        (tmp_path / "train.py").write_text(script)
        begun.append(Nursery(["script", str(tmp_path / "train.py")]))
        return begun[-1]

    yield begin
    for nursery in begun:
        nursery.close()


def told(task: str) -> dict[str, str]:
    launch = {LAUNCH: json.dumps({"round": "1"}), "LOCKSTEP_RUN_DIR": "run", "RANK": "0", "OMP_NUM_THREADS": "1"}
    return clean_environment() | launch | {"TASK": task}


def test_a_worker_has_torch_already_and_its_own_variables(
    begin: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = told("look")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GONE", "not asked for")
    assert begin().start(environment).wait() == 0
    assert (tmp_path / "known").read_text() == "True"
    assert (tmp_path / "seen").read_text() == "1 None True"


def test_a_script_that_sets_variables_does_so_before_torch_is_imported(begin: Start, tmp_path: Path) -> None:
    assert begin(SETS_THREADS + SCRIPT).start(told("look")).wait() == 0
    assert (tmp_path / "known").read_text() == "False"
    assert (tmp_path / "seen").read_text().split()[0] == "2"


def test_workers_end_with_their_own_codes_as_often_as_they_are_started(begin: Start, tmp_path: Path) -> None:
    nursery = begin(SETS_THREADS + SCRIPT)
    for task, code in (("exit", 3), ("kill", -signal.SIGKILL), ("exit", 3), ("nothing", 0)):
        assert nursery.start(told(task)).wait() == code
    sleeper, other = nursery.start(told("sleep")), nursery.start(told("exit"))
    assert other.wait() == 3
    assert sleeper.poll() is None
    wait_for((tmp_path / "asleep").exists, "the worker")
    os.killpg(sleeper.pid, signal.SIGKILL)
    assert sleeper.wait() == -signal.SIGKILL


def test_workers_end_with_the_process_they_come_from_and_the_next_come_from_a_new_one(
    begin: Start, tmp_path: Path
) -> None:
    nursery = begin(SETS_THREADS + SCRIPT)
    sleeper = nursery.start(told("sleep"))
    wait_for((tmp_path / "asleep").exists, "the worker")
    process = psutil.Process(sleeper.pid)
    process.parent().kill()  # type: ignore[union-attr]
    assert sleeper.wait() == -signal.SIGKILL
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the end of the worker")
    assert nursery.start(told("exit")).wait() == 3


def test_what_a_scheduler_sends_to_any_process_reaches_the_launcher(begin: Start, tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        sleeper = begin(SETS_THREADS + SCRIPT).start(told("sleep"))
        wait_for((tmp_path / "asleep").exists, "the worker")
        psutil.Process(sleeper.pid).parent().send_signal(signal.SIGUSR1)  # type: ignore[union-attr]
        wait_for(lambda: bool(received), "the signal")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]
