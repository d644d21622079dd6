"""What a profile may not cost a run: not its speed afterwards, not its time to write, not an event that is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lockstep.observe.profiling import Profiler, TraceRecording


@pytest.mark.parametrize(("device", "told", "found"), [("cuda", None, "1"), ("cuda", "0", "0"), ("cpu", None, None)])
def test_cupti_is_detached_after_a_profile_on_a_gpu_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, device: str, told: str | None, found: str | None
) -> None:
    monkeypatch.setenv("TEARDOWN_CUPTI", told or "")
    if told is None:
        monkeypatch.delenv("TEARDOWN_CUPTI")
    engine: Any = SimpleNamespace(pipeline=None)
    with mock.patch("lockstep.observe.profiling.profile"):
        TraceRecording(engine, torch.device(device), with_stacks=True)
    assert os.environ.get("TEARDOWN_CUPTI") == found


@pytest.mark.parametrize(
    ("steps", "pipeline", "found"), [("3", None, True), ("1-5", None, True), ("1-6", None, False), ("3", "a", False)]
)
def test_stacks_are_recorded_of_a_few_steps_and_not_in_a_pipeline(
    steps: str, pipeline: str | None, found: bool
) -> None:
    profiler = Profiler(steps, "0", 0, 1, torch.device("cpu"))
    engine: Any = SimpleNamespace(pipeline=pipeline)
    with (
        mock.patch("lockstep.observe.profiling.profile") as made,
        mock.patch("lockstep.observe.profiling.TraceRecording.begin_step"),
    ):
        profiler.begin_step(3, engine)
    assert made.call_args.kwargs["with_stack"] is found


RECORD = """
from types import SimpleNamespace
import torch
from lockstep.observe.profiling import TraceRecording

cpu, optimizer = torch.device("cpu"), SimpleNamespace(state={})
engine = SimpleNamespace(pipeline=None, stored=[], buffers=[], optimizer=optimizer, device=cpu)
recording = TraceRecording(engine, cpu, with_stacks=True)
recording.begin_step(1)
torch.ones(2) + 1
recording.close()
"""


def test_the_profiler_writes_nothing_to_the_terminal_of_a_run() -> None:
    """In a process of its own: kineto looks only once how much it is to say."""
    env = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", RECORD], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("steps", "total", "told"),
    [
        ("10-12", 11, ["steps 10-12 are profiled up to step 11: the run has 11 steps"]),
        ("10-12", 9, ["steps 10-12 cannot be profiled: the run has 9 steps"]),
        ("10-12", 12, []),
    ],
)
def test_a_run_that_ends_too_early_says_what_is_profiled(steps: str, total: int, told: list[str]) -> None:
    assert list(Profiler(steps, "0", 0, 1, torch.device("cpu")).out_of_reach(0, total)) == told
