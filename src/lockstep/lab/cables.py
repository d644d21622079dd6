"""A network of the lab's own: every rank in a network namespace, with one cable to a switch, as fast as told.

The namespaces have no names and belong to processes, so they are gone when those end, however they do. Nothing outside
is touched, and a user who is not root makes them inside of a user namespace, where the system allows that.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.launch.probe import Answer, Seat, run_ranks
from lockstep.runtime.nursery import die_with_parent

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MTU = 9000
BURST = 10_000
"""Bytes that a cable carries at once, a frame and a little: more would be for free after every pause."""
SOCKET_BYTES = 262_144
"""What the kernel takes from a sender before the cable has carried it; by default that is megabytes. With much less,
a sender that is late by some milliseconds leaves the cable idle."""
SECONDS_TO_PLUG_IN = 20.0


class NotHereError(Exception):
    """There can be no such network here; the text says why, and what would help."""


class _Plugged(NamedTuple):
    rank: int
    pid: int


def run_on_own_network(
    work: Callable[[Seat], Any], ranks: int, bytes_per_second: float, hear: Callable[[Any], None], seconds: float
) -> list[Answer]:
    """`run_ranks`, but each rank has a host of its own; `hear` gets what rank 0 tells.

    Raises NotHereError where the system does not let this user make such a network.
    """

    def be_host(seat: Seat) -> Any:
        _become_host(seat, bytes_per_second)
        return work(seat)

    def be_switch(tell: Callable[[Any], None]) -> list[Answer]:
        def hear_rank(rank: int, message: Any) -> None:
            if isinstance(message, _Plugged):
                _plug_in(message, bytes_per_second)
            elif rank == 0:
                tell(message)

        _make_switch()
        return run_ranks(be_host, ranks, hear=hear_rank, seconds=seconds)

    return _in_a_fork(be_switch, hear)


def _in_a_fork(function: Callable[[Callable[[Any], None]], list[Answer]], hear: Callable[[Any], None]) -> list[Answer]:
    """Call a function in another process, which leaves this one's network; it can tell this one something meanwhile.

    A fork has one thread, as the kernel demands of those who make a user namespace. A rank of `run_ranks` would have
    those that torch has made by then.
    """
    ours, theirs = connection.Pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            ours.close()
            die_with_parent()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is interrupted, and ends this process
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            if os.getppid() == parent:
                try:
                    theirs.send(("returned", function(lambda message: theirs.send(("told", message)))))
                except NotHereError as error:
                    theirs.send(("not here", str(error)))
        finally:
            os._exit(0)
    theirs.close()
    try:
        while True:
            kind, value = ours.recv()
            if kind == "told":
                hear(value)
            elif kind == "not here":
                raise NotHereError(value)
            else:
                answers: list[Answer] = value
                return answers
    except EOFError:
        raise NotHereError("the process with the switch ended") from None
    finally:
        ours.close()
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def _make_switch() -> None:
    """Leave the network of this machine for an empty one with a bridge in it."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise NotHereError(f"{' and '.join(missing)} not found (Linux with iproute2 has them)")
    try:
        if os.geteuid() == 0:
            _unshare(CLONE_NEWNET)
        else:
            _become_root_of_its_own()
    except OSError as error:
        raise NotHereError(
            f"no network namespace can be made ({(error.strerror or str(error)).lower()}): run it as root, or where "
            "users may make namespaces"
        ) from None
    _system("ip", "link", "add", "bridge", "up", "type", "bridge")
    _system("ip", "link", "add", "probe", "type", "veth", "peer", "name", "eborp")
    _slow_down("probe", 1e6)
    _system("ip", "link", "delete", "probe")


def _become_root_of_its_own() -> None:
    user, group = os.geteuid(), os.getegid()
    _unshare(CLONE_NEWUSER | CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _become_host(seat: Seat, bytes_per_second: float) -> None:
    """Move this rank into a namespace of its own, and wait for the cable."""
    rank = seat.place.rank
    _unshare(CLONE_NEWNET)
    for name, value in (
        ("tcp_wmem", f"4096 {SOCKET_BYTES} {SOCKET_BYTES}"),
        ("tcp_congestion_control", "reno"),
        ("tcp_limit_output_bytes", "20000"),  # so that a short message need not wait behind a long one
        ("tcp_slow_start_after_idle", "0"),
    ):
        with suppress(OSError):  # read-only in many containers
            Path("/proc/sys/net/ipv4", name).write_text(value)
    seat.tell(_Plugged(rank, os.getpid()))
    end = time.monotonic() + SECONDS_TO_PLUG_IN
    while "eth0" not in (name for _, name in socket.if_nameindex()):
        if time.monotonic() > end:
            raise NotHereError(f"rank {rank} got no cable to the switch")
        time.sleep(0.01)
    _system("ip", "address", "add", f"10.0.0.{rank + 1}/24", "dev", "eth0")
    _slow_down("eth0", bytes_per_second)
    for device in ("lo", "eth0"):
        _system("ip", "link", "set", device, "up")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _plug_in(host: _Plugged, bytes_per_second: float) -> None:
    """A cable from the switch, where this runs, to a host."""
    port = f"port{host.rank}"
    mtu = ("mtu", str(MTU))
    _system("ip", "link", "add", port, *mtu, "type", "veth", "peer", "name", "eth0", *mtu, "netns", str(host.pid))
    _slow_down(port, bytes_per_second)
    _system("ip", "link", "set", port, "master", "bridge", "up")


def _slow_down(device: str, bytes_per_second: float) -> None:
    """Limit what leaves by a device; tc calls bytes per second `bps`."""
    burst = max(BURST, int(bytes_per_second * 0.002))  # what is due while the kernel sleeps
    limit = ("tbf", "rate", f"{bytes_per_second:.0f}bps", "burst", str(burst), "limit", "16mb")
    _system("tc", "qdisc", "add", "dev", device, "root", *limit)


def _unshare(what: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(what):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _system(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHereError(f"`{' '.join(command)}` says {(done.stderr or done.stdout).strip()!r}")
