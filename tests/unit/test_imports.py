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
    "lockstep.config",
    "lockstep.layout",
    "lockstep.errors",
    "lockstep.events",
    "lockstep.folder",
    "lockstep.recipes.catalog",
    "lockstep.data.sets",
    "lockstep.trace_digest",
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

for question in ("--help", "train --help", "run --help", "train --list", "fetch --help", "fetch --list"):
    sys.argv = ["lockstep", *question.split()]
    with contextlib.redirect_stdout(io.StringIO()) as answer, contextlib.suppress(SystemExit):
        main()
    assert answer.getvalue().strip(), f"lockstep {question} said nothing"
    assert "torch" not in sys.modules, f"lockstep {question} imports torch"
""")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_imports(module: str) -> None:
    importlib.import_module(module)


@pytest.mark.parametrize("name", lockstep.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(lockstep, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(lockstep, "no_such_name")
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from lockstep import no_such_name")


@pytest.mark.parametrize(
    ("module", "may_import"),
    [
        ("errors", set()),
        ("layout", {"errors"}),
        ("event_schema", {"errors"}),
        ("events", {"errors", "event_schema"}),
        ("recipes.catalog", {"errors"}),
        ("cadence", set()),
        ("toml", {"errors"}),
        ("selection", {"errors"}),
        ("config", {"cadence", "errors", "layout", "recipes.catalog", "selection", "toml"}),
    ],
)
def test_what_describes_imports_nothing_above_it(module: str, may_import: set[str]) -> None:
    imported = _imports_of(f"lockstep.{module}", also_inside_functions=True)
    assert imported <= {f"lockstep.{name}" for name in may_import}


def test_imports_go_one_way() -> None:
    graph = {module: _imports_of(module, also_inside_functions=False) for module in MODULES}
    # Raises a CycleError that names the modules of a cycle.
    assert set(TopologicalSorter(graph).static_order()) >= set(MODULES)


def _run(code: str) -> None:
    script = f"import contextlib, importlib, io, sys\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _imports_of(module: str, *, also_inside_functions: bool) -> set[str]:
    """The modules of the package that importing this one imports; what stands there for the type checker does not."""
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
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif also_inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)
    return {name for name in found if name in MODULES}
