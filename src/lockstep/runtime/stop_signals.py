"""The signals that stop a run: what this process does with them before, during and after a training.

While Python still imports torch, or once the ranks have agreed to stop, a signal must not decide how the process ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

STOPS = {
    signal.SIGINT: "interrupt",
    signal.SIGTERM: "terminate",
    signal.SIGUSR1: "terminate",
    signal.SIGUSR2: "terminate",
    signal.SIGHUP: "terminate",
}
"""The signals that stop a run on purpose, and what each asks for."""

CODES = {"interrupt": 130, "terminate": 75}
"""What a process ends with that was stopped on purpose."""

Handler = Callable[[int, FrameType | None], object] | int | None

_noted: list[signal.Signals] = []
_ignored: dict[signal.Signals, Handler] = {}


class StopError(BaseException):
    """A signal asks a command to end that has nothing to save. Raised once: the signals that follow are only noted."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number

    @property
    def code(self) -> int:
        """What the process ends with."""
        return CODES[STOPS[self.number]]


def heard() -> list[signal.Signals]:
    """The stops that this process was not told to ignore, as nohup does with SIGHUP."""
    return [number for number in STOPS if number in _ignored or signal.getsignal(number) is not signal.SIG_IGN]


def listen(handle: Callable[[int, FrameType | None], object] | None = None) -> dict[signal.Signals, Handler]:
    """From now on only note the stops, or call `handle` with them; returns what was done with them before."""
    before = {number: signal.signal(number, handle or note) for number in heard()} | _ignored
    _ignored.clear()
    return before


def give_back(before: Mapping[signal.Signals, Handler]) -> None:
    """Let the stops mean what they did before."""
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def noting() -> Iterator[None]:
    """Meanwhile the stops are only noted."""
    before = listen()
    try:
        yield
    finally:
        give_back(before)


def note(number: int, _: FrameType | None = None) -> None:
    """Remember a stop. A second Ctrl-C ends the process at once."""
    if number == signal.SIGINT and signal.SIGINT in _noted:
        end_at_once(CODES["interrupt"])
    remember(number)


def remember(number: int) -> None:
    """The same for who decides about a second Ctrl-C."""
    _noted.append(signal.Signals(number))


def stop_the_command(number: int, _: FrameType | None) -> None:
    """End a command that has not begun to train; whatever it holds is given back on the way."""
    is_first = not _noted
    note(number)
    if is_first:
        raise StopError(signal.Signals(number))


def asked() -> signal.Signals | None:
    """The first stop that was noted."""
    return _noted[0] if _noted else None


def take() -> set[str]:
    """What was asked for until now."""
    kinds = {STOPS[number] for number in _noted}
    _noted.clear()
    return kinds


def ignore(before: Mapping[signal.Signals, Handler] | None = None) -> None:
    """How this process ends is decided: no stop changes it, not even while Python takes itself down.

    A later run in the same process gives back what was done with them `before`.
    """
    for number in heard():
        was = signal.signal(number, signal.SIG_IGN)
        _ignored.setdefault(number, (before or {}).get(number, was))


@contextmanager
def held() -> Iterator[None]:
    """Meanwhile the stops wait: a process that is started here has none before it says `release`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release() -> None:
    """In a process that was started while they were held: let the stops through, now that it knows what to do."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def end_at_once(code: int) -> NoReturn:
    """End this process without another line of Python, but not without the cursor that a live bar hides."""
    with suppress(Exception):
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")
    os._exit(code)
