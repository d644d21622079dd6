"""What may happen to a job of Slurm: each strikes a real training that `lockstep submit` has submitted.

`plant` lets one strike and measures what follows. The job has to end COMPLETED, with the weights of one that nothing
happened to.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.cli.commands import LOCKSTEP, events
from tests.faults.test_nodes import weights_of
from tests.patience import wait_for
from tests.slurm.cluster import Cluster
from tests.small_training import small_training

STEPS, STRIKES_AT, SAVES_EVERY = 50, 22, 10
SCRIPT = small_training(STEPS, SAVES_EVERY, dropout=0.1)
PAUSE = 0.15
SUBMIT = (*LOCKSTEP, "submit", "--cluster", "lab.toml", "--nodes", "2", "--nproc", "2")
PROFILE = """
[slurm]
lead = 50
start_up = 5
host_suffix = "i"
[storage]
shared = ["/tmp"]
"""


@dataclass(frozen=True)
class Submitted:
    """A job, its run, and where it was submitted."""

    slurm: Cluster
    number: str
    folder: Path
    run_folder: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.run_folder, kind)

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: any(one["step"] >= step for one in self.events("step")), f"step {step}", 100)

    @property
    def node_names(self) -> list[str]:
        """The nodes of the last start, the head first."""
        named = self.events("job")[-1]["nodes"]
        shown = self.slurm.run("scontrol", "show", "hostnames", named)
        return shown.stdout.split()

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.run_folder / "logs").glob("slurm-*.out")))


def write_files(folder: Path) -> None:
    """The script and the profile of the cluster."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "lab.toml").write_text(PROFILE)


def submit(slurm: Cluster, folder: Path, *options: str, pause: float = PAUSE, name: str = "train") -> Submitted:
    """`lockstep submit` on the login node: two nodes with two ranks each."""
    write_files(folder)
    done = slurm.run(*SUBMIT, *options, "run", "train.py", str(pause), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    number = done.stdout.split("submitted job ")[1].split(":")[0]
    return Submitted(slurm, number, folder, folder / "runs" / name)


@dataclass(frozen=True)
class SlurmFault:
    """One fault: `strike` acts on a running job and returns what puts the cluster right again."""

    name: str
    what: str
    strike: Callable[[Submitted], Callable[[], None]]
    options: tuple[str, ...] = ()
    saves: bool = True
    """Whether the run is asked to save, so that no step is lost."""
    pause: float = PAUSE
    """Seconds between two steps."""


def crash_node(job: Submitted) -> Callable[[], None]:
    name = job.node_names[1]
    job.slurm.crash(name)
    return lambda: job.slurm.boot(name)


def crash_head(job: Submitted) -> Callable[[], None]:
    name = job.node_names[0]
    job.slurm.crash(name)
    return lambda: job.slurm.boot(name)


def unplug_node(job: Submitted) -> Callable[[], None]:
    name = job.node_names[1]
    job.slurm.nodes[name].cut()

    def plug() -> None:
        job.slurm.nodes[name].mend()
        wait_for(lambda: job.slurm.node_state(name) == "IDLE", f"{name} to be idle", 120)

    return plug


def kill_slurmd(job: Submitted) -> Callable[[], None]:
    name = job.node_names[1]
    for pid in job.slurm.nodes[name].pids():
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).name() == "slurmd":
                os.kill(pid, signal.SIGKILL)

    def start_again() -> None:
        job.slurm.nodes[name].kill_all()
        job.slurm.boot(name)

    return start_again


def fail_at_once(job: Submitted) -> Callable[[], None]:
    name = job.node_names[1]
    job.slurm.fail(name)
    return lambda: job.slurm.resume(name)


def signal_one_rank(job: Submitted) -> Callable[[], None]:
    for pid in job.slurm.nodes[job.node_names[1]].pids():
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).name().startswith("lockstep-rank"):
                os.kill(pid, signal.SIGUSR1)
                break
    return lambda: None


