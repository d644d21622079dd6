"""When the ranks of a pipeline do what: their timetable, with the times that follow from who waits for whom.

The order is that of `timetable`, by which pipelines really run. A forward pass takes one unit of time, a backward pass
two, and each of its halves one; sending takes none.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.schema import Schedule
from lockstep.parallel.pipeline.timetable import Action, check, peak_in_flight, stages_of, timetable

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True)
class TimedAction:
    """An action and when it is done."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True)
class Played:
    """A timetable with its times: `lanes[rank]` in the order of the rank's work."""

    schedule: Schedule
    stages: list[list[int]]
    micro_batches: int
    lanes: list[list[TimedAction]]

    @property
    def length(self) -> int:
        """When the last rank is done."""
        return max(piece.end for lane in self.lanes for piece in lane)

    def bubble(self, rank: int) -> float:
        """The share of the step in which a rank has nothing to do."""
        return 1 - sum(piece.end - piece.start for piece in self.lanes[rank]) / self.length

    @property
    def whole_bubble(self) -> float:
        """The share over all ranks."""
        return sum(map(self.bubble, range(len(self.lanes)))) / len(self.lanes)

    def in_flight(self, rank: int) -> int:
        """The most activations a rank holds at once, one for each of its stages and micro-batches."""
        return peak_in_flight(piece.action for piece in self.lanes[rank])


def play(schedule: Schedule, ranks: int, per_rank: int, micro_batches: int) -> Played:
    """Let every rank do its actions in order, each as soon as what it needs is there."""
    check(schedule, ranks, per_rank, micro_batches)
    stages = stages_of(schedule, ranks, per_rank)
    left = [list(reversed(actions)) for actions in timetable(schedule, ranks, per_rank, micro_batches)]
    lanes: list[list[TimedAction]] = [[] for _ in range(ranks)]
    done: dict[Action, int] = {}
    while any(left):
        before = len(done)
        for rank, actions in enumerate(left):
            while actions and all(any(way in done for way in ways) for ways in needs(actions[-1], ranks * per_rank)):
                action = actions.pop()
                ready = [done[way] for ways in needs(action, ranks * per_rank) for way in ways if way in done]
                free = lanes[rank][-1].end if lanes[rank] else 0
                start = max([free, *ready])
                done[action] = start + UNITS[action.kind]
                lanes[rank].append(TimedAction(action, start, done[action]))
        assert len(done) > before, f"the ranks of {schedule} wait for each other"
    return Played(schedule, stages, micro_batches, lanes)


def needs(action: Action, stages: int) -> list[list[Action]]:
    """What has to be done before an action can be; of each inner list one, a backward pass being whole or in halves."""
    _, stage, number = action
    if action.kind == "F":
        return [[Action("F", stage - 1, number)]] if stage else []
    if action.kind == "W":
        return [[Action("I", stage, number)]]
    after = [[Action("B", stage + 1, number), Action("I", stage + 1, number)]] if stage + 1 < stages else []
    return [[Action("F", stage, number)], *after]
