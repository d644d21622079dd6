"""`lockstep doctor`: is this machine, or this allocation, fit to train? Names what is not.

facts of every node  ->  findings that need no network (findings.py)
calls between nodes, the run folder  ->  who reaches whom, and one place to write (reach.py)
ranks  ->  every collective, checked for the right values (collectives.py)
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from lockstep.checkup.check_collectives import check_all, computes
from lockstep.checkup.reach import SECONDS_FOR_THE_OTHERS, DoorKnock, call_all, calls, folders, look_at_folder
from lockstep.errors import UserError
from lockstep.launch.meeting import Meeting, meet
from lockstep.launch.nodes import Nodes
from lockstep.launch.probe import Answer, Seat, first_trouble, leaving_on_sigterm, run_ranks
from lockstep.layout import Layout
from lockstep.links.findings import Finding, Plan, judge_nodes
from lockstep.runtime.device import backend_for, choose_device
from lockstep.runtime.host.node_facts import NodeFacts, look_around

SECONDS_TO_MEET = 60.0
SECONDS_TO_COME = 120.0
"""How long the head waits for the others: torch may have to come from a slow disk there."""
SECONDS_OF_A_COLLECTIVE = 15.0
SECONDS_OF_ALL_RANKS = 90.0


@dataclass(frozen=True)
class Wanted:
    """What is to be trained on this node."""

    layout: str
    processes: int
    device: Literal["cpu", "cuda"]
    share_gpu: bool
    workers: int | None
    """Loader processes of each rank; None: as many as a training would take."""
    run_dir: Path


@dataclass(frozen=True)
class DoctorReport:
    """What was found on all nodes."""

    nodes: list[NodeFacts]
    findings: list[Finding]

    @property
    def is_fit(self) -> bool:
        """Whether nothing would break or slow a training."""
        return not any(finding.is_bad for finding in self.findings)


def examine(nodes: Nodes, names: Sequence[str], wanted: Wanted, status: Callable[[str], None]) -> DoctorReport:
    """Look at everything, together with the other nodes; `names` is what they are called before they have said it."""
    try:
        meeting = meet(nodes, SECONDS_TO_MEET)
    except UserError as error:
        return _alone(str(error))
    try:
        with meeting, leaving_on_sigterm():
            return _examine(meeting, names, wanted, status)
    except dist.DistError as error:
        return _alone(f"the head is gone ({str(error).splitlines()[0]})")


def _alone(why: str) -> DoctorReport:
    """What a node says that does not reach the others, or loses them."""
    fix = "see whether the same command runs on the head, and what is between"
    return DoctorReport([], [Finding("network", "broken", socket.gethostname(), why, fix)])


def _examine(meeting: Meeting, names: Sequence[str], wanted: Wanted, status: Callable[[str], None]) -> DoctorReport:
    status("looking at the machine, and waiting for the other nodes")
    told = meeting.share("facts", {"node": look_around().model_dump(), "nproc": wanted.processes}, SECONDS_TO_COME)
    # The head decides who takes part: a node that has just come would see more of them than those that gave up.
    present = meeting.from_head("present", [facts is not None for facts in told], SECONDS_FOR_THE_OTHERS)
    if present is None or not present[meeting.rank]:
        fix = "start the nodes closer together, or again"
        late = Finding("network", "broken", names[meeting.rank], "this node came when the head had given up", fix)
        return DoctorReport([], [late])
    told = [facts if is_here else None for facts, is_here in zip(told, present, strict=True)]
    missing = [
        Finding(
            "network",
            "broken",
            names[number],
            f"{names[number]} has not said anything for {SECONDS_TO_COME:.0f} s",
            "see whether the same command runs there, and whether it reaches the head",
        )
        for number, facts in enumerate(told)
        if facts is None
    ]
    nodes = [NodeFacts.model_validate(facts["node"]) for facts in told if facts is not None]
    hosts = [facts["node"]["host"] if facts else names[number] for number, facts in enumerate(told)]
    processes = [facts["nproc"] for facts in told if facts is not None]
    findings = [*missing, *judge_nodes(nodes, Plan(processes, wanted.device, wanted.workers))]
    status("looking at the network and the run folder")
    made: list[DoorKnock] = []
    if missing:  # the others would be waited for again and again
        findings += folders(hosts[meeting.rank :][:1], look_at_folder(Meeting(), wanted.run_dir))
    else:
        made = call_all(meeting, hosts)
        findings += calls(hosts, made)
        findings += folders(hosts, look_at_folder(meeting, wanted.run_dir))
    if missing or any(call.trouble for call in made):
        unchecked = "not checked, because not all nodes reach each other"
        return DoctorReport(
            nodes, [*findings, Finding("collectives", "note", "all ranks", unchecked, "mend the network first")]
        )
    status("")  # ranks are forks, and the thread that shows it would leave them half of itself
    findings += _collectives(meeting, Layout.parse(wanted.layout).resolve(sum(processes)), wanted)
    return DoctorReport(nodes, findings)


def _collectives(meeting: Meeting, layout: Layout, wanted: Wanted) -> list[Finding]:
    """Start ranks and let them talk; every node gets the answers of all."""
    at: dict[int, str] = {}

    def work(seat: Seat) -> dict[str, Any]:
        own = choose_device(seat.place, wanted.device, wanted.share_gpu)
        if own.type == "cuda":
            torch.cuda.set_device(own)
        trouble = computes(own)
        backend = backend_for(own.type, wanted.share_gpu)
        if seat.place.world_size == 1:
            return {"device": str(own), "backend": backend, "computes": trouble, "checked": 0, "wrong": []}
        comm = seat.join(layout, own, backend, SECONDS_OF_A_COLLECTIVE)
        checked, wrong = check_all(comm, layout, own, seat.tell)
        comm.barrier()
        comm.close()
        found = {"checked": checked, "wrong": [asdict(one) for one in wrong]}
        return {"device": str(own), "backend": backend, "computes": trouble, **found}

    answers = run_ranks(work, wanted.processes, meeting, hear=at.__setitem__, seconds=SECONDS_OF_ALL_RANKS)
    own = [
        [answer.rank, answer.value, answer.trouble, answer.log, at.get(answer.rank, "the start")] for answer in answers
    ]
    told = meeting.share("answers", own, SECONDS_OF_ALL_RANKS)
    return judge_ranks([tuple(answer) for answers_of in told for answer in answers_of or []], layout)


def judge_ranks(told: Sequence[tuple[Any, ...]], layout: Layout) -> list[Finding]:
    """What the ranks' answers say; each is rank, value, trouble, the end of its log, and where it was last."""
    answers = [Answer(rank, value, trouble, log) for rank, value, trouble, log, _ in told]
    last = {rank: at for rank, _, _, _, at in told}
    everybody = "1 rank" if len(answers) == 1 else f"{len(answers)} ranks"
    if (first := first_trouble(answers)) is not None:
        return [
            Finding(
                "collectives",
                "broken",
                f"rank {first.rank}",
                f"rank {first.rank}, {last[first.rank]}: {first.trouble}",
                "do not train on this: see its host with lockstep doctor alone, and leave that out",
            )
        ]
    findings = [
        Finding(
            "device",
            "broken",
            f"rank {answer.rank}",
            f"{answer.value['device']} multiplies wrongly: {bad}",
            "leave it out, and have it looked at",
        )
        for answer in answers
        if (bad := answer.value["computes"]) is not None
    ]
    wrong: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for answer in answers:
        for one in answer.value["wrong"]:
            wrong.setdefault(one["what"].split(",")[0], []).append((answer.rank, one))
    for found in wrong.values():
        rank, one = found[0]
        ranks = ", ".join(map(str, sorted({rank for rank, _ in found})))
        findings.append(
            Finding(
                "collectives",
                "broken",
                f"rank{'s' if ',' in ranks else ''} {ranks}",
                f"{one['what']} gives wrong values on rank {rank}: {one['evidence']}",
                "do not train on this: see driver and library versions, and which node it needs to go wrong",
            )
        )
    if not findings:
        value = answers[0].value
        checked = sum(answer.value["checked"] for answer in answers)
        axes = "" if len(answers) == 1 else f" on {layout}"
        what = (
            f"{checked:,} calls{axes} over {value['backend']}: the right values"
            if checked
            else "one rank: nobody to talk to"
        )
        findings.append(Finding("collectives", "ok", everybody, what))
    return findings