def signal_the_step(job: Submitted) -> Callable[[], None]:
    done = job.slurm.run("scancel", "--signal=USR1", f"{job.number}.0")
    assert done.returncode == 0, done.stderr
    return lambda: None


def preempt(job: Submitted) -> Callable[[], None]:
    options = ("--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--time=5")
    done = job.slurm.run("sbatch", "--parsable", *options, "--wrap=sleep 5")
    assert done.returncode == 0, done.stderr
    return lambda: None


def requeue(job: Submitted) -> Callable[[], None]:
    done = job.slurm.run("scontrol", "requeue", job.number)
    assert done.returncode == 0, done.stderr
    return lambda: None


def wait_for_the_limit(_: Submitted) -> Callable[[], None]:
    return lambda: None


FAULTS = (
    SlurmFault("time-limit", "the time limit of the job comes", wait_for_the_limit, ("--time", "1m"), pause=0.6),
    SlurmFault("preempted", "a job of a higher partition takes the nodes", preempt, ("--partition", "low")),
    SlurmFault("signal-step", "`scancel --signal=USR1` to the step", signal_the_step),
    SlurmFault("signal-rank", "SIGUSR1 to one rank", signal_one_rank),
    SlurmFault("requeue", "`scontrol requeue` from outside", requeue, saves=False),
    SlurmFault("node-down", "Slurm declares a node down", fail_at_once, saves=False),
    SlurmFault("crash", "a node loses its power", crash_node, saves=False),
    SlurmFault("crash-head", "the first node loses its power", crash_head, saves=False),
    SlurmFault(
        "unplugged", "a node's cable is pulled, and put back after the job has gone on", unplug_node, saves=False
    ),
    SlurmFault("slurmd", "kill -9 of a node's slurmd", kill_slurmd, saves=False, pause=1.3),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


@dataclass(frozen=True)
class Row:
    """What came of a fault: seconds until the run or Slurm knew, until the next step was done, and steps lost."""

    state: str
    starts: int
    detected: float | None
    resumed: float | None
    lost: int | None
    weights: dict[str, torch.Tensor]
    log: str


def plant(slurm: Cluster, fault: SlurmFault, folder: Path) -> Row:
    """Submit a training, let a fault strike, and wait for the end of the job."""
    job = submit(slurm, folder, *fault.options, pause=fault.pause)
    limited = fault.strike is wait_for_the_limit
    job.wait_for_step(1 if limited else STRIKES_AT)
    struck = time.time()
    mend = fault.strike(job)
    detected: float | None = None
    try:
        wait_for(lambda: len(job.events("start")) > 1 or _is_over(slurm, job), "the next start", 200)
        detected = _detected(job, struck)
    finally:
        mend()
    final = slurm.wait_for_job(job.number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", seconds=120)
    starts = job.events("start")
    after = [one for one in job.events("step") if one["attempt"] > 1]
    before = [one for one in job.events("step") if one["attempt"] == 1]
    went_on = len(starts) > 1 and bool(after)
    return Row(
        final["JobState"],
        len(starts),
        detected,
        after[0]["time"] - struck if went_on else None,
        before[-1]["step"] - (starts[1]["resumed_from_step"] or 0) if went_on else None,
        weights_of(job.run_folder, STEPS) if final["JobState"] == "COMPLETED" else {},
        job.log,
    )


def _is_over(slurm: Cluster, job: Submitted) -> bool:
    return slurm.job(job.number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def _detected(job: Submitted, struck: float) -> float | None:
    """When the first start was over: by the run's own words, or by Slurm's end of it."""
    told = [one["time"] for kind in ("stop", "failure") for one in job.events(kind) if one["attempt"] == 1]
    told += [one["time"] for one in job.events("job") if one["restart"] > 0]
    return min((at - struck for at in told if at > struck), default=None)
