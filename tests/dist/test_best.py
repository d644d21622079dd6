"""The test split: scored once, by the best checkpoint, with the same numbers on every layout and after a crash."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.layout import Layout
from tests.cli.commands import events
from tests.marks import others_slow
from tests.parity.problems import (
    GLOBAL_BATCH,
    SEED,
    RaggedTexts,
    Stream,
    TinyGPT,
    adamw,
    fingerprint,
    join,
    text_loss,
    weights,
)
from tests.ranks import Job, RankPool
from tests.sets import WRITE

SMALL: dict[str, dict[str, Any]] = {
    "wikitext2": {"model": {"context": 16, "width": 16, "hidden": 16}, "global_batch": 8, "micro_batch": 2},
    "mnist": {"model": {"width": 16}, "global_batch": 16, "micro_batch": 4},
    "cifar10": {"model": {"width": 4}, "global_batch": 16, "micro_batch": 4, "schedule": {"warmup_steps": 2}},
}
SPLITS = {"wikitext2": (108, 129), "mnist": (6, 13), "cifar10": (4, 11)}
"""Words that are predicted, or images, of validation and test."""
COUNTED = {"wikitext2": "perplexity", "mnist": "accuracy", "cifar10": "accuracy"}
LAYOUTS = ["dp=2", "dp=3", "fsdp=2"]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(write(tmp_path_factory.mktemp(name))) for name, write in WRITE.items()}


def config_of(recipe: str, path: str, layout: str) -> dict[str, Any]:
    return {"recipe": recipe, "epochs": 1, "layout": layout, "data": {"path": path, "workers": 0}, **SMALL[recipe]}


def train(job: Job, recipe: str, path: str, layout: str) -> list[dict[str, Any]]:
    run = join(job, layout)
    trainer = lockstep.Trainer(config_of(recipe, path, layout), run)
    trainer.fit()
    assert trainer.last_test[COUNTED[recipe]].count == SPLITS[recipe][1], "on every rank"
    return events(run.folder.path) if job.rank == 0 else []


@pytest.fixture(scope="module")
def one_process(ranks: RankPool, sets: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    return {name: ranks.run(train, 1, name, path, "single")[0] for name, path in sets.items()}


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in found if event["kind"] == kind]


@pytest.mark.parametrize("recipe", SMALL)
def test_the_test_data_are_scored_once_at_the_end_and_counted_whole(one_process, recipe):
    found = one_process[recipe]
    [test] = of_kind(found, "test")
    [end] = of_kind(found, "end")
    validation = of_kind(found, "validation")[-1]
    assert test["step"] == end["best_step"]
    for event, size in zip((validation, test), SPLITS[recipe], strict=True):
        metric = event["metrics"][COUNTED[recipe]]
        assert metric["count"] == size
        assert event["samples"] == (size if recipe != "wikitext2" else -(-size // 16))
        if recipe == "wikitext2":
            assert metric["value"] == pytest.approx(math.exp(event["loss"]), rel=1e-12)
            assert metric["sum"] / metric["count"] == pytest.approx(event["loss"], rel=1e-12)


@pytest.mark.parametrize(
    ("recipe", "layout"),
    others_slow(
        [(recipe, layout) for recipe in SMALL for layout in LAYOUTS],
        [("wikitext2", "dp=3"), ("mnist", "dp=2"), ("cifar10", "fsdp=2")],
    ),
)
def test_every_layout_gives_the_numbers_of_one_process(ranks: RankPool, sets, one_process, recipe, layout):
    found = ranks.run(train, Layout.parse(layout).world_size, recipe, sets[recipe], layout)[0]
    for kind in ("validation", "test"):
        ours, theirs = of_kind(found, kind)[-1], of_kind(one_process[recipe], kind)[-1]
        assert (ours["step"], ours["samples"]) == (theirs["step"], theirs["samples"])
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        metric, expected = (event["metrics"][COUNTED[recipe]] for event in (ours, theirs))
        assert metric["count"] == expected["count"]
        assert metric["sum"] == pytest.approx(expected["sum"], rel=1e-4)


def test_a_run_that_crashed_before_the_test_is_tested_when_it_goes_on(tmp_path: Path, sets, one_process, monkeypatch):
    def trainer() -> lockstep.Trainer:
        config = config_of("mnist", sets["mnist"], "single")
        return lockstep.Trainer(config, lockstep.init("single", run_dir=tmp_path / "run", seed=SEED))

    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("the node went away")

    crashed = trainer()
    monkeypatch.setattr(crashed.run, "test", crash)
    with pytest.raises(RuntimeError, match="went away"):
        crashed.fit()
    crashed.run.leave()
    assert events(tmp_path / "run", "test") == events(tmp_path / "run", "end") == []

    trainer().fit()

    [test] = events(tmp_path / "run", "test")
    [expected] = of_kind(one_process["mnist"], "test")
    assert {key: test[key] for key in ("step", "loss", "metrics", "samples")} == {
        key: expected[key] for key in ("step", "loss", "metrics", "samples")
    }
    assert events(tmp_path / "run")[-1]["kind"] == "end"


def right_labels(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    counted = batch["y"] != -100
    return ((model(batch["x"]).argmax(-1) == batch["y"]) & counted).sum(), counted.sum()


def script(job: Job, layout: str) -> dict[str, Any]:
    """A user's own loop that gets worse after step 2: it validates, then tests the best."""
    run = join(job, layout)
    engine = run.setup(
        lambda: TinyGPT(dropout=0.2), text_loss, optimizer=adamw, schedule=lambda step: 1.0 if step < 2 else 1e3
    )
    seen = {}
    for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=5, workers=0):
        out = engine.step(batch)
        run.validate(RaggedTexts(21), {"accuracy": right_labels}, perplexity=True)
        seen[out.step] = fingerprint(weights(engine))
    results = run.test(RaggedTexts(13), {"accuracy": right_labels}, perplexity=True)
    assert run.best is not None
    assert fingerprint(weights(engine)) == seen[run.best[0]], "the best weights are in the model"
    assert fingerprint(weights(engine)) != seen[5]
    assert engine.steps_done == 5
    run.close()
    found = events(run.folder.path) if job.rank == 0 else []
    checkpoints = sorted(path.name for path in (run.folder.path / "checkpoints").glob("step-*"))
    return {"best": run.best, "results": results, "events": found, "checkpoints": checkpoints}


