"""docs/faults.md tells of every fault that is planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.planted import FAULTS, Fault

PAGE = Path(__file__).parent.parent.parent / "docs" / "faults.md"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_page_has_a_row_for_the_fault(fault: Fault) -> None:
    _, begins, rest = PAGE.read_text(encoding="utf-8").partition("<!-- faults:begin -->")
    table, ends, _ = rest.partition("<!-- faults:end -->")
    assert begins
    assert ends
    rows = [line for line in table.splitlines() if line.startswith(f"| `{fault.name}`: {fault.what} | {fault.where} |")]
    assert len(rows) == 1, "run benchmarks/faults.py --write"
    assert rows[0].split("|")[3].strip() != "not measured"
