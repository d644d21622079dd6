"""`run.evaluate` counts every sample once and gives the metric of one process, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from lockstep.layout import Layout
from lockstep.step.scoring import Metric
from tests.events import read_events
from tests.marks import others_slow
from tests.parity.problems import (
    GLOBAL_BATCH,
    IGNORED,
    Batch,
    RaggedTexts,
    Stream,
    TinyGPT,
    adamw,
    fingerprint,
    fork_loader_workers,
    join,
    text_loss,
    weights,
)
from tests.ranks import Job, RankPool

SIZES = (1, 5, 21, 97)
MICRO_BATCH = 4
LAYOUTS = ["dp=2", "dp=3", "dp=4", "fsdp=2", "fsdp=3", "fsdp=4", "dp=2,fsdp=2"]
QUICK = ["dp=2", "fsdp=3", "dp=2,fsdp=2"]
SOURCES = ("map", "stream")

Results = dict[tuple[str, int], dict[str, Metric]]


def dataset(source: str, size: int) -> Dataset[Any]:
    return RaggedTexts(size) if source == "map" else Stream(size, shuffle=False)


def right_labels(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    counted = batch["y"] != IGNORED
    return ((model(batch["x"]).argmax(-1) == batch["y"]) & counted).sum(), counted.sum()


def samples(_model: nn.Module, batch: Batch) -> tuple[float, int]:
    """Plain numbers, the sum of the first tokens among them: it changes with any sample left out or read twice."""
    return float(batch["x"][:, 0].double().exp().sum()), len(batch["x"])


def evaluate(job: Job, layout: str, workers: int = 0) -> Results:
    fork_loader_workers()
    metrics = {"accuracy": right_labels, "samples": samples}
    with join(job, layout) as run:
        run.setup(lambda: TinyGPT(dropout=0.2), text_loss, optimizer=adamw)
        return {
            (source, size): run.evaluate(dataset(source, size), metrics, micro_batch=MICRO_BATCH, workers=workers)
            for source in SOURCES
            for size in SIZES
        }


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> Results:
    return ranks.run(evaluate, 1, "single")[0]


def test_one_process_counts_every_sample_and_label(one_process: Results) -> None:
    for (source, size), found in one_process.items():
        texts = RaggedTexts(size)
        labels = int((texts.labels != IGNORED).sum())
        assert found["samples"].count == size
        assert found["samples"].sum == pytest.approx(float(texts.tokens[:, 0].double().exp().sum()), rel=1e-12)
        assert found["loss"].count == found["accuracy"].count == labels, (source, size)
        assert found["loss"].value == pytest.approx(found["loss"].sum / labels if labels else float("nan"), nan_ok=True)


@pytest.mark.parametrize("layout", others_slow(LAYOUTS, QUICK))
def test_metrics_over_any_number_of_samples_equal_those_of_one_process(
    ranks: RankPool, one_process: Results, layout: str
) -> None:
    everybody = ranks.run(evaluate, Layout.parse(layout).world_size, layout)
    for case, expected in one_process.items():
        for name, metric in expected.items():
            found = everybody[0][case][name]
            assert found.count == metric.count, (case, name)
            assert found.sum == pytest.approx(metric.sum, rel=1e-12, abs=1e-12), (case, name)
    # By their text, because a mean over nothing is NaN, which equals nothing.
    assert all(repr(rank) == repr(everybody[0]) for rank in everybody)


def recall_in_the_batch(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """How many samples are closest to themselves among those who share their forward."""
    z = model(batch["x"]).flatten(1)
    return ((z @ z.T).argmax(1) == torch.arange(len(z))).sum(), len(z)


def mean_length(_model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """A mean of means."""
    return (batch["y"] != IGNORED).double().mean(), 1


class Calls:
    """Counts, as a library's metrics do, where nobody else looks."""

    def __init__(self) -> None:
        self.state = {"batches": [torch.zeros(1)]}

    def add(self) -> int:
        self.state["batches"].append(torch.zeros(1))
        return len(self.state["batches"]) - 1


CALLS = Calls()


def calls(_model: nn.Module, batch: Batch) -> tuple[int, int]:
    return CALLS.add(), len(batch["x"])


def evaluate_at_the_defaults(job: Job, layout: str) -> tuple[dict[str, Metric], dict[str, Metric], list[str]]:
    """Scores that depend on who shares a forward, and one that does not; what the run says of it."""
    with join(job, layout) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, steps=1, workers=0):
            engine.step(batch)
        coupled = run.evaluate(RaggedTexts(21), {"recall": recall_in_the_batch, "length": mean_length}, workers=0)
        free = run.evaluate(RaggedTexts(21), {"accuracy": right_labels}, workers=0)
        if layout == "single":
            CALLS.state["batches"] = [torch.zeros(1)]
            run.evaluate(RaggedTexts(GLOBAL_BATCH), {"calls": calls}, workers=0)
            assert CALLS.add() == 2, "what would stay is not tried out"
        run.close()
    events = read_events(job.folder / "run" / "events.jsonl")
    return coupled, free, [event["text"] for event in events if event["kind"] == "message"]


def plain_scores() -> tuple[float, float]:
    """Over groups of the global batch, as a plain loop with that batch size has them. Recall needs no trained model."""
    data = RaggedTexts(21)
    groups = [default_collate([data[i] for i in range(a, min(a + GLOBAL_BATCH, 21))]) for a in (0, 8, 16)]
    lengths = [float(mean_length(nn.Identity(), group)[0]) for group in groups]
    return sum(lengths) / len(groups), len(groups)


@pytest.mark.parametrize("layout", ["single", "dp=2", "pp=2"])
def test_scores_of_a_forward_see_the_global_batch_on_every_layout(ranks: RankPool, layout: str) -> None:
    (one, one_free, _), *_ = ranks.run(evaluate_at_the_defaults, 1, "single")
    for coupled, free, said in ranks.run(evaluate_at_the_defaults, Layout.parse(layout).world_size, layout):
        assert (coupled["length"].value, coupled["length"].count) == pytest.approx(plain_scores(), rel=1e-6)
        assert coupled["recall"] == one["recall"]
        assert free["accuracy"] == one_free["accuracy"]
        assert [text for text in said if "because its length" in text or "because its recall" in text]


def test_worker_processes_change_nothing(ranks: RankPool, one_process: Results) -> None:
    found = ranks.run(evaluate, 2, "dp=2", workers=2)[0]
    for case, expected in one_process.items():
        for name, metric in expected.items():
            assert found[case][name].count == metric.count
            assert found[case][name].sum == pytest.approx(metric.sum, rel=1e-12, abs=1e-12)


def evaluate_between_steps(job: Job, layout: str) -> list[str]:
    """Fingerprints of the weights around an evaluation, and the modes the model is left in."""
    with join(job, layout) as run:
        engine = run.setup(lambda: TinyGPT(dropout=0.2), text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=2, workers=0):
            engine.step(batch)
        before = fingerprint(weights(engine))
        run.evaluate(RaggedTexts(21), {"accuracy": right_labels})
        return [before, fingerprint(weights(engine)), str(engine.model.training)]


@pytest.mark.parametrize("layout", ["single", "dp=2", "fsdp=2"])
def test_evaluation_leaves_the_weights_alone_and_the_model_in_training(ranks: RankPool, layout: str) -> None:
    for before, after, training in ranks.run(evaluate_between_steps, Layout.parse(layout).world_size, layout):
        assert before == after
        assert training == "True"
