"""The run folder: which one a command uses, and what of it is there already."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lockstep.config.checked import flatten
from lockstep.config.layers import to_toml
from lockstep.config.schema import Config, LaunchConfig, script_config
from lockstep.config.toml import read_toml
from lockstep.errors import UserError, nearest, reason
from lockstep.record.failure import short_host
from lockstep.record.run_state import RunState, read_state
from lockstep.runtime.host.slurm_env import Allocation, find_allocation

CONFIG = "config.toml"
EVENTS = "events.jsonl"
REPORT = "report.html"
LOCK = ".lock"
EXIT_CODE = ".exit"
"""How the last start of a job ended, for its script."""
JOB_SCRIPT = "job.sbatch"
SNAPSHOT = "code"
"""The code that a job runs, where it was submitted with a copy."""
BEFORE_A_RUN = {"checkpoints", "logs", EVENTS, JOB_SCRIPT, SNAPSHOT}
"""What may be in the folder of a run that has not begun."""

FREE_TO_CHANGE = {
    *("name", "layout", "nproc", "device", "backend", "share_gpu", "timeout_minutes"),
    *("restarts", "on_oom", "max_time", "profile", "profile_ranks", "log_to"),
    *("steps", "epochs", "micro_batch", "validate_every", "save_every", "keep", "keep_every"),
    *("data.workers", "data.prefetch", "data.persistent"),
    *("shard.level", "shard.units", "shard.min_params"),
    *("pipeline.schedule", "pipeline.micro_batches", "pipeline.stages_per_rank", "pipeline.cuts"),
}
"""Keys a continued run may change: the numbers do not depend on them, or they say how far to go, or (micro_batch) are
only drawn anew, which the run says."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and which start of the run this is."""

    path: Path
    attempt: int
    lost: int = 0
    """How many lines of its event log cannot be read."""

    @property
    def continues(self) -> bool:
        """Whether an unfinished run goes on here."""
        return self.attempt > 1

    @property
    def events(self) -> Path:
        """The event log."""
        return self.path / EVENTS

    def log(self, host: str, rank: int) -> Path:
        """The file a rank's output goes to."""
        return self.path / "logs" / f"{host}.{rank}.log"

    def log_here(self, rank: int) -> Path:
        """The same for a rank on this host."""
        return self.log(short_host(), rank)

    def logs_of(self, rank: int) -> list[Path]:
        """The logs of a rank, which may have been on several hosts."""
        return sorted((self.path / "logs").glob(f"*.{rank}.log"))

    def announce(self) -> str:
        """The first line a command prints: whether a run begins or goes on."""
        lost = f"; {lost_lines(self.lost)}" if self.lost else ""
        return f"{'continuing the unfinished' if self.continues else 'new'} run {self.path}{lost}"


def lost_lines(count: int) -> str:
    """What to say of a run of whose event log so many lines cannot be read."""
    return f"{count} line{'s are' if count > 1 else ' is'} damaged in its {EVENTS}, and passed over"


def name_after(file: Path) -> str:
    """What the run of a script or a config is called by default: as the file, with dashes for what no name may have."""
    return re.sub(r"[^\w.-]+", "-", file.stem)


def choose_folder(name: str, run_dir: Path | None = None, resume: str = "auto", runs: Path = Path("runs")) -> RunFolder:
    """The folder of a run: an unfinished run goes on, a finished one stays and the new one takes the next number.

    Nothing is written. A folder that is not a run's, or cannot be read, is refused.
    """
    if run_dir is not None:
        found = _look(run_dir)
        if found == "finished":
            raise UserError(f"{run_dir} holds a finished run", "give another --run-dir")
        if found == "unfinished" and resume == "never":
            raise UserError(f"{run_dir} holds an unfinished run", "give another --run-dir, or drop --resume never")
        return _going_on(run_dir) if found == "unfinished" else RunFolder(run_dir, 1)
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise UserError(
            f"{name!r} is not a run name", "use letters, digits, dots, dashes and underscores; --run-dir takes a path"
        )
    free, last = runs / name, None
    for path in _numbered(runs / name):
        if _look(path) == "free":
            free = path
            break
        last = path
    if last is not None and resume != "never" and _look(last) == "unfinished":
        return _going_on(last)
    return RunFolder(free, 1)


