"""Where a step's time goes: each second to one part, what stands still not to what it stood still in."""

from __future__ import annotations

import time

import pytest
import torch

from lockstep.observe.clock import Spent, StepClock


class Time:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Time:
    wall = Time()
    monkeypatch.setattr(time, "perf_counter", lambda: wall.now)
    return wall


def take_a_step(clock: StepClock, wall: Time) -> None:
    """1 s for a batch, 2 s of the script, 4 s forward and backward, 8 s of the optimizer with 16 s of waiting in it."""
    with clock.stalled("input"):
        wall.pass_(1)
    clock.script_begins()
    wall.pass_(2)
    clock.script_ends()
    wall.pass_(4)
    with clock.optimizing():
        wall.pass_(8)
        with clock.stalled("wait"):
            wall.pass_(16)
    clock.step_done(samples=3)
    clock.script_ends()


def test_every_second_is_in_one_part(wall: Time) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.start()
    for _ in range(3):
        take_a_step(clock, wall)
    spent = clock.take(last=True)
    assert spent == Spent(steps=2, seconds=62, input=2, wait=32, samples=6, optimizer=16, between=4), (
        "the first warms up"
    )


def test_what_happens_between_steps_that_are_not_measured_is_in_none(wall: Time) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.start()
    take_a_step(clock, wall)
    with clock.paused():
        wall.pass_(1000)
    take_a_step(clock, wall)
    assert clock.take(last=True).seconds == 31


def test_what_was_told_is_not_told_again(wall: Time) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.start()
    take_a_step(clock, wall)
    assert clock.take(last=False).steps == 1
    assert clock.take(last=True) == Spent(steps=0, seconds=0.0, input=0.0, wait=0.0, samples=0)


def test_waiting_inside_of_waiting_is_counted_once(wall: Time) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.start()
    with clock.stalled("input"):
        wall.pass_(1)
        with clock.stalled("wait"):  # a dataset that talks to other ranks
            wall.pass_(2)
    clock.step_done(samples=1)
    spent = clock.take(last=True)
    assert (spent.input, spent.wait) == (3, 0)
