"""The seconds of tests follow the load of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import patience


@pytest.mark.parametrize(
    ("loadavg", "expected"),
    [
        ("0.10 0.20 0.30 1/447 907", 1.0),
        ("3.00 0.20 0.30 1/447 907", 1.5),
        ("3.00 0.20 0.30 9/447 907", 4.5),
    ],
    ids=["idle", "of the last minute", "of this moment"],
)
def test_slowness_is_the_number_of_processes_that_want_a_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loadavg: str, expected: float
) -> None:
    monkeypatch.setattr(patience, "CORES", 2)
    monkeypatch.setattr(patience, "LOAD", tmp_path / "loadavg")
    (tmp_path / "loadavg").write_text(loadavg)
    assert patience.slowness() == expected
    assert patience.patient(15) == 15 * expected


def test_a_deadline_follows_the_load_as_it_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, load = 0.0, 1.0
    monkeypatch.setattr(patience, "monotonic", lambda: now)
    monkeypatch.setattr(patience, "slowness", lambda: load)
    deadline = patience.Deadline(10)
    now = 4.0
    assert deadline.left == 6
    load, now = 5.0, 14.0
    assert deadline.left == 4
    load, now = 1.0, 17.0
    assert not deadline.passed
    now = 18.0
    assert deadline.passed


def test_what_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "slowness", lambda: 1.0)
    asked = iter([False, False, True])
    patience.wait_for(lambda: next(asked), "the third time")
    with pytest.raises(AssertionError, match=r"waited 0\.1 s for the end"):
        patience.wait_for(lambda: False, "the end", 0.1)