@pytest.mark.parametrize("layout", ["single", "dp=2", "fsdp=2"])
def test_a_script_of_ones_own_records_validations_and_tests_the_best_one(ranks: RankPool, layout):
    everybody = ranks.run(script, Layout.parse(layout).world_size, layout)
    first = everybody[0]
    assert all(rank["results"] == first["results"] for rank in everybody)
    validations = of_kind(first["events"], "validation")
    assert [event["step"] for event in validations] == [1, 2, 3, 4, 5]
    losses = {event["step"]: event["loss"] for event in validations}
    best = min(losses, key=losses.__getitem__)
    assert first["best"] == (best, losses[best])
    assert best < 5, "else this shows nothing"
    [test] = of_kind(first["events"], "test")
    assert test["step"] == best
    assert test["samples"] == 13
    assert {"accuracy", "perplexity"} == set(test["metrics"]) == set(validations[0]["metrics"])
    assert first["checkpoints"][-1] == "step-00000005", "where the training stood is saved before"


def validate_a_stream(job: Job, layout: str) -> list[dict[str, Any]]:
    with join(job, layout) as run:
        run.setup(lambda: TinyGPT(), text_loss, optimizer=adamw)
        run.validate(Stream(21, shuffle=False), micro_batch=4)
    return events(run.folder.path, "validation")


@pytest.mark.parametrize("layout", ["single", "dp=2", "fsdp=2"])
def test_a_validation_counts_the_samples_of_a_stream_that_knows_no_length(ranks: RankPool, layout):
    [validation] = ranks.run(validate_a_stream, Layout.parse(layout).world_size, layout)[0]
    assert validation["samples"] == 21
    assert validation["best"]


def test_without_a_validation_the_last_weights_are_tested(tmp_path: Path):
    with lockstep.init("single", run_dir=tmp_path / "run") as run:
        engine = run.setup(lambda: TinyGPT(), text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, steps=2, workers=0):
            engine.step(batch)
        before = fingerprint(weights(engine))
        assert run.load_best() == 2
        assert fingerprint(weights(engine)) == before
        run.test(RaggedTexts(3))
    assert events(tmp_path / "run", "test")[0]["step"] == 2


def test_a_best_checkpoint_that_was_damaged_is_not_tested(tmp_path: Path):
    with lockstep.init("single", run_dir=tmp_path / "run") as run:
        engine = run.setup(lambda: TinyGPT(), text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, steps=1, workers=0):
            engine.step(batch)
        run.validate(RaggedTexts(3))
        run._checkpoints.wait()
        [shard] = (tmp_path / "run" / "checkpoints" / "step-00000001").glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
        with pytest.raises(lockstep.UserError, match="is damaged"):
            run.test(RaggedTexts(3))
