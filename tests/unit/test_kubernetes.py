"""A job as a JobSet: JobSet's own schema allows every field, and each setting of the job is where it has to be."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from lockstep.config.cluster import Cluster, Node, Software
from lockstep.errors import UserError
from lockstep.launch.cluster_job import ClusterJob
from lockstep.launch.kubernetes import render
from tests.cli.commands import listens
from tests.golden.jobset_schema import errors, load_schema
from tests.patience import wait_for

GOLDEN = Path(__file__).parents[1] / "golden"

ONE_NODE = ClusterJob(
    name="digits",
    command=("train", "digits", "--layout", "dp=2"),
    run_dir=Path("/runs/digits"),
    folder=Path("/work"),
    processes=2,
    cpus=4,
)
FOUR_NODES = ClusterJob(
    name="lm_7b",
    command=("run", "--layout", "dp=4,fsdp=8", "train.py", "--lr", "1e-3"),
    run_dir=Path("/data/runs/lm_7b"),
    folder=Path("/home/user/project"),
    nodes=4,
    least=4,
    processes=8,
    gpus=8,
    cpus=96,
    seconds=86400,
    lead=300,
)
ELASTIC = replace(FOUR_NODES, least=3)
PLAIN = Cluster(name="plain", software=Software(offline=False))
CENTRE = Cluster(
    name="centre", node=Node(gpus=8, cpus=128, memory_gb=2000), software=Software(variables={"NCCL_DEBUG": "WARN"})
)

MANIFESTS = {
    "kubernetes-one-node.yaml": render(ONE_NODE, PLAIN, "registry.example.org/lockstep:0.1", "runs"),
    "kubernetes-four-nodes.yaml": render(FOUR_NODES, CENTRE, "registry.example.org/team/lm:2", "team-data"),
}


def manifest_of(job: ClusterJob, cluster: Cluster = CENTRE, image: str = "image", claim: str = "claim") -> Any:
    manifest = yaml.safe_load(render(job, cluster, image, claim))
    assert list(errors(manifest, load_schema())) == []
    return manifest


def job_of(manifest: Any) -> Any:
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)
    return replicated["template"]["spec"]


def pod_of(manifest: Any) -> Any:
    return job_of(manifest)["template"]["spec"]


def container_of(manifest: Any) -> Any:
    (container,) = pod_of(manifest)["containers"]
    return container


def variables_of(manifest: Any) -> dict[str, str]:
    return {one["name"]: one.get("value") for one in container_of(manifest).get("env", [])}


@pytest.mark.parametrize("file", MANIFESTS)
def test_the_text_is_the_one_that_was_read_and_approved(file):
    assert MANIFESTS[file] == (GOLDEN / file).read_text(), "read tests/golden/README.md"


@pytest.mark.parametrize("job", [ONE_NODE, FOUR_NODES, ELASTIC, replace(FOUR_NODES, requeue=False, cpus=None, gpus=0)])
@pytest.mark.parametrize("cluster", [PLAIN, CENTRE])
def test_every_field_is_one_of_a_jobset(job, cluster):
    manifest = manifest_of(job, cluster)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["metadata"].keys() == {"name"}  # any object, says the schema


def rename(parent: dict[str, Any], old: str, new: str) -> None:
    parent[new] = parent.pop(old)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda m: rename(m["spec"], "failurePolicy", "failurepolicy"), ".spec.failurepolicy is not a field"),
        (lambda m: rename(job_of(m), "backoffLimit", "backOffLimit"), "backOffLimit is not a field"),
        (lambda m: rename(pod_of(m)["volumes"][1]["emptyDir"], "medium", "kind"), ".emptyDir.kind is not a field"),
        (lambda m: rename(container_of(m)["env"][0], "name", "key"), ".env[0].name is missing"),
        (lambda m: m["spec"]["failurePolicy"].update(maxRestarts="100"), "'100' is no integer"),
        (lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="Fail"), "'Fail' is none of"),
        (lambda m: container_of(m)["resources"]["limits"].update(memory="2 TB"), "'2 TB' is not allowed"),
        (lambda m: pod_of(m)["volumes"].append({"name": "shm"}), ".volumes has ('shm',) twice"),
        (lambda m: m["spec"].update(ttlSecondsAfterFinished=-1), "-1 is too small"),
    ],
)
def test_the_schema_finds_what_is_wrong(damage: Callable[[Any], object], complaint: str) -> None:
    manifest = copy.deepcopy(manifest_of(FOUR_NODES))
    damage(manifest)
    assert complaint in "\n".join(errors(manifest, load_schema()))


def test_several_nodes_meet_at_the_first_pod():
    manifest = manifest_of(FOUR_NODES)
    job = job_of(manifest)
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    assert manifest["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "lm-7b"}
    assert {"--nodes=4", "--head=lm-7b-node-0-0.lm-7b:29500"} < set(container_of(manifest)["command"])
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in container_of(manifest)["command"]
    assert "JOB_COMPLETION_INDEX" in variables_of(manifest)


def test_one_node_meets_nobody():
    manifest = manifest_of(ONE_NODE)
    assert "network" not in manifest["spec"]
    assert "initContainers" not in pod_of(manifest)
    assert "JOB_COMPLETION_INDEX" not in variables_of(manifest)
    assert container_of(manifest)["command"] == [
        *("lockstep", "train", "--nproc=2", "--run-dir=/runs/digits", "--max-time=3480s"),
        *("digits", "--layout", "dp=2"),
    ]


def test_our_options_stand_before_a_script_and_its_own():
    command = container_of(manifest_of(FOUR_NODES))["command"]
    ours, script = command[2:-5], command[-5:]
    assert command[:2] == ["lockstep", "run"]
    assert all(word.startswith("--") and "=" in word for word in ours)
    assert script == ["--layout", "dp=4,fsdp=8", "train.py", "--lr", "1e-3"]


def test_the_run_has_time_to_save_before_the_limit_and_after_a_signal():
    manifest = manifest_of(FOUR_NODES)
    assert job_of(manifest)["activeDeadlineSeconds"] == 86400
    assert pod_of(manifest)["terminationGracePeriodSeconds"] == 300
    assert "--max-time=86100s" in container_of(manifest)["command"]


@pytest.mark.parametrize(("job", "final"), [(ONE_NODE, [1, 2]), (FOUR_NODES, [2]), (ELASTIC, [2])])
def test_all_start_again_unless_that_would_not_help(job, final):
    manifest = manifest_of(job)
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 100
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("FailJobSet", ["PodFailurePolicy"])
    ]
    assert (job_of(manifest)["backoffLimit"], pod_of(manifest)["restartPolicy"]) == (0, "Never")
    first = job_of(manifest)["podFailurePolicy"]["rules"][0]
    container = container_of(manifest)["name"]
    assert first == {
        "action": "FailJob",
        "onExitCodes": {"containerName": container, "operator": "In", "values": final},
    }


def test_nothing_starts_again_that_was_not_to():
    assert manifest_of(replace(ONE_NODE, requeue=False))["spec"]["failurePolicy"]["maxRestarts"] == 0


def test_a_run_that_goes_on_with_fewer_nodes_gets_lost_ones_back():
    manifest = manifest_of(ELASTIC)
    assert "--nodes=3:4" in container_of(manifest)["command"]
    assert job_of(manifest)["podFailurePolicy"]["rules"][1]["action"] == "Ignore"
    assert job_of(manifest)["successPolicy"]["rules"] == [{"succeededIndexes": "0"}]


def test_a_pod_gets_its_part_of_the_node():
    assert container_of(manifest_of(FOUR_NODES))["resources"]["limits"] == {
        "cpu": 96,
        "memory": "1800G",
        "nvidia.com/gpu": 8,
    }
    half = replace(FOUR_NODES, gpus=4, cpus=None)
    assert container_of(manifest_of(half))["resources"]["limits"] == {"memory": "900G", "nvidia.com/gpu": 4}
    assert container_of(manifest_of(ONE_NODE))["resources"]["limits"] == {"cpu": 4, "memory": "56G"}
    assert "resources" not in container_of(manifest_of(replace(ONE_NODE, cpus=None), PLAIN))


def test_volumes_hold_the_runs_and_shared_memory():
    manifest = manifest_of(FOUR_NODES, claim="team-data")
    assert container_of(manifest)["workingDir"] == "/home/user/project"
    assert container_of(manifest)["volumeMounts"] == [
        {"name": "runs", "mountPath": "/data/runs"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    assert pod_of(manifest)["volumes"] == [
        {"name": "runs", "persistentVolumeClaim": {"claimName": "team-data"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def test_variables_of_the_cluster():
    offline = dict.fromkeys(["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"], "1")
    assert variables_of(manifest_of(ONE_NODE)) == {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "WARN", **offline}
    assert variables_of(manifest_of(ONE_NODE, PLAIN)) == {"OMP_NUM_THREADS": "2"}
    assert variables_of(manifest_of(replace(ONE_NODE, cpus=None), PLAIN)) == {}
    own = Cluster(name="own", software=Software(offline=False, variables={"OMP_NUM_THREADS": "1"}))
    assert variables_of(manifest_of(ONE_NODE, own)) == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "word", ["it's", 'say "hi"', "a: b # c", "back\\slash", "two\nlines", "né 🙂", "yes", "", "{x}"]
)
def test_any_word_arrives_as_it_was_typed(word):
    job = replace(ONE_NODE, command=("run", "train.py", word))
    cluster = Cluster(name="own", software=Software(variables={"WORD": word}))
    manifest = manifest_of(job, cluster, image=word or "image")
    assert container_of(manifest)["command"][-1] == word
    assert variables_of(manifest)["WORD"] == word
    assert container_of(manifest)["image"] == (word or "image")


def test_kubernetes_puts_no_variables_into_what_the_user_typed():
    job = replace(ONE_NODE, command=("run", "train.py", "$(HOME)", "$$"), run_dir=Path("/runs/$a"))
    command = container_of(manifest_of(job))["command"]
    assert command[-2:] == ["$$(HOME)", "$$$$"]
    assert "--run-dir=/runs/$$a" in command


@pytest.mark.parametrize(
    ("given", "name"),
    [("lm_7B.test", "lm-7b-test"), ("--x--", "x"), ("7b", "run-7b"), ("Größe 3", "gr-e-3"), ("no", "no")],
)
def test_names_are_made_to_fit(given, name):
    assert manifest_of(replace(ONE_NODE, name=given))["metadata"]["name"] == name


def test_the_longest_name_is_that_of_a_pod():
    name = "a" * 48
    assert manifest_of(replace(ONE_NODE, name=name))["metadata"]["name"] == name
    assert len(f"{name}-node-0-0-abcde") == 63
    with pytest.raises(UserError, match="47"):
        render(replace(FOUR_NODES, name=name, nodes=11), CENTRE, "image", "claim")


@pytest.mark.parametrize(
    ("job", "cause"),
    [
        (replace(ONE_NODE, name="___"), "leaves nothing"),
        (replace(ONE_NODE, array="0-3"), "an array of jobs has no Kubernetes form"),
        (replace(ONE_NODE, seconds=120, lead=120), "a time limit of 120 s leaves nothing"),
        (replace(ONE_NODE, run_dir=Path("/digits")), "a volume cannot be mounted at /"),
    ],
)
def test_what_cannot_be_is_refused(job, cause):
    with pytest.raises(UserError, match=cause) as caught:
        render(job, CENTRE, "image", "claim")
    assert caught.value.fix


def waiting(rank: int, port: int) -> subprocess.Popen[bytes]:
    """The container that waits for the head, as a process that takes this machine for it."""
    (container,) = pod_of(manifest_of(FOUR_NODES))["initContainers"]
    program, option, script = container["command"]
    assert (program, option, container["env"][0]["name"]) == ("python3", "-c", "JOB_COMPLETION_INDEX")
    script = script.replace("lm-7b-node-0-0.lm-7b", "localhost").replace("29500", str(port))
    return subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "JOB_COMPLETION_INDEX": str(rank)})


def test_nodes_wait_until_the_head_is_there():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
        head, other = waiting(0, port), waiting(1, port)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.7)
        assert head.poll() is None  # the address is not yet its own
        taken.listen()
        assert other.wait() == 0
    assert head.wait() == 0


def test_waiting_ends_when_the_pod_has_to():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        other = waiting(1, taken.getsockname()[1])
        wait_for(lambda: listens(other.pid), "what it does with SIGTERM")
        other.terminate()
        assert other.wait() == 75


if __name__ == "__main__":
    for file, text in MANIFESTS.items():
        (GOLDEN / file).write_text(text)
