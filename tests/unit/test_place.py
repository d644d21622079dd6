"""A process finds its rank from what its launcher left in the environment, or is refused in one sentence."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.schema import LaunchConfig
from lockstep.errors import UserError
from lockstep.init_run import _take_device
from lockstep.runtime.rank_env import LAUNCH, Launcher, Place, cpus_per_rank, expand_hostlist, find_place, place_of

RECORDED = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("environments/*.json")}
ALLOWED = sorted(name for name, recorded in RECORDED.items() if "expect" in recorded)
REFUSED = sorted(name for name, recorded in RECORDED.items() if "refused" in recorded)


def test_every_recorded_environment_is_either_a_place_or_a_refusal() -> None:
    assert set(ALLOWED).isdisjoint(REFUSED)
    assert set(ALLOWED) | set(REFUSED) == set(RECORDED)


@pytest.mark.parametrize("name", ALLOWED)
def test_a_launchers_environment_tells_the_place(name: str) -> None:
    assert asdict(find_place(RECORDED[name]["env"])) == RECORDED[name]["expect"]


@pytest.mark.parametrize("name", REFUSED)
def test_an_odd_environment_is_refused_with_one_sentence(name: str) -> None:
    with pytest.raises(UserError) as refusal:
        find_place(RECORDED[name]["env"])
    assert RECORDED[name]["refused"] in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.cause
    assert refusal.value.fix


def test_an_empty_variable_counts_as_unset() -> None:
    assert find_place({"RANK": "", "WORLD_SIZE": "", "SLURM_STEP_ID": ""}) == find_place({})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        monkeypatch.delenv(variable)
    for variable, value in RECORDED["torchrun_unequal_nodes"]["env"].items():
        monkeypatch.setenv(variable, value)
    assert find_place().rank == 5


def test_all_ranks_of_one_launch_meet_at_the_same_port_and_another_launch_at_another() -> None:
    env = RECORDED["openmpi_one_node"]["env"]
    other_rank = {**env, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "0"}
    other_launch = {**env, "PMIX_NAMESPACE": "prterun-node1-4218@1"}
    assert find_place(other_rank).head == find_place(env).head
    assert find_place(other_launch).head != find_place(env).head


def test_steps_of_one_job_and_of_neighbouring_jobs_meet_at_different_ports() -> None:
    env = RECORDED["srun_two_nodes_requeued"]["env"]
    heads = {
        find_place({**env, "SLURM_JOB_ID": str(49059002 + job), "SLURM_STEP_ID": str(step)}).head
        for job in range(20)
        for step in range(20)
    }
    assert len(heads) == 400


HEAD = "node1:29500"
MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        ({"rank": 0, "world_size": 1}, {}, Place(0, 1, 0, 1, 0, 1, None, "explicit")),
        ({"rank": 0, "world_size": 1, "head": HEAD}, {}, Place(0, 1, 0, 1, 0, 1, None, "explicit")),
        ({"rank": 3, "world_size": 4, "head": HEAD}, {}, Place(3, 4, 3, 4, 0, 1, HEAD, "explicit")),
        ({"rank": 3, "world_size": 4}, MASTER, Place(3, 4, 3, 4, 0, 1, HEAD, "explicit")),
        (
            {"rank": 3, "world_size": 4, "head": "[::1]:7"},
            MASTER,
            Place(3, 4, 3, 4, 0, 1, "[::1]:7", "explicit"),
        ),
        (
            {"rank": 5, "world_size": 8, "local_world_size": 4},
            MASTER,
            Place(5, 8, 1, 4, 1, 2, HEAD, "explicit"),
        ),
        (
            {"rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4},
            MASTER,
            Place(5, 8, 1, 4, 1, 2, HEAD, "explicit"),
        ),
    ],
)
def test_a_stated_place_is_taken_as_stated(arguments: dict[str, Any], env: dict[str, str], expected: Place) -> None:
    assert place_of(**arguments, env=env) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR is not set"),
        ({"rank": 0, "world_size": 2, "head": "node1"}, "'node1' is not host:port"),
        ({"rank": 2, "world_size": 2, "head": HEAD}, "the arguments say rank 2 of 2"),
        ({"rank": -1, "world_size": 2, "head": HEAD}, "the arguments say rank -1 of 2"),
        ({"rank": 0, "world_size": 0}, "the arguments say rank 0 of 0"),
        ({"rank": 0, "world_size": 2, "local_world_size": 0, "head": HEAD}, "local rank 0 of 0"),
        ({"rank": 5, "world_size": 8, "local_rank": 1, "head": HEAD}, "give local_world_size too"),
        ({"rank": 1, "world_size": 3, "local_world_size": 2, "head": HEAD}, "equally many consecutive ranks"),
        (
            {"rank": 1, "world_size": 4, "local_rank": 0, "local_world_size": 2, "head": HEAD},
            "equally many consecutive ranks",
        ),
    ],
)
def test_a_stated_place_that_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refusal:
        place_of(**arguments, env={})
    assert words in str(refusal.value)


IN_STEP = {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("about", "launcher", "local_ranks", "env", "affinity", "expected"),
    [
        ("a single process has all it may run on", "python", 1, {}, 16, 16),
        ("workers of torchrun share them", "torchrun", 4, {}, 16, 4),
        ("spawned processes share them", "explicit", 4, {}, 16, 4),
        ("the rest of a division is left over", "torchrun", 3, {}, 16, 5),
        ("nobody gets less than one", "torchrun", 8, {}, 2, 1),
        ("a task of srun is a rank", "slurm", 4, {"SLURM_CPUS_PER_TASK": "8"}, 64, 8),
        ("a task bound to fewer cores has no more", "slurm", 4, {"SLURM_CPUS_PER_TASK": "8"}, 1, 1),
        ("a bound task keeps its cores", "slurm", 4, {"SLURM_CPUS_ON_NODE": "32"}, 8, 8),
        ("unbound tasks share the node's", "slurm", 4, {"SLURM_CPUS_ON_NODE": "32"}, 64, 8),
        ("without any count what is seen is shared", "slurm", 4, {}, 64, 16),
        ("torchrun in a task shares it", "torchrun", 4, {**IN_STEP, "SLURM_CPUS_PER_TASK": "32"}, 64, 8),
        ("bound or not", "torchrun", 4, {**IN_STEP, "SLURM_CPUS_PER_TASK": "32"}, 16, 4),
        (
            "torchrun in a batch script has all tasks of the node",
            "torchrun",
            4,
            {"SLURM_CPUS_PER_TASK": "8", "SLURM_TASKS_PER_NODE": "4(x2)"},
            64,
            8,
        ),
        ("a rank of mpirun is a task of the job", "openmpi", 4, {"SLURM_CPUS_PER_TASK": "8"}, 64, 8),
        ("ranks of mpirun share a node", "pmi", 4, {}, 64, 16),
    ],
)
def test_a_rank_may_use_its_share_of_the_cores(
    about: str, launcher: Launcher, local_ranks: int, env: dict[str, str], affinity: int, expected: int
) -> None:
    place = Place(0, local_ranks, 0, local_ranks, 0, 1, None, launcher)
    assert cpus_per_rank(place, env, affinity) == expected, about


def test_by_default_the_cores_are_those_this_process_may_run_on() -> None:
    assert cpus_per_rank(find_place({}), {}) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("gpu-a.site,gpu-b.site", ["gpu-a.site", "gpu-b.site"]),
        ("n[01-03,07],m1", ["n01", "n02", "n03", "n07", "m1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[1,003]", ["n1", "n003"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[1-2]-ib,m[3]", ["n1-ib", "n2-ib", "m3"]),
    ],
)
def test_a_node_list_is_written_out_in_order(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-2", "n1]", "n[]", "n[a-b]", "n[1-2],", "n[1[2]]", "n[3-1]", "n1 n2"])
def test_a_malformed_node_list_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="node"):
        expand_hostlist(text)


def test_a_place_is_always_consistent() -> None:
    place = find_place(RECORDED["srun_unequal_nodes"]["env"])
    with pytest.raises(UserError, match="the variables of slurm say node rank 2 of 2"):
        replace(place, node_rank=2)


@pytest.mark.parametrize(
    ("launcher", "said", "threads"),
    [("ours", "1", 1), ("ours", "999", 2), ("ours", "2,1", 2), ("torchrun", "1", 2)],
)
def test_a_rank_on_cpus_takes_its_share_of_them_and_no_more_than_the_user_said(
    launcher: str, said: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun says 1 for everybody, which nobody has asked for."""
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    if launcher == "ours":
        monkeypatch.setenv(LAUNCH, "{}")
    before = torch.get_num_threads()
    try:
        _take_device(Place(0, 2, 0, 2, 0, 1, "host:1", "torchrun"), LaunchConfig(device="cpu"))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
