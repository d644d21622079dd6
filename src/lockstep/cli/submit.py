"""`lockstep submit`: the same command as a job of Slurm, or of Kubernetes."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer
from lockstep.cli.run import run_command
from lockstep.cli.start_run import result_of
from lockstep.cli.train import train_command
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.config.cluster import Cluster
    from lockstep.launch.cluster_job import ClusterJob
    from lockstep.record.folder import RunFolder

COMMANDS: dict[str, Callable[..., int]] = {"train": train_command, "run": run_command}
OURS = ("nodes", "nproc", "node_rank", "head", "name", "run_dir", "resume")
"""Options of `train` and `run` that a job settles, so that they stand before those words."""


def submit_command(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="train|run ...", help="The command, as on one machine.")],
    cluster: Annotated[str | None, typer.Option(help="A cluster profile: its name, or a TOML file.")] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Nodes of the job, 2; or 3:4 to go on with 3 when one is lost.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of each node. Default: all that the profile has.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Processes on each node. Default: one a GPU, or 2.")] = None,
    cpus: Annotated[int | None, typer.Option(help="CPU cores of each node. Default: the GPUs' share.")] = None,
    time: Annotated[str, typer.Option(help="Time limit: 2h, 90m, 1-12:00:00. The job goes on in the next one.")] = "1h",
    lead: Annotated[int | None, typer.Option(help="Seconds before the limit at which it saves.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    qos: Annotated[str | None, typer.Option(help="Slurm's quality of service.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="A further option for sbatch. May be repeated.")] = None,
    array: Annotated[str | None, typer.Option(help="An array of jobs, 0-3; %a in the command is the number.")] = None,
    requeue: Annotated[bool, typer.Option(help="Go back into the queue after a stop or a lost node.")] = True,
    kubernetes: Annotated[str | None, typer.Option(metavar="IMAGE", help="Print a JobSet with this image.")] = None,
    claim: Annotated[str, typer.Option(help="The volume claim of a JobSet that holds the runs.")] = "runs",
    snapshot: Annotated[bool, typer.Option("--snapshot", help="Run a copy of the script's code as it is now.")] = False,
    name: opt.Name = None,
    run_dir: opt.RunDir = None,
    dry_run: opt.DryRun = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show the job to its end.")] = False,
    as_json: opt.Json = False,
) -> int:
    """Run a training as a Slurm job: `lockstep submit --nodes 2 --time 4h train lm`. Options stand before `train`."""
    from lockstep.config.cluster import check_shared, expanded, find_cluster
    from lockstep.launch import slurm
    from lockstep.launch.cluster_job import ClusterJob
    from lockstep.launch.nodes import counts
    from lockstep.launch.snapshot import copy_code, files_of
    from lockstep.record.folder import SNAPSHOT, choose_folder

    for option, value in context.params.items():
        _refuse_control_characters("the command" if option == "command" else f"--{option.replace('_', '-')}", value)
    _refuse_control_characters("the current folder", Path.cwd())
    _refuse_control_characters("the virtual environment", _own_environment())
    profile = find_cluster(cluster)
    told = opt.given(partition=partition, account=account, qos=qos)
    told["options"] = [*profile.slurm.options, *(sbatch or [])]
    profile = profile.model_copy(update={"slurm": profile.slurm.model_copy(update=told)})
    given = _parse(command)
    if follow and array:
        raise UserError("--follow shows one job, and --array makes several", "see them with lockstep jobs")
    called = name or _name_of(command[0], given)
    runs = expanded(profile.storage.runs) if profile.storage.runs else Path("runs")
    folder = choose_folder(called, run_dir, "auto", runs)
    least, most = counts(nodes or "1")
    gpus, nproc, cpus = _of_each_node(profile, gpus, nproc, cpus)
    job = ClusterJob(called, tuple(command), folder.path.absolute(), Path.cwd(), most, least, nproc, gpus, cpus)
    lead = profile.slurm.lead if lead is None else lead
    job = replace(job, seconds=_seconds(time), lead=lead, requeue=requeue, array=array)
    _check_command(command[0], given, job)
    if snapshot and (kubernetes or command[0] != "run"):
        what = "a JobSet runs its image's" if kubernetes else "a recipe has none of its own"
        raise UserError(f"--snapshot keeps a script's code, and {what}", "leave it out")
    copy, script = _beside(job, SNAPSHOT), Path(given.get("script", ""))
    files = files_of(script, runs) if snapshot else []
    if snapshot:
        job = replace(job, command=_of_copy(command, given, copy))
    if kubernetes:
        from lockstep.launch import kubernetes as k8s

        print(k8s.render(job, profile, kubernetes, claim), end="")
        return 0
    slurm.check_job(job, profile, _last_save(folder))
    text = slurm.render(job, profile, _own_environment())
    if dry_run:
        print(text, end="")
        return 0
    check_shared(profile, job.run_dir)
    number = _submit(job, folder, text, lambda: copy_code(script, files, copy) if snapshot else None)
    said = {"job": number, "run": str(job.run_dir), "script": str(_script_of(job))}
    if as_json and not follow:
        answer(said)
        return 0
    print(f"submitted job {number}: {_script_of(job)}", file=sys.stderr if as_json else sys.stdout)
    if not follow:
        print(f"  lockstep jobs shows it; its output is in {slurm.logs_of(job)}")
        return 0
    from lockstep.launch.follow_job import follow_job

    code = follow_job(number, folder, sys.stderr if as_json else sys.stdout)
    if as_json:
        answer({**said, **result_of(folder, code)})
    return code


def _refuse_control_characters(what: str, value: Any) -> None:
    """A new line in a name would be a line of the job's script."""
    for word in value if isinstance(value, list | tuple) else [value]:
        if isinstance(word, str | Path) and not str(word).isprintable():
            raise UserError(f"{what} has control characters in it ({str(word)!r})", "leave them out")


