"""Which address and which network interface of this node reach the others.

Left to itself, gloo takes the address that the host's name resolves to: 127.0.1.1 on many a Debian, nothing at all in
many a container, the wrong network on nodes with several. The kernel knows the way to the peers, so it is asked.
"""

from __future__ import annotations

import ipaddress
import socket
import time

from lockstep.errors import UserError

SECONDS_FOR_NAMES = 10.0
"""How long a host may stay unknown: where nodes are started on demand, their names are published a little later."""


def address_towards(host: str, port: int) -> str:
    """The address of this node from which it reaches a host; for the host itself its own address. Sends nothing."""
    refused: OSError | None = None
    for family, address in _addresses(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)  # only chooses a route
            except OSError as error:
                refused = error
                continue
            return str(probe.getsockname()[0]).partition("%")[0]
    assert refused is not None
    cause = f"no route from {socket.gethostname()} to {host} ({refused.strerror})"
    raise UserError(cause, "set MASTER_ADDR to an address of rank 0's node that every node reaches")


def interface_of(address: str) -> str:
    """The network interface that has this address, like eth0."""
    import psutil

    wanted = ipaddress.ip_address(address)
    found = psutil.net_if_addrs()
    for name, entries in found.items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own = ipaddress.ip_address(entry.address.partition("%")[0])
            if own == wanted or (own.is_loopback and wanted.is_loopback):  # all of 127.0.0.0/8 is on one interface
                return str(name)
    raise UserError(f"no network interface of this node has the address {address}", f"use one of {', '.join(found)}")


def is_loopback(address: str) -> bool:
    """Does the address mean the node itself, on every node?"""
    return ipaddress.ip_address(address).is_loopback


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]]:
    end = time.monotonic() + SECONDS_FOR_NAMES
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except socket.gaierror as error:
            if time.monotonic() < end:
                time.sleep(0.5)
                continue
            cause = f"the host {host} is unknown on {socket.gethostname()} ({error.strerror})"
            fix = "set MASTER_ADDR to the address of rank 0's node in numbers, or add its name to /etc/hosts or the DNS"
            raise UserError(cause, fix) from None
        return [(family, address) for family, _, _, _, address in found]  # type: ignore[misc]
