"""Where a start of a run begins: at which checkpoint, and what of the run's folder is in its way."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from lockstep.checkpoint.disk import format as fmt
from lockstep.checkpoint.disk.format import PipelineState, Whole
from lockstep.checkpoint.disk.pick import newest_whole
from lockstep.config.schema import PipelineConfig
from lockstep.errors import UserError
from lockstep.parallel.pipeline.timetable import stages_of

WENT_BACK = ".went-back"
"""Names the checkpoint that a user last told the run to go back to."""


def find_start(run_folder: Path, resume: str, warn: Callable[[int, str], None]) -> Whole | None:
    """The checkpoint that `--resume auto | never | PATH` means; None to begin at step 0.

    It has an index that is sound and files of the right sizes; their content is checked when it is read. `warn` is told
    step and problem of those that have not.
    """
    if resume == "never":
        return None
    wanted = None if resume == "auto" else Path(resume)
    note = fmt.checkpoints_folder(run_folder) / WENT_BACK
    went_back = note.read_text(encoding="utf-8") if note.is_file() else ""
    # Where the run went back to this checkpoint before, it is the same command, typed again.
    if wanted is not None and is_of(run_folder, wanted) and wanted.name != went_back:
        return fmt.open_or_refuse(wanted)
    if fmt.steps_on_disk(run_folder):
        # A checkpoint of another run begins this one; from then on its own ones are newer.
        return newest_whole(run_folder, warn)
    return given_checkpoint(wanted) if wanted else None


def given_checkpoint(path: Path) -> Whole:
    """The checkpoint that a path means: its own folder, or a run, of which it is the newest whole one."""
    if path.is_file():
        raise UserError(
            f"{path} is a file and not a checkpoint",
            f"make a run of it first: lockstep ckpt import {shlex.quote(str(path))} RUN",
        )
    return (
        newest_whole(path)
        if (path / "checkpoints").is_dir() and not fmt.is_checkpoint(path)
        else fmt.open_or_refuse(path)
    )


def go_on_from(run_folder: Path, checkpoint: Whole, attempt: str, named: bool) -> None:
    """The run has loaded one of its checkpoints: what is newer is no longer part of it, damaged or not.

    It is renamed, not deleted. Where a user `named` the checkpoint, that is noted.
    """
    if not is_of(run_folder, checkpoint.folder):
        return
    if named:
        (fmt.checkpoints_folder(run_folder) / WENT_BACK).write_text(checkpoint.folder.name, encoding="utf-8")
    for newer in fmt.steps_on_disk(run_folder):
        if newer > checkpoint.index.step:
            folder = fmt.step_folder(run_folder, newer)
            folder.rename(folder.with_name(f".{folder.name}.set-aside-{attempt}"))


def is_of(run_folder: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint is one of this run's."""
    return checkpoint.resolve().parent == fmt.checkpoints_folder(run_folder).resolve()


def cut_as_before(config: PipelineConfig, ranks: int, saved: PipelineState | None) -> PipelineConfig:
    """Where the same pipeline goes on, the cuts it had: work is measured anew at every start, and might differ.

    Another pipeline, or cuts that the user states, are cut as they say: a checkpoint fits all of them.
    """
    if saved is None or config.cuts is not None:
        return config
    if stages_of(config.schedule, ranks, config.per_rank) != saved.stages:
        return config
    return config.model_copy(update={"cuts": saved.cuts})
