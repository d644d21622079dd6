"""Signals, which a stopped run or command ignores until its process ends, and so would all that this one starts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from lockstep.runtime import stop_signals as early


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """What is done with signals inside is not for those who come after."""
    before = {number: signal.getsignal(number) for number in early.STOPS}
    try:
        yield
    finally:
        early.listen()
        early.give_back(before)
        early.take()
