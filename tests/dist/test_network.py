"""Ranks on several hosts find the network that reaches the others by themselves."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lockstep.errors import UserError
from lockstep.runtime.host import network
from lockstep.runtime.host.network import address_towards, interface_of
from tests.cli.commands import clean_environment, run
from tests.hosts import Host, Names, hosts
from tests.one_script import assert_trained_alike, write_script

PER_HOST = 2
ASK = (
    "import sys; from lockstep.runtime.host.network import *; "
    "a = address_towards(sys.argv[1], 1); print(a, interface_of(a))"
)


def test_a_host_that_nobody_knows_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(network, "SECONDS_FOR_NAMES", 0.0)
    with pytest.raises(UserError, match=r"no-such-host\.invalid is unknown on .*MASTER_ADDR") as refusal:
        address_towards("no-such-host.invalid", 29500)
    assert "\n" not in str(refusal.value)


def test_a_name_that_is_published_late_is_waited_for(monkeypatch):
    asked = []

    def resolve(*_arguments, **_options):
        asked.append(1)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 1))]

    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert address_towards("late", 1) == "127.0.0.1"


def test_an_address_belongs_to_an_interface(monkeypatch):
    def entry(family: int, address: str) -> object:
        return type("Entry", (), {"family": family, "address": address})()

    found = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "ib0": [
            entry(psutil.AF_LINK, "00:00"),
            entry(socket.AF_INET, "10.1.2.3"),
            entry(socket.AF_INET6, "fe80::1%ib0"),
        ],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert interface_of("127.0.1.1") == "lo"
    assert interface_of("10.1.2.3") == interface_of("fe80::1") == "ib0"
    with pytest.raises(UserError, match=r"10\.1\.2\.4.*use one of lo, ib0"):
        interface_of("10.1.2.4")


def test_the_way_to_a_host_leads_over_the_interface_that_reaches_it():
    with hosts(2) as (first, second):
        for host in (first, second):
            add_decoy(host)
        towards_peer = ask(first, second.name)
        assert towards_peer == f"{first.address} eth0"
        assert ask(second, second.name) == f"{second.address} eth0", "the head itself: its own address"
        assert ask(first, "172.17.0.9") == "172.17.0.1 docker0"
        assert "no route from host1 to 192.0.2.1 (Network is unreachable)" in ask(first, "192.0.2.1")


def ask(host: Host, other: str) -> str:
    done = host.run([sys.executable, "-c", ASK, other], env=clean_environment())
    return (done.stdout or done.stderr).strip()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    done = run(folder, sys.executable, write_script(folder).name, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "head"),
    [
        ("loopback", "name"),  # the head's own name leads to its loopback, as on many a Debian
        ("none", "address"),  # no name is known, not even a host's own
        ("loopback", "address"),
    ],
)
def test_two_hosts_train_together_without_a_word_about_interfaces(reference, tmp_path, names: Names, head):
    with hosts(2, names=names) as made:
        for host in made:
            add_decoy(host)
        head_host = made[0].name if head == "name" else made[0].address
        ended = train_by_hand(made, head_host, tmp_path)
    assert [code for code, _ in ended] == [0] * 4, "\n".join(output for _, output in ended)
    assert_trained_alike(tmp_path, reference, "dp=4")
    logs = {path.name.split(".")[0] for path in (tmp_path / "runs" / "one" / "logs").glob("*.log")}
    assert logs <= {"host1", "host2"}


@pytest.mark.slow
@pytest.mark.parametrize("meeting", ["static", "c10d"])
def test_torchrun_on_two_hosts(reference, tmp_path, meeting):
    script = write_script(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={PER_HOST}"]
    with hosts(2, names="loopback") as made:
        processes = []
        for number, host in enumerate(made):
            add_decoy(host)
            options = [f"--node-rank={number}", f"--master-addr={made[0].name}", "--master-port=29500"]
            if meeting == "c10d":
                # What torchrun itself cannot find out where names lead to loopback.
                options = ["--rdzv-backend=c10d", f"--rdzv-endpoint={made[0].name}:29500", "--rdzv-id=one"]
                options += [f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr={host.address}"]
            env = clean_environment() | {"OMP_NUM_THREADS": "1"}
            processes.append(host.popen([*torchrun, *options, script.name], tmp_path, env))
        outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert_trained_alike(tmp_path, reference, "dp=4")


@pytest.mark.slow
def test_an_unknown_head_is_refused_on_every_rank(tmp_path):
    with hosts(2, names="none") as made:
        ended = train_by_hand(made, "host1", tmp_path)
    for code, output in ended:
        assert code != 0
        assert "the host host1 is unknown on host" in output
        assert "MASTER_ADDR" in output


def add_decoy(host: Host) -> None:
    """An interface as Docker makes one: it has an address, the same on every host, and reaches nobody."""
    host.ip("link", "add", "docker0", "type", "bridge")
    host.ip("address", "add", "172.17.0.1/16", "dev", "docker0")
    host.ip("link", "set", "docker0", "up")


def train_by_hand(made: list[Host], head: str, folder: Path) -> list[tuple[int, str]]:
    """Start the script's ranks on all hosts, with the variables torchrun would set; exit code and output of each."""
    script = write_script(folder)
    processes: list[subprocess.Popen[str]] = []
    world_size = PER_HOST * len(made)
    for rank in range(world_size):
        node, local_rank = divmod(rank, PER_HOST)
        place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": PER_HOST}
        place |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": len(made)}
        env = clean_environment() | {name: str(number) for name, number in place.items()}
        env |= {"MASTER_ADDR": head, "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
        assert not any("IFNAME" in name for name in env)
        processes.append(made[node].popen([sys.executable, script.name], folder, env))
    outputs = [process.communicate()[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
