"""Launchers of several nodes that tell each other something before, or without, a training: doctor and bench do."""

from __future__ import annotations

import datetime
import json
import socket
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lockstep.errors import UserError
from lockstep.launch.nodes import Nodes, host_and_port
from lockstep.runtime.host.network import address_towards, interface_of, is_loopback
from lockstep.runtime.rank_env import free_range_port

if TYPE_CHECKING:
    from torch.distributed import Store

SECONDS_TO_LEAVE = 10.0


@dataclass(frozen=True)
class Meeting:
    """The nodes of a command as one of them sees them. With a single node there is nobody to talk to."""

    rank: int = 0
    nodes: int = 1
    store: Store | None = None
    address: str = "127.0.0.1"
    """Of this node, as the others reach it."""

    def share(self, what: str, value: Any, seconds: float) -> list[Any]:
        """A JSON value of every node, in their order; None for those that said nothing for so long."""
        if self.store is None:
            return [value]
        self.store.set(f"{what}/{self.rank}", json.dumps(value))
        keys = [f"{what}/{node}" for node in range(self.nodes)]
        _wait_for(self.store, keys, seconds)
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]

    def from_head(self, what: str, value: Any, seconds: float) -> Any:
        """The head's value, the same on every node: what all of them have to agree on; None if it does not say it."""
        if self.store is None:
            return value
        key = f"from the head/{what}"
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            return value
        return json.loads(self.store.get(key)) if _wait_for(self.store, [key], seconds) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """The store is the head's: it leaves last, unless something went wrong. What is refused is refused by all."""
        if error is None or isinstance(error, UserError):
            with suppress(RuntimeError):  # the head is gone, and its store with it
                self.share("left", True, SECONDS_TO_LEAVE if self.rank == 0 else 0.0)


def _wait_for(store: Store, keys: list[str], seconds: float) -> bool:
    """Whether all of these are there by then."""
    end = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def meet(nodes: Nodes, seconds: float) -> Meeting:
    """Find the other launchers at the head; a UserError says why this one does not reach it."""
    if nodes.is_alone:
        return Meeting()
    from torch.distributed import TCPStore

    host, port = head_of(nodes)
    address = address_towards(host, port)
    try:
        store = TCPStore(
            host, port, is_master=nodes.is_head, timeout=datetime.timedelta(seconds=seconds), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:  # torch's own classes of both, in versions of their own
        what = "take the port" if nodes.is_head else "reach the head"
        raise UserError(
            f"{socket.gethostname()} cannot {what} {host}:{port} ({str(error).splitlines()[0][:120]})",
            "see that node 0 was started, that its port is free, and that no firewall is between",
        ) from None
    # The head's own name is often 127.0.1.1 on the head itself: the way to a peer tells.
    if nodes.is_head and is_loopback(address) and _wait_for(store, ["address/1"], seconds):
        address = address_towards(json.loads(store.get("address/1")), port)
    store.set(f"address/{nodes.rank}", json.dumps(address))
    return Meeting(nodes.rank, nodes.most, store, address)


def head_of(nodes: Nodes) -> tuple[str, int]:
    """Where the nodes meet; Slurm's step has a port of its own."""
    if nodes.meeting:
        return nodes.head, free_range_port(zlib.crc32(nodes.meeting.encode()))
    return host_and_port(nodes.head)


def use_interface_of(meeting: Meeting) -> None:
    """Have every rank of this node talk through the interface that the other nodes reach."""
    from lockstep.runtime.comm import use_interface

    if meeting.store is not None:
        use_interface(interface_of(meeting.address))
