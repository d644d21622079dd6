"""What importing costs, and which way imports go."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lockstep

PACKAGE = Path(lockstep.__path__[0])
MODULES = {
    ".".join(["lockstep", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem != "__main__"  # importing it runs the command
}

WITHOUT_TORCH = [
    "lockstep",
    "lockstep.config.schema",
    "lockstep.layout",
    "lockstep.errors",
    "lockstep.record.log",
    "lockstep.record.folder",
    "lockstep.config.catalog",
    "lockstep.data.sets",
    "lockstep.observe.trace_digest",
    "lockstep.cli.app",
]


def test_importing_what_only_describes_leaves_torch_out() -> None:
    _run(f"""
for module in {WITHOUT_TORCH!r}:
    importlib.import_module(module)
    heavy = {{"torch", "numpy", "tensorboard"}} & set(sys.modules)
    assert not heavy, f"importing {{module}} imports {{heavy}}"
""")


def test_asking_the_command_for_help_or_the_recipes_leaves_torch_out() -> None:
    _run("""
from lockstep.cli import main

for question in ("--help", "--version", "train --help", "run --help", "train --list", "fetch --help", "fetch --list"):
    sys.argv = ["lockstep", *question.split()]
    with contextlib.redirect_stdout(io.StringIO()) as answer, contextlib.suppress(SystemExit):
        main()
    assert answer.getvalue().strip(), f"lockstep {question} said nothing"
    assert "torch" not in sys.modules, f"lockstep {question} imports torch"
""")


def test_every_module_imports() -> None:
    for module in MODULES:
        importlib.import_module(module)


@pytest.mark.parametrize("name", lockstep.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(lockstep, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(lockstep, "no_such_name")
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from lockstep import no_such_name")


LAYERS = (
    *("errors", "layout", "text", "config", "runtime", "record", "data", "follow", "step", "parallel", "checkpoint"),
    *(
        "faults",
        "training",
        "engine",
        "trial",
        "links",
        "recipes",
        "planner",
        "compare",
        "page",
        "sinks",
        "prove",
        "observe",
    ),
    *("run", "init_run", "trainer", "load_run", "launch", "checkup", "lab", "cli"),
)
"""The packages and modules of the root, from the ground up: none imports one to its right, for the type checker and
inside of functions neither; only commands are imported late, so that `--help` is fast."""


def test_no_package_imports_one_above_it() -> None:
    above = []
    for module in MODULES:
        layer = _layer(module)
        if layer is None:
            continue  # the public names, each imported when it is asked for
        for imported in _imports_of(module, all_of_them=True):
            other = _layer(imported)
            if other is not None and LAYERS.index(other) > LAYERS.index(layer):
                above.append(f"{module} imports {imported}")
    assert not above, "\n".join(sorted(above))


def test_every_package_has_its_layer() -> None:
    assert {_layer(module) for module in MODULES} == {None, *LAYERS}


def test_imports_go_one_way() -> None:
    graph = {module: _imports_of(module, all_of_them=False) for module in MODULES}
    # Raises a CycleError that names the modules of a cycle.
    assert set(TopologicalSorter(graph).static_order()) >= set(MODULES)


def _run(code: str) -> None:
    script = f"import contextlib, importlib, io, sys\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _imports_of(module: str, *, all_of_them: bool) -> set[str]:
    """The modules of the package that importing this one imports, or that stand anywhere in it."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(MODULES[module].read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
        elif not all_of_them and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif all_of_them or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)
    return {name for name in found if name in MODULES}


def _layer(module: str) -> str | None:
    return module.split(".")[1] if "." in module else None
