"""A job as a JobSet for Kubernetes. The text is a pure function of the job and the cluster's profile."""

from __future__ import annotations

import json
import re

from lockstep.config.cluster import Cluster
from lockstep.errors import UserError
from lockstep.launch.cluster_job import OFFLINE, ClusterJob

HEAD_PORT = 29500
"""Every pod has an address of its own, so nobody else has taken it."""

MOST_RESTARTS = 100

SHARE_OF_MEMORY = 0.9
"""What of a node's memory pods may ask for: the system and the kubelet keep the rest."""


def render(job: ClusterJob, cluster: Cluster, image: str, claim: str) -> str:
    """The manifest, for `kubectl apply`: a pod for each node, and all of them start again until the training is done.

    The image has `lockstep` and `python3` on its PATH, and the user's files in `job.folder`. The persistent volume
    `claim` is mounted at `job.run_dir.parent`; several nodes need one that all of them can write to (ReadWriteMany).
    """
    name = _name(job)
    _check(job)
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    each = f", {job.gpus} GPU{'s' * (job.gpus > 1)} each" if job.gpus else ", no GPUs"
    lines = [
        f"# Training with Lockstep: {nodes}{each}. Needs the JobSet controller, 0.6 or newer: https://jobset.sigs.k8s.io",
        "# kubectl apply -f starts it. kubectl delete -f ends it: it saves first, and applied again it goes on.",
        "apiVersion: jobset.x-k8s.io/v1alpha2",
        "kind: JobSet",
        "metadata:",
        f"  name: {_text(name)}",
        "spec:",
        *_indented(2, _network(job, name)),
        *_indented(2, _failure_policy(job)),
        "  replicatedJobs:",
        "  - name: node",
        "    replicas: 1",
        "    template:",
        "      spec:",
        *_indented(8, _indexed_job(job)),
        "        template:",
        "          spec:",
        *_indented(12, _pod(job, cluster, name, image, claim)),
    ]
    return "\n".join(lines) + "\n"


def _name(job: ClusterJob) -> str:
    """The job's name as one of a service and of pods: RFC 1123, a letter first (RFC 1035), and not too long."""
    kept = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    if not kept:
        raise UserError(f"the name {job.name!r} leaves nothing for Kubernetes", "use letters and digits: --name")
    name = kept if kept[0].isalpha() else f"run-{kept}"
    most = 63 - len(f"-node-0-{job.nodes - 1}-abcde")
    if len(name) > most:
        raise UserError(
            f"the name {name!r} has {len(name)} characters, and Kubernetes allows the pods of this job {most}",
            "choose a shorter one: --name",
        )
    return name


def _check(job: ClusterJob) -> None:
    if job.array is not None:
        raise UserError("an array of jobs has no Kubernetes form", "make one job for each number, without --array")
    if job.seconds <= job.lead:
        raise UserError(
            f"a time limit of {job.seconds} s leaves nothing: {job.lead} s before it the run has to save",
            "use a longer --time, or a smaller --lead",
        )
    if job.run_dir.parent == job.run_dir.parent.parent:
        raise UserError(
            f"a volume cannot be mounted at {job.run_dir.parent}, where the run {job.run_dir} would be",
            "put the run one folder deeper: --run-dir",
        )


def _network(job: ClusterJob, name: str) -> list[str]:
    if job.nodes == 1:
        return []
    return ["network:", f"  enableDNSHostnames: true # the nodes meet at {_head(name)}", f"  subdomain: {_text(name)}"]


def _failure_policy(job: ClusterJob) -> list[str]:
    lines = ["failurePolicy:"]
    if job.requeue:
        lines += [
            "  # Exit code 75 is a run that has saved: preempted, or out of time. Then, and when a node is lost,",
            "  # all pods start again and the run goes on from its last checkpoint.",
            f"  maxRestarts: {MOST_RESTARTS}",
        ]
    else:
        lines.append("  maxRestarts: 0 # it was asked not to start again by itself")
    return [
        *lines,
        "  rules:",
        "  - name: final # exit codes after which another try would not help: see podFailurePolicy",
        "    action: FailJobSet",
        "    onJobFailureReasons: [PodFailurePolicy]",
    ]


def _indexed_job(job: ClusterJob) -> list[str]:
    lines = [
        "completionMode: Indexed # the index of a pod is the rank of its node",
        f"completions: {job.nodes}",
        f"parallelism: {job.nodes}",
        "backoffLimit: 0 # a pod that fails is not replaced alone: all start again",
        f"activeDeadlineSeconds: {job.seconds} # of one start; --max-time saves before it is over",
    ]
    if job.least < job.nodes:
        lines += [
            "successPolicy: # the head is done when the run is; a pod that found no node until then is not waited for",
            "  rules:",
            '  - succeededIndexes: "0"',
        ]
    # A node that has lost the head, or waits in vain for the others, ends with 1 too: that is worth another try.
    final = "1, 2" if job.nodes == 1 else "2"
    why = "1: the run failed, and Lockstep's own restarts did not help; 2: wrong input"
    lines += [
        "podFailurePolicy:",
        "  rules:",
        f"  - action: FailJob # {why if job.nodes == 1 else 'wrong input'}",
        "    onExitCodes:",
        "      containerName: lockstep",
        "      operator: In",
        f"      values: [{final}]",
    ]
    if job.least < job.nodes:
        lines += [
            f"  - action: Ignore # a lost node: its pod is replaced while at least {job.least} others go on",
            "    onPodConditions:",
            "    - type: DisruptionTarget",
            '      status: "True"',
        ]
    return lines


