"""Every planted fault (planted.py) in a real `lockstep run`: the verdict, the exit code, the weights, nothing left.

Only a few of them belong to the fast tests; the others take minutes together.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.record.failure import short_host
from tests.faults.planted import BY_NAME, FAULTS, SECONDS_TO_EXPLAIN, TIMEOUT, TRAINING, Fault, Row, plant, same_weights
from tests.patience import patient

FAST = ("exception", "kill", "skipped-collective")
SAVES_EVERY = 10
"""As in planted_training.py."""
FINAL = ("exception", "exit-3", "segfault", "kill", "memory")
"""Those that are looked at without restarts too, for the verdict at the end."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Row:
    row = plant(None, tmp_path_factory.mktemp("undisturbed"))
    assert row.code == 0, row.output
    return row


def slow_but(fast: tuple[str, ...], names: tuple[str, ...]) -> list[object]:
    return [pytest.param(BY_NAME[name], id=name, marks=[] if name in fast else pytest.mark.slow) for name in names]


@pytest.mark.limit(400)
@pytest.mark.parametrize("fault", slow_but(FAST, tuple(BY_NAME)))
def test_a_fault_ends_as_it_should(fault: Fault, undisturbed: Row, tmp_path: Path) -> None:
    timeout = patient(TIMEOUT)
    row = plant(fault, tmp_path, timeout=timeout)
    assert row.left == []
    assert row.code == fault.code, row.output
    check_failure(row)
    if fault.hangs:
        check_hang(row, timeout)
    if fault.goes_on:
        assert row.last_code in (None, 0), row.output
        assert row.lost is not None
        # While one thread saves, another may do a step more.
        # A save that was still on its way when the fault came is lost with it.
        assert row.lost - fault.lost in (0, SAVES_EVERY, int(fault.name == "kill-while-saving"))
        assert row.weights is not None
        assert same_weights(row, undisturbed) == fault.equal
    else:
        assert row.weights is None
        check_verdict(row)
    if fault.code in (75, 130):
        assert row.failures == []
        assert "Traceback" not in row.output


@pytest.mark.slow
@pytest.mark.limit(400)
@pytest.mark.parametrize("fault", slow_but(FINAL, FINAL))
def test_without_restarts_the_verdict_is_final(fault: Fault, tmp_path: Path) -> None:
    row = plant(fault, tmp_path, more=["--restarts", "0", "--on-oom", "stop"])
    assert row.left == []
    assert row.code == 1
    assert not row.failures[0]["restarted"]
    check_failure(row)
    check_verdict(row)


def check_failure(row: Row) -> None:
    """The `failure` event says who, what and where."""
    fault = row.fault
    if not fault.cause:
        assert row.failures == []
        return
    event = row.failures[0]
    assert event["cause"] == fault.cause, event
    assert event["host"] == short_host()
    assert fault.rank in (None, event["rank"]), event
    if fault.goes_on == "restart" and row.code == 0:
        assert event["restarted"]
        assert "starting again from step" in row.output
    for word in fault.words:
        assert word in row.output
    if fault.line:
        assert fault.line in line_of(event["where"]), event


def line_of(where: str) -> str:
    """What stands in the line that a verdict names."""
    match = re.fullmatch(r"train\.py:(\d+) in .+", where)
    assert match, where
    return TRAINING.read_text().splitlines()[int(match[1]) - 1]


def check_verdict(row: Row) -> None:
    """The end of the console has all that people need, in few lines."""
    verdict = row.verdict.splitlines()
    assert 0 < len(verdict) <= 15, row.output
    assert "Traceback" not in row.verdict
    event = row.failures[-1]
    assert f"rank {event['rank']}" in row.verdict
    if not row.fault.hangs and "all 2 ranks stopped" not in row.verdict:
        assert f"rank {event['rank']} on {short_host()}" in row.verdict
    assert event["where"] in row.verdict
    assert "lockstep run --nproc 2 --device cpu" in row.verdict
    log = row.folder / row.verdict.partition("log: ")[2].strip()
    assert log.is_file(), row.verdict


def check_hang(row: Row, timeout: float) -> None:
    """By the run's own clocks: from the fault to the verdict."""
    assert row.hang in ("", row.fault.hang)  # none where gloo finds that sizes differ, and aborts
    assert row.detected is not None
    assert row.detected <= timeout + patient(SECONDS_TO_EXPLAIN), row.output


def test_the_table_has_faults_of_every_kind() -> None:
    assert len(FAULTS) >= 18
    assert {fault.cause for fault in FAULTS} >= {"exception", "exit", "signal", "memory", "hang", "left", ""}
    assert set(FAST) <= set(BY_NAME)