def _parse(command: list[str]) -> dict[str, Any]:
    """What the options of the inner command are; wrong ones are refused as there."""
    kind, *rest = command
    if kind not in COMMANDS:
        raise UserError(f"lockstep submit {kind} is no training", "submit train ... or run SCRIPT ...")
    app = typer.Typer(add_completion=False)
    settings = {"allow_interspersed_args": False} if kind == "run" else {}
    app.command(kind, context_settings=settings)(COMMANDS[kind])
    context = typer.main.get_command(app).make_context(kind, list(rest))
    for key in OURS:
        if context.params.get(key) not in (None, "auto"):
            option = f"--{key.replace('_', '-')}"
            if key in ("node_rank", "head", "resume"):
                raise UserError(f"{option} is not for a job", "leave it out: the job finds it out")
            raise UserError(f"{option} stands after {kind}", f"put it before: lockstep submit {option} ... {kind} ...")
    return dict(context.params)


def _of_each_node(
    profile: Cluster, gpus: int | None, nproc: int | None, cpus: int | None
) -> tuple[int, int, int | None]:
    """GPUs, processes and CPU cores of each node: what the user says, else what the profile has."""
    node = profile.node
    gpus = node.gpus if gpus is None else gpus
    nproc = nproc or gpus or 2
    if cpus is None and node.cpus:
        cpus = max(1, node.cpus * gpus // node.gpus) if gpus and node.gpus else node.cpus
    return gpus, nproc, cpus or (None if gpus else nproc)


def _seconds(time: str) -> int:
    from lockstep.config.cadence import parse_duration

    try:
        return int(parse_duration(time))
    except ValueError:
        raise UserError(f"--time {time} is not a time", "write it like 2h, 90m or 1-12:00:00") from None


def _name_of(kind: str, given: dict[str, Any]) -> str:
    from lockstep.record.folder import name_after

    if kind == "run":
        return name_after(Path(given["script"]))
    what = given.get("what") or "lm"
    return name_after(Path(what)) if what.endswith(".toml") else str(what)


def _check_command(kind: str, given: dict[str, Any], job: ClusterJob) -> None:
    """What the command itself would refuse in the job, hours later: a recipe, a key, a layout."""
    from lockstep.checkpoint.disk.code import check_code_on_disk
    from lockstep.config.layers import parse_assignments, resolve
    from lockstep.config.schema import LaunchConfig, script_config
    from lockstep.config.selection import ranks_of
    from lockstep.layout import AUTO, Layout
    from lockstep.sinks.trackers import check_installed

    world = job.nodes * job.processes
    assigned = [assignment for assignment in given["set_"] or [] if "%a" not in assignment]
    told = opt.settings_in(given, "nproc", "name", "device", "share_gpu")
    if kind == "run":
        if not Path(given["script"]).is_file():
            raise UserError(f"there is no script {given['script']}", "check the path; options stand before it")
        if not given.get("accept"):
            check_code_on_disk(job.run_dir, Path(given["script"]))
        told |= parse_assignments(assigned) | {"script": str(given["script"])}
        config: LaunchConfig = script_config(told, "the command")
    else:
        config = resolve(opt.config_layers(given["what"], told, assigned)).config
    ranks_of(config.profile_ranks, world)
    check_installed(config.log_to)
    if config.layout != AUTO:
        Layout.parse(config.layout).resolve(world)


def _last_save(folder: RunFolder) -> float:
    """The most seconds that a checkpoint of a run took; 0 before there is one."""
    from lockstep.record.log import read_events

    if not folder.events.exists():
        return 0.0
    return max((event["seconds"] for event in read_events(folder.events) if event["kind"] == "checkpoint"), default=0.0)


def _own_environment() -> Path | None:
    """The virtual environment of this command."""
    return Path(sys.prefix) if sys.prefix != sys.base_prefix else None


def _script_of(job: ClusterJob) -> Path:
    from lockstep.record.folder import JOB_SCRIPT

    return _beside(job, JOB_SCRIPT)


def _beside(job: ClusterJob, name: str) -> Path:
    """Where something of the job itself is: in the run folder, and of an array beside the folders of its runs."""
    return job.run_dir.with_name(f"{job.run_dir.name}.{name}") if job.array else job.run_dir / name


def _of_copy(command: list[str], given: dict[str, Any], copy: Path) -> tuple[str, ...]:
    """The command with the copy's script in the place of the user's."""
    at = len(command) - len(given["args"] or []) - 1
    assert Path(command[at]) == Path(given["script"])
    return *command[:at], str(copy / Path(given["script"]).name), *command[at + 1 :]


def _submit(job: ClusterJob, folder: RunFolder, text: str, take_copy: Callable[[], None]) -> str:
    """Write the script into the run folder and submit it; a refused job leaves nothing."""
    from lockstep.launch.follow_job import note
    from lockstep.launch.queue import JobState, check_accepted, last_job, state_of, submit
    from lockstep.record.folder import SNAPSHOT

    before = last_job(folder.path)
    if before is not None and (now := state_of(before)) is not None and not now.is_over:
        raise UserError(
            f"{folder.path} is job {before} already, which is {now.state.lower()}",
            f"wait for it, scancel {before}, or use --name for a new run",
        )
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch", delete=False) as draft:
        draft.write(text)
    try:
        check_accepted(Path(draft.name))
    finally:
        Path(draft.name).unlink()
    script, copy = _script_of(job), _beside(job, SNAPSHOT)
    had_copy = copy.exists()
    made = [path for path in (job.run_dir / "logs", job.run_dir) if not path.exists()]
    try:
        (script.parent if job.array else job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        take_copy()
        script.write_text(text, encoding="utf-8")
        number = submit(script)
    except BaseException:
        script.unlink(missing_ok=True)
        if not had_copy:
            shutil.rmtree(copy, ignore_errors=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise
    if not job.array:
        note(folder, JobState(number, "PENDING"))
    return number
