"""Who may write into a run: the attempt that began last.

Every attempt makes a folder of its own and writes its checkpoints there; a finished one is renamed to its place. The
next attempt takes that folder away. Then a rename of the attempt before it fails, however late it comes: a node that
was cut off and is back cannot write into a run that has moved on, and there is no moment between asking and writing.
"""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.disk.format import checkpoints_folder
from lockstep.errors import SaveError

TAKEN_OVER = (
    "another attempt of this run has begun, and this one may not write into it any more: end it, the other one goes on"
)


def begin_attempt(run_folder: Path, number: int) -> Path:
    """Make the folder of a new attempt, and take those of all others away."""
    folder = checkpoints_folder(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f".attempt-{number}-{secrets.token_hex(4)}"
    own.mkdir()  # before the others go: of two attempts that begin at once, both may lose, and never both win
    for other in folder.glob(".attempt-*"):
        if other != own:
            with suppress(FileNotFoundError):  # it has just ended
                other.rename(other.with_name(other.name.replace(".attempt-", ".stale-", 1)))
    for left in (*folder.glob(".stale-*"), *folder.glob(".step-*.deleting")):
        shutil.rmtree(left, ignore_errors=True)  # somebody may still write into it; then the next attempt does it
    return own


def check_still_ours(attempt: Path) -> None:
    """Refuse to go on for an attempt that another one has replaced."""
    if not attempt.is_dir():
        raise SaveError(TAKEN_OVER)


def end_attempt(attempt: Path) -> None:
    """Take the folder of an attempt away that is over."""
    shutil.rmtree(attempt, ignore_errors=True)
