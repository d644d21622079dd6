"""What Slurm tells a launcher of its job: which nodes it has, which of them this is, and where they meet.

    #SBATCH --nodes=2 --ntasks-per-node=1
    srun lockstep train ...          one launcher a node: each finds the others by what srun left in its environment

Everything is read from variables; `scontrol` need not be there, as in a container it is not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import UserError
from lockstep.runtime.rank_env import expand_hostlist, is_srun_task, tasks_per_node

HOST_SUFFIX = "LOCKSTEP_HOST_SUFFIX"
"""What host names of this cluster need to lead to its fast network."""


@dataclass(frozen=True)
class Allocation:
    """A job of Slurm as one of its processes sees it."""

    job: str
    """Its number; of a task of an array ARRAY_TASK."""
    restart: int
    """How often the job was requeued."""
    nodes: int
    partition: str
    account: str
    node_list: str

    @property
    def start(self) -> str:
        """One start of the job: two of them never have the same."""
        return f"{self.job}.{self.restart}"


def find_allocation(env: Mapping[str, str] | None = None) -> Allocation | None:
    """The job that this process belongs to, None outside of Slurm."""
    env = os.environ if env is None else env
    job = env.get("SLURM_JOB_ID")
    if not job:
        return None
    if env.get("SLURM_ARRAY_TASK_ID"):
        job = f"{env.get('SLURM_ARRAY_JOB_ID', job)}_{env['SLURM_ARRAY_TASK_ID']}"
    nodes = env.get("SLURM_STEP_NUM_NODES") if is_srun_task(env) else None
    return Allocation(
        job,
        int(env.get("SLURM_RESTART_COUNT") or 0),
        int(nodes or env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES") or 1),
        env.get("SLURM_JOB_PARTITION", ""),
        env.get("SLURM_JOB_ACCOUNT", ""),
        env.get("SLURM_JOB_NODELIST", ""),
    )


@dataclass(frozen=True)
class Step:
    """What srun started: launchers on so many nodes, `rank` is the number of this one."""

    nodes: int
    rank: int
    head: str
    """The host at which they meet."""
    name: str
    """Of this start of this step; there is no second with it."""


def find_step(counts: tuple[int, int] | None, env: Mapping[str, str] | None = None) -> Step | None:
    """The step of srun that this launcher is a task of; None where it is none.

    `counts` is what the user said of their number.
    """
    env = os.environ if env is None else env
    allocation = find_allocation(env)
    if allocation is None:
        return None
    if not is_srun_task(env):
        if allocation.nodes > 1 and counts is None:
            raise UserError(
                f"job {allocation.job} has {allocation.nodes} nodes, and without srun only this one would train",
                "start it as `srun --ntasks-per-node=1 lockstep ...`, or say --nodes 1",
            )
        return None
    rank = int(env.get("SLURM_NODEID") or 0)
    tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1")
    if max(tasks) > 1:
        raise UserError(
            f"srun started {max(tasks)} tasks on a node, and each would start processes of its own",
            "use srun --ntasks-per-node=1 for lockstep, or srun python SCRIPT for one task per rank",
        )
    least, most = counts or (allocation.nodes, allocation.nodes)
    if not least <= allocation.nodes <= most:
        said = str(least) if least == most else f"{least}:{most}"
        raise UserError(
            f"--nodes {said}, but srun started this on {allocation.nodes}", "give both the same number, or leave it out"
        )
    hosts = expand_hostlist(env.get("SLURM_STEP_NODELIST") or allocation.node_list)
    head = hosts[0] + env.get(HOST_SUFFIX, "")
    return Step(allocation.nodes, rank, head, f"{allocation.start}.{env['SLURM_STEP_ID']}")
