"""Cluster profiles: one TOML that a centre writes once and users name, `--cluster NAME`.

It says what a node is made of, which Slurm options a job needs there, and how its software is found. docs/clusters.md
explains every key to the people who write one.
"""

from __future__ import annotations

import getpass
import os
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from lockstep.config.checked import checked, flatten
from lockstep.config.schema import Section
from lockstep.config.toml import read_toml
from lockstep.errors import UserError, unknown

FOLDERS = "LOCKSTEP_CLUSTERS"
"""The variable with further folders of profiles, like PATH: a centre's module sets it."""


class Node(Section):
    """What one compute node is made of."""

    count: int | None = Field(None, gt=0, description="how many such nodes there are")
    gpus: int = Field(0, ge=0, description="GPUs of a node; 0: a CPU cluster")
    gpu: str | None = Field(None, description="their kind, as in A100-40 or H100")
    cpus: int | None = Field(None, gt=0, description="CPU cores that a job may use of a node")
    memory_gb: int | None = Field(None, gt=0, description="memory of a node")
    gpu_link: Literal["nvlink", "nvswitch", "pcie"] | None = Field(None, description="how the GPUs of a node talk")
    gpu_link_gb_s: float | None = Field(None, gt=0, description="GB/s of that link, one way, per GPU")
    network_gb_s: float | None = Field(None, gt=0, description="GB/s of a node to the others, one way, all its cards")


class Slurm(Section):
    """What sbatch needs there."""

    partition: str | None = Field(None, description="where jobs go unless the user says otherwise")
    account: str | None = Field(None, description="who pays; mostly left to the user: --account")
    qos: str | None = Field(None, description="a quality of service that every job needs")
    constraint: str | None = Field(None, description="features that the nodes have to have")
    gpu_option: Literal["gpus-per-node", "gres"] = Field(
        "gpus-per-node", description="how GPUs are asked for: --gpus-per-node=4 or --gres=gpu:4"
    )
    gpu_type: str | None = Field(None, description="the name of the GPUs in those options, as in gpu:a100:4")
    cpu_bind: str | None = Field(None, description="srun's --cpu-bind, where Slurm's own choice is wrong")
    options: list[str] = Field([], description='further sbatch options, as in "--exclusive"')
    max_time: str | None = Field(None, description='the longest a job may take, as in "24h"')
    lead: int = Field(120, gt=0, description="seconds before the end at which the run is asked to save")
    start_up: int = Field(60, ge=0, description="seconds that a job needs until its first step")
    host_suffix: str = Field("", description='what host names need for the fast network: "i" makes node7i of node7')


class Software(Section):
    """How a job finds its programs."""

    modules: list[str] = Field([], description="loaded in this order, after a purge")
    setup: list[str] = Field([], description="lines of shell before anything else is started")
    venv: str | None = Field(None, description="a virtual environment; unset: the one that submits")
    container: str | None = Field(None, description="an image; the command runs inside it")
    container_with: Literal["apptainer", "pyxis"] = Field(
        "apptainer", description="apptainer exec IMAGE, or srun --container-image (pyxis and enroot)"
    )
    mounts: list[str] = Field([], description="folders that the container sees besides the run's and the job's")
    variables: dict[str, str] = Field({}, description="environment variables of every job")
    offline: bool = Field(True, description="compute nodes have no internet: libraries are told not to try")


class Storage(Section):
    """Where a run may write."""

    shared: list[str] = Field([], description="folders that every node sees; a run folder elsewhere is refused")
    runs: str | None = Field(None, description="where run folders go by default; $USER and $HOME are put in")


class Cluster(Section):
    """A cluster as its centre describes it."""

    name: str = Field("", description="what messages call it; unset: the file's name")
    description: str = Field("", description="a line for people")
    node: Node = Node()
    nodes: list[Node] = Field([], description="further kinds of nodes, as [[nodes]] tables with the keys of node")
    slurm: Slurm = Slurm()
    software: Software = Software()
    storage: Storage = Storage()

    @model_validator(mode="after")
    def _has_a_first_kind(self) -> Cluster:
        if self.nodes and self.node == Node():
            raise ValueError(
                "[[nodes]] are further kinds of nodes, and there is no [node]: describe the kind that jobs usually get "
                "as [node]"
            )
        return self


def find_cluster(name: str | None) -> Cluster:
    """The profile that a user names: a file, or one of those that are known; without a name an empty one."""
    if name is None:
        return Cluster(name="slurm")
    path = Path(name)
    if not name.endswith(".toml"):
        profiles = known_clusters()
        if name not in profiles:
            raise unknown("cluster", name, sorted(profiles))
        path = profiles[name]
    values = {"name": path.stem, **read_toml(path)}
    return checked(Cluster, values, {key: str(path) for key, _ in flatten(values)})


def known_clusters() -> dict[str, Path]:
    """Names of profiles, and where they are: those of the user before the centre's before the examples."""
    own = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "lockstep" / "clusters"
    places = [own, *(Path(part) for part in os.environ.get(FOLDERS, "").split(os.pathsep) if part)]
    places += [Path("/etc/lockstep/clusters"), Path(str(resources.files("lockstep.config") / "clusters"))]
    found: dict[str, Path] = {}
    for folder in places:
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def check_shared(cluster: Cluster, run_dir: Path) -> None:
    """Refuse a run folder that compute nodes would not see."""
    shared = [expanded(folder) for folder in cluster.storage.shared]
    where = run_dir.absolute().resolve()
    if shared:
        if not any(where.is_relative_to(folder.resolve()) for folder in shared):
            folders = ", ".join(map(str, shared))
            raise UserError(
                f"compute nodes of {cluster.name} do not see {where}", f"put the run below {folders}: --run-dir"
            )
        return
    local = next((kind for folder, kind in _mounts() if where.is_relative_to(folder)), "")
    private = next((top for top in ("/tmp", "/var/tmp", "/dev/shm", "/run") if where.is_relative_to(top)), None)
    if private or local in ("tmpfs", "ramfs"):
        raise UserError(
            f"compute nodes do not see {where}: {private or local} is this machine's own",
            "put the run on a shared file system: --run-dir",
        )


def expanded(folder: str) -> Path:
    """A folder of a profile for this user: with ~, $HOME, $USER and other variables put in."""
    return Path(os.path.expandvars(folder.replace("$USER", getpass.getuser()))).expanduser()


def _mounts() -> list[tuple[Path, str]]:
    """Mount points and their kinds, the deepest first."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    mounts = [(Path(line.split()[1].replace("\\040", " ")), line.split()[2]) for line in lines]
    return sorted(mounts, key=lambda mount: -len(mount[0].parts))
