"""The nodes of a run, started by hand or by srun on each: how many, which one this is, and where they meet."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import UserError, reason
from lockstep.runtime.host.network import address_towards
from lockstep.runtime.host.slurm_env import find_step

HEAD = ".head"
"""The note in the run folder with the head's port."""
SECONDS_TO_MEET = 600

SECONDS_WITHOUT_HEAD = 30.0
"""How long a node goes on that does not reach the head: the others go on without it, and it may not write any more."""


@dataclass(frozen=True)
class Nodes:
    """How many nodes take part, at least and at most, and where this one finds the others."""

    least: int = 1
    most: int = 1
    rank: int = 0
    head: str = "localhost:0"
    address: str = "localhost"
    patience: int = SECONDS_TO_MEET
    """Seconds to wait for the others."""
    meeting: str = ""
    """The name of this start, where Slurm gives it one; the head's port is not known then before `settle_head`."""

    @property
    def is_head(self) -> bool:
        """Whether the nodes meet at this one, and the run is shown here."""
        return self.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether this node says what goes on; under srun all of them would write into one log."""
        return self.is_head or not self.meeting

    @property
    def is_alone(self) -> bool:
        """Whether there is only this node."""
        return self.most == 1


def find_nodes(nodes: str | None, node_rank: int | None, head: str | None, resume: str) -> Nodes:
    """What `--nodes`, `--node-rank` and `--head` say, checked: names resolve, the head's port is free on the head."""
    least, most = counts(nodes or "1")
    if node_rank is None and head is None and (step := find_step((least, most) if nodes else None)) is not None:
        if not nodes:
            least = most = step.nodes
        if most > 1:
            _refuse_never(resume, step.nodes)
            return Nodes(least, most, step.rank, step.head, meeting=step.name)
    if most == 1:
        if node_rank or head:
            raise UserError("--node-rank and --head are for several nodes", "say how many: --nodes 2, or --nodes 1:2")
        return Nodes()
    if node_rank is None or head is None:
        missing = "--node-rank" if node_rank is None else "--head"
        raise UserError(
            f"--nodes {nodes} without {missing}",
            "start on every node: --node-rank 0 on the head, 1, 2, ... on the others, --head HOST:PORT the same on all",
        )
    if not 0 <= node_rank < most:
        raise UserError(f"--node-rank {node_rank} with --nodes {nodes}", f"count the nodes from 0 to {most - 1}")
    _refuse_never(resume, nodes)
    host, port = host_and_port(head)
    address = address_towards(host, port)
    if node_rank == 0:
        _check_free(host, port)
    return Nodes(least, most, node_rank, head, address)


def settle_head(nodes: Nodes, folder: Path) -> Nodes:
    """Agree on a port where Slurm started the nodes: the head takes a free one, and leaves it in the run folder."""
    if not nodes.meeting:
        return nodes
    note = folder / HEAD
    if nodes.is_head:
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        own = note.with_name(f"{HEAD}.{os.getpid()}")
        own.write_text(json.dumps({"meeting": nodes.meeting, "port": port}), encoding="utf-8")
        own.replace(note)
    else:
        port = _wait_for_port(note, nodes)
    return replace(nodes, head=f"{nodes.head}:{port}", address=address_towards(nodes.head, port))


def _wait_for_port(note: Path, nodes: Nodes) -> int:
    end = time.monotonic() + nodes.patience
    while time.monotonic() < end:
        try:
            found = json.loads(note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        if found.get("meeting") == nodes.meeting:
            return int(found["port"])
        time.sleep(0.2)
    raise UserError(
        f"the head {nodes.head} has left no word in {note.parent} for {nodes.patience} s",
        "see whether it runs, and whether every node sees the same run folder",
    )


def _refuse_never(resume: str, nodes: object) -> None:
    if resume == "never":  # the second to come would take the first one's new run for an old one
        raise UserError(
            f"--resume never with --nodes {nodes}",
            "give a new --run-dir instead, the same on every node: it begins anew",
        )


def counts(text: str) -> tuple[int, int]:
    """The least and the most nodes that `2` or `3:4` say."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"--nodes {text} is not a number of nodes", "write 2, or 3:4 for at least 3 and at most 4")
    return least, most


def host_and_port(head: str) -> tuple[str, int]:
    """The two parts of where nodes meet."""
    match = re.fullmatch(r"(.+):(\d+)", head)
    if match is None or not 0 < int(match[2]) < 65536:
        raise UserError(f"--head {head} is not host:port", "write the head node and a free port, like node1:29500")
    return match[1].strip("[]"), int(match[2])


def _check_free(host: str, port: int) -> None:
    """Refuse a port that is taken, or a head that is another machine, before anything is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == 98
            fix = "choose another port" if taken else "start node-rank 0 on the head itself, or correct --head"
            raise UserError(f"this node cannot listen on --head {host}:{port} ({reason(error)})", fix) from None


def end_without_head(nodes: Nodes, ended: threading.Event) -> None:
    """End this process, and its workers with it, when the head was out of reach for long; torch's agent waits on.

    For a thread: it returns when the launch has ended.
    """
    seen: float | None = None  # it may be started minutes after this node
    while not ended.wait(3.0):
        try:
            socket.create_connection(host_and_port(nodes.head), timeout=3.0).close()
            seen = time.monotonic()
        except OSError as error:
            if seen is not None and time.monotonic() - seen > SECONDS_WITHOUT_HEAD:
                since = f"has not reached the head {nodes.head} for {SECONDS_WITHOUT_HEAD:.0f} s ({reason(error)})"
                print(f"lockstep: this node {since} and ends: mend the network, start it again", file=sys.stderr)
                os._exit(1)
