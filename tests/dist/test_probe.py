"""Ranks that are no training: they answer in order, and whoever fails, refuses, hangs or dies is the one named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import clean_environment
from tests.patience import patient

# In a process of its own, as the commands that use it are: ranks are forks, and this one has threads.
SCRIPT = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from lockstep.errors import UserError
from lockstep.launch import probe
from lockstep.layout import Layout

def joined(seat):
    return seat.join(Layout(dp=seat.place.world_size), torch.device("cpu"), "gloo", PATIENT(6))

def answer(seat):
    comm = joined(seat)
    seat.tell(f"hello from {seat.place.rank}")
    total = comm.sum([float(seat.place.rank)])
    comm.close()
    return {"rank": seat.place.rank, "sum": total}

def fail(seat):
    comm = joined(seat)
    if seat.place.rank == 1:
        raise ValueError("the cable is a snake")
    comm.barrier()

def refuse(seat):
    raise UserError("this cannot be", "do something else")

def die(seat):
    comm = joined(seat)
    if seat.place.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()

def hang(seat):
    comm = joined(seat)
    if seat.place.rank == 1:
        time.sleep(300)
    comm.barrier()

def all_of(answers):
    first = probe.first_trouble(answers)
    return [[a.rank, a.trouble] for a in answers], first and [first.rank, first.trouble, first.log]

probe.SECONDS_AFTER_A_FAILURE = PATIENT(1)
heard = []
results = {"answers": [a.value for a in probe.run_ranks(answer, 3, hear=lambda rank, text: heard.append([rank, text]))]}
results["heard"] = sorted(heard)
results["fail"] = all_of(probe.run_ranks(fail, 3))
results["die"] = all_of(probe.run_ranks(die, 3))
results["hang"] = all_of(probe.run_ranks(hang, 2))
results["late"] = all_of(probe.run_ranks(hang, 2, seconds=0.5))
try:
    probe.run_ranks(refuse, 2)
except UserError as error:
    results["refused"] = str(error)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    results["left"] = "no child"
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("probe")
    script = re.sub(r"PATIENT\((.)\)", lambda found: str(patient(float(found[1]))), SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "what ranks print is kept for those in trouble"
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_they_answer_in_the_order_of_their_ranks(results: dict[str, Any]) -> None:
    assert [answer["rank"] for answer in results["answers"]] == [0, 1, 2]
    assert {answer["sum"][0] for answer in results["answers"]} == {3.0}
    assert results["heard"] == [[0, "hello from 0"], [1, "hello from 1"], [2, "hello from 2"]]


def test_who_fails_by_itself_is_blamed_and_not_who_lost_it(results: dict[str, Any]) -> None:
    everybody, (rank, trouble, log) = results["fail"]
    assert all(text for _, text in everybody)
    assert (rank, trouble) == (1, "ValueError: the cable is a snake")
    assert "line 21, in fail" in log


def test_who_is_killed_is_blamed(results: dict[str, Any]) -> None:
    assert results["die"][1][:2] == [2, "was killed by SIGKILL"]


def test_who_hangs_is_blamed_and_not_who_waited_for_it(results: dict[str, Any]) -> None:
    assert results["hang"][1][:2] == [1, "did not come back"]
    assert results["late"][0] == [[0, "did not come back"], [1, "did not come back"]], "the time was up"


def test_a_refusal_is_the_commands_own(results: dict[str, Any]) -> None:
    assert results["refused"] == "this cannot be: do something else"


def test_nothing_is_left_running(results: dict[str, Any]) -> None:
    assert results["left"] == "no child"
