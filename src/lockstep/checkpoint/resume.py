"""Where a start of a run begins: at which checkpoint, and what of the run's folder is in its way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import format as fmt
from lockstep.checkpoint.format import checkpoints_folder, damage, read_index, step_folder, steps_on_disk
from lockstep.checkpoint.load import best_checkpoint, check_layout, latest_checkpoint
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.runtime.comm import Comm


@dataclass(frozen=True)
class StartingPoint:
    """A checkpoint to go on from, with its index, and the best one so far."""

    folder: Path
    index: dict[str, Any]
    best: tuple[int, float] | None


def find_starting_point(
    run_folder: Path, resume: str, layout: Layout, seed: int, comm: Comm, warn: Callable[[str], None]
) -> StartingPoint | None:
    """The checkpoint that `--resume auto | never | PATH` means, the same on every rank; None to begin at step 0."""
    found, best = comm.once("find the checkpoint", lambda: _find(run_folder, resume, warn))
    if found is None:
        return None
    check_layout(Path(found), layout)
    index = read_index(Path(found))
    if index["seed"] != seed:
        raise UserError(
            f"the checkpoint {Path(found).name} was written with seed {index['seed']} and this run has seed {seed}",
            "use the old seed, or start anew with --resume never",
        )
    return StartingPoint(Path(found), index, tuple(best) if best else None)


def _find(run_folder: Path, resume: str, warn: Callable[[str], None]) -> tuple[str | None, tuple[int, float] | None]:
    if resume == "never":
        return None, None
    wanted = None if resume == "auto" else Path(resume)
    own = checkpoints_folder(run_folder).resolve()
    if wanted is not None and wanted.resolve().parent == own:
        chosen: Path | None = check_whole(wanted)
    else:
        # A checkpoint of another run begins this one; from then on its own ones are newer.
        chosen = latest_checkpoint(run_folder, warn) or (check_whole(wanted) if wanted else None)
    if chosen is None or chosen.resolve().parent != own:
        return (str(chosen) if chosen else None), None
    step = read_index(chosen)["step"]
    _set_aside_newer(run_folder, step)
    best = best_checkpoint(run_folder)
    return str(chosen), best if best and best[0] <= step else None


def check_whole(folder: Path) -> Path:
    """Refuse a checkpoint whose files are not what was written."""
    problem = damage(folder, read_index(folder))
    if problem:
        raise UserError(f"the checkpoint {folder} is damaged", f"{problem}; give another one")
    return folder


def _set_aside_newer(run_folder: Path, step: int) -> None:
    """What was saved after this step, damaged or not, is no longer part of the run; it is renamed, not deleted."""
    for newer in steps_on_disk(run_folder):
        if newer > step:
            folder = step_folder(run_folder, newer)
            aside = folder.with_name(f".{folder.name}.set-aside")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
    best = checkpoints_folder(run_folder) / fmt.BEST
    known = best_checkpoint(run_folder)
    if known and known[0] > step:
        best.unlink()
