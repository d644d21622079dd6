"""A training as a job of a cluster: what Slurm's script and Kubernetes' manifest are both made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
"""What tells libraries that compute nodes have no internet: else they wait for it."""


@dataclass(frozen=True)
class ClusterJob:
    """One training that somebody else starts. `command` is what a user would type after `lockstep`."""

    name: str
    command: tuple[str, ...]
    run_dir: Path
    """On a disk that all nodes share; absolute."""
    folder: Path
    """Where the command is started; absolute."""
    nodes: int = 1
    least: int = 1
    """With so many nodes it goes on when others are lost; equal to `nodes` where it does not."""
    processes: int = 1
    """On each node."""
    gpus: int = 0
    """Of each node."""
    cpus: int | None = None
    """Of each node, for all its processes."""
    seconds: int = 3600
    """The time limit."""
    lead: int = 120
    """So many seconds before the time limit the run is asked to save."""
    requeue: bool = True
    array: str | None = None
    """Numbers of an array of such jobs, as in 0-3; `%a` in the command is the number of each."""
