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


def timetable_event(lanes: Sequence[Lane], nodes: Sequence[int]) -> dict[str, Any] | None:
    """The fields of the event `timetable`, but for its step, from what the first rank of every place tells.

    Time begins with the first action and ends with the last one. What follows a pipeline in a step, sums of gradients
    and the optimizer, is not part of it. None where nothing took time, or nothing says how the clocks of two nodes
    belong together.
    """
    shifts = _shifts(lanes, nodes)
    if shifts is None:
        return None
    moved = [
        [(kind, stage, number, begin + shift, end + shift) for kind, stage, number, begin, end in lane]
        for lane, shift in zip(lanes, shifts, strict=True)
    ]
    first = min((action[3] for lane in moved for action in lane), default=0.0)
    seconds = max((action[4] for lane in moved for action in lane), default=0.0) - first
    if seconds <= 0:
        return None
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


def _shifts(lanes: Sequence[Lane], nodes: Sequence[int]) -> list[float] | None:
    """What to add to the times of every place, so that they are of the first one's clock; None where nothing tells.

    Places of one node have one clock. The names of two hosts may be the same, the numbers of nodes are not.
    """
    shifts = [0.0]
    for place in range(1, len(lanes)):
        shift = _shift(lanes[place - 1], lanes[place]) if nodes[place] != nodes[place - 1] else 0.0
        if shift is None:
            return None
        shifts.append(shifts[-1] + shift)
    return shifts


def _shift(before: Lane, after: Lane) -> float | None:
    """How far the second clock is behind the first.

    The messages tell: what was sent before it was received shows how far the clocks can be apart, seen from both sides.
    Right is something in between, and the middle is off by at most half of the shortest way there and back.
    """
    forward, back = _least_behind(before, after), _least_behind(after, before)
    if forward is None or back is None:
        return forward if back is None else -back
    # Where the two contradict each other no gradients go back: the stages before are frozen.
    return forward if forward > -back else (forward - back) / 2


def _least_behind(sender: Lane, receiver: Lane) -> float | None:
    """How far the receiver's clock is behind at least: nothing is used before it was made. None without a message."""
    begins = {(kind == "F", stage, number): begin for kind, stage, number, begin, _ in receiver if kind != "W"}
    made = [
        ((kind == "F", stage + (1 if kind == "F" else -1), number), end)
        for kind, stage, number, _, end in sender
        if kind != "W"
    ]
    return max((end - begins[used] for used, end in made if used in begins), default=None)


def _micro(seconds: float) -> float:
    return round(seconds, 6)
