"""A last checkpoint before a run dies, where what it has learnt is sound and nobody is missing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from lockstep.errors import InvariantError, SampleError, SaveError, StoppedTogetherError
from lockstep.runtime.dtensors import local_part

if TYPE_CHECKING:
    from lockstep.run import Run
    from lockstep.runtime.comm import Comm

SECONDS_FOR_THE_OTHERS = 5.0
"""How long rank 0 waits to hear that the others were refused too."""

NEVER = (SaveError, InvariantError)
"""After these there is nothing to save: the disk is wrong, or the state itself."""


def on_uncaught(act: Callable[[BaseException], None]) -> Callable[[], None]:
    """Call something with the exception that ends the script, after it was printed; returns how to undo that.

    Not at exit: Python starts no threads any more by then.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SampleError):
            print(f"lockstep: {error}", file=sys.stderr, flush=True)
            act(error)
            return
        try:
            previous(kind, error, trace)
        finally:  # after a UserError the hook before this one ends in the exit code
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
    with suppress(Exception):  # who judges the failure reads in the events how far the run was
        run.journal.flush()
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


def refused_alike(comm: Comm, error: BaseException) -> bool:
    """Whether all ranks were refused in the same words, as rank 0 hears of it, before anybody leaves; never raises."""
    try:
        notices, everybody = comm.notices("refused"), [str(rank) for rank in range(comm.world_size)]
        notices.post(str(comm.rank), str(error))
        end = time.monotonic() + SECONDS_FOR_THE_OTHERS
        while comm.rank == 0 and not notices.has(*everybody):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return comm.rank == 0 and set(notices.wait(everybody)) == {str(error)}
    except Exception:  # the store is gone, and with it the others
        return False
