"""The page's script is checked against the panels that Python sends it."""

from __future__ import annotations

from lockstep.page import panels
from tests.unit.page_types import TARGET, declarations, type_text


def test_the_types_of_the_script_are_those_of_the_panels() -> None:
    assert TARGET.read_text(encoding="utf-8") == declarations(), "`python -m tests.unit.page_types` writes them anew"


def test_types_are_those_that_json_brings() -> None:
    assert type_text(list[panels.Number]) == "(number | null)[]"
    assert type_text(list[tuple[str, int]]) == "[string, number][]"
    assert type_text(panels.Level) == '"good" | "info" | "warning" | "error"'
