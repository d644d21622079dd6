"""The list of tests that wait for CI, or for a soak, names tests that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import budget

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("entry", [*budget.SLOW, *budget.SOAK])
def test_an_entry_names_a_test_or_a_file_of_them(entry: str) -> None:
    file, _, test = entry.partition("::")
    wanted = f"def {test.partition('[')[0]}(" if test else "def test_"
    assert wanted in (ROOT / file).read_text(encoding="utf-8")


def test_a_soak_is_not_run_by_ci() -> None:
    name = "tests/parity/test_tensor.py::test_every_rank_reports_the_steps_of_one_process"
    assert budget.is_soak(f"{name}[cp=4]")
    assert not budget.is_soak(f"{name}[tp=2]")
