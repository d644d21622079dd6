"""A job as a script for sbatch. The text is a pure function of the job and the cluster's profile."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from lockstep.config.cadence import parse_duration
from lockstep.config.cluster import Cluster
from lockstep.errors import UserError
from lockstep.faults.stop import KEEP_STOP_FILE, STOP_FILE
from lockstep.launch.cluster_job import OFFLINE, ClusterJob
from lockstep.record.folder import EXIT_CODE
from lockstep.runtime.host.slurm_env import HOST_SUFFIX


def logs_of(job: ClusterJob) -> Path:
    """Where Slurm writes what the job prints; the tasks of an array have a folder in common."""
    return job.run_dir.parent if job.array else job.run_dir / "logs"


def check_job(job: ClusterJob, cluster: Cluster, save_seconds: float = 0.0) -> None:
    """Refuse what Slurm would refuse much later, or accept and never start; `save_seconds` is what a save took last."""
    has = cluster.node
    if has.gpus and job.gpus > has.gpus:
        raise UserError(
            f"--gpus {job.gpus}, but a node of {cluster.name} has {has.gpus}", f"use --gpus {has.gpus} and more nodes"
        )
    if job.gpus and job.processes > job.gpus and "--share-gpu" not in job.command:
        raise UserError(
            f"--nproc {job.processes} with {job.gpus} GPUs of each node",
            f"use --nproc {job.gpus}, or --share-gpu to let ranks share them",
        )
    if has.cpus and job.cpus and job.cpus > has.cpus:
        raise UserError(f"--cpus {job.cpus}, but a node of {cluster.name} has {has.cpus}", f"use --cpus {has.cpus}")
    longest = parse_duration(cluster.slurm.max_time) if cluster.slurm.max_time else None
    if longest and job.seconds > longest:
        raise UserError(
            f"--time {_clock(job.seconds)} is longer than jobs of {cluster.name} may take ({_clock(longest)})",
            f"use --time {cluster.slurm.max_time}: the job goes back into the queue and on, until the training is done",
        )
    needed = job.lead + cluster.slurm.start_up
    if job.seconds < needed:
        raise UserError(
            f"--time {_clock(job.seconds)} is over before anything is learnt: starting takes about "
            f"{cluster.slurm.start_up} s, and {job.lead} s before the end the run has to save",
            f"use at least --time {-(-needed // 60) + 1}m, or a smaller --lead",
        )
    if job.lead < 1.5 * save_seconds:
        raise UserError(
            f"--lead {job.lead} is too short: a checkpoint of this run took {save_seconds:.0f} s",
            f"use --lead {int(3 * save_seconds) + 10}",
        )
    if job.array is not None and not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", job.array):
        raise UserError(f"--array {job.array} is not an array of jobs", "write it like 0-3, 1,5,7 or 0-99%4")


def render(job: ClusterJob, cluster: Cluster, venv: Path | None) -> str:
    """The script. `venv` is the environment that submits, used where the profile names none."""
    parts = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in _options(job, cluster)),
        "",
        *_software(cluster, venv),
        *_body(job, cluster),
    ]
    return "\n".join(parts) + "\n"


def _options(job: ClusterJob, cluster: Cluster) -> list[str]:
    slurm = cluster.slurm
    lines = [
        f"--job-name={shlex.quote(job.name)}",
        f"--nodes={job.nodes}",
        _commented("--ntasks-per-node=1", "one launcher a node"),
    ]
    if job.gpus:
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        lines.append(
            f"--gres=gpu:{kind}{job.gpus}" if slurm.gpu_option == "gres" else f"--gpus-per-node={kind}{job.gpus}"
        )
    if job.cpus:
        lines.append(f"--cpus-per-task={job.cpus}")
    lines.append(f"--time={_clock(job.seconds)}")
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "constraint": slurm.constraint}
    lines += [f"--{key}={value}" for key, value in named.items() if value]
    lines += slurm.options
    if job.array:
        lines.append(f"--array={job.array}")
    lines.append(_commented(f"--signal=B:USR1@{job.lead}", "to this script alone; see the trap below"))
    lines.append("--requeue" if job.requeue else "--no-requeue")
    if job.least < job.nodes:
        lines.append(_commented("--no-kill", "a lost node does not end the others"))
    log = "slurm-%A_%a.out" if job.array else "slurm-%j.out"
    lines.append(_commented("--open-mode=append", "a requeued job adds to its log"))
    lines.append(f"--output={shlex.quote(str(logs_of(job) / log))}")
    lines.append(f"--chdir={shlex.quote(str(job.folder))}")
    return lines


def _commented(option: str, why: str) -> str:
    return f"{option:38} # {why}"


def _software(cluster: Cluster, venv: Path | None) -> list[str]:
    software = cluster.software
    lines = ["set -u"]
    if software.modules:
        lines += ["module purge", f"module load {' '.join(software.modules)}"]
    lines += software.setup
    if not software.container and (chosen := software.venv or venv):
        lines.append(f"source {shlex.quote(str(chosen))}/bin/activate")
    if software.variables:
        lines.append("export " + " ".join(f"{key}={shlex.quote(value)}" for key, value in software.variables.items()))
    if software.offline:
        lines.append(f"export {' '.join(f'{name}=1' for name in OFFLINE)}  # compute nodes have no internet")
    if cluster.slurm.host_suffix:
        lines.append(f"export {HOST_SUFFIX}={shlex.quote(cluster.slurm.host_suffix)}  # the fast network's host names")
    return [*lines, ""]


def _body(job: ClusterJob, cluster: Cluster) -> list[str]:
    run = shlex.quote(str(job.run_dir))
    if job.array:
        run += "-$SLURM_ARRAY_TASK_ID"
    lines = [f"run={run}"]
    if job.array:
        lines.append('mkdir -p "$run/logs"')
    # Launchers that end with 75 end one after another: killing the rest at once would hide that code.
    keep = "--kill-on-bad-exit=0 --wait=60" if job.least == job.nodes else "--no-kill --kill-on-bad-exit=0 --wait=0"
    cpus = ' --cpus-per-task="$SLURM_CPUS_PER_TASK"' if job.cpus else ""
    bind = f" --cpu-bind={cluster.slurm.cpu_bind}" if cluster.slurm.cpu_bind else ""
    inside = _container(job, cluster)
    lines += [
        "",
        "# Before the time is over, or when the nodes are wanted for another job, Slurm sends USR1 to this script.",
        "# The run looks for this file between two steps, saves, and ends with 75: no signal gets lost at its start.",
        f'rm -f "$run/{STOP_FILE}" "$run/{EXIT_CODE}"; export {KEEP_STOP_FILE}=1',
        f"""trap 'echo "$(date +%T) asked to stop" && touch "$run/{STOP_FILE}"' USR1 TERM""",
        "",
        'echo "$(date +%T) job $SLURM_JOB_ID, requeued ${SLURM_RESTART_COUNT:-0} times, on $SLURM_JOB_NODELIST"',
        f"srun {keep} --export=ALL{cpus}{bind}{inside} \\",
        f"  {_command(job)} &",
        "# A signal ends a wait, and not what is waited for.",
        "while kill -0 $! 2>/dev/null; do wait $!; done",
        "wait $!",
        "code=$?",
        "# srun's code is the highest of its tasks', also of one on a lost node; the run's own is in its folder.",
        f'[ -s "$run/{EXIT_CODE}" ] && code=$(cat "$run/{EXIT_CODE}")',
    ]
    if job.requeue:
        task = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if job.array else "$SLURM_JOB_ID"
        alone = ", this task of the array alone" if job.array else ""
        lines += [
            "",
            f"# It has saved and wants to go on: back into the queue{alone}, unless the job was cancelled.",
            f'if [ "$code" = 75 ] && scontrol show job "{task}" | grep -q JobState=RUNNING; then',
            f'  scontrol requeue "{task}" && sleep 60',
            "fi",
        ]
    return [*lines, 'exit "$code"']


def _container(job: ClusterJob, cluster: Cluster) -> str:
    software = cluster.software
    if not software.container:
        return ""
    mounts = ",".join(dict.fromkeys([str(job.folder), str(job.run_dir.parent), *software.mounts]))
    if software.container_with == "pyxis":
        pairs = ",".join(f"{mount}:{mount}" for mount in mounts.split(","))
        workdir = f"--container-workdir={shlex.quote(str(job.folder))}"
        return f" --container-image={shlex.quote(software.container)} --container-mounts={pairs} {workdir}"
    gpus = " --nv" if job.gpus else ""
    return f" \\\n  apptainer exec{gpus} --bind {mounts} {shlex.quote(software.container)}"


def _command(job: ClusterJob) -> str:
    kind, *rest = job.command
    ours = ["--nproc", str(job.processes), "--run-dir", '"$run"']
    if job.nodes > 1:
        ours += ["--nodes", str(job.nodes) if job.least == job.nodes else f"{job.least}:{job.nodes}"]
    said = [_with_number(word) if job.array else shlex.quote(word) for word in rest]
    return " ".join(["lockstep", kind, *ours, *said])


def _with_number(word: str) -> str:
    """A word of the command in an array, where `%a` is the number of each job."""
    parts = [shlex.quote(part) if part else "" for part in word.split("%a")]
    return '"$SLURM_ARRAY_TASK_ID"'.join(parts)


def _clock(seconds: float) -> str:
    """A time as Slurm writes it."""
    minutes, rest = divmod(int(seconds), 60)
    days, minutes = divmod(minutes, 1440)
    day = f"{days}-" if days else ""
    return f"{day}{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
