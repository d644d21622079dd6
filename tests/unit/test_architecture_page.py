"""docs/architecture.md: its drawing, its tables and its walk of a step are those of the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_architecture", DOCS / "make_architecture.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawing_and_the_tables_are_those_of_the_code():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert page == _generator().render(page), "run `make maps`"


def test_every_module_says_in_one_line_what_it_is_for():
    maker = _generator()
    for path in maker.modules():
        line = maker.summary(path)
        assert line, f"{path} has no docstring"
        assert len(line) <= 110, f"the first line of {path} is longer than 110 characters"
        assert line.endswith((".", "?", "!", "`", ")")), f"the first line of {path} is no sentence: {line}"


def test_the_walk_is_short_and_names_files_that_are_there():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    walk = page.split("## One optimizer step, through the files\n")[1].split("\n## ")[0]
    assert len(walk.strip().splitlines()) <= 60
    named = set(re.findall(r"`([\w/]+(?:\.py|/))", walk))
    package = DOCS.parent / "src" / "lockstep"
    assert named
    assert not [name for name in sorted(named) if not (package / name).exists()]


def test_pages_name_files_that_are_there():
    root = DOCS.parent
    for page in (*DOCS.glob("*.md"), *root.glob("*.md")):
        text = re.sub(
            r"^\| `.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE
        )  # without tables of packages
        named = re.findall(r"`([\w./]+/\w+\.py)\b", text)
        places = (root, root / "src", root / "src" / "lockstep")
        assert not [
            name for name in named if "NAME" not in name and not any((place / name).exists() for place in places)
        ], page.name
