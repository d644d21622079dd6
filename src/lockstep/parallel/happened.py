"""One step of a pipeline as it really happened: when each place did what, on one clock for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

Lane = list[tuple[str, int, int, float, float]]
"""What one rank did: (F, B, I or W; stage; micro-batch; begin; end), in seconds of the clock of its host."""
Moment = float | torch.cuda.Event


class Stopwatch:
    """Notes when a device comes to a point of its work, without waiting for it.

    On a CPU that is now. On a GPU the host is ahead: there an event is laid on the stream that computes, and its time
    is asked for later. Both are told in seconds of the host's monotonic clock, which all processes of a host share.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spare: list[torch.cuda.Event] = []

    def now(self) -> Moment:
        """This point of the device's work."""
        if not self._on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def forget(self, moments: Sequence[Moment]) -> None:
        """Nobody will ask for these."""
        self._spare += [moment for moment in moments if not isinstance(moment, float)]

    def seconds(self, moments: Sequence[Moment]) -> list[float]:
        """When they were; waits until a GPU has come to them."""
        if not self._on_gpu:
            return [moment for moment in moments if isinstance(moment, float)]
        last = self.now()
        assert isinstance(last, torch.cuda.Event)
        last.synchronize()
        now = time.perf_counter()
        self.forget([last])
        return [now - event.elapsed_time(last) / 1000 for event in moments if isinstance(event, torch.cuda.Event)]


def timetable_event(lanes: Sequence[Lane], hosts: Sequence[str]) -> dict[str, Any]:
    """The fields of the event `timetable`, but for its step, from what the first rank of every place tells.

    Time begins with the first action and ends with the last one. What follows a pipeline in a step, sums of gradients
    and the optimizer, is not part of it.
    """
    shifts = _shifts(lanes, hosts)
    moved = [
        [(kind, stage, number, begin + shift, end + shift) for kind, stage, number, begin, end in lane]
        for lane, shift in zip(lanes, shifts, strict=True)
    ]
    first = min(action[3] for lane in moved for action in lane)
    seconds = max(action[4] for lane in moved for action in lane) - first
    return {
        "seconds": _micro(seconds),
        "busy": [round(sum(action[4] - action[3] for action in lane) / seconds, 4) for lane in moved],
        "lanes": [
            [
                [kind, stage, number, _micro(begin - first), _micro(end - first)]
                for kind, stage, number, begin, end in lane
            ]
            for lane in moved
        ],
    }


def _shifts(lanes: Sequence[Lane], hosts: Sequence[str]) -> list[float]:
    """What to add to the times of every place, so that they are of the first one's clock.

    Places of one host have one clock. Between two hosts the messages tell: what was sent before it was received shows
    how far their clocks can be apart, seen from both sides. Right is something in between, and the middle is off by at
    most half of the shortest way there and back.
    """
    shifts = [0.0]
    for place in range(1, len(lanes)):
        shift = 0.0
        if hosts[place] != hosts[place - 1]:
            forward = _least_behind(lanes[place - 1], lanes[place])
            back = _least_behind(lanes[place], lanes[place - 1])
            # Where the two contradict each other no gradients go back: the stages before are frozen.
            shift = forward if forward > -back else (forward - back) / 2
        shifts.append(shifts[-1] + shift)
    return shifts


def _least_behind(sender: Lane, receiver: Lane) -> float:
    """How far the receiver's clock is behind at least: nothing is used before it was made."""
    begins = {(kind == "F", stage, number): begin for kind, stage, number, begin, _ in receiver if kind != "W"}
    made = [
        ((kind == "F", stage + (1 if kind == "F" else -1), number), end)
        for kind, stage, number, _, end in sender
        if kind != "W"
    ]
    return max(end - begins[used] for used, end in made if used in begins)


def _micro(seconds: float) -> float:
    return round(seconds, 6)
