"""Which rank is this process? Read from the environment that its launcher left.

Looked for in this order: torchrun (RANK and WORLD_SIZE), Open MPI, a task of srun, another MPI (PMI).
A process that none of them started is rank 0 of 1.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import UserError

LAUNCH = "LOCKSTEP_LAUNCH"
"""The variable in which a launcher tells its workers of the run: a JSON object with run_dir, options and more."""

AGREED = "agreed-to-stop"
"""A file that ranks leave in the scratch folder of their node: whatever happens then, they do not start again."""

Env = Mapping[str, str]
Launcher = Literal["python", "torchrun", "slurm", "openmpi", "pmi", "explicit"]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Names of rank, world size, local rank and local world size; the first that is set counts.
_OPENMPI = (
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
)
_PMI = (
    ("PMI_RANK", "PALS_RANKID", "PMIX_RANK"),
    ("PMI_SIZE", "WORLD_SIZE"),
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
)
# Equal in all ranks of one MPI launch, different in the next launch.
_MPI_LAUNCH_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "I_MPI_HYDRA_UUID", "PALS_APID")


@dataclass(frozen=True)
class Place:
    """Where this process stands among all processes of the run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    head: str | None  # host:port where rank 0 waits for the others; None for a single process
    launcher: Launcher

    def __post_init__(self) -> None:
        source = "the arguments" if self.launcher == "explicit" else f"the variables of {self.launcher}"
        for name, index, count in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
            ("node rank", self.node_rank, self.nodes),
        ):
            if not 0 <= index < count:
                cause = f"{source} say {name} {index} of {count}"
                raise UserError(cause, f"a {name} counts from 0 and stays below its total; see what sets it")
        if max(self.local_world_size, self.nodes) > self.world_size:
            cause = f"{source} say {self.local_world_size} ranks on this node and {self.nodes} node(s)"
            raise UserError(cause, f"there are only {self.world_size} ranks in all; see what sets them")


def find_place(env: Env | None = None) -> Place:
    """The place of this process, from what torchrun, srun or mpirun left in its environment."""
    env = os.environ if env is None else env
    if env.get("RANK"):
        return _from_torchrun(env)
    place = _below_torchrun(env)
    wanted = _number(env, "WORLD_SIZE")
    if wanted is not None and wanted != place.world_size:
        started = f"{place.launcher} started {place.world_size} process(es)"
        cause = f"WORLD_SIZE is {wanted} without RANK, and {started}"
        raise UserError(cause, "start with `lockstep run`, torchrun or srun, or unset WORLD_SIZE")
    return place


def place_of(
    rank: int,
    world_size: int,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    head: str | None = None,
    env: Env | None = None,
) -> Place:
    """The place a caller states itself, as under `mp.spawn`; without local numbers all ranks share this node.

    `head` is host:port of rank 0; without it several processes need MASTER_ADDR and MASTER_PORT.
    """
    if local_world_size is None and local_rank not in (None, rank):
        cause = f"rank {rank} is local rank {local_rank}, and nothing says how many ranks share its node"
        raise UserError(cause, "give local_world_size too")
    local_world_size = world_size if local_world_size is None else local_world_size
    local_rank = rank % max(1, local_world_size) if local_rank is None else local_rank
    if head is None or world_size == 1:
        head = _head(os.environ if env is None else env, world_size)
    elif not re.fullmatch(r".+:[0-9]+", head):
        raise UserError(f"the head {head!r} is not host:port", "write it like node1:29500")
    return _node_by_node(rank, world_size, local_rank, local_world_size, head, "explicit")