def _going_on(path: Path) -> RunFolder:
    run = look_back(path)
    return RunFolder(path, max(1, run.attempt) + 1, run.damaged)


def existing_runs(paths: Sequence[Path]) -> list[Path]:
    """The folders of runs that a user named, each once, whether or not they have begun; anything else is refused."""
    return list({run.resolve(): run for run in map(_existing_run, paths)}.values())


def _existing_run(path: Path) -> Path:
    try:
        if path.name == EVENTS and path.is_file():
            return path.parent
        if (path / EVENTS).is_file() or (path / CONFIG).is_file():
            return path
        if inside := _runs_in(path):
            raise UserError(f"{path} is a folder of runs", f"name one of them: {_some(inside)}")
        if path.exists():
            raise UserError(f"{path} is not a run folder", f"name one such as runs/lm: it has {CONFIG} and {EVENTS}")
        runs = [one for place in dict.fromkeys((path.parent, Path("runs"))) for one in _runs_in(place)]
    except OSError as error:
        raise UserError(f"cannot read the run folder {path}", reason(error)) from None
    meant = nearest(str(path), map(str, runs)) or next((str(one) for one in runs if one.name == path.name), None)
    there = f"there {'is' if len(runs) == 1 else 'are'} {_some(runs)}" if runs else "train one"
    raise UserError(f"there is no run {path}", f"did you mean {meant}?" if meant else there)


def _runs_in(place: Path) -> list[Path]:
    return [one for one in sorted(place.iterdir()) if (one / EVENTS).is_file()] if place.is_dir() else []


def _some(runs: Sequence[Path]) -> str:
    """The last few of them."""
    return ", ".join(map(str, runs[-8:]))


def create_folder(folder: RunFolder, config: LaunchConfig) -> list[Path]:
    """Make the folder and write its config; a disk that cannot be written to is refused.

    Returns the folders that were not there before, innermost first.
    """
    made = [path for path in (folder.path / "logs", folder.path, *folder.path.parents) if not path.exists()]
    try:
        (folder.path / "logs").mkdir(parents=True, exist_ok=True)
        write_config(folder.path, config)
    except OSError as error:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise UserError(f"cannot write to {folder.path}", f"{reason(error)}; give another --run-dir") from None
    return made


def take_back(folder: RunFolder, made: list[Path]) -> None:
    """Remove a run that was refused before it began, if it is a new one, and the folders made for it."""
    if folder.continues or look_back(folder.path).starts:
        return
    if folder.path not in made:  # it had imported weights, which stay
        for path in folder.path.iterdir():
            if path.is_dir() and path.name != "checkpoints":
                shutil.rmtree(path, ignore_errors=True)
            elif not path.is_dir():
                path.unlink()
        return
    shutil.rmtree(folder.path, ignore_errors=True)
    for path in made:
        with suppress(OSError):  # something else has come into it
            path.rmdir()


def write_config(folder: Path, config: LaunchConfig) -> None:
    """Store the resolved config in a run folder, all of it or nothing."""
    temporary = folder / f".{CONFIG}.{os.getpid()}"
    try:
        # The arguments of a script may hold bytes that are no text.
        temporary.write_text(to_toml(config), encoding="utf-8", errors="replace")
        temporary.replace(folder / CONFIG)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def with_script(config: LaunchConfig) -> LaunchConfig:
    """The config of a start without a launcher of ours, with the script that this process runs, where it is one."""
    if not Path(sys.argv[0]).is_file():
        return config
    values = {**config.model_dump(exclude_none=True), "script": sys.argv[0], "args": sys.argv[1:]}
    return script_config(values, "the command line")


