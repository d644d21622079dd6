"""A real Slurm on one machine: its daemons in the hosts of tests/hosts.py, all its files in one short-lived folder.

Each node is a host with an address and a name of its own. The controller's host is also the login node: commands run
there. Nothing of the machine's own Slurm or munge, if it has one, is used or touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cli.commands import clean_environment
from tests.hosts import Host, hosts, why_no_hosts
from tests.patience import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scontrol")
CPUS = 4
_START_SECONDS = 60


def why_no_slurm() -> str | None:
    """Why no cluster can be started here; None when it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found (.ci/install-slurm installs them on Debian and Ubuntu)"
    return why_no_hosts()


@dataclass
class Cluster:
    """A running Slurm: where to submit, and what to do to its nodes."""

    folder: Path
    """Its configuration, state and logs; the disk is shared by all nodes."""
    login: Host
    nodes: dict[str, Host]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user on the login node."""
        return clean_environment() | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def run(
        self, *command: str | Path, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node to its end."""
        return self.login.run(command, cwd, self.environment | environment)

    def popen(self, *command: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start a command on the login node and go on."""
        return self.login.popen(command, cwd, self.environment | environment)

    def job(self, number: int | str) -> dict[str, str]:
        """What `scontrol show job` says of a job: JobState, Restarts, ExitCode, NodeList, ..."""
        return self._show("job", str(number))

    def node_state(self, name: str) -> str:
        """A node's state, like IDLE or DOWN*."""
        return self._show("node", name)["State"]

    def wait_for_job(self, number: int | str, *states: str, seconds: float = 60) -> dict[str, str]:
        """Poll until a job is in one of the states. (`sbatch --wait` looks only after 2, 10 and 42 s.)"""
        wait_for(lambda: self.job(number)["JobState"] in states, f"job {number} to be {' or '.join(states)}", seconds)
        return self.job(number)

    def boot(self, name: str) -> None:
        """Start a node, or start it again after `crash`; it is idle when this comes back."""
        node = self.nodes[name]
        node.mend()
        _start(node, self.folder, "slurmd", "-D", "-N", name)
        wait_for(lambda: self.node_state(name) == "IDLE", f"{name} to be idle", _START_SECONDS)

    def crash(self, name: str) -> None:
        """A power cut: the cable first, then every process of the node. Slurm notices after about half a minute."""
        self.nodes[name].vanish()

    def fail(self, name: str) -> None:
        """Make Slurm believe at once that a node is down: its jobs end with NODE_FAIL or are requeued."""
        done = self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
        assert done.returncode == 0, done.stderr

    def resume(self, name: str) -> None:
        """Let Slurm use a node again that it took for down; it may have found out by itself."""
        self.run("scontrol", "update", f"nodename={name}", "state=resume")
        wait_for(lambda: self.node_state(name) == "IDLE", f"{name} to be idle", _START_SECONDS)

    def log(self, daemon: str) -> str:
        """What slurmctld or a node's slurmd wrote."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(f"{daemon}*.log")))

    def _show(self, kind: str, name: str) -> dict[str, str]:
        done = self.run("scontrol", "--oneliner", "show", kind, name)
        assert done.returncode == 0, done.stderr
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)


@contextlib.contextmanager
def cluster(count: int) -> Iterator[Cluster]:
    """A Slurm with `count` idle nodes called node1, node2, ...; ended and removed at the end."""
    # A socket's path has at most 107 bytes: not below pytest's long folders. Munge refuses a folder others can write.
    folder = Path(tempfile.mkdtemp(prefix="ls-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    names = ["login", *(f"node{number}" for number in range(1, count + 1))]
    try:
        with hosts(count + 1, called=names) as (login, *nodes):
            made = Cluster(folder, login, {node.name: node for node in nodes})
            (folder / "slurm.conf").write_text(_configuration(folder, login, nodes))
            _start_munge(login, folder)
            _start(login, folder, "slurmctld", "-D")
            for node in nodes:
                (folder / "spool" / node.name).mkdir(parents=True)
                _start(node, folder, "slurmd", "-D", "-N", node.name)
            _wait_for_nodes(made)
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_nodes(made: Cluster) -> None:
    def all_idle() -> bool:
        states = made.run("sinfo", "--noheader", "--Node", "--format=%N %t")
        return set(states.stdout.splitlines()) == {f"{name} idle" for name in made.nodes}

    try:
        wait_for(all_idle, f"{len(made.nodes)} nodes of Slurm", _START_SECONDS)
    except AssertionError as error:
        said = "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-500:]}" for path in sorted(made.folder.glob("*.log"))
        )
        raise AssertionError(f"{error}\n{said}") from None


def _start_munge(login: Host, folder: Path) -> None:
    """The service that signs what Slurm's daemons send one another, with a key of its own."""
    own = folder / "munge"
    own.mkdir(mode=0o700)
    key = own / "key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    files = (f"--key-file={key}", f"--seed-file={own / 'seed'}", f"--socket={folder / 'munge.socket'}")
    logs = (f"--pid-file={folder / 'munge.pid'}", f"--log-file={folder / 'munge.log'}")
    _start(login, folder, "munged", "--foreground", *files, *logs)
    wait_for((folder / "munge.socket").exists, "munge", _START_SECONDS)


def _start(host: Host, folder: Path, *command: str, **environment: str) -> None:
    env: Mapping[str, str] = clean_environment() | {"SLURM_CONF": str(folder / "slurm.conf")} | environment
    with (folder / f"{command[0]}-{host.name}.out.log").open("a") as output:
        host.popen(command, folder, env, stdout=output)


def _configuration(folder: Path, login: Host, nodes: list[Host]) -> str:
    """No cgroups, no binding, no accounting, and short clocks where Slurm's own would make a test wait for minutes."""
    node_lines = [
        f"NodeName={node.name} NodeAddr={node.address} CPUs={CPUS} CoresPerSocket={CPUS} RealMemory=4000 State=UNKNOWN"
        for node in nodes
    ]
    return f"""
ClusterName=lockstep
SlurmctldHost={login.name}({login.address})
SlurmUser=root
SlurmdUser=root
# cred_expire is also how long a requeued job waits before it starts again: 120 s by default
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
# Otherwise every cluster counts its jobs from 1, and would find what the jobs of another left behind.
FirstJobId={1000 + int(time.time()) % 60000 * 1000}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
# A node may claim more CPUs than this machine has.
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
SlurmdTimeout=10
KillWait=5
MinJobAge=3600
TCPTimeout=5
ReturnToService=2
DefMemPerCPU=100
{chr(10).join(node_lines)}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP
PartitionName=main Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high PriorityTier=100 PreemptMode=OFF
"""
