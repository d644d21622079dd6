"""Bring the drawing of the layers and the tables of modules in docs/architecture.md up to date: `make maps`."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "src" / "lockstep"
GROUPS = {
    "errors": "the ground: words, settings, text",
    "runtime": "this process, and what a run leaves behind",
    "data": "what a step is made of",
    "engine": "one optimizer step under any layout",
    "links": "before a run, beside it and after it",
    "run": "one run from start to end",
    "launch": "processes and machines",
    "cli": "what a user types",
}
"""The layer that each group of the drawing begins with, from the ground up; it goes on to the next of them."""

WIDTH = 76


def layers() -> list[str]:
    """The packages from the ground up, as the test of imports has them."""
    tree = ast.parse((ROOT / "tests" / "unit" / "test_imports.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return [leaf.value for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant)]
    raise AssertionError("tests/unit/test_imports.py has no LAYERS")


def draw_layers() -> str:
    """The layers as boxes, the highest on top: nothing imports what stands above it, or to its right in a box."""
    boxes: list[tuple[str, list[str]]] = []
    for layer in layers():
        if layer in GROUPS:
            boxes.append((GROUPS[layer], []))
        boxes[-1][1].append(layer)
    lines = []
    for number, (title, names) in enumerate(reversed(boxes)):
        left, right = "┌┐" if number == 0 else "├┤"
        lines.append(f"{left}─ {title} {'─' * (WIDTH - len(title) - 5)}{right}")
        lines += [f"│ {line:{WIDTH - 4}} │" for line in textwrap.wrap("  <  ".join(names), WIDTH - 4)]
    return "\n".join(["```text", *lines, f"└{'─' * (WIDTH - 2)}┘", "```"])


def summary(module: Path) -> str:
    """What a module is for: the first line of its docstring."""
    return (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def modules() -> list[Path]:
    """All modules, but for those that say nothing: what runs a package as a command."""
    return sorted(
        path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py" and "node_modules" not in path.parts
    )


def make_tables() -> str:
    """One table a package, in the order of the layers; a package's inner folders stand in its table."""
    known = modules()
    roots = [path for path in known if path.parent == PACKAGE]
    parts = [_table("The root", "what a reader needs first", roots)]
    for layer in layers():
        inside = [path for path in known if PACKAGE / layer in path.parents]
        if inside:
            init = PACKAGE / layer / "__init__.py"
            parts.append(_table(f"`{layer}/`", summary(init), [path for path in inside if path != init]))
    return "\n\n".join(parts)


def _table(title: str, about: str, files: list[Path]) -> str:
    base = PACKAGE if title == "The root" else PACKAGE / title.strip("`/")
    rows = []
    for path in sorted(files, key=lambda path: (len(path.relative_to(base).parts) > 1, path.parent, path.name)):
        name = path.relative_to(base).as_posix().replace("__init__.py", "")
        rows.append(f"| `{name or '__init__.py'}` | {summary(path)} |")
    return "\n".join([f"### {title}: {about}", "", "| file | |", "|---|---|", *rows])


def render(page: str) -> str:
    """The page with its generated parts made anew."""
    for name, text in (("layers", draw_layers()), ("tables", make_tables())):
        begin, end = f"<!-- {name}: made by `make maps` -->\n", f"\n<!-- end of {name} -->"
        before, rest = page.split(begin)
        page = before + begin + text + end + rest.split(end)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
