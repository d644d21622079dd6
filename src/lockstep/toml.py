"""TOML files: read with a sentence where they cannot be, and written, which the standard library does not."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UserError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a config file; an unreadable or malformed one is a UserError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read config {path}", f"{error.strerror or error}".lower()) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
