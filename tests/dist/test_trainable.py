"""A model that a script changes after `run.setup`: parameters that are replaced are refused by name on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import UserError
from tests.parity.problems import GLOBAL_BATCH, RaggedTexts, TinyGPT, adamw, join, text_loss
from tests.ranks import Job, RankPool

LAYER = "blocks.0.mlp.0"


def replace_weight(model: nn.Module) -> None:
    """What reinitialising a layer after setup does."""
    layer: Any = model.get_submodule(LAYER)
    layer.weight = nn.Parameter(torch.zeros(layer.weight.shape))


def replaced(job: Job, layout: str) -> dict[str, str]:
    found = {}
    for when in ("after setup", "after the loader", "after a step"):
        if when == "after setup" and layout != "fsdp=2":
            continue  # the model is not cut yet
        try:
            with join(job, layout, meeting=when.replace(" ", "-")) as run:
                engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
                if when == "after setup":
                    replace_weight(engine.model)
                loader = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=3, workers=0)
                if when == "after the loader":
                    replace_weight(engine.model)
                for batch in loader:
                    engine.step(batch)
                    if when == "after a step":
                        replace_weight(engine.model)
                found[when] = "trained"
        except UserError as error:
            found[when] = f"{engine.steps_done}: {error}"
    return found


@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2", "pp=2"])
def test_a_parameter_that_is_replaced_is_refused_by_name(ranks: RankPool, layout: str) -> None:
    for found in ranks.run(replaced, 2, layout, timeout=60):
        for when, said in found.items():
            steps = 1 if when == "after a step" else 0
            assert said.startswith(f"{steps}: {LAYER}.weight was replaced, added or removed after run.setup"), when


def scaled_by_an_operator(job: Job, layout: str) -> list[float]:
    losses: list[float] = []
    with join(job, layout) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=3, workers=0):
            if losses:
                layer: Any = engine.model.get_submodule(LAYER)
                with torch.no_grad():
                    layer.weight *= 0.5
            losses.append(engine.step(batch).loss)
    return losses


@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2", "pp=2"])
def test_an_operator_in_place_replaces_nothing(ranks: RankPool, layout: str) -> None:
    (expected,) = ranks.run(scaled_by_an_operator, 1, "single")
    for losses in ranks.run(scaled_by_an_operator, 2, layout, timeout=40):
        assert losses == pytest.approx(expected, rel=1e-5)
