"""What every test gets: the ranks, a limit on its time, and no silent skips in CI."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType

import psutil
import pytest

from tests import budget
from tests.patience import Deadline, patient
from tests.ranks import RankPool
from tests.signals import hear_all, own_signals

# Before anything imports torch, and for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

# Before anything is started, in every process of pytest: they are handed on.
hear_all()

DEFAULT_LIMIT = 120.0
# After the limit a test has this long to fail by itself; then the whole session is ended.
LAST_RESORT = 30.0
LOOKS_EVERY = 10.0

real_stderr = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of rank processes: `ranks.run(function, 4, ...)`."""
    with RankPool() as pool:
        yield pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        default=os.environ.get("CI", "").lower() not in ("", "0", "false"),
        help="a skipped or xfailed test that is not marked gpu fails the session (default where CI is set)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"limit(seconds): fail after so long on an idle machine, not {DEFAULT_LIMIT:g} s"
    )
    config.stash[real_stderr] = os.dup(2)
    if config.getoption("--no-skips"):
        config.pluginmanager.register(NoSkips(), "no-skips")


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[real_stderr])


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if budget.is_slow(item.nodeid) or budget.is_soak(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if budget.is_soak(item.nodeid):
            item.add_marker(pytest.mark.soak)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    with own_signals():
        return (yield)


class NoSkips:
    """Turns skips into a failure of the session, so that a green CI means that everything ran."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and "gpu" not in report.keywords:
            self.skipped.append(f"{report.nodeid}: {reason_of(report)}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(f"{report.nodeid}: {reason_of(report)}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped, which is a failure here", red=True)
            for line in self.skipped:
                terminalreporter.write_line(line)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfail {report.wasxfail}"
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    return str(report.longrepr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    with time_limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with time_limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    with time_limit(item):
        return (yield)


@contextlib.contextmanager
def time_limit(item: pytest.Item) -> Iterator[None]:
    """Fail the phase of a test that takes too long, with the stack of every thread on stderr.

    What the test waits for needs no timeout of its own: the processes that it started are ended with it.
    """
    marker = item.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker else DEFAULT_LIMIT
    deadline = Deadline(seconds)
    before = children()

    def look(_number: int, _frame: FrameType | None) -> None:
        __tracebackhide__ = True
        left = deadline.left
        # Python runs signal handlers between byte codes: a test stuck in C never gets here, but this timer does.
        faulthandler.dump_traceback_later(patient(left + LAST_RESORT), exit=True, file=item.config.stash[real_stderr])
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, min(left, LOOKS_EVERY))
            return
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        end_children(children() - before)
        pytest.fail(f"not done after {seconds:g} s of an idle machine")

    previous = signal.signal(signal.SIGALRM, look)
    look(signal.SIGALRM, None)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(map(int, thread.read_text().split()))
    return found


def end_children(pids: set[int]) -> None:
    """Kill these processes and all that they have started."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
