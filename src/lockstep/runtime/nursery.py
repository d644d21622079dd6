"""A process of the launcher that imports torch once and then becomes, by fork, every worker of this node.

Importing torch takes seconds. Ranks that are born here have it at once, at the first start and at every restart.

    launcher  --  {"environment": ...}  ->  nursery        start a worker
    launcher  <-  {"pid": ...}          --  nursery        it is there
    launcher  <-  {"pid": ..., "code": ...}  -- nursery    it has ended
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from lockstep.runtime import stop_signals

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


# The launcher's side ----------------------------------------------------------------------------------------------


class Nursery:
    """Starts workers that run `python -m lockstep.launch.worker` with the arguments `worker`."""

    def __init__(self, worker: list[str]) -> None:
        self._worker = worker
        self._children: dict[int, Child] = {}
        self._begin()

    def start(self, environment: dict[str, str]) -> Child:
        """A new worker, in a session of its own, with these environment variables and no others."""
        if self._process.poll() is not None:
            self._connection.close()
            self._begin()
        child = Child(self)
        with suppress(OSError):  # it has died; what is read then tells
            self._connection.send_bytes(json.dumps({"environment": environment}).encode())
        while child.pid < 0 and child.returncode is None:
            self._hear(child)
        return child

    def close(self) -> None:
        """End the process, and with it the workers that live."""
        self._connection.close()
        self._process.kill()  # it may still be importing
        self._process.wait()

    def hear_all(self) -> None:
        """Note which workers have ended."""
        while self._connection.poll():
            if not self._hear():
                return

    def _begin(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-u", "-m", "lockstep.launch.worker", str(theirs.fileno()), *self._worker]
        with stop_signals.held():  # until it knows what to do with a stop
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()

    def _hear(self, newborn: Child | None = None) -> bool:
        """Take one piece of news; False where there will be no more, because the process has died."""
        try:
            news = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            code = self._process.wait() or 1
            for child in (*self._children.values(), *([newborn] if newborn else [])):
                child.returncode = code  # the kernel ends them with it
            self._children.clear()
            return False
        if "code" in news:
            self._children.pop(news["pid"]).returncode = news["code"]
        else:
            assert newborn is not None, "a worker comes only when one was asked for"
            newborn.pid = news["pid"]
            self._children[newborn.pid] = newborn
        return True


class Child:
    """A worker, with what torch's agent uses of subprocess.Popen."""

    def __init__(self, nursery: Nursery) -> None:
        self.pid = -1
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """The exit code, None while it runs; as with Popen -N is a signal's number."""
        if self.returncode is None:
            self._nursery.hear_all()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("worker", timeout or 0)
            time.sleep(0.01)
        return code


# The process's own side -------------------------------------------------------------------------------------------


def be_born(descriptor: int, what: str, target: str) -> None:
    """Wait for the launcher to ask for workers: returns in each of those, and never in the process that waits."""
    die_with_parent()
    launcher = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the launcher, too
    for number in stop_signals.heard():  # what a scheduler sends to one process is meant for the run
        signal.signal(number, lambda received, _: os.kill(launcher, received))
    stop_signals.release()
    if what != "script" or not sets_variables(Path(target)):
        _import_torch()
    connection = Connection(descriptor)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        for ready in wait([connection, woken]):
            if ready is not connection:
                os.read(woken, 4096)
                _tell_of_the_dead(connection)
                continue
            try:
                order = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the launcher has closed it, or is gone
            if _fork(connection):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (woken, wakes):
                    os.close(descriptor)
                connection.close()
                os.environ.clear()
                os.environ.update(order["environment"])
                _call_oneself(f"lockstep-rank{os.environ['RANK']}")
                return


def sets_variables(script: Path) -> bool:
    """Whether a script may set environment variables, some of which torch reads while it is imported."""
    try:
        return re.search(r"\b(environ|putenv)\b", script.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return True


def die_with_parent() -> None:
    """End when the process that started this one does, however that ends (Linux only; elsewhere this does nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _fork(connection: Connection) -> bool:
    """Whether this is the new process, for which stops wait; the old one tells the launcher of it."""
    nursery = os.getpid()
    began, begins = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.STOPS)
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        if os.getppid() != nursery:  # it was killed before the call
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()  # before anybody may send its group a signal
        os.close(began)
        os.close(begins)
        return True
    stop_signals.release()
    os.close(begins)
    os.read(began, 1)
    os.close(began)
    connection.send_bytes(json.dumps({"pid": pid}).encode())
    return False


def _tell_of_the_dead(connection: Connection) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            news: dict[str, Any] = {"pid": ended[0], "code": os.waitstatus_to_exitcode(ended[1])}
            connection.send_bytes(json.dumps(news).encode())


def _import_torch() -> None:
    """Everything that a training needs sooner or later. What cannot be imported fails in the worker, which says why."""
    # Else torch asks the driver whether there is a GPU, and processes that are forked then cannot use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with suppress(Exception):
        for module in ("torch._dynamo", "lockstep.init_run", "lockstep.trainer"):  # the first is what optimizers import
            importlib.import_module(module)
    gc.freeze()  # else the first collection of every worker would copy all pages


def _call_oneself(name: str) -> None:
    """What `top` and `ps -o comm` show."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
