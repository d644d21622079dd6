"""How launches end that are stopped or refused at odd moments: the right code, a sentence, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.commands import LOCKSTEP, clean_environment, events, free_port, interrupt, lockstep, start
from tests.faults.test_nodes import SCRIPT
from tests.patience import patient, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.limit(300)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def has_steps(folder: Path) -> bool:
    return len(events(folder / "runs" / "train", "step")) > 3


def test_a_crash_after_a_stop_is_a_crash(folder: Path) -> None:
    process = start(folder, "run", "train.py")
    wait_for(lambda: has_steps(folder), "the first steps")
    assert interrupt(process, signal.SIGTERM)[0] == 75
    (folder / "train.py").write_text("import no_such_module")
    done = lockstep(folder, "run", "--accept", "changed-script", "train.py")
    assert done.returncode == 1, done.stderr
    assert "No module named 'no_such_module'" in done.stderr


def test_another_seed_is_refused_in_a_sentence(folder: Path) -> None:
    process = start(folder, "run", "train.py")
    wait_for(lambda: has_steps(folder), "the first steps")
    interrupt(process, signal.SIGTERM)
    done = lockstep(folder, "run", "--set", "seed=5", "train.py")
    assert done.returncode == 2
    assert "was written with seed 0 and this run has seed 5" in done.stderr


def test_ctrl_c_while_processes_start_ends_with_130(folder: Path) -> None:
    process = start(folder, "run", "train.py")
    wait_for(lambda: any((folder / "runs").glob("train/logs/*.log")), "the ranks")
    code, output = interrupt(process, signal.SIGINT)
    assert code == 130, output
    assert "Traceback" not in output


def test_ctrl_c_while_other_nodes_are_awaited_ends_with_130(folder: Path) -> None:
    head = f"127.0.0.1:{free_port()}"
    process = start(folder, "run", "--nodes", "2", "--node-rank", "0", "--head", head, "train.py")
    wait_for(lambda: listens(process.pid), "the head")
    code, output = interrupt(process, signal.SIGINT)
    assert code == 130, output
    assert "before the workers had started" in output


def listens(pid: int) -> bool:
    return any(one.status == psutil.CONN_LISTEN for one in psutil.Process(pid).net_connections())


def test_a_run_under_nohup_survives_the_end_of_its_terminal(folder: Path) -> None:
    command = ["nohup", *LOCKSTEP, "run", "train.py"]
    process = subprocess.Popen(command, cwd=folder, env=clean_environment(), stdout=subprocess.DEVNULL)
    wait_for(lambda: has_steps(folder), "the first steps")
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0


@pytest.mark.skipif(os.getuid() != 0, reason="a namespace of processes needs root")
def test_the_launcher_may_be_the_first_process_of_a_container(folder: Path) -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "lockstep.cli", "run", "train.py"]
    done = subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_rank_that_is_stuck_before_others_wait_for_it_is_named(folder: Path) -> None:
    script = f"import time, lockstep\nrun = lockstep.init(timeout_minutes={patient(6) / 60})\n"
    script += "if run.rank == 0:\n    time.sleep(100_000)\n"
    (folder / "stuck.py").write_text(f"{script}run.once('prepare', lambda: 1)\n")
    done = lockstep(folder, "run", "--restarts", "0", "stuck.py")
    assert done.returncode == 1
    assert "rank 0 is still at stuck.py:4" in done.stderr
    assert "rank 1 waits in run.once at stuck.py:5" in done.stderr
