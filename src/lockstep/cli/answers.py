"""How commands answer: text for people, one line of JSON for programs, sentences on stderr, and files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import UserError, reason

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.table import Table


def open_terminal(as_json: bool = False) -> Terminal:
    """Where text for people goes: to stderr, where stdout is for JSON."""
    from rich.console import Console as Terminal

    return Terminal(stderr=as_json, highlight=False)


def say(terminal: Terminal, *lines: str, style: str | None = None) -> None:
    """Print lines for people as they are, however long they are."""
    for line in lines:
        terminal.print(line, style=style, markup=False, soft_wrap=True)


def plain_table(*columns: str) -> Table:
    """A table without lines."""
    from rich.table import Table

    return Table(*columns, box=None, header_style="bold", pad_edge=False)


def answer(result: Any) -> None:
    """The result for programs, as one line on stdout."""
    print(json.dumps(result, allow_nan=False), flush=True)


def complain(text: str) -> None:
    """Why a command did not do what it was asked for, on stderr."""
    print(f"lockstep: {text}", file=sys.stderr)


def check_output(option: str, path: Path | None, suffix: str) -> None:
    """Refuse a file that cannot be written before there is anything to write."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder", f"name a file in it, as in {path / f'name{suffix}'}")
    if path.suffix != suffix:
        raise UserError(f"{option} {path} is not a {suffix} file", f"call it {path.with_suffix(suffix)}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path} would be in a folder that is not there", f"make {path.parent} first")
    if not all(os.access(place, os.W_OK) for place in (path.parent, path) if place.exists()):
        raise UserError(f"{option} {path} cannot be written", "name a file in a folder of your own")


def write_output(path: Path, text: str) -> None:
    """Write a file that `check_output` had nothing against; a disk may be full all the same."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({reason(error)})", "name a file somewhere else") from None
