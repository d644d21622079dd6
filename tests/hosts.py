"""Several hosts on this one machine: network namespaces on a switch of their own, each with an address and a name.

The switch is a bridge in a namespace of its own too, so nothing of it can be seen or reached from outside, and two
test runs may use the same addresses. What runs in a host shares the disk with everybody, as on a cluster.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import pytest

from tests.patience import Deadline

Names = Literal["all", "loopback", "none"]
"""What a host's /etc/hosts says. all: every name with its address. loopback: the same, but the host's own name is
127.0.1.1, as Debian's installer writes it. none: no name at all."""

# Not `ip netns exec`: it mounts a new /sys, and Slurm's daemons do not start without what lies below the old one.
_BECOME_HOST = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


@dataclass
class Host:
    """One host: a network namespace with a cable `eth0` to the switch."""

    name: str
    address: str
    namespace: str
    _switch: str
    _port: str
    _etc_hosts: Path
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def popen(
        self,
        command: Sequence[str | Path],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = subprocess.PIPE,
        stderr: int | IO[Any] | None = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Start a command in the host, with this environment and no other; its pid is the command's own."""
        process = subprocess.Popen(
            [
                *("nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount", "--", "sh", "-c"),
                *(_BECOME_HOST, self.name, str(self._etc_hosts), *map(str, command)),
            ],
            cwd=cwd,
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        self._started.append(process)
        return process

    def run(
        self,
        command: Sequence[str | Path],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the host to its end; stdout and stderr apart."""
        process = self.popen(command, cwd, env, stderr=subprocess.PIPE)
        out, err = process.communicate()
        return subprocess.CompletedProcess(list(map(str, command)), process.returncode, out, err)

    def ip(self, *arguments: str) -> str:
        """`ip ARGUMENTS` on the host's own interfaces, routes and addresses."""
        return _system("ip", "-n", self.namespace, *arguments)

    def cut(self) -> None:
        """From now on the switch drops all that comes from the host or goes to it; nobody is told."""
        _system("ip", "-n", self._switch, "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        """Undo `cut`."""
        _system("ip", "-n", self._switch, "link", "set", self._port, "master", "bridge")

    def slow(self, rate: str | None) -> None:
        """Limit the cable to a rate like `20mbit`, each way; None: as fast as it goes."""
        for namespace, device in ((self.namespace, "eth0"), (self._switch, self._port)):
            if rate is None:
                subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)
            else:
                limit = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
                _system("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limit)

    def pids(self) -> list[int]:
        """All processes that live in the host now."""
        return [int(pid) for pid in _system("ip", "netns", "pids", self.namespace).split()]

    def vanish(self) -> None:
        """A power cut: the cable goes first, so that no peer hears of it, then every process is killed."""
        self.cut()
        self.kill_all()

    def kill_all(self) -> None:
        """SIGKILL for every process of the host, until there is none."""
        deadline = Deadline(10)
        for process in self._started:
            process.kill()  # one that is still on its way into the namespace is not among its pids
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.poll()  # a zombie keeps its namespace
            assert not deadline.passed, f"{self.name}: {pids} cannot be killed"
            time.sleep(0.01)


@contextlib.contextmanager
def hosts(count: int, *, names: Names = "all", called: Sequence[str] = ()) -> Iterator[list[Host]]:
    """`count` hosts that reach one another and nothing else; gone at the end, with all that still runs in them.

    They are called host1, host2, ..., or as they are `called`.
    The test that asks for them is skipped by name where this user cannot make network namespaces.
    """
    if (reason := why_no_hosts()) is not None:
        pytest.skip(f"needs network namespaces: {reason}")
    token = f"ls{os.getpid()}x{random.randrange(1 << 16):04x}"
    network = f"10.213.{random.randrange(256)}"
    switch = f"{token}-switch"
    called = called or [f"host{number}" for number in range(1, count + 1)]
    assert len(called) == count
    with tempfile.TemporaryDirectory(prefix="ls-hosts-") as etc, contextlib.ExitStack() as afterwards:
        made = [
            Host(name, f"{network}.{10 + i}", f"{token}-{i}", switch, f"port{i}", Path(etc, name))
            for i, name in enumerate(called, 1)
        ]
        for namespace in (switch, *(host.namespace for host in made)):
            afterwards.callback(_delete_namespace, namespace)
            _system("ip", "netns", "add", namespace)
        _system("ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        for host in made:
            afterwards.callback(_end_all, host)
            host._etc_hosts.write_text(_known_names(host, made, names))
            _plug_in(host)
        yield made


def _plug_in(host: Host) -> None:
    cable = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _system("ip", "-n", host._switch, "link", "add", host._port, *cable)
    _system("ip", "-n", host._switch, "link", "set", host._port, "master", "bridge", "up")
    host.ip("link", "set", "lo", "up")
    host.ip("address", "add", f"{host.address}/24", "dev", "eth0")
    host.ip("link", "set", "eth0", "up")


def _known_names(host: Host, all_hosts: list[Host], names: Names) -> str:
    lines = ["127.0.0.1 localhost"]
    if names != "none":
        # On some clusters the fast network has names of its own, with an i at the end.
        lines += [f"{it.address} {it.name} {it.name}i" for it in all_hosts if it is not host or names == "all"]
    if names == "loopback":
        lines.append(f"127.0.1.1 {host.name}")
    return "\n".join(lines) + "\n"


def _end_all(host: Host) -> None:
    host.kill_all()
    for process in host._started:
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _delete_namespace(name: str) -> None:
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@functools.cache
def why_no_hosts() -> str | None:
    """Why this user on this machine cannot have hosts; None when they can be made."""
    missing = [program for program in ("ip", "tc", "nsenter", "unshare") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Linux with iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "only root may make them"
    name = f"ls{os.getpid()}-probe"
    try:
        _system("ip", "netns", "add", name)
        _system("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
        _system("ip", "-n", name, "link", "add", "port", "type", "veth", "peer", "name", "eth0")
        _system("nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "hostname", "probe")
    except AssertionError as error:
        return str(error)
    finally:
        _delete_namespace(name)
    return None


def _system(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"`{' '.join(command)}`: {done.stderr.strip()}"
    return done.stdout
