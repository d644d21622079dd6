"""A last checkpoint before a run dies, where what it has learnt is sound and nobody is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from lockstep.errors import InvariantError, SaveError, StoppedTogetherError, UserError
from lockstep.parallel.dtensors import local_part

if TYPE_CHECKING:
    from lockstep.run import Run

NEVER = (UserError, SaveError, InvariantError)
"""After these there is nothing to save: the input is wrong, or the disk, or the state itself."""


def on_uncaught(act: Callable[[BaseException], None]) -> Callable[[], None]:
    """Call something with the exception that ends the script, after it was printed; returns how to undo that.

    Not at exit: Python starts no threads any more by then.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        act(error)

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = previous

    sys.excepthook = hook
    return undo


def save_in_emergency(run: Run, error: BaseException) -> None:
    """Save what was done since the last checkpoint before an error ends the run; never raises.

    All ranks have to take part: either they all fail together, or there is only one.
    """
    if not isinstance(error, Exception) or isinstance(error, NEVER) or not run.has_unsaved_steps:
        return
    if run.world_size > 1 and not isinstance(error, StoppedTogetherError):
        return
    reason = f"{type(error).__name__}: {error}"
    try:
        engine = run.engine
        assert engine is not None
        engine.undo_half_a_step()
        sound = engine.is_sound and all(bool(local_part(one.detach()).isfinite().all()) for one in engine.parameters)
        if run.reduce(int(sound), "min") == 0:
            return
        run.save(wait=True, emergency=reason[:500])
        run.message(
            f"saved an emergency checkpoint of step {engine.steps_done}: the same command goes on from it", "warning"
        )
    except Exception as failed:
        with suppress(Exception):  # the error that ends the run is the one to show
            run.message(f"no emergency checkpoint could be saved: {failed}", "warning")
