"""The run folder: which one a command uses, and what of it is there already."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lockstep.config import Config, LaunchConfig, flatten, script_config, to_toml
from lockstep.errors import UserError
from lockstep.events import read_events
from lockstep.toml import read_toml

CONFIG = "config.toml"
EVENTS = "events.jsonl"
LOCK = ".lock"

FREE_TO_CHANGE = {
    *("name", "layout", "nproc", "device", "backend", "share_gpu", "timeout_minutes"),
    *("steps", "epochs", "validate_every", "save_every", "keep"),
    *("data.workers", "data.prefetch", "data.persistent"),
    *("shard.level", "shard.units", "shard.min_params"),
    *("pipeline.schedule", "pipeline.micro_batches", "pipeline.stages_per_rank", "pipeline.cuts"),
}
"""Keys a continued run may change: the numbers do not depend on them, or they say how far to go."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and which start of the run this is."""

    path: Path
    attempt: int

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
        return self.log(socket.gethostname().split(".")[0], rank)

    def announce(self) -> str:
        """The first line a command prints: whether a run begins or goes on."""
        return f"{'continuing the unfinished' if self.continues else 'new'} run {self.path}"


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
        return RunFolder(run_dir, _attempts(run_dir) + 1 if found == "unfinished" else 1)
    if not name or name != Path(name).name or name.startswith("."):
        raise UserError(f"{name!r} is not a run name", "use letters, digits and dashes; --run-dir takes a path")
    free, last = runs / name, None
    for path in _numbered(runs / name):
        if _look(path) == "free":
            free = path
            break
        last = path
    if last is not None and resume != "never" and _look(last) == "unfinished":
        return RunFolder(last, _attempts(last) + 1)
    return RunFolder(free, 1)


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
        raise UserError(
            f"cannot write to {folder.path}",
            f"{(error.strerror or str(error)).lower()}; give another --run-dir",
        ) from None
    return made


def take_back(folder: RunFolder, made: list[Path]) -> None:
    """Remove a run that was refused before it began, if it is a new one, and the folders made for it."""
    began = folder.events.exists() and any(event["kind"] == "start" for event in read_events(folder.events))
    if folder.path in made and not began:
        shutil.rmtree(folder.path, ignore_errors=True)
        for path in made:
            with suppress(OSError):  # something else has come into it
                path.rmdir()


def write_config(folder: Path, config: LaunchConfig) -> None:
    """Store the resolved config in a run folder, all of it or nothing."""
    temporary = folder / f".{CONFIG}.{os.getpid()}"
    try:
        temporary.write_text(to_toml(config), encoding="utf-8")
        temporary.replace(folder / CONFIG)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def settle_script_config(folder: Path, config: LaunchConfig) -> None:
    """Store what a script's own `lockstep.init(...)` decided, beside what `lockstep run` was told."""
    stored = read_toml(folder / CONFIG)
    if "script" in stored:
        write_config(folder, script_config({**stored, **config.model_dump(exclude_none=True)}, CONFIG))


def hold(folder: Path) -> IO[str]:
    """Keep other processes from writing to a run while this one does; ends when the file is closed."""
    lock = (folder / LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(
            f"{folder} is being written by another process", "wait for it, or use --name for a new run"
        ) from None
    except OSError:
        pass  # a file system without locks
    return lock


def check_same_training(folder: RunFolder, config: Config) -> None:
    """Refuse to go on with a run under a config that would give other numbers."""
    stored = dict(flatten(read_toml(folder.path / CONFIG)))
    defaults = dict(flatten(Config.model_construct().model_dump(mode="json")))
    for key, value in flatten(config.model_dump(mode="json")):
        kept = key == "micro_batch" and value is None  # was chosen then, and is not chosen again
        # A key that a version before did not know had its default then.
        before = stored.get(key, defaults.get(key))
        if key not in FREE_TO_CHANGE and not kept and before != value:
            raise UserError(
                f"{folder.path} is an unfinished run with {key} = {before!r}, now it is {value!r}",
                "use the old value, or --name for a new run, or --resume never",
            )


def check_same_script(folder: RunFolder, script: Path) -> None:
    """Refuse to go on with a run that something else began."""
    if folder.continues:
        stored = read_toml(folder.path / CONFIG)
        if Path(stored.get("script", "")).name != script.name:
            began = stored.get("script") or f"lockstep train {stored.get('recipe', '')}".strip()
            raise UserError(
                f"{folder.path} is an unfinished run of {began}, not of {script}",
                "use --name for a new run, or --resume never",
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
        if not (path / CONFIG).is_file():
            raise UserError(f"{path} is not a run folder (it has no {CONFIG})", "give another name or --run-dir")
        (path / CONFIG).read_bytes()
        return "finished" if _last_kind(path / EVENTS) == "end" else "unfinished"
    except OSError as error:
        raise UserError(f"cannot read the run folder {path}", (error.strerror or str(error)).lower()) from None


def _last_kind(events: Path) -> str | None:
    kind = None
    if events.exists():
        for event in read_events(events):
            kind = event["kind"]
    return kind


def _attempts(path: Path) -> int:
    events = path / EVENTS
    return max([1, *(event["attempt"] for event in read_events(events))]) if events.exists() else 1
