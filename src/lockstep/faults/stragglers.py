"""Who holds a training up: from where each rank's time went to one sentence that names the slow rank, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from lockstep.layout import Layout
from lockstep.record.events import RankTimesTold
from lockstep.text.units import rounded

Cause = Literal["input", "compute", "communication"]

LEAST_SECONDS = 0.01
LEAST_SHARE = 0.2
"""What a rank takes more than the others, at least, and as a share of the step: what is less comes and goes."""
LEAST_STEPS, LONG_ENOUGH = 5, 5.0
"""Fewer steps that took fewer seconds say little: the last ones of a run, say."""
MOST_WAITING = 0.5
"""The share of a step that all ranks may stand still for the same reason before that is worth a word."""


@dataclass(frozen=True)
class Straggler:
    """What holds the steps up. Without a `rank` it is all of them alike, and there are no `others` to compare with."""

    rank: int | None
    host: str | None
    cause: Cause
    seconds: float
    others: float | None
    text: str


def ranks_event(told: Sequence[Mapping[str, Any]]) -> RankTimesTold:
    """The fields of a `ranks` event, seconds of a mean step, from what every rank tells of its own steps."""
    steps = told[0]["steps"]

    def of_a_step(*parts: str) -> list[float]:
        return [rounded(sum(rank[part] for part in parts) / steps) for rank in told]

    whole, still = of_a_step("seconds"), of_a_step("input", "wait")
    return {
        "steps": steps,
        "seconds": rounded(sum(whole) / len(whole)),
        "input": of_a_step("input"),
        "compute": [rounded(max(0.0, seconds - stood)) for seconds, stood in zip(whole, still, strict=True)],
        "optimizer": of_a_step("optimizer"),
        "between": of_a_step("between"),
        "wait": of_a_step("wait"),
        "samples": [rank["samples"] for rank in told],
        "memory": [rank["memory"] for rank in told],
        "hosts": [rank["host"] for rank in told],
    }


def find_straggler(ranks: RankTimesTold, layout: Layout) -> Straggler | None:
    """What holds the steps of a `ranks` event up, if anything does."""
    return _slow_rank(ranks, layout) or _slow_place(ranks, layout) or _slow_together(ranks, layout)


class StragglerWatch:
    """Says who is slow once it was found twice in a row, and again only when it is another rank or cause."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._found: tuple[int | None, Cause] | None = None
        self._said: tuple[int | None, Cause] | None = None

    def look(self, ranks: RankTimesTold) -> Straggler | None:
        """The straggler to tell people of now, after one more `ranks` event."""
        if ranks["steps"] < LEAST_STEPS and ranks["steps"] * ranks["seconds"] < LONG_ENOUGH:
            return None
        straggler = find_straggler(ranks, self._layout)
        before, self._found = self._found, (straggler.rank, straggler.cause) if straggler else None
        if straggler is None or self._found != before or self._found == self._said:
            return None
        self._said = self._found
        return straggler


def _slow_rank(ranks: RankTimesTold, layout: Layout) -> Straggler | None:
    """The rank that reads or computes longer than its equals: all ranks, or those of its place in the pipeline."""
    everybody = list(range(len(ranks["hosts"])))
    groups: list[tuple[Literal["input", "compute"], list[int]]] = [("input", everybody)]
    groups += [("compute", place) for place in _places(layout)]
    found: list[tuple[float, Literal["input", "compute"], int, float, int]] = []
    for cause, group in groups:
        if len(group) < 2:
            continue
        seconds = ranks[cause]
        slowest = max(group, key=lambda rank: seconds[rank])
        others = median(seconds[rank] for rank in group if rank != slowest)
        fair = [others * share for share in _shares(ranks, cause, group, slowest)]
        count = sum(_is_slow(seconds[rank] - allowed, ranks) for rank, allowed in zip(group, fair, strict=True))
        if _is_slow(seconds[slowest] - fair[group.index(slowest)], ranks):
            found.append((seconds[slowest] - others, cause, slowest, others, count))
    if not found:
        return None
    more, cause, rank, others, count = max(found)
    took, host = ranks[cause][rank], ranks["hosts"][rank]
    what = {"input": "its data take", "compute": "its compute takes"}[cause]
    fix = {
        "input": "give it more data.workers, or a faster disk",
        "compute": "look at its device (lockstep doctor), or at what only this rank does",
    }[cause]
    of = f", the slowest of {count}" if count > 1 else ""
    text = (
        f"rank {rank} ({host}){of} is slow: {what} {took:.3f} s of a step and {_those(cause)} of the others "
        f"{others:.3f} s, so that they wait {more:.3f} s for it: {fix}"
    )
    return Straggler(rank, host, cause, took, others, text)


def _shares(ranks: RankTimesTold, cause: Cause, group: Sequence[int], slowest: int) -> list[float]:
    """How much longer than the others each rank may take, because a batch that does not divide gave it more samples."""
    samples = ranks["samples"]
    usual = median(samples[rank] for rank in group if rank != slowest)
    return [max(1.0, samples[rank] / usual) if cause == "compute" and usual else 1.0 for rank in group]


def _slow_place(ranks: RankTimesTold, layout: Layout) -> Straggler | None:
    """The place of a pipeline that computes longer than the others."""
    places = _places(layout)
    if len(places) < 2:
        return None
    seconds = [median(ranks["compute"][rank] for rank in place) for place in places]
    slowest = max(range(len(places)), key=lambda place: seconds[place])
    others = median(took for place, took in enumerate(seconds) if place != slowest)
    if not _is_slow(seconds[slowest] - others, ranks):
        return None
    rank = places[slowest][0]
    host = ranks["hosts"][rank]
    text = (
        f"place {slowest} of the pipeline (rank {rank} on {host}) computes {seconds[slowest]:.3f} s of a step and the "
        f"others {others:.3f} s, and they wait for it: its part of the model is larger (pipeline.cuts moves blocks to "
        "others), or its device slower (lockstep doctor)"
    )
    return Straggler(rank, host, "compute", seconds[slowest], others, text)


def _slow_together(ranks: RankTimesTold, layout: Layout) -> Straggler | None:
    """What all ranks stand still for."""
    waits, reads = median(ranks["wait"]), median(ranks["input"])
    whole = f"of a step of {ranks['seconds']:.3f} s"
    if _is_most(reads, ranks):
        text = f"the training waits {reads:.3f} s {whole} for its data: use more data.workers, or a faster disk"
        return Straggler(None, None, "input", reads, None, text)
    if not _is_most(waits, ranks):
        return None
    fix = "lockstep bench finds the slow link"
    if layout.pp > 1:
        fix = f"more pipeline.micro_batches make a pipeline wait less, and {fix}"
    text = f"the ranks wait {waits:.3f} s {whole} for each other and none is slow by itself: {fix}"
    return Straggler(None, None, "communication", waits, None, text)


def _places(layout: Layout) -> list[list[int]]:
    """The ranks at each place of the pipeline, which compute alike."""
    return layout.ranks_along("dp", "fsdp", "cp", "tp")


def _is_slow(more: float, ranks: RankTimesTold) -> bool:
    return more >= max(LEAST_SECONDS, LEAST_SHARE * ranks["seconds"])


def _is_most(seconds: float, ranks: RankTimesTold) -> bool:
    return seconds >= max(LEAST_SECONDS, MOST_WAITING * ranks["seconds"])


def _those(cause: Cause) -> str:
    return "those" if cause == "input" else "that"
