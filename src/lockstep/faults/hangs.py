"""From what the ranks of a hung run report to one sentence: who waits in which collective, who is missing, why."""

from __future__ import annotations

import itertools
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
    "no samples",
    "different blocks",
]

FOR_EVERY_RANK = ("save", "export", "validate", "evaluate", "test", "load_best", "reduce", "once", "setup", "loader")
"""Calls of a run that every rank has to make, and that people like to put behind `if rank == 0`."""

AFTER_THE_LOOP = ("close", "leave", "_at_exit", "__exit__")
"""Where a rank is that has left its loop. At the end of a script there is no line of it any more."""


@dataclass(frozen=True)
class RankReport:
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
    shapes: list[str] = field(default_factory=list)
    """Of what it gave to the collective that it is in."""
    stack: list[str] = field(default_factory=list)
    gathered: list[str] = field(default_factory=list)
    """The sharded blocks it has called in the step."""

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
    reports: Sequence[RankReport],
    lead: str,
    silent: Sequence[int] = (),
    hosts: Mapping[int, Sequence[object]] | None = None,
) -> Verdict:
    """Find the cause of a hang. `silent` ranks gave no answer; `hosts` says where they were."""
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
    in_forward = any(_is_own(report) and _passed(report, "engine.py") for report in waiting)
    if conditional and len(conditional) < len(waiting) and not in_forward:  # a loss may be called by run.loader
        return _conditional(lead, waiting, conditional)
    same_call = len({(report.call, report.where) for report in waiting}) == 1
    if same_call and len({str(report.shapes) for report in waiting}) > 1:
        return _shapes(lead, waiting)
    if not same_call:
        return _skipped(lead, waiting)
    first = waiting[0]
    sentence = f"{lead}all {len(waiting)} ranks wait in {first.place}: the network between them does not get through"
    return Verdict(f"{sentence}; check links and firewalls, or give a longer timeout_minutes", "network", 0, first.host)


def mismatched(found: Sequence[RankReport], others: Sequence[RankReport]) -> Verdict:
    """Ranks did not wait for ever: in a collective of the ranks `found` tensors came that do not go together.

    What these gave is not known any more. The `others` have lost them, in the same call or later.
    """
    first = found[0]
    elsewhere = [report for report in (*found, *others) if report.place != first.place]
    # A script's own collectives have a group of their own: whoever is in a call of Lockstep's has made this one before.
    if elsewhere and (not _is_own(first) or any(map(_is_own, elsewhere))):
        return explain([*found, *others], "ranks gave one collective tensors of different sizes: ")
    return _shapes("", [report for report in others if report.place == first.place], found, elsewhere)


def no_samples(report: RankReport, lead: str) -> Verdict:
    """What to say of one rank alone whose loader gives nothing any more."""
    sentence = f"{lead}rank {report.rank} is {report.phase} of step {report.step} at {report.where}"
    fix = "find out why that takes for ever (a lock, a network file), or give a longer timeout_minutes"
    return Verdict(f"{sentence}; {fix}", "no samples", report.rank, report.host, report.where)


SAME_BLOCKS = (
    "let every rank call the same blocks in every forward (decide by random, numpy or torch.rand(()), which draw the "
    "same on every rank, or multiply by 0 what is left out), or use a dp layout"
)


def parted_ways(reports: Sequence[RankReport]) -> Verdict | None:
    """Whether ranks have called different sharded blocks in one step: then they wait for each other for ever.

    Needs no patience: it is so however long they have waited.
    """
    latest = max((report.step for report in reports), default=0)
    here = [report for report in reports if report.step == latest and report.gathered]
    for one, other in itertools.combinations(here, 2):
        for mine, theirs in zip(one.gathered, other.gathered, strict=False):
            if mine != theirs:
                sentence = (
                    f"rank {one.rank} came to {mine} where rank {other.rank} came to {theirs}, in step {latest}, "
                    "and the blocks of a sharded model are gathered by all ranks together"
                )
                return Verdict(f"{sentence}; {SAME_BLOCKS}", "different blocks", other.rank, other.host, other.where)
    return None


def _dead(
    lead: str, waiting: list[RankReport], silent: Sequence[int], hosts: Mapping[int, Sequence[object]]
) -> Verdict:
    host = str(hosts[silent[0]][0]) if silent[0] in hosts else "an unknown host"
    pid = f" (pid {hosts[silent[0]][1]} there)" if silent[0] in hosts else ""
    who = f"{ranks(silent)} on {host} {'does' if len(silent) == 1 else 'do'} not answer{pid}"
    cause = "dead, stopped or cut off from the network"
    sentence = f"{lead}{who} and {'is' if len(silent) == 1 else 'are'} {cause}, while {_groups(waiting)}"
    return Verdict(f"{sentence}; look at its log and its node", "dead rank", silent[0], host)


