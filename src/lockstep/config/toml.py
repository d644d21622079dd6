"""TOML files: read with a sentence where they cannot be, and written, which the standard library does not."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

MOST_LEVELS = 50
"""How deep values may be nested: far more than any config needs, far less than Python can bear."""


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """What `source` says as TOML; what nests too deep is a UserError, what is no TOML a ValueError."""
    try:
        values = tomllib.loads(text)
        level: list[Any] = [values]
        for _ in range(MOST_LEVELS):
            level = [one for value in level for one in _inside(value)]
        if not level:
            return values
    except RecursionError:
        pass
    raise UserError(f"{source} nests its values more than {MOST_LEVELS} deep", "write them flatter")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a config file; an unreadable or malformed one is a UserError."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"), f"config {path}")
    except OSError as error:
        raise UserError(f"cannot read config {path}", f"{error.strerror or error}".lower()) from None
    except UserError:
        raise
    except ValueError as error:  # of TOML, of UTF-8, or a number of thousands of digits
        raise UserError(f"config {path} is not TOML", str(error)) from None


def write_toml(values: Mapping[str, Any]) -> str:
    """Values and one level of tables as TOML; what is None stands as a comment."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [_line(key, value) for key, value in values.items() if key not in tables]
    for name, table in tables.items():
        lines += ["", f"[{_key(name)}]", *(_line(key, value) for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any) -> str:
    return f"# {_key(key)} is unset" if value is None else f"{_key(key)} = {_value(value)}"


def _key(key: str) -> str:
    """A key as TOML has it: quoted where it is more than letters and digits."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    return repr(value)
