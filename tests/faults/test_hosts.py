"""The hosts of tests/hosts.py are what they claim: reachable, cut, slow, gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, hosts
from tests.patience import patient, wait_for

LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        while connection.recv(1 << 16):
            pass
        connection.send(b"all")
        connection.close()
"""

SEND = """
import socket, sys, time
begin = time.monotonic()
with socket.create_connection((sys.argv[1], 5000), 3) as connection:
    connection.settimeout(None)
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(3) == b"all"
print(time.monotonic() - begin)
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Host]]:
    with hosts(2) as made:
        listening = made[1].popen([sys.executable, "-c", LISTEN, made[1].address])
        assert listening.stdout is not None
        assert listening.stdout.readline() == "ready\n"
        yield made


def send(pair: list[Host], size: int) -> subprocess.CompletedProcess[str]:
    return pair[0].run([sys.executable, "-c", SEND, pair[1].name, str(size)])


def seconds_to_send(pair: list[Host], size: int) -> float:
    done = send(pair, size)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_each_host_has_a_name_and_an_address_of_its_own(pair):
    for host in pair:
        assert host.run(["hostname"]).stdout == f"{host.name}\n"
        assert host.address in host.ip("-brief", "address", "show", "eth0")
    assert pair[0].address != pair[1].address
    assert os.uname().nodename not in {host.name for host in pair}, "this machine keeps its name"


def test_a_cut_host_is_silent_until_it_is_mended(pair):
    pair[1].cut()
    try:
        cut = send(pair, 1)
    finally:
        pair[1].mend()
    assert cut.returncode != 0
    assert "timed out" in cut.stderr or "No route to host" in cut.stderr, "nobody refused the connection"
    assert "state UP" in pair[1].ip("link", "show", "eth0"), "the host itself sees nothing"
    wait_until_reachable(pair)


def wait_until_reachable(pair: list[Host]) -> None:
    wait_for(lambda: send(pair, 1).returncode == 0, "the host")


def test_a_slow_cable_takes_as_long_as_its_rate_says(pair):
    megabytes = 4
    open_seconds = min(seconds_to_send(pair, megabytes << 20) for _ in range(3))
    pair[1].slow("20mbit")
    try:
        slow_seconds = seconds_to_send(pair, megabytes << 20)
    finally:
        pair[1].slow(None)
    expected = megabytes * 8.39 / 20
    assert slow_seconds > 0.9 * expected
    assert slow_seconds < patient(2 * expected) + open_seconds, "and not much slower"
    assert slow_seconds > 3 * open_seconds
    assert min(seconds_to_send(pair, megabytes << 20) for _ in range(3)) < slow_seconds / 3, "the limit is lifted again"


@pytest.mark.parametrize(("names", "own"), [("all", None), ("loopback", "127.0.1.1"), ("none", "unknown")])
def test_names_resolve_as_asked(names, own):
    ask = "import socket, sys\ntry: print(socket.gethostbyname(sys.argv[1]))\nexcept OSError: print('unknown')"
    with hosts(2, names=names) as (first, second):
        found = [first.run([sys.executable, "-c", ask, it.name]).stdout.strip() for it in (first, second)]
        peer = "unknown" if names == "none" else second.address
        assert found == [own or first.address, peer]


def test_a_vanished_host_leaves_no_process_and_its_peer_hears_nothing():
    with hosts(2) as (first, second):
        family = ["sh", "-c", "sleep 1000 & sleep 1000 & wait"]
        process = second.popen(family)
        bystander = first.popen(["sleep", "1000"])
        wait_for(lambda: len(second.pids()) == 3, "the family")
        second.vanish()
        assert process.wait() == -9
        assert second.pids() == []
        assert bystander.poll() is None


def test_everything_is_gone_after_a_failure():
    def fail_inside() -> None:
        with hosts(1) as (host,):
            seen.append(host)
            host.popen(["sh", "-c", "trap '' TERM; sleep 1000 & wait"])
            raise RuntimeError("the test failed")

    seen: list[Host] = []
    with pytest.raises(RuntimeError, match="the test failed"):
        fail_inside()
    (host,) = seen
    assert host._started[0].returncode == -9
    assert not Path("/run/netns", host.namespace).exists()
    assert not Path("/run/netns", host._switch).exists()
    assert not host._etc_hosts.exists()
