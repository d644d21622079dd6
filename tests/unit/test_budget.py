"""The list of tests that wait for CI, or for a soak, names tests that are there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests import budget

ROOT = Path(__file__).parents[2]


@cache
def text_of(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def test_an_entry_names_a_test_or_a_file_of_them() -> None:
    for entry in (*budget.SLOW, *budget.SOAK):
        file, _, test = entry.partition("::")
        wanted = f"def {test.partition('[')[0]}(" if test else "def test_"
        assert wanted in text_of(file), entry


def test_the_cells_of_a_table_are_those_of_a_file_of_tests() -> None:
    for file in (*budget.SLOW_CELLS, *budget.SOAKED_CELLS):
        assert "def test_" in text_of(file), file


def test_a_soak_is_not_run_by_ci() -> None:
    name = "tests/parity/test_tensor.py::test_every_rank_reports_the_steps_of_one_process"
    assert budget.is_soak(f"{name}[cp=4]")
    assert not budget.is_soak(f"{name}[tp=2]")
