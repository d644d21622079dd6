"""Whether the code that goes on with a run is the code that wrote its last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lockstep.checkpoint.disk.format import DamageError, read_index, step_folder, steps_on_disk
from lockstep.config.toml import read_toml
from lockstep.errors import UserError, unknown
from lockstep.record.folder import CONFIG, RunFolder
from lockstep.record.identity import digest_of

ACCEPT = "LOCKSTEP_ACCEPT"
"""The variable that names what is accepted at this start; `--accept` sets it for the workers."""
CHANGED_SCRIPT = "changed-script"


def accept_by_name(names: list[str] | None) -> None:
    """Take note, for this process and those it starts, of what a user accepts by name."""
    for name in names or []:
        if name != CHANGED_SCRIPT:
            raise unknown("thing to accept", name, [CHANGED_SCRIPT])
    if names:
        os.environ[ACCEPT] = ",".join(names)


def accepts_changes() -> bool:
    """Whether another script may go on with a run at this start."""
    return CHANGED_SCRIPT in os.environ.get(ACCEPT, "").split(",")


def saved_code(run_folder: Path) -> tuple[int, dict[str, str]]:
    """The step of a run's last checkpoint, and the digests of the code that wrote it; nothing where none has any."""
    for step in reversed(steps_on_disk(run_folder)):
        try:
            training = read_index(step_folder(run_folder, step)).training
        except DamageError:
            continue
        return step, training.code if training else {}
    return 0, {}


def check_same_script(folder: RunFolder, script: Path) -> None:
    """Refuse to go on with a run that something else began."""
    if not folder.continues:
        return
    stored = read_toml(folder.path / CONFIG)
    began = stored.get("script")
    if began is None and (not steps_on_disk(folder.path) or script.name in saved_code(folder.path)[1]):
        return  # it begins anew, or a Trainer has put its own config in the place of the script's
    if began is None or Path(began).name != script.name:
        trained = f"lockstep train {stored['recipe']}" if "recipe" in stored else "another script"
        raise UserError(
            f"{folder.path} is an unfinished run of {began or trained}, not of {script}",
            "use --name for a new run, or --resume never",
        )


def check_code_on_disk(run_folder: Path, script: Path) -> None:
    """The same before anything is started, of the files that lie in the script's folder, where they may not differ."""
    step, before = saved_code(run_folder)
    folder = script.resolve().parent
    now = {name: digest_of((folder / name).read_bytes()) for name in before if (folder / name).is_file()}
    if not accepts_changes():
        refuse_changed_code(step, before, now)


def check_same_code(run_folder: Path, now: Mapping[str, str], *, may_differ: bool) -> str | None:
    """Refuse code that has changed since a run's last checkpoint, or, where it may, return the sentence for people."""
    step, before = saved_code(run_folder)
    if may_differ:
        changed = _changed(step, before, now)
        return f"{changed}: from here on the numbers are those of the new code" if changed else None
    refuse_changed_code(step, before, now)
    return None


def refuse_changed_code(step: int, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse code that has changed since the checkpoint of a step."""
    if changed := _changed(step, before, now):
        raise UserError(
            changed,
            f"put the old code back, or go on with the new by --accept {CHANGED_SCRIPT} (without a launcher, by "
            f"{ACCEPT}={CHANGED_SCRIPT} in the environment), or use --name for a new run",
        )


def _changed(step: int, before: Mapping[str, str], now: Mapping[str, str]) -> str:
    names = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    files = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    has = "has" if len(names) == 1 else "have"
    return f"{files} {has} changed since the checkpoint of step {step} was written" if names else ""
