"""What of a log cannot be read: counted while reading, and told in sentences. Nothing in a file raises further."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import NoneType
from typing import Any

import numpy as np

from lockstep.page.reading.series import MOST_ROWS, Array

LONGEST_NAME = 120
LONGEST_TEXT = 1000
MOST_NAMED = 5
MOST_SORTS = 100
"""Of damage that are told apart; the rest is counted together."""
LARGEST_COUNT = 2**53
"""Whole numbers above this one are not what anybody counted."""
LARGEST = 1e18
"""The same for seconds, bytes and joules."""
NOT_FINITE = ("NaN", "Infinity", "-Infinity")

Fields = Mapping[str, Any]


class UnusableError(Exception):
    """A field is not what it has to be, so that the event is left out."""


def number(fields: Fields, name: str) -> float:
    """A number, finite or not."""
    value = fields.get(name)
    if type(value) is float:
        return value
    if type(value) is int and abs(value) <= LARGEST_COUNT:
        return float(value)
    if isinstance(value, str) and value in NOT_FINITE:
        return float(value)
    raise UnusableError(f"its field {name!r} is not a number")


def finite(fields: Fields, name: str) -> float:
    """A number that is finite and not negative: seconds, or bytes."""
    value = number(fields, name)
    if not 0 <= value <= LARGEST:
        raise UnusableError(f"its field {name!r} is not a number from 0, or a very large one")
    return value


def finite_or_none(fields: Fields, name: str) -> float | None:
    """The same, where nobody may know it."""
    return None if fields.get(name) is None else finite(fields, name)


def whole(fields: Fields, name: str, least: int = 0) -> int:
    """A whole number."""
    value = fields.get(name)
    if type(value) is not int or not least <= value <= LARGEST_COUNT:
        raise UnusableError(f"its field {name!r} is not a whole number from {least}")
    return value


def whole_or_none(fields: Fields, name: str) -> int | None:
    """The same, where there may be none."""
    return None if fields.get(name) is None else whole(fields, name)


def text(fields: Fields, name: str, most: int = LONGEST_TEXT) -> str:
    """Text as it is, cut where it is longer than anybody reads."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise UnusableError(f"its field {name!r} is not text")
    return cut(value, most)


def cut(value: str, most: int = LONGEST_NAME) -> str:
    """Text of at most so many characters, which can be written as UTF-8."""
    short = value if len(value) <= most else value[: most - 3] + "..."
    return short.encode("utf-8", "replace").decode()


def listed(fields: Fields, name: str, most: int = MOST_ROWS) -> list[Any]:
    """A list that is not absurdly long."""
    value = fields.get(name)
    if not isinstance(value, list) or len(value) > most:
        raise UnusableError(f"its field {name!r} is not a list of at most {most}")
    return value


def inner(fields: Fields, name: str) -> Fields:
    """An object inside of the event."""
    value = fields.get(name)
    if not isinstance(value, dict):
        raise UnusableError(f"its field {name!r} is not an object")
    return value


def array(values: list[Any]) -> Array:
    """Numbers of all ranks: NaN where one is not a number, or a very large one."""
    result = _array(values)
    result[np.abs(result) > LARGEST] = np.nan
    return result


def _array(values: list[Any]) -> Array:
    if set(map(type, values)) <= {float, int, NoneType}:
        with suppress(OverflowError):
            return np.array(values, float)
    return np.array([_number_or_nan(value) for value in values], float)


def _number_or_nan(value: object) -> float:
    try:
        return number({"": value}, "")
    except UnusableError:
        return math.nan


class Damage:
    """Counts what is wrong, by sentence, with the line where it was first seen."""

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}
        self._kinds: dict[str, list[int]] = {}
        self._sayings: dict[str, Callable[[int, str], str]] = {}

    def event(self, kind: str, why: str, line: int) -> None:
        """An event that is left out."""
        self.count(
            f"{kind} {why}",
            line,
            lambda count, where: f"{_some(count, f'{kind} event')} cannot be used ({where}): {why}",
        )

    def line(self, why: str, line: int) -> None:
        """A line that is no event at all."""
        self.count(why, line, lambda count, where: f"{_some(count, 'line')} {_are(count)} {why} ({where})")

    def count(self, key: str, line: int, saying: Callable[[int, str], str]) -> None:
        """Anything else: `saying` makes the sentence of how often, and of where."""
        if key not in self._seen and len(self._seen) >= MOST_SORTS:
            key = "more"
            saying = lambda count, where: f"{_some(count, 'further event')} cannot be used ({where})"  # noqa: E731
        self._seen.setdefault(key, [0, line])[0] += 1
        self._sayings.setdefault(key, saying)

    def unknown_kind(self, kind: str, line: int) -> None:
        """An event of another version."""
        kind = cut(kind, 40)
        if kind not in self._kinds and len(self._kinds) >= MOST_SORTS:
            kind = "..."
        self._kinds.setdefault(kind, [0, line])[0] += 1

    def sentences(self) -> list[str]:
        """All of it, for people."""
        told = [self._sayings[key](count, _where(count, line)) for key, (count, line) in self._seen.items()]
        if self._kinds:
            count = sum(one for one, _ in self._kinds.values())
            names = ", ".join(repr(kind) for kind in list(self._kinds)[:MOST_NAMED])
            more = len(self._kinds) - MOST_NAMED
            names += f" and {more} more" if more > 0 else ""
            first = min(line for _, line in self._kinds.values())
            told.append(
                f"{_some(count, 'event')} {_are(count)} of a kind that this version does not know "
                f"({_where(count, first)}): {names}"
            )
        return told


def _where(count: int, line: int) -> str:
    return f"line {line}" if count == 1 else f"the first in line {line}"


def _some(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
