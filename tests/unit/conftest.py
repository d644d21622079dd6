"""What several tests of the page need."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from lockstep.page.panels import Advice, Chapter, Headline
from lockstep.page.reading.summary import Summary


@pytest.fixture
def plain_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for what makes sentences of a summary: these tests are of what is read and drawn."""

    def headline(summary: Summary, _written: float | None = None) -> Headline:
        return Headline(summary.name, "", summary.state, "", [])

    def compare_runs(summaries: Sequence[Summary]) -> list[Chapter]:
        return [Chapter(summary.name, "", []) for summary in summaries]

    def advise(_: Summary) -> list[Advice]:
        return []

    for name, function in {
        "advice.choose": advise,
        "sections.headline": headline,
        "sections.comparison": compare_runs,
    }.items():
        module = ModuleType(f"lockstep.page.{name}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
