"""Numbers that can be trusted: what a step used up and what it cost do not depend on who computed which part of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from lockstep.errors import UserError
from lockstep.lab.play_schedule import needs
from lockstep.layout import Layout
from lockstep.parallel.pipeline.timetable import Action, Kind, timetable
from lockstep.record.events import validate
from tests.events import Event, read_events
from tests.parity.problems import (
    GLOBAL_BATCH,
    IGNORED,
    LENGTH,
    SIZE,
    VOCABULARY,
    WIDTH,
    Batch,
    RaggedTexts,
    Stream,
    TinyGPT,
    adamw,
    error_of,
    join,
    text_loss,
)
from tests.ranks import Job, RankPool

DEPTH = 2
STEPS = 5
"""The fifth has 5 samples."""
# Queries, keys, values and what mixes them; the perceptron, twice as wide; the head, which is the table of tokens.
WEIGHTS = DEPTH * (3 + 1 + 2 + 2) * WIDTH**2 + WIDTH * VOCABULARY
# Its attention is written out as products.
FLOPS = {"products": 6 * LENGTH * WEIGHTS + 12 * DEPTH * WIDTH * LENGTH**2}


class Piece(NamedTuple):
    kind: str
    stage: int
    micro_batch: int
    begin: float
    end: float


class Masked(RaggedTexts):
    """Texts with the mask of a tokenizer: 0 where a row is filled up."""

    def __getitem__(self, index: int) -> Batch:
        sample = super().__getitem__(index)
        return {**sample, "attention_mask": (sample["y"] != IGNORED).long()}


def tokens(batch: Batch) -> int:
    return batch["x"].numel()


def tokens_and_padding(batch: Batch) -> tuple[int, int]:
    return batch["x"].numel(), int((batch["y"] == IGNORED).sum())


def train(
    job: Job, layout: str, micro_batch: int = 2, texts: Dataset[Any] | None = None, **options: Any
) -> list[Event]:
    count = {"tokens": options.pop("tokens", tokens_and_padding), "workers": options.pop("workers", 0)}
    with join(job, layout) as run:
        engine = run.setup(lambda: TinyGPT(depth=DEPTH), text_loss, optimizer=adamw, **options)
        dataset = texts or RaggedTexts()
        for batch in run.loader(dataset, GLOBAL_BATCH, micro_batch=micro_batch, steps=STEPS, **count):
            out = engine.step(batch)
            assert out.items >= out.padding
    return list(read_events(run.folder.events))


def of_kind(kind: str, events: list[Event]) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("single", {"micro_batch": 1}),
        ("single", {"micro_batch": 4, "precision": "bf16", "recompute": True}),
        ("dp=2", {"micro_batch": 2}),
        ("fsdp=2", {"micro_batch": 2, "recompute": True}),
        ("tp=2", {"micro_batch": 4}),
        ("pp=2,dp=2", {"micro_batch": 1}),
    ],
)
def test_items_and_flops_of_a_step_do_not_depend_on_how_its_batch_is_split(
    ranks: RankPool, layout: str, options: dict[str, Any]
) -> None:
    events = ranks.run(train, Layout.parse(layout).world_size, layout, **options)[0]
    assert of_kind("start", events)[0]["item"] == "tokens"
    steps = of_kind("step", events)
    samples = [GLOBAL_BATCH] * (STEPS - 1) + [SIZE - (STEPS - 1) * GLOBAL_BATCH]
    assert [step["items"] for step in steps] == [LENGTH * count for count in samples]
    assert [step["items"] - step["padding"] for step in steps] == [step["weight"] for step in steps]
    assert any(step["padding"] for step in steps)
    (flops,) = of_kind("flops", events)
    validate(flops)
    assert flops["by"] == FLOPS
    assert flops["per_sample"] == sum(FLOPS.values())


@pytest.mark.parametrize(("texts", "workers"), [(Masked(), 1), (Stream(), 1)])
def test_padding_is_counted_by_the_loader_also_in_other_processes(
    ranks: RankPool, texts: Dataset[Any], workers: int
) -> None:
    count = tokens_and_padding if isinstance(texts, IterableDataset) else tokens
    events = ranks.run(train, 1, "single", texts=texts, tokens=count, workers=workers)[0]
    for step in of_kind("step", events):
        assert step["items"] - step["padding"] == step["weight"]


def test_a_script_that_counts_nothing_counts_samples(ranks: RankPool) -> None:
    events = ranks.run(train, 2, "dp=2", tokens=None, texts=Masked())[0]
    assert of_kind("start", events)[0]["item"] == "samples"
    assert [(step["items"], step["padding"]) for step in of_kind("step", events)] == [(8, 0)] * (STEPS - 1) + [(5, 0)]


def refused(job: Job, counted: Any) -> Exception | None:
    return error_of(lambda: train(job, "single", tokens=lambda _: counted))


@pytest.mark.parametrize("counted", [None, (3, 5), (1, 2, 3), 2.5])
def test_a_count_that_is_none_is_refused(ranks: RankPool, counted: Any) -> None:
    error = ranks.run(refused, 1, counted)[0]
    assert isinstance(error, UserError)
    assert "the function that counts tokens returned" in error.cause


def pipelined(job: Job, schedule: str, stages: int, steps: int) -> list[Event]:
    with join(job, f"pp={job.world_size}") as run:
        pipeline = {"schedule": schedule, "stages_per_rank": stages}
        engine = run.setup(lambda: TinyGPT(depth=4), text_loss, optimizer=adamw, pipeline=pipeline)
        for batch in run.loader(RaggedTexts(size=8 * steps), 8, micro_batch=2, steps=steps, workers=0):
            engine.step(batch)
            run.evaluate(RaggedTexts(size=4), workers=0)  # goes through the pipeline too, and is no step
    return list(read_events(run.folder.events))


@pytest.mark.parametrize(("schedule", "per_rank", "steps"), [("1f1b", 1, 8), ("zbv", 2, 3)])
def test_a_pipeline_tells_when_each_of_its_places_did_what(
    ranks: RankPool, schedule: Any, per_rank: int, steps: int
) -> None:
    events = ranks.run(pipelined, 2, schedule, per_rank, steps)[0]
    (told,) = of_kind("timetable", events)
    validate(told)
    assert told["step"] == min(7, steps), "with the first report of the ranks, or with the last where there is no other"
    lanes = [[Piece(*piece) for piece in lane] for lane in told["lanes"]]
    assert [[piece[:3] for piece in lane] for lane in lanes] == timetable(schedule, 2, per_rank, 4)
    done = {Action(cast(Kind, piece.kind), *piece[1:3]): piece for lane in lanes for piece in lane}
    for lane, busy in zip(lanes, told["busy"], strict=True):
        assert all(before.end <= after.begin + 2e-6 for before, after in pairwise(lane)), "one thing after another"
        assert busy == pytest.approx(sum(p.end - p.begin for p in lane) / told["seconds"], abs=0.01)
    for action, piece in done.items():
        for ways in needs(action, 2 * per_rank):
            (before,) = (done[way] for way in ways if way in done)
            assert before.end <= piece.begin + 2e-6, "nothing is used before it was made; both are rounded"
    assert min(piece.begin for piece in done.values()) == 0
    assert max(piece.end for piece in done.values()) == pytest.approx(told["seconds"], abs=1e-5)
    step = next(step for step in of_kind("step", events) if step["step"] == told["step"])
    assert told["seconds"] < step["seconds"]


def untraceable(job: Job) -> list[Event]:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(given)
            return out if out.sum() > 0 else -out

    with join(job, "single") as run:
        engine = run.setup(Moody, lambda model, batch: (model(batch).sum(), 1), optimizer=adamw)
        for batch in run.loader([torch.ones(1)] * 4, 2, micro_batch=2, workers=0):  # type: ignore[arg-type]
            engine.step(batch)
    return list(read_events(run.folder.events))


def test_a_model_that_cannot_be_traced_trains_and_says_why_it_has_no_flops(ranks: RankPool) -> None:
    events = ranks.run(untraceable, 1)[0]
    (flops,) = of_kind("flops", events)
    assert (flops["per_sample"], flops["by"]) == (None, {})
    assert "test_numbers.py" in flops["reason"]
    assert "reads a value of the model" in flops["reason"]
    assert len(of_kind("step", events)) == 2
    assert of_kind("end", events)
