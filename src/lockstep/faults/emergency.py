"""A last checkpoint before a run dies, where what it has learnt is sound and nobody is missing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from lockstep.errors import InvariantError, SampleError, SaveError
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
