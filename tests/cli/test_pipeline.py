"""Pipelines, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import MODEL_OF_BLOCKS, SMALL_LM, events, lockstep

SCRIPT = (
    MODEL_OF_BLOCKS
    + """
run = lockstep.init()
engine = run.setup(
    Model,
    lambda model, x: (model(x).square().sum(), len(x)),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    pipeline={"schedule": "gpipe"},
)
for batch in run.loader(Samples(), global_batch=16):
    engine.step(batch)
"""
)


@pytest.mark.slow
def test_the_plan_of_a_script_is_explained_and_then_proved(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    explained = lockstep(tmp_path, "verify", "script.py", "--layout", "pp=2", "--explain", "--json", COLUMNS="160")
    assert explained.returncode == 0, explained.stderr
    plan = json.loads(explained.stdout)
    assert [module["name"] for module in plan["modules"]] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "out"]
    (cut,) = plan["cuts"]
    assert next(m["why"] for m in plan["modules"] if m["name"] == cut).startswith("begins stage 1")
    assert plan["stages"][1]["receives"] == ["2x6 float32"]
    assert "the slowest stage does" in explained.stderr
    proved = lockstep(
        tmp_path, "verify", "script.py", "--layout", "pp=2", "--set", "pipeline.schedule=1f1b", "--steps", "2", "--json"
    )
    assert proved.returncode == 0, proved.stderr
    assert json.loads(proved.stdout)["ok"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]


def test_a_script_that_reads_a_value_is_refused_with_its_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = lockstep(tmp_path, "run", "--layout", "pp=2", "script.py", "item")
    assert done.returncode == 2
    assert "script.py:21 reads a value of the model while it computes" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]


def test_a_recipe_trains_as_a_pipeline_and_says_how_it_is_cut(tmp_path: Path) -> None:
    options = (*SMALL_LM, "--layout", "pp=2", "--steps", "3", "--set", "schedule.warmup_steps=1", "--json")
    done = lockstep(tmp_path, "train", "lm", *options)
    assert done.returncode == 0, done.stderr
    said = [event["text"] for event in events(tmp_path / "runs" / "lm", "message")]
    assert any(text.startswith("1f1b pipeline: 2 stages, cut before blocks.") for text in said)
