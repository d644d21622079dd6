"""Which parameters of a test everybody runs, and which only CI."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def others_slow(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Parameters of a test, those that are not quick marked slow; a tuple is several arguments."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[] if value in quick else pytest.mark.slow
        )
        for value in values
    ]
