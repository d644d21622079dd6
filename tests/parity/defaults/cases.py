"""All cases of the table, by name."""

from __future__ import annotations

from tests.parity.defaults import basics, coupled, draws, sequences, state
from tests.parity.defaults.case import Case

ALL: tuple[Case, ...] = (*basics.CASES, *draws.CASES, *coupled.CASES, *sequences.CASES, *state.CASES)
CASES = {case.name: case for case in ALL}
assert len(CASES) == len(ALL), "names are unique"