def settle_script_config(folder: Path, config: LaunchConfig) -> None:
    """Store what a script's own `lockstep.init(...)` decided, beside what `lockstep run` was told."""
    stored = read_toml(folder / CONFIG)
    if "script" in stored:
        write_config(folder, script_config({**stored, **config.model_dump(exclude_none=True)}, CONFIG))


def hold(folder: Path) -> IO[str]:
    """Keep other processes from writing to a run while this one does; ends when the file is closed.

    A job that Slurm has requeued takes the run from its former start, which may live on where the network was cut.
    """
    path = folder / LOCK
    job = find_allocation()
    lock = path.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = _told(lock.read())
        lock.close()
        if job is None or not _follows(holder, job):
            if holder.items() >= _this_process().items():
                raise UserError(
                    f"this script has called lockstep.init a second time, and {folder} is still its first run",
                    "call it once, or run.close() before the second",
                ) from None
            raise UserError(
                f"{folder} is being written by another process", "wait for it, or use --name for a new run"
            ) from None
        own = path.with_name(f"{LOCK}.{job.start}")
        lock = own.open("a+")
        fcntl.flock(lock, fcntl.LOCK_EX)
        own.replace(path)
    except OSError:
        pass  # a file system without locks
    lock.truncate(0)
    lock.write(json.dumps(_this_process() | ({"job": job.job, "restart": job.restart} if job else {})))
    lock.flush()
    return lock


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def _told(holder: str) -> dict[str, Any]:
    """Who holds a run, as its lock says."""
    try:
        told = json.loads(holder)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def is_held(folder: Path, lock: IO[str]) -> bool:
    """Whether a run is still this process's, and no later start has taken it."""
    try:
        return os.path.samestat((folder / LOCK).stat(), os.fstat(lock.fileno()))
    except OSError:
        return False


def _follows(holder: Mapping[str, Any], job: Allocation) -> bool:
    """Whether `job` is a later start of the job that holds a run."""
    return bool(holder.get("job") == job.job and holder["restart"] < job.restart)


def check_same_training(folder: RunFolder, config: Config) -> None:
    """Refuse to go on with a run under a config that would give other numbers."""
    stored = dict(flatten(read_toml(folder.path / CONFIG)))
    defaults = dict(flatten(Config.model_construct().model_dump(mode="json")))
    for key, value in flatten(config.model_dump(mode="json")):
        # A key that a version before did not know had its default then.
        before = stored.get(key, defaults.get(key))
        if key not in FREE_TO_CHANGE and before != value:
            raise UserError(
                f"{folder.path} is an unfinished run with {key} = {before!r}, now it is {value!r}",
                "use the old value, or --name for a new run, or --resume never",
            )


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in range(2, 100_000):
        yield path.with_name(f"{path.name}-{number}")


def _look(path: Path) -> str:
    """What is at a path: "free", an "unfinished" or a "finished" run; anything else is refused."""
    try:
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return "free"
        if not path.is_dir():
            raise UserError(f"{path} is a file", "a run needs a folder: give another name or --run-dir")
        if {inside.name for inside in path.iterdir() if not inside.name.startswith(".")} <= BEFORE_A_RUN:
            return "free"  # weights were imported, a job waits in a queue, or another node is just beginning it
        if not (path / CONFIG).is_file():
            raise UserError(f"{path} is not a run folder (it has no {CONFIG})", "give another name or --run-dir")
        (path / CONFIG).read_bytes()
        return "finished" if look_back(path).is_finished else "unfinished"
    except OSError as error:
        raise UserError(f"cannot read the run folder {path}", reason(error)) from None


def look_back(path: Path) -> RunState:
    """What the events of a run folder say of it until now."""
    return read_state(path / EVENTS)


def this_attempt(path: Path, first: int) -> tuple[int, int | None]:
    """The number of the start that begins now, where a launcher's first was `first`; and its largest micro-batch."""
    run = look_back(path)
    return max(first, run.attempt + 1), run.most_since(first)
