"""How many objects with changing state a rank has that trains: each may be the reason why a number is wrong."""

from __future__ import annotations

import ast
import gc
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import lockstep
from tests.parity.problems import GLOBAL_BATCH, RaggedTexts, TinyGPT, adamw, join, text_loss
from tests.ranks import Job, RankPool

PACKAGE = Path(lockstep.__path__[0])
MOST = 12
NOT_YET = 48
MAKING = ("__init__", "__post_init__", "__new__")


@cache
def changing_classes() -> frozenset[tuple[str, str]]:
    """The module and name of every class that sets an attribute of its own outside of where it is made."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(["lockstep", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(map(_changes_itself, node.body)):
                found.add((module, node.name))
    return frozenset(found)


def _changes_itself(method: ast.stmt) -> bool:
    if not isinstance(method, ast.FunctionDef) or method.name in MAKING:
        return False
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        for node in ast.walk(method)
    )


def changing_objects() -> Counter[str]:
    """Those of this process, by class; one that derives from such a class counts as well."""
    gc.unfreeze()  # a training hides what it was set up with from the collection of garbage
    gc.collect()
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        if any((base.__module__, base.__qualname__) in changing_classes() for base in kind.__mro__):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return found


def count_in_a_training(job: Job, layout: str) -> Counter[str]:
    before = changing_objects()
    with join(job, layout) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw, clip=0.5)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=3, workers=0):
            engine.step(batch)
            if engine.steps_done == 2:
                return changing_objects() - before
    raise AssertionError("no second step")


@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "pp=2"])
def test_a_rank_that_trains_has_few_objects_with_changing_state(ranks: RankPool, layout: str) -> None:
    for rank, found in enumerate(ranks.run(count_in_a_training, 2, layout)):
        print(f"{layout}, rank {rank}: {found.total()} objects of {len(found)} classes")
        print("".join(f"    {count} {name}\n" for name, count in sorted(found.items())))
        assert len(found) <= max(MOST, NOT_YET)
