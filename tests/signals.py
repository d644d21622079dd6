"""Signals, which a stopped run or command ignores until its process ends, and so would all that this one starts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from lockstep.runtime import stop_signals as early


def hear_all() -> None:
    """Signals mean what they do in a terminal, here and in all that is started from here.

    A shell lets what it starts in the background ignore Ctrl-C, nohup lets it ignore the end of its terminal, and a
    process hands on what it ignores or blocks to those it starts.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    for number in (*early.STOPS, signal.SIGQUIT, signal.SIGCHLD):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


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
