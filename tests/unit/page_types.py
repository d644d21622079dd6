"""The kinds of panels.py as TypeScript: `python -m tests.unit.page_types` writes them for the page's script."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.page import panels

TARGET = Path(panels.__file__).parent / "front/src/panels.d.ts"
PLAIN = {str: "string", float: "number", int: "number", bool: "boolean", type(None): "null"}


def type_text(kind: Any) -> str:
    """A type of Python as JSON brings it to the page."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type) and is_dataclass(kind):
        return str(kind.__name__)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " | ".join(f'"{value}"' for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(type_text, inner)))
    if origin is tuple:
        return f"[{', '.join(map(type_text, inner))}]"
    assert origin is list, kind
    return f"({type_text(inner[0])})[]" if " | " in type_text(inner[0]) else f"{type_text(inner[0])}[]"


def declarations() -> str:
    """All of the file."""
    lines = ["// What the page is made of, from panels.py: `python -m tests.unit.page_types` writes it."]
    for name, kind in vars(panels).items():
        if is_dataclass(kind) and isinstance(kind, type):
            hints = typing.get_type_hints(kind)
            lines += ["", f"export interface {name} {{"]
            lines += [f"  {field.name}: {type_text(hints[field.name])};" for field in fields(kind)]
            lines += ["}"]
    lines += ["", f"export type Panel = {' | '.join(kind.__name__ for kind in typing.get_args(panels.Panel))};", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(declarations(), encoding="utf-8")
