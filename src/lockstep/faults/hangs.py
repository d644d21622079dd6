"""From what the ranks of a hung run report to one sentence: who waits in what, who is missing, and why that happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Cause = Literal[
    "skipped collective",
    "different shapes",
    "slow rank",
    "dead rank",
    "rank-conditional call",
    "uneven data",
    "network",
]

FOR_EVERY_RANK = ("save", "export", "validate", "evaluate", "test", "load_best", "reduce", "once", "setup", "loader")
"""Calls of a run that every rank has to make, and that people like to put behind `if rank == 0`."""

AFTER_THE_LOOP = ("close", "leave", "_at_exit", "__exit__")
"""Where a rank is that has left its loop. At the end of a script there is no line of it any more."""


@dataclass(frozen=True)
class Report:
    """What one rank does, as its watchdog sees it."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    waits: bool
    moving: bool
    call: str
    where: str
    shapes: list[list[int]] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        """The call and the line it stands in, for people."""
        return " at ".join(part for part in (self.call or self.phase, self.where) if part)


@dataclass(frozen=True)
class Verdict:
    """The one sentence, its class of cause, and the rank that holds the others up."""

    sentence: str
    cause: Cause
    rank: int
    host: str
    where: str = ""


def explain(
    reports: Sequence[Report],
    lead: str,
    silent: Sequence[int] = (),
    hosts: Mapping[int, Sequence[object]] | None = None,
    mismatch: bool = False,
) -> Verdict:
    """Find the cause of a hang. `silent` ranks gave no answer; `hosts` says where they were.

    With `mismatch` the ranks did not wait for ever: a collective found that their tensors do not go together.
    """
    waiting = [report for report in reports if report.waits]
    if silent:
        return _dead(lead, waiting, silent, hosts or {})
    busy = [report for report in reports if not report.waits]
    if busy:
        return _slow(lead, waiting, busy)
    gone = [report for report in waiting if _method(report) in AFTER_THE_LOOP or not report.where]
    if gone and len(gone) < len(waiting):
        return _uneven(lead, waiting, gone)
    conditional = [report for report in waiting if _method(report) in FOR_EVERY_RANK]
    if conditional and len(conditional) < len(waiting):
        return _conditional(lead, waiting, conditional)
    same_call = len({(report.call, report.where) for report in waiting}) == 1
    if same_call and (mismatch or len({str(report.shapes) for report in waiting}) > 1):
        return _shapes(lead, waiting)
    if not same_call:
        return _skipped(lead, waiting)
    first = waiting[0]
    sentence = f"{lead}all {len(waiting)} ranks wait in {first.place}: the network between them does not get through"
    return Verdict(f"{sentence}; check links and firewalls, or give a longer timeout_minutes", "network", 0, first.host)


def _dead(lead: str, waiting: list[Report], silent: Sequence[int], hosts: Mapping[int, Sequence[object]]) -> Verdict:
    host = str(hosts[silent[0]][0]) if silent[0] in hosts else "an unknown host"
    pid = f" (pid {hosts[silent[0]][1]} there)" if silent[0] in hosts else ""
    who = f"{ranks(silent)} on {host} {'does' if len(silent) == 1 else 'do'} not answer{pid}"
    cause = "dead, stopped or cut off from the network"
    sentence = f"{lead}{who} and {'is' if len(silent) == 1 else 'are'} {cause}, while {_groups(waiting)}"
    return Verdict(f"{sentence}; look at its log and its node", "dead rank", silent[0], host)


def _slow(lead: str, waiting: list[Report], busy: list[Report]) -> Verdict:
    slow = min(busy, key=lambda report: (report.step, report.rank))
    names = ranks([report.rank for report in busy])
    doing = f"{slow.where}, {slow.phase} of step {slow.step}" if slow.where else f"{slow.phase} of step {slow.step}"
    sentence = f"{lead}{names} {'is' if len(busy) == 1 else 'are'} still at {doing}, while {_groups(waiting)}"
    fix = "make that part equally long on all ranks, put it into run.once(...), or give a longer timeout_minutes"
    return Verdict(f"{sentence}; {fix}", "slow rank", slow.rank, slow.host, slow.where)


def _conditional(lead: str, waiting: list[Report], conditional: list[Report]) -> Verdict:
    rest = [report for report in waiting if report not in conditional]
    few, many = sorted((conditional, rest), key=len)
    first = conditional[0]
    sentence = f"{lead}{_groups(conditional)}, while {_groups(rest)}: every rank has to call {first.call}"
    fix = "take it out of the condition on the rank (it writes and prints once by itself)"
    odd = few[0] if len(few) < len(many) else first
    return Verdict(f"{sentence}; {fix}", "rank-conditional call", odd.rank, odd.host, first.where)


def _uneven(lead: str, waiting: list[Report], gone: list[Report]) -> Verdict:
    rest = [report for report in waiting if report not in gone]
    first, names = gone[0], ranks([report.rank for report in gone])
    has = "has" if len(gone) == 1 else "have"
    sentence = f"{lead}{names} {has} left the training loop, while {_groups(rest)}: the ranks have different data"
    fix = "let every rank do the same number of steps (run.loader does), without a break of its own"
    return Verdict(f"{sentence}; {fix}", "uneven data", first.rank, first.host, first.where or rest[0].where)


def _shapes(lead: str, waiting: list[Report]) -> Verdict:
    by_shape: dict[str, list[Report]] = {}
    for report in waiting:
        by_shape.setdefault(str(report.shapes[0] if report.shapes else []), []).append(report)
    parts = [f"{ranks([one.rank for one in group])} gave {shape}" for shape, group in by_shape.items()]
    told = f": {', '.join(parts)}" if len(parts) > 1 else f" from {ranks([one.rank for one in waiting])}"
    odd = min(by_shape.values(), key=len)[0]
    sentence = f"{lead}{odd.call} at {odd.where} got different shapes{told}"
    return Verdict(f"{sentence}; pad or gather sizes first", "different shapes", odd.rank, odd.host, odd.where)


def _skipped(lead: str, waiting: list[Report]) -> Verdict:
    own = [report for report in waiting if report.call.startswith("dist.")]
    groups = Counter(report.place for report in waiting)
    if own and len(own) < len(waiting):
        callers, others = own, [report for report in waiting if report not in own]
    else:
        place = groups.most_common(1)[0][0]
        callers = [report for report in waiting if report.place == place]
        others = [report for report in waiting if report.place != place]
    odd = min((callers, others), key=len)[0]
    verb = "passed it by" if len(others) <= len(callers) else "do not call it"
    sentence = f"{lead}{_groups(callers)}, and {ranks([one.rank for one in others])} {verb}: {_groups(others)}"
    return Verdict(
        f"{sentence}; let every rank make the same collective calls in the same order",
        "skipped collective",
        odd.rank,
        odd.host,
        callers[0].where,
    )


def _method(report: Report) -> str:
    owner, _, method = report.call.partition(".")
    return method if owner == "run" else ""


def _groups(reports: Sequence[Report]) -> str:
    """Who waits in what."""
    by_place: dict[str, list[int]] = {}
    for report in sorted(reports, key=lambda one: one.rank):
        by_place.setdefault(report.place, []).append(report.rank)
    parts = [f"{ranks(who)} wait{'s' if len(who) == 1 else ''} in {place}" for place, who in by_place.items()]
    return " and ".join(parts) or "nobody waits"


def ranks(numbers: Sequence[int]) -> str:
    """Rank numbers for people: `rank 2`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"
