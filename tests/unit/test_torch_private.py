"""Private torch: only in its own package, and still there on the torch of now."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import UserError
from lockstep.runtime.torch_private import seen
from lockstep.runtime.torch_private.seen import NAMES, PrivateName, require, what_is_wrong
from lockstep.runtime.torch_private.waits import WaitsSeen

PACKAGE = Path(lockstep.__path__[0])
HOME = PACKAGE / "runtime" / "torch_private"
NOT_TORCH = {
    "_exit",
    "_getframe",
    "_current_frames",
    "_replace",
    "_asdict",
    "_fields",
    "_is_of_main_thread",
    "_file",
    "_observe",
}
"""Python's own, and ours: `_exit` of os, `_getframe` of sys, `_replace` of a named tuple."""
FUNCTIONS = ("getattr", "setattr", "hasattr", "delattr")


def private_names(path: Path) -> list[str]:
    """The private names of torch in a file, and its assignments to torch's modules and classes, with their lines."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = None
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            name = next(filter(_is_private, parts), None)
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")]
            name = next(filter(_is_private, parts), None)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            name = node.attr if _is_private(node.attr) else None
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in FUNCTIONS and len(node.args) > 1:
            name = _private_text(node.args[1])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
            name = _private_text(node.slice)
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            name = next((text for text in map(ast.unparse, targets) if text.startswith(("torch.", "dist."))), None)
        if name is not None:
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}")  # type: ignore[attr-defined]
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_lockstep_")) and name not in NOT_TORCH


def _private_text(node: ast.AST) -> str | None:
    text = node.value if isinstance(node, ast.Constant) else None
    return text if isinstance(text, str) and _is_private(text) else None


def test_private_torch_and_patches_of_torch_are_in_one_package() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(HOME)]
    assert [name for path in files for name in private_names(path)] == []


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.where.removeprefix("torch."))
def test_this_torch_still_has_it(name: PrivateName) -> None:
    why = what_is_wrong(name)
    assert why is None, f"torch {torch.__version__}: {name.where} (for {name.use}) {why}"


@pytest.mark.parametrize("purpose", ["random draws", "sharding", "pipeline", "tensor parallelism", "compile"])
def test_what_numbers_depend_on_is_as_it_was(purpose: seen.Purpose) -> None:
    require.cache_clear()
    require(purpose)


def test_a_name_that_is_gone_called_otherwise_or_no_longer_read_is_told() -> None:
    def why(name: PrivateName) -> str:
        return what_is_wrong(name) or ""

    assert "is gone" in why(PrivateName("torch.utils._pytree.tree_plant", ""))
    assert "is gone" in why(PrivateName("torch.utils._no_such_module.name", ""))
    assert "is called otherwise" in why(PrivateName("torch.utils._pytree.tree_map", "", call=(1, ())))
    unread = PrivateName("module._buffers", "", read_by="torch.nn.Module.__call__")
    assert "is no longer read by torch.nn.Module.__call__" in why(unread)


def test_a_backward_that_cannot_be_told_is_refused_before_it_draws_other_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    require.cache_clear()
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: -1)
    with pytest.raises(UserError, match=r"random draws would go wrong: torch._C._current_graph_task_id does not tell"):
        require("random draws")
    monkeypatch.undo()
    require.cache_clear()


def test_shards_that_are_written_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require.cache_clear()
    monkeypatch.setitem(seen.WRITTEN_ON_SHARDS, seen.GROUP, ("_format_of_sums",))
    with pytest.raises(UserError, match=r"sharding would go wrong: .*FSDPParamGroup has no _format_of_sums"):
        require("sharding")
    require.cache_clear()


def test_waiting_times_that_cannot_be_measured_end_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Work:
        def wait(self) -> str:
            return "done"

    def stalled() -> contextlib.AbstractContextManager[None]:
        raise RuntimeError("no clock")

    monkeypatch.setattr(dist, "Work", Work)
    original = Work.wait
    waits = WaitsSeen(stalled, None)
    assert Work.wait is not original
    assert [Work().wait(), Work().wait()] == ["done", "done"]
    assert Work.wait is original  # given up, and said once
    assert capsys.readouterr().err.count("is not measured with torch") == 1
    waits.close()

    monkeypatch.setattr(dist, "Work", object)  # as if it had no `wait` any more
    WaitsSeen(stalled, None).close()
    assert "is not measured with torch" in capsys.readouterr().err
