"""Which checkpoint a user means by a run folder, a step or a path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.checkpoint.disk import format as fmt
from lockstep.checkpoint.disk.format import DamageError, Whole
from lockstep.errors import UserError


def pick(path: Path, step: str | int = "last") -> Whole:
    """A checkpoint by its own folder, or one of a run's: the "best", the "last", or that of a step."""
    if fmt.is_checkpoint(path):
        return fmt.open_or_refuse(path)
    steps = run_steps(path)
    if isinstance(step, int) or step.isdigit():
        if int(step) not in steps:
            raise UserError(f"{path} has no checkpoint of step {step}", f"it has {', '.join(map(str, steps))}")
        return fmt.open_or_refuse(fmt.step_folder(path, int(step)))
    if step not in ("best", "last"):
        raise UserError(f"{step!r} is not a step", "give a number, best or last")
    last = newest_whole(path)
    best = last.index.training.best if last.index.training else None
    if step == "best" and best is not None and best.step != last.index.step:
        return fmt.open_or_refuse(fmt.step_folder(path, best.step))
    return last


def run_steps(path: Path) -> list[int]:
    """The steps of which a run has checkpoints; a folder without any is refused."""
    steps = fmt.steps_on_disk(path)
    if not steps:
        what = "has no checkpoint" if (path / "config.toml").exists() else "is not a run folder or a checkpoint"
        raise UserError(f"{path} {what}", "give a folder such as runs/lm or runs/lm/checkpoints/step-00000100")
    return steps


def newest_whole(
    run_folder: Path, warn: Callable[[int, str], None] | None = None, before: int | None = None, problem: str = ""
) -> Whole:
    """The newest checkpoint of a run that looks whole, of those `before` a step that turned out to have a `problem`.

    `warn` is told step and problem of every one that is passed over. A run of which nothing else is left is refused.
    """
    for step in reversed(run_steps(run_folder)):
        if before is not None and step >= before:
            continue
        try:
            return fmt.open_checkpoint(fmt.step_folder(run_folder, step))
        except DamageError as error:
            problem = problem or str(error)
            if warn is not None:
                warn(step, str(error))
    raise UserError(
        f"no checkpoint of {run_folder} is whole ({problem})",
        "put one back from a backup, or start anew with --resume never and another name",
    )
