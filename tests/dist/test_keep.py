"""State of a script's own, which restarts must not lose."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import UserError
from tests.parity.problems import GLOBAL_BATCH, RaggedTexts, TinyGPT, adamw, error_of, join, text_loss, unfinished
from tests.ranks import Job, RankPool

STEPS = 4


def train(run: lockstep.Run, until: int) -> dict[str, Any]:
    """An average by hand, a counter and a buffer, up to a step."""
    engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
    loader = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=4, steps=STEPS, shuffle=False, workers=0)
    average = run.keep("average", {name: one.detach().clone() for name, one in engine.model.named_parameters()})
    seen = run.keep("seen", {"best": math.inf, "bad": 0, "last": deque(maxlen=2), "at": np.zeros(2), 3: (1, "a")})
    module = run.keep("module", nn.Linear(1, 1))
    for batch in loader:
        out = engine.step(batch)
        with torch.no_grad():
            for name, one in engine.model.named_parameters():
                average[name].mul_(0.5).add_(one, alpha=0.5)
            module.weight.fill_(out.step)
        seen["best"] = min(seen["best"], round(out.loss, 4))
        seen["last"].append(out.step)
        seen["at"] += 1
        if out.step == until:
            run.save(wait=True)
            break
    return {"average": average, "seen": seen, "module": module.weight.item()}


def live(job: Job, folder: Path, layout: str, until: int, meeting: str) -> dict[str, Any]:
    with unfinished(join(job, layout, folder, meeting=meeting)) as run:
        return train(run, until)


def lives(job: Job) -> dict[str, Any]:
    live(job, job.folder / "parts", "tp=2", 1, "first")
    live(job, job.folder / "parts", "fsdp=2", 3, "second")
    return {
        "restarted": live(job, job.folder / "parts", "pp=2", 4, "third"),
        "at once": live(job, job.folder / "whole", "dp=2", 4, "whole"),
    }


def test_what_a_script_keeps_survives_restarts_on_other_layouts(ranks: RankPool) -> None:
    for found in ranks.run(lives, 2, timeout=120):
        one, other = found["restarted"], found["at once"]
        for name, tensor in other["average"].items():
            if not name.endswith("key.bias"):  # whose gradient is rounding alone, of which Adam makes whole steps
                assert torch.allclose(one["average"][name], tensor, rtol=1e-3, atol=1e-4), name
        assert one["module"] == other["module"] == 4
        assert one["seen"]["best"] == pytest.approx(other["seen"]["best"], abs=2e-4)
        assert one["seen"]["last"] == deque([3, 4], maxlen=2)
        assert one["seen"]["at"].tolist() == [4, 4]
        assert one["seen"][3] == (1, "a")
        assert one["seen"]["bad"] == 0


def differ(job: Job) -> str:
    with join(job, "dp=2") as run:
        run.setup(TinyGPT, text_loss, optimizer=adamw)
        return str(error_of(lambda: run.keep("scores", {"mine": run.rank})))


def test_ranks_that_keep_something_else_are_refused(ranks: RankPool) -> None:
    for said in ranks.run(differ, 2):
        assert said.startswith("rank 1 keeps another scores than rank 0")


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    with lockstep.init("single", device="cpu", run_dir=tmp_path / "run") as run:
        for state, said in ((3, "was given a int"), ({"a": [object()]}, r"was given a object \(x/a/0\)")):
            run._checkpoints.kept._states.clear()
            with pytest.raises(UserError, match=said):
                run.keep("x", state)


def test_what_is_noted_after_a_save_is_in_that_checkpoint(tmp_path: Path) -> None:
    def life(steps: int) -> dict[str, Any]:
        run = lockstep.init("single", device="cpu", run_dir=tmp_path / "run")
        with unfinished(run):
            engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
            loader = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=4, steps=STEPS, workers=0)
            seen: dict[str, Any] = run.keep("seen", {"best": math.inf})
            found = dict(seen)
            for batch in loader:
                out = engine.step(batch)
                if out.step > steps:
                    break
                run.save(wait=True)
                seen["best"] = out.step
        return found

    assert life(2) == {"best": math.inf}
    assert life(0) == {"best": 2}


def rate_on_one_rank(job: Job) -> str:
    with unfinished(join(job, "dp=2", job.folder / "run")) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        steps = iter(run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=4, steps=2, workers=0))
        engine.step(next(steps))
        run.save()
        if run.is_main:
            engine.optimizer.param_groups[0]["lr"] *= 0.5
        return str(error_of(lambda: engine.step(next(steps))))


def test_a_rate_that_one_rank_sets_after_a_save_is_refused_as_such(ranks: RankPool) -> None:
    for said in ranks.run(rate_on_one_rank, 2):
        assert "the learning rate is not the same on all ranks" in said