def cpus_per_rank(place: Place, env: Env | None = None, affinity: int | None = None) -> int:
    """How many CPU cores this one rank may use, at least 1; `affinity` is how many the process may run on."""
    env = os.environ if env is None else env
    cores = len(os.sched_getaffinity(0)) if affinity is None else affinity
    per_task = _number(env, "SLURM_CPUS_PER_TASK")
    if place.launcher in ("slurm", "openmpi", "pmi"):
        # A task is a rank. If bound it sees only its own cores, if not it sees those of its neighbours too.
        on_node = _number(env, "SLURM_CPUS_ON_NODE") or cores
        return max(1, min(cores, per_task or on_node // place.local_world_size))
    if per_task:
        # Within srun the local ranks share one task; a batch script owns all tasks of its node.
        tasks = 1 if is_srun_task(env) else tasks_per_node(env.get("SLURM_TASKS_PER_NODE") or "1")[0]
        cores = min(cores, per_task * tasks)
    return max(1, cores // place.local_world_size)


def expand_hostlist(text: str) -> list[str]:
    """All hosts of a node list as Slurm writes it: `n[01-03,07],m1` is n01, n02, n03, n07, m1."""
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):
        if not re.fullmatch(r"([^\[\],\s]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])+", item):
            raise UserError(f"{text!r} is not a Slurm node list", "write it like n[01-03,07],m1")
        literals_and_ranges = re.split(r"\[(.*?)\]", item)
        choices = [_expand_ranges(it) if i % 2 else [it] for i, it in enumerate(literals_and_ranges)]
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    return hosts


def _expand_ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise UserError(f"the node range [{text}] runs backwards", "write it like [01-03,07]")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def _from_torchrun(env: Env) -> Place:
    rank, world_size = _needed(env, "RANK"), _needed(env, "WORLD_SIZE")
    local_rank, local_world_size = _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE")
    node_rank, nodes = _number(env, "GROUP_RANK"), _number(env, "GROUP_WORLD_SIZE")
    head = _head(env, world_size)
    if local_rank is None or local_world_size is None:
        below = _below_torchrun(env)
        if below.world_size == world_size:
            if below.rank != rank:
                cause = f"RANK is {rank}, but {below.launcher} started this process as rank {below.rank}"
                raise UserError(cause, "unset RANK and WORLD_SIZE, or set them for each process")
            local_rank = below.local_rank if local_rank is None else local_rank
            local_world_size, node_rank, nodes = below.local_world_size, below.node_rank, below.nodes
        else:
            local_rank, local_world_size = _local_ranks(env, rank, world_size, local_rank, local_world_size)
    if node_rank is None or nodes is None:
        return _node_by_node(rank, world_size, local_rank, local_world_size, head, "torchrun")
    return Place(rank, world_size, local_rank, local_world_size, node_rank, nodes, head, "torchrun")


def _below_torchrun(env: Env) -> Place:
    if env.get("OMPI_COMM_WORLD_RANK"):
        return _from_mpi(env, "openmpi", _OPENMPI)
    if _first(env, *_PMI[0]):
        # srun sets these for its own tasks too. But more ranks than tasks means that mpirun used the step
        # only to start its daemons, one per node.
        tasks_of_step = _number(env, "SLURM_STEP_NUM_TASKS") if env.get("SLURM_STEP_ID") else None
        if tasks_of_step is None or (_number(env, *_PMI[1]) or 0) > tasks_of_step:
            return _from_mpi(env, "pmi", _PMI)
    return _from_slurm(env) if is_srun_task(env) else Place(0, 1, 0, 1, 0, 1, None, "python")


def is_srun_task(env: Env) -> bool:
    # A batch script has SLURM_PROCID=0 and the SLURM_NTASKS of the job, but no step. The shell that salloc
    # opens on a node has a step, with one of Slurm's reserved numbers as its id.
    step = _number(env, "SLURM_STEP_ID")
    return step is not None and step < 0xFFFFFFF0


def _from_slurm(env: Env) -> Place:
    rank, world_size = _needed(env, "SLURM_PROCID"), _needed(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank, node_rank = _needed(env, "SLURM_LOCALID"), _needed(env, "SLURM_NODEID")
    tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    hosts = expand_hostlist(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    if sum(tasks) != world_size or len(tasks) != len(hosts) or node_rank >= len(hosts):
        counts = f"{world_size} tasks, {tasks} by node, {len(hosts)} hosts, node {node_rank}"
        raise UserError(f"Slurm's counts disagree ({counts})", "let srun alone set the SLURM_STEP_* variables")
    reserved = re.match(r"\d+", env.get("SLURM_STEP_RESV_PORTS", ""))
    # 31 keeps the steps of jobs with neighbouring ids apart, for these often share a node.
    port = free_range_port(_needed(env, "SLURM_JOB_ID") * 31 + _needed(env, "SLURM_STEP_ID"))
    head = _head(env, world_size, hosts[0], int(reserved[0]) if reserved else port)
    return Place(rank, world_size, local_rank, tasks[node_rank], node_rank, len(tasks), head, "slurm")


def tasks_per_node(text: str) -> list[int]:
    """Tasks of each node from Slurm's short form: `2(x3),1` is 2, 2, 2, 1."""
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise UserError(f"SLURM_TASKS_PER_NODE is {text!r}", "leave it as Slurm sets it, like 2(x3),1")
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in counts for _ in range(int(nodes or 1))]


def _from_mpi(env: Env, launcher: Launcher, names: tuple[tuple[str, ...], ...]) -> Place:
    rank, world_size = _needed(env, *names[0]), _needed(env, *names[1])
    local_rank, local_world_size = _number(env, *names[2]), _number(env, *names[3])
    local_rank, local_world_size = _local_ranks(env, rank, world_size, local_rank, local_world_size)
    launch_id = _first(env, *_MPI_LAUNCH_IDS)
    host = "127.0.0.1" if local_world_size == world_size else None
    head = _head(env, world_size, host, free_range_port(zlib.crc32(env[launch_id].encode())) if launch_id else None)
    return _node_by_node(rank, world_size, local_rank, local_world_size, head, launcher)


def _local_ranks(
    env: Env, rank: int, world_size: int, local_rank: int | None, local_world_size: int | None
) -> tuple[int, int]:
    if local_rank is not None and local_world_size is not None:
        return local_rank, local_world_size
    if world_size > 1 and env.get("MASTER_ADDR") not in _LOOPBACK:
        cause = f"nothing says which of the {world_size} ranks share this node"
        raise UserError(cause, "set LOCAL_RANK and LOCAL_WORLD_SIZE, or start with torchrun or srun")
    return rank if local_rank is None else local_rank, local_world_size or world_size


def _node_by_node(
    rank: int, world_size: int, local_rank: int, local_world_size: int, head: str | None, launcher: Launcher
) -> Place:
    """The place if nobody says which node this is: sure only for equally many consecutive ranks on each."""
    per_node = max(1, local_world_size)
    node_rank, nodes = rank // per_node, -(-world_size // per_node)
    place = Place(rank, world_size, local_rank, local_world_size, node_rank, nodes, head, launcher)
    if world_size % per_node or rank % per_node != local_rank:
        shape = f"rank {rank} of {world_size} as local rank {local_rank} of {per_node}"
        cause = f"{shape} does not tell which node this is"
        raise UserError(cause, "put equally many consecutive ranks on each node, or start with torchrun or srun")
    return place


def _head(env: Env, world_size: int, host: str | None = None, port: int | None = None) -> str | None:
    if world_size <= 1:
        return None
    host, port = env.get("MASTER_ADDR") or host, _number(env, "MASTER_PORT") or port
    if host is None or port is None:
        missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
        cause = f"{world_size} processes must meet at rank 0, but {missing} is not set"
        raise UserError(cause, "export MASTER_ADDR=<host of rank 0> and MASTER_PORT=29500 to all of them")
    if port > 65535:
        raise UserError(f"MASTER_PORT is {port}", "choose a free port below 65536")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_range_port(number: int) -> int:
    """A port that follows from a number that the processes of one start have in common."""
    # From 32768 on Linux gives ports to outgoing connections.
    return 20000 + number % 12000


def _first(env: Env, *names: str) -> str | None:
    return next((name for name in names if env.get(name)), None)


def _number(env: Env, *names: str) -> int | None:
    name = _first(env, *names)
    if name is None:
        return None
    if not re.fullmatch(r"[0-9]+", env[name]):
        raise UserError(f"{name} is {env[name]!r}, not a whole number from 0 on", "correct or unset it")
    return int(env[name])


def _needed(env: Env, *names: str) -> int:
    number = _number(env, *names)
    if number is None:
        cause = f"this process is one of several, but {' or '.join(names)} is not set"
        raise UserError(cause, "set it for each process, or start with `lockstep run`, torchrun or srun")
    return number
