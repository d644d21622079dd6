"""What to change in the steps: who is slow, what all wait for. Every rule: (seconds won, advice), or None.

The shares are of a mean step of the last attempt, so that what comes and goes does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Literal

from lockstep.errors import UserError
from lockstep.faults.stragglers import LEAST_SECONDS as SLOW_SECONDS
from lockstep.faults.stragglers import LEAST_SHARE as SLOW_SHARE
from lockstep.layout import Layout
from lockstep.page.panels import Advice
from lockstep.page.reading.summary import HostSummary, RankSummary, Summary
from lockstep.text.units import percent, seconds_text

Found = tuple[float, Advice]

LEAST_STEPS = 20
"""Fewer steps say nothing certain, unless the run itself has found the same twice in a row."""
MOST_INPUT = 0.1
MOST_BETWEEN = 0.1
"""The share of a step that every rank may wait for data, or spend in the script's own code."""
MOST_WAITING = 0.2
"""The same of exposed communication, of which some is always there."""
LEAST_OF_A_STEP = 0.001
"""Seconds: what is less costs a run little, and is hard to measure."""
BUSY_CORES = 0.9
"""From this share on more data workers would only take the cores from others."""


def slow_input_of_a_rank(summary: Summary) -> Found | None:
    """One rank waits for its data, and all others for it."""
    slow = _slow_rank(summary, "input")
    if slow is None:
        return None
    rank, others, more, _ = slow
    busy = max((busy_of(host, summary.ranks) for host in summary.hosts if host.host == rank.host), default=0.0)
    if busy >= BUSY_CORES:
        fix = f"the cores of {rank.host} are {percent(busy)} busy, so prepare its data beforehand, or free some cores"
    else:
        fix = f"give it more data.workers{_workers(rank.workers)}, or put its data on a faster disk"
    text = f"Rank {rank.rank} ({rank.host}) waits for its data, and all others wait for it: {fix}."
    evidence = (
        f"Its data take {seconds_text(rank.input)} of a mean step of {seconds_text(step_of(summary))}, those of the "
        f"others {seconds_text(others)}: the difference is {percent(more)} of the time in steps."
    )
    return more * summary.spent.steps, Advice(text, evidence, "ranks")


def slow_compute_of_a_rank(summary: Summary) -> Found | None:
    """One rank computes longer than its equals, or one place of a pipeline than the others."""
    slow = _slow_rank(summary, "compute")
    if slow is None:
        return None
    rank, others, more, is_place = slow
    usual = median(other.between for other in summary.ranks if other.rank != rank.rank)
    if rank.between - usual >= 0.5 * more * step_of(summary):
        fix = "let all ranks share what its script does between two steps, or do it less often"
    elif is_place:
        fix = "its part of the model is larger (pipeline.cuts moves blocks to others), or its device slower"
    else:
        fix = "look at its device (lockstep doctor), or at what only this rank does"
    who = f"The place of the pipeline that rank {rank.rank} ({rank.host}) is at" if is_place else _named(rank)
    text = f"{who} computes longer than the others, which wait for it: {fix}."
    evidence = (
        f"It computes {seconds_text(_compute(rank))} of a mean step of {seconds_text(step_of(summary))}, the others "
        f"{seconds_text(others)}: the difference is {percent(more)} of the time in steps."
    )
    return more * summary.spent.steps, Advice(text, evidence, "ranks")


def all_wait_for_data(summary: Summary) -> Found | None:
    """No rank has its data in time."""
    waits = _at_least(summary, [rank.input for rank in summary.ranks], MOST_INPUT, "input")
    if waits is None:
        return None
    counts = {rank.workers for rank in summary.ranks}
    busy = max((busy_of(host, summary.ranks) for host in summary.hosts), default=0.0)
    if busy >= BUSY_CORES:
        fix = f"the cores are {percent(busy)} busy, so prepare the data beforehand, or ask for more cores"
    else:
        fix = f"use more data.workers{_workers(counts.pop() if len(counts) == 1 else None)}, or a faster disk"
    return _of_the_steps(summary, waits, f"The training waits for its data: {fix}.", "every rank waited", "time")


def exposed_communication(summary: Summary) -> Found | None:
    """All ranks wait for each other, and nobody is late: that is the network, or the layout."""
    if summary.world_size < 2:
        return None
    waits = _at_least(summary, [rank.wait for rank in summary.ranks], MOST_WAITING, "communication")
    if waits is None:
        return None
    fix = f"{_talk_less(summary)}; lockstep plan ranks the layouts, lockstep bench finds a slow link"
    least = min(summary.ranks, key=lambda rank: rank.wait)
    all_of_them = seconds_text(mean(rank.wait for rank in summary.ranks))
    who = f"rank {least.rank}, which waits least (all ranks on average: {all_of_them}), waited"
    return _of_the_steps(summary, waits, f"The ranks wait for each other: {fix}.", who, "time")


def between_steps(summary: Summary) -> Found | None:
    """The script does something of its own between steps, on every rank."""
    takes = _at_least(summary, [rank.between for rank in summary.ranks], MOST_BETWEEN, "")
    if takes is None:
        return None
    text = (
        "The script's own code between two steps takes long: do it less often, or leave values on the device "
        "(printing, .item() and writing files wait for it)."
    )
    return _of_the_steps(summary, takes, text, "between two steps went", "time")


def step_of(summary: Summary) -> float:
    """Seconds of a mean step, by what the ranks tell."""
    return mean(_whole(rank) for rank in summary.ranks) if summary.ranks else 0.0