def _pod(job: ClusterJob, cluster: Cluster, name: str, image: str, claim: str) -> list[str]:
    wait = _wait_for_head(job, cluster, name, image) if job.nodes > 1 else []
    return [
        "restartPolicy: Never",
        f"terminationGracePeriodSeconds: {job.lead} # on SIGTERM it saves, and ends with 75",
        *wait,
        "containers:",
        "- name: lockstep",
        f"  image: {_text(image)}",
        f"  workingDir: {_text(str(job.folder))} # in the image, or below the volume of runs",
        "  command:",
        *(f"  - {_text(word)}" for word in _command(job, name)),
        *_indented(2, _environment(job, cluster)),
        *_indented(2, _resources(job, cluster, job.gpus)),
        "  volumeMounts:",
        "  - name: runs",
        f"    mountPath: {_text(str(job.run_dir.parent))}",
        "  - name: shm",
        "    mountPath: /dev/shm",
        "volumes:",
        "- name: runs # checkpoints and logs; it outlives the pods" + ", and all nodes write to it" * (job.nodes > 1),
        "  persistentVolumeClaim:",
        f"    claimName: {_text(claim)}",
        "- name: shm # processes of a node exchange data there; a container's own 64 MB are too little",
        "  emptyDir:",
        "    medium: Memory",
    ]


def _wait_for_head(job: ClusterJob, cluster: Cluster, name: str, image: str) -> list[str]:
    """A container that ends when this pod can start: Lockstep itself takes an unknown head for wrong input."""
    return [
        "initContainers:",
        "- name: wait-for-head # pods start in any order; its name may be unknown yet, or still that of an old pod",
        f"  image: {_text(image)}",
        "  command:",
        "  - python3",
        "  - -c",
        "  - |",
        "    import os, signal, socket, sys, time",
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))",
        "    socket.setdefaulttimeout(3)",
        "    is_head = os.environ['JOB_COMPLETION_INDEX'] == '0'",
        "    meet = socket.socket().bind if is_head else socket.create_connection",
        "    while True:",
        "        try:",
        f"            meet(('{_head(name)}', {HEAD_PORT}))",
        "            break",
        "        except OSError:",
        "            time.sleep(1)",
        *_indented(2, _named("env", _rank())),
        *_indented(2, _resources(job, cluster, gpus=0)),
    ]


def _head(name: str) -> str:
    """How pods find that of node 0: JobSet calls them JOBSET-JOB-INDEX-RANK."""
    return f"{name}-node-0-0.{name}"


def _command(job: ClusterJob, name: str) -> list[str]:
    kind, *rest = job.command
    ours = [
        f"--nproc={job.processes}",
        f"--run-dir={_literal(str(job.run_dir))}",
        f"--max-time={job.seconds - job.lead}s",
    ]
    if job.nodes > 1:
        nodes = str(job.nodes) if job.least == job.nodes else f"{job.least}:{job.nodes}"
        ours += [f"--nodes={nodes}", "--node-rank=$(JOB_COMPLETION_INDEX)", f"--head={_head(name)}:{HEAD_PORT}"]
    return ["lockstep", kind, *ours, *map(_literal, rest)]


def _environment(job: ClusterJob, cluster: Cluster) -> list[str]:
    variables = {}
    if job.cpus:  # a pod sees all cores of its node, whatever its limit
        variables["OMP_NUM_THREADS"] = str(max(1, job.cpus // job.processes))
    if cluster.software.offline:
        variables |= dict.fromkeys(OFFLINE, "1")
    variables |= cluster.software.variables
    lines = _rank() if job.nodes > 1 else []
    for key, value in variables.items():
        lines += [f"- name: {_text(key)}", f"  value: {_text(_literal(value))}"]
    return _named("env", lines)


def _rank() -> list[str]:
    """Kubernetes puts into a command only what the container's own `env` declares."""
    return [
        "- name: JOB_COMPLETION_INDEX",
        "  valueFrom:",
        "    fieldRef:",
        "      fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']",
    ]


def _resources(job: ClusterJob, cluster: Cluster, gpus: int) -> list[str]:
    """Limits alone: Kubernetes sets as much aside for the pod, and nobody takes it away."""
    limits = {"cpu": job.cpus, "memory": _memory(job, cluster), "nvidia.com/gpu": gpus}
    said = [f"  {key}: {value}" for key, value in limits.items() if value]
    return _named("resources", _named("  limits", _indented(2, said)))


def _memory(job: ClusterJob, cluster: Cluster) -> str | None:
    """The share of a node's memory that goes with the GPUs of the job, or else with its cores."""
    node = cluster.node
    if node.memory_gb is None:
        return None
    share = 1.0
    if node.gpus and job.gpus:
        share = min(1.0, job.gpus / node.gpus)
    elif node.cpus and job.cpus:
        share = min(1.0, job.cpus / node.cpus)
    return f"{max(1, int(SHARE_OF_MEMORY * share * node.memory_gb))}G"


def _named(key: str, lines: list[str]) -> list[str]:
    """The lines below a key, which is left out where there are none."""
    return [f"{key}:", *lines] if lines else []


def _indented(spaces: int, lines: list[str]) -> list[str]:
    return [" " * spaces + line for line in lines]


def _literal(word: str) -> str:
    """A word that Kubernetes is not to put variables into: in commands and values it reads $$ as $."""
    return word.replace("$", "$$")


def _text(value: str) -> str:
    """A string of any content. What JSON calls a string is one in YAML too, as long as it does not escape letters."""
    return json.dumps(value, ensure_ascii=False)