def _slow(lead: str, waiting: list[RankReport], busy: list[RankReport]) -> Verdict:
    slow = min(busy, key=lambda report: (report.step, report.rank))
    names = ranks([report.rank for report in busy])
    doing = f"{slow.where}, {slow.phase} of step {slow.step}" if slow.where else f"{slow.phase} of step {slow.step}"
    sentence = f"{lead}{names} {'is' if len(busy) == 1 else 'are'} still at {doing}, while {_groups(waiting)}"
    fix = "make that part equally long on all ranks, put it into run.once(...), or give a longer timeout_minutes"
    return Verdict(f"{sentence}; {fix}", "slow rank", slow.rank, slow.host, slow.where)


def _conditional(lead: str, waiting: list[RankReport], conditional: list[RankReport]) -> Verdict:
    rest = [report for report in waiting if report not in conditional]
    few, many = sorted((conditional, rest), key=len)
    first = conditional[0]
    sentence = f"{lead}{_groups(conditional)}, while {_groups(rest)}: every rank has to call {first.call}"
    fix = "take it out of the condition on the rank (it writes and prints once by itself)"
    odd = few[0] if len(few) < len(many) else first
    return Verdict(f"{sentence}; {fix}", "rank-conditional call", odd.rank, odd.host, first.where)


def _uneven(lead: str, waiting: list[RankReport], gone: list[RankReport]) -> Verdict:
    rest = [report for report in waiting if report not in gone]
    first, names = gone[0], ranks([report.rank for report in gone])
    has = "has" if len(gone) == 1 else "have"
    sentence = f"{lead}{names} {has} left the training loop, while {_groups(rest)}: the ranks have different data"
    fix = "let every rank do the same number of steps (run.loader does), without a break of its own"
    return Verdict(f"{sentence}; {fix}", "uneven data", first.rank, first.host, first.where or rest[0].where)


def _shapes(
    lead: str, waiting: Sequence[RankReport], found: Sequence[RankReport] = (), gone_on: Sequence[RankReport] = ()
) -> Verdict:
    """Who gave what to one collective. Nobody knows what the ranks `found` gave, and those that have `gone_on`."""
    by_shape: dict[str, list[RankReport]] = {}
    for report in waiting:
        by_shape.setdefault(" and ".join(report.shapes) or "something else", []).append(report)
    if found and len(by_shape) == 1:
        by_shape["something else"] = list(found)
    parts = [f"{ranks([report.rank for report in group])} gave {shape}" for shape, group in by_shape.items()]
    if not parts:
        parts.append(f"{ranks([report.rank for report in found])} got more than expected")
    if gone_on:
        parts.append(f"{ranks([report.rank for report in gone_on])} came through it, to {gone_on[0].place}")
    odd = min(by_shape.values(), key=len)[0] if by_shape else found[0]
    sentence = f"{lead}{odd.call} at {odd.where} got different shapes or dtypes: {', '.join(parts)}"
    fix = f"let no shape in the model depend on the rank, and {SAME_BLOCKS}"
    if _is_own(odd):
        fix = "give it the same on every rank, pad or gather sizes first"
    return Verdict(f"{sentence}; {fix}", "different shapes", odd.rank, odd.host, odd.where)


def _skipped(lead: str, waiting: list[RankReport]) -> Verdict:
    own = [report for report in waiting if _is_own(report)]
    groups = Counter(report.place for report in waiting)
    if own and len(own) < len(waiting):
        callers, others = own, [report for report in waiting if report not in own]
    else:
        place = groups.most_common(1)[0][0]
        callers = [report for report in waiting if report.place == place]
        others = [report for report in waiting if report.place != place]
    odd = min((callers, others), key=len)[0]
    verb = "passed it by" if len(others) <= len(callers) else "do not call it"
    fix = "let every rank make the same collective calls in the same order"
    if own and _passed(callers[0], "parallel/pipeline/runner.py"):
        verb = "cannot come to it"
        fix = "make it between steps: the ranks of a pipeline call the loss and the model one after another"
    sentence = f"{lead}{_groups(callers)}, and {ranks([report.rank for report in others])} {verb}: {_groups(others)}"
    return Verdict(f"{sentence}; {fix}", "skipped collective", odd.rank, odd.host, callers[0].where)


def _is_own(report: RankReport) -> bool:
    """Whether it is in a collective that the script makes by itself."""
    return report.call.startswith("dist.")


def _passed(report: RankReport, file: str) -> bool:
    """Whether a file of Lockstep's is in the stack."""
    return any(f"/lockstep/{file}:" in line for line in report.stack)


def _method(report: RankReport) -> str:
    owner, _, method = report.call.partition(".")
    return method if owner == "run" else ""


def _groups(reports: Sequence[RankReport]) -> str:
    """Who waits in what."""
    by_place: dict[str, list[int]] = {}
    for report in sorted(reports, key=lambda other: other.rank):
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
