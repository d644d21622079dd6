"""The shape of the package: how much of it there is, and that a name means one thing.

What is not so yet stands in the tables called NOT_YET, which may only become shorter: `python -m tests.unit.test_shape`
prints them as they could be now.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lockstep

PACKAGE = Path(lockstep.__path__[0])
PATHS = [path for path in sorted(PACKAGE.rglob("*.py")) if "node_modules" not in path.parts]
FILES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8")) for path in PATHS}

MOST_LINES = 45_000
MOST_MODULES_IN_THE_ROOT = 12
MOST_MODULES_IN_A_FOLDER = 14
MOST_COMPLEXITY = 20
MOST_PARAMETERS = 8
MOST_ATTRIBUTES_OF_THE_ENGINE = 25

LARGE_FOLDERS = {
    "cli": "a module for each command",
}
"""Folders with more modules than that, and why."""

KEYWORD_APIS = {
    # What scripts call, by keyword.
    *("init_run.py init", "run.py Run.setup", "run.py Run.loader"),
    # Functions whose parameters are the options of a command.
    *(f"cli/{name}.py {name}_command" for name in ("bench", "compare", "doctor", "plan", "submit", "verify")),
}
"""Functions with more parameters than that, all of them public and called by keyword."""

NOT_YET_LINES = 56_119
NOT_YET_ATTRIBUTES = 10
NOT_YET_MOCKED: set[str] = set()
NOT_YET_FOLDERS: set[str] = set()
NOT_YET_PARAMETERS: set[str] = set()
NOT_YET_FILES: set[str] = set()
NOT_YET_CLASSES: set[str] = set()


def test_the_package_can_be_read() -> None:
    assert lines() <= max(MOST_LINES, NOT_YET_LINES)


def test_the_root_has_what_a_reader_needs_first() -> None:
    assert len([file for file in FILES if "/" not in file]) <= MOST_MODULES_IN_THE_ROOT


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    assert large_folders() <= LARGE_FOLDERS.keys() | NOT_YET_FOLDERS


def test_a_file_name_means_one_thing() -> None:
    """The command of a module or package may have its name: cli/bench.py is that of checkup/bench.py."""
    assert without(file_names(), NOT_YET_FILES) == {}


def test_a_class_name_means_one_thing() -> None:
    assert without(class_names(), NOT_YET_CLASSES) == {}


def test_a_function_can_be_followed() -> None:
    """McCabe's cyclomatic complexity, as ruff counts it."""
    options = ["--isolated", "--select", "C901", "--config", f"lint.mccabe.max-complexity={MOST_COMPLEXITY}"]
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", *options, "--output-format", "json", str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert [f"{one['filename']}: {one['message']}" for one in found] == []


def test_a_function_takes_what_can_be_remembered() -> None:
    assert long_signatures() - KEYWORD_APIS - NOT_YET_PARAMETERS == set()
    assert KEYWORD_APIS - long_signatures() == set(), "no exception for what needs none"


def test_what_runs_is_not_what_tests_patch() -> None:
    assert mocked() <= NOT_YET_MOCKED


def test_the_engine_is_a_small_face() -> None:
    assert len(attributes_of_the_engine()) <= max(MOST_ATTRIBUTES_OF_THE_ENGINE, NOT_YET_ATTRIBUTES)


# What there is ------------------------------------------------------------------------------------------------------


def lines() -> int:
    return sum(len((PACKAGE / file).read_text("utf-8").splitlines()) for file in FILES)


def large_folders() -> set[str]:
    found: dict[str, int] = defaultdict(int)
    for file in FILES:
        folder, _, name = file.rpartition("/")
        found[folder] += name not in ("__init__.py", "__main__.py")
    return {folder for folder, count in found.items() if count > MOST_MODULES_IN_A_FOLDER}


def file_names() -> dict[str, list[str]]:
    """The names that several modules and packages have, but for commands."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in FILES:
        path = Path(file)
        if path.stem not in ("__init__", "__main__") and path.parent != Path("cli"):
            places[path.stem].append(file)
        elif path.stem == "__init__" and path.parent.name:
            places[path.parent.name].append(f"{path.parent}/")
    return {name: homes for name, homes in places.items() if len(homes) > 1}


def class_names() -> dict[str, list[str]]:
    """The names that several classes have."""
    places: dict[str, list[str]] = defaultdict(list)
    for file, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file}:{node.lineno}")
    return {name: homes for name, homes in places.items() if len(homes) > 1}


def long_signatures() -> set[str]:
    return {
        f"{file} {name}"
        for file, tree in FILES.items()
        for name, function in functions_of(tree)
        if parameters_of(function) > MOST_PARAMETERS
    }


def mocked() -> set[str]:
    return {file for file in FILES if "unittest" in (PACKAGE / file).read_text("utf-8")}


def attributes_of_the_engine() -> set[str]:
    (engine,) = [node for node in FILES["engine.py"].body if isinstance(node, ast.ClassDef) and node.name == "Engine"]
    return attributes_of(engine)


def without(found: Mapping[str, list[str]], known: set[str]) -> dict[str, list[str]]:
    return {name: homes for name, homes in found.items() if name not in known}


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions of a module with their qualified names."""
    nodes: list[tuple[str, ast.AST]] = [("", tree)]
    while nodes:
        prefix, node = nodes.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if isinstance(child, ast.FunctionDef):
                    yield name, child
                nodes.append((f"{name}.", child))
            else:
                nodes.append((prefix, child))


def parameters_of(function: ast.FunctionDef) -> int:
    """How many parameters a caller gives."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([one for one in given if one.arg not in ("self", "cls")])


def attributes_of(owner: ast.ClassDef) -> set[str]:
    """What an instance of a class holds: the fields of a dataclass, and all that its methods set on themselves."""
    annotated = [node.target for node in owner.body if isinstance(node, ast.AnnAssign)]
    stored = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    own = {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
    return own | {target.id for target in annotated if isinstance(target, ast.Name)}


if __name__ == "__main__":
    for name, found in {
        "LINES": lines(),
        "ATTRIBUTES": len(attributes_of_the_engine()),
        "MOCKED": sorted(mocked()),
        "FOLDERS": sorted(large_folders() - LARGE_FOLDERS.keys()),
        "PARAMETERS": sorted(long_signatures() - KEYWORD_APIS),
        "FILES": file_names(),
        "CLASSES": class_names(),
    }.items():
        print(f"{name}: {json.dumps(found, indent=4)}")