def busy_of(host: HostSummary, ranks: Sequence[RankSummary]) -> float:
    """How busy the cores of a host are: all of them with whomever, or those that the run may use with its ranks."""
    own = sum(rank.cores or 0.0 for rank in ranks if rank.host == host.host)
    return min(1.0, max(host.cpu or 0.0, own / host.cores if host.cores > 0 else 0.0))


def layout_of(summary: Summary) -> Layout | None:
    """The layout of a run, where its text is one and there are so many ranks."""
    try:
        layout = Layout.parse(summary.layout)
    except UserError:
        return None
    return layout if layout.auto is None and layout.world_size == summary.world_size else None


def is_certain(summary: Summary) -> bool:
    """Whether there are enough steps to speak of their mean."""
    return summary.steps >= LEAST_STEPS


def _slow_rank(summary: Summary, cause: Literal["input", "compute"]) -> tuple[RankSummary, float, float, bool] | None:
    """The slowest rank that the run itself has named, where it was slow on average as well.

    With it come the seconds of its equals, the share of a step it takes more, and whether it is a place of a pipeline.
    The run looks at how many samples each rank had, and says nothing of what it has seen only once.
    """
    by_rank = {rank.rank: rank for rank in summary.ranks}
    named = {
        straggler.rank for straggler in summary.stragglers if straggler.cause == cause and straggler.rank in by_rank
    }
    step = step_of(summary)
    found = []
    for number in named:
        assert number is not None
        rank = by_rank[number]
        took = rank.input if cause == "input" else _compute(rank)
        for is_place, equals in _equals(summary, number, cause):
            others = median(other.input if cause == "input" else _compute(other) for other in equals)
            if took - others >= max(SLOW_SECONDS, SLOW_SHARE * step):
                found.append(((took - others) / step, number, rank, others, is_place))
                break
    if not found:
        return None
    more, _, rank, others, is_place = max(found, key=lambda slow: slow[:2])
    return rank, others, more, is_place


def _equals(summary: Summary, rank: int, cause: str) -> list[tuple[bool, list[RankSummary]]]:
    """Whom a rank is compared with: those at its place of a pipeline, then those at the other places."""
    layout = layout_of(summary)
    everybody = [other for other in summary.ranks if other.rank != rank]
    if cause == "input" or layout is None or layout.pp == 1:
        return [(False, everybody)] if everybody else []
    place = layout.coordinate(rank)["pp"]
    here = [other for other in everybody if layout.coordinate(other.rank)["pp"] == place]
    there = [other for other in everybody if other not in here]
    return [(is_place, equals) for is_place, equals in ((False, here), (True, there)) if equals]


def _at_least(summary: Summary, seconds: Sequence[float], most: float, cause: str) -> float | None:
    """What every rank spends at least, where that is more than `most` of a step."""
    said = any(straggler.rank is None and straggler.cause == cause for straggler in summary.stragglers)
    if not seconds or not (said or is_certain(summary)):
        return None
    least = min(seconds)
    return least if least >= max(LEAST_OF_A_STEP, most * step_of(summary)) else None


def _of_the_steps(summary: Summary, seconds: float, text: str, what: str, section: str) -> Found:
    step = step_of(summary)
    share = seconds / step
    evidence = f"{what} {seconds_text(seconds)} of a mean step of {seconds_text(step)}, {percent(share)}."
    return share * summary.spent.steps, Advice(text, evidence[0].upper() + evidence[1:], section)


def _talk_less(summary: Summary) -> str:
    """What to try for less communication, by the axis that talks most."""
    layout = layout_of(summary)
    if layout is not None and layout.pp > 1 and layout.tp == 1:
        return (
            "give the pipeline more pipeline.micro_batches, so that its places stand still less, and cut it into parts "
            "that take equally long (pipeline.cuts)"
        )
    if summary.device == "cpu" and summary.nodes == 1:
        fewer = "one rank" if summary.world_size == 2 else f"fewer ranks than {summary.world_size}"
        return f"on the CPUs of one node {fewer} with more threads may be faster"
    if layout is None:
        return "try a layout that sends less"
    per_node = max(1, summary.world_size // max(1, summary.nodes))
    if layout.tp > 1:
        if summary.nodes > 1 and layout.tp > per_node:
            return f"tp={layout.tp} sends between nodes in every block, so keep it inside one, tp={per_node} at most"
        if layout.tp % 2 == 0:
            other = replace(layout, tp=layout.tp // 2, fsdp=layout.fsdp * 2)
            return f"tp sends in every block, so cut less with it, as in {other}"
    if layout.cp > 1:
        return f"cp={layout.cp} sends keys and values in every block, so use it only for texts that do not fit else"
    if layout.fsdp > 1:
        if summary.nodes > 1 and layout.fsdp > per_node and layout.fsdp % per_node == 0:
            other = replace(layout, dp=layout.dp * (layout.fsdp // per_node), fsdp=per_node)
            return f"fsdp gathers weights between nodes in every block, so shard inside the nodes alone, as in {other}"
        other = replace(layout, dp=layout.dp * layout.fsdp, fsdp=1)
        return f'fsdp gathers weights in every block, so try {other} where that fits, else shard.level = "zero2"'
    return 'dp sums all gradients in every step, so send half with numerics.reduce_dtype = "bf16"'


def _whole(rank: RankSummary) -> float:
    return rank.input + _compute(rank) + rank.wait


def _compute(rank: RankSummary) -> float:
    """As the run's own search for stragglers counts it."""
    return rank.compute + rank.optimizer + rank.between


def _named(rank: RankSummary) -> str:
    return f"Rank {rank.rank} ({rank.host})"


def _workers(count: int | None) -> str:
    return "" if count is None else f" than the {count} of now" if count else " (it has none)"
