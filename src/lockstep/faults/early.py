"""Signals that come before a training can act on them: while Python still imports torch, a stop would kill a rank."""

from __future__ import annotations

import signal

STOPS = {
    signal.SIGINT: "interrupt",
    signal.SIGTERM: "terminate",
    signal.SIGUSR1: "terminate",
    signal.SIGUSR2: "terminate",
    signal.SIGHUP: "terminate",
}
"""The signals that stop a run on purpose, and what each asks for."""

_noted: set[int] = set()


def listen() -> None:
    """Note the signals of a scheduler from now on. Ctrl-C ends a process that has not begun to train."""
    for number in heard():
        if number != signal.SIGINT:
            signal.signal(number, lambda received, _: _noted.add(received))


def heard() -> list[signal.Signals]:
    """The stops that this process was not told to ignore, as nohup does with SIGHUP."""
    return [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]


def take() -> set[str]:
    """What was asked for until now."""
    asked = {STOPS[signal.Signals(number)] for number in _noted}
    _noted.clear()
    return asked
