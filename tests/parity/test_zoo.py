"""Plain models of every kind train under every layout with the numbers of one process, or are refused by name.

A new layout goes into LAYOUTS. A rank may hold only a part of the parameters: gradients are compared as the union over
ranks, and ranks that hold the same parameter have to agree on it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.run import Run
from tests.parity.problems import Tensors, adamw, anew, disagreeing_gradients, gradients, join
from tests.parity.zoo import ENTRIES, ZOO, Entry
from tests.ranks import Job, RankFailed, RankPool

MIXED = "tp=2,pp=2"
LAYOUTS = ["dp=2", "fsdp=2", "pp=2", "pp=4", "tp=2", "cp=2", MIXED]
QUICK_LAYOUTS = ["pp=2", "tp=2"]
QUICK = ["nanogpt-no-bias", "rotary-gpt", "moe", "torch-seq2seq", "vit", "course-mlp", "siamese", "item", "hf-llama"]
"""What a newcomer waits for; CI trains all of them under all layouts."""
GLOBAL_BATCH = 8
MICRO_BATCH = 2
STEPS = 3
ENTRIES_PER_JOB = 4
LOSS = 1e-6
"""Allowed difference of a step's loss, relative to the loss or to 1, whichever is more."""


@dataclass
class Record:
    """What one rank saw of one training; the gradients are those of the first step."""

    losses: list[float]
    weights: list[float]
    norms: list[float]
    gradients: Tensors


# ---- What runs in a rank


def train(job: Job, layout: str, names: list[str]) -> list[Record | UserError]:
    """One training for each entry, one after another in the same processes."""
    with join(job, layout) as run:
        return [train_one(run, ZOO[name]) for name in names]


def train_one(run: Run, entry: Entry) -> Record | UserError:
    seen = Record([], [], [], {})
    try:
        engine = anew(run).setup(entry.build, entry.loss, optimizer=adamw, clip=1.0)
        for batch in run.loader(entry.dataset, GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=STEPS, workers=0):
            out = engine.step(batch)
            seen.losses.append(out.loss)
            seen.weights.append(out.weight)
            seen.norms.append(out.grad_norm.item())
            if out.step == 1:
                seen.gradients = gradients(engine)
    except UserError as error:
        return error
    return seen


@dataclass
class Plain:
    """What a model does by itself."""

    random: bool
    statistics: bool
    parameters: set[str]
    frozen: set[str]


def try_all(_job: Job, names: list[str]) -> dict[str, Plain]:
    return {name: try_plain(ZOO[name]) for name in names}


def try_plain(entry: Entry) -> Plain:
    torch.manual_seed(0)
    model = entry.build().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    samples = default_collate([entry.dataset[index] for index in range(MICRO_BATCH)])

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return entry.loss(model, samples)[0].item()

    first, again, other = (loss(seed) for seed in (1, 1, 2))
    assert first == again
    return Plain(
        random=first != other,
        statistics=any(not buffer.equal(before[name]) for name, buffer in model.named_buffers()),
        parameters={name for name, _ in model.named_parameters()},
        frozen={name for name, parameter in model.named_parameters() if not parameter.requires_grad},
    )


# ---- Each training once


Outcomes = list[Record | UserError]


class Trainings:
    """Trains several entries in one job when the first of them is asked for.

    A training that fails takes its job along, so the entries of that job are then trained one by one.
    """

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._found: dict[tuple[str, str], Outcomes] = {}
        self._alone: set[tuple[str, str]] = set()

    def outcomes(self, layout: str, entry: Entry) -> Outcomes:
        """What every rank saw."""
        wanted = layout, entry.name
        if wanted not in self._found and wanted not in self._alone:
            try:
                self._train(layout, [other.name for other in job_of(entry, layout)])
            except RankFailed:
                self._alone |= {(layout, other.name) for other in job_of(entry, layout)}
        if wanted not in self._found:
            self._train(layout, [entry.name])
        return self._found[wanted]

    def reference(self, entry: Entry) -> Record:
        """One process with the same micro-batches."""
        return together(self.outcomes("single", entry))

    def _train(self, layout: str, names: list[str]) -> None:
        by_rank = self._ranks.run(train, Layout.parse(layout).world_size, layout, names, timeout=100)
        for name, *outcomes in zip(names, *by_rank, strict=True):
            self._found[layout, name] = outcomes


def is_tried(entry: Entry, layout: str) -> bool:
    """Under tp and pp a model has two plans, each of which is tried by itself: there a few of every kind will do."""
    in_mix = entry.name in QUICK or MIXED in entry.expect.refused
    return entry.expect.runs(layout) and (layout != MIXED or in_mix)


def is_quick(entry: Entry, layout: str) -> bool:
    return layout in QUICK_LAYOUTS and entry.name in QUICK


def job_of(entry: Entry, layout: str) -> list[Entry]:
    """The entries that are trained together with one; those that most sessions do not ask for apart."""
    tried = [other for other in RUNNABLE if is_tried(other, layout)]
    alike = [other for other in tried if is_quick(other, layout) == is_quick(entry, layout)]
    first = alike.index(entry) // ENTRIES_PER_JOB * ENTRIES_PER_JOB
    return alike[first : first + ENTRIES_PER_JOB]


@pytest.fixture(scope="module")
def trainings(ranks: RankPool) -> Trainings:
    return Trainings(ranks)


@pytest.fixture(scope="module")
def plain(ranks: RankPool) -> dict[str, Plain]:
    return ranks.run(try_all, 1, [entry.name for entry in RUNNABLE])[0]


def is_missing(entry: Entry) -> bool:
    return entry.needs is not None and importlib.util.find_spec(entry.needs) is None


def case(entry: Entry, *more: str) -> Any:
    marks = [pytest.mark.skipif(is_missing(entry), reason=f"needs {entry.needs}, which make setup installs")]
    marks += [mark for layout in more if not is_quick(entry, layout) for mark in (pytest.mark.slow, pytest.mark.soak)]
    return pytest.param(entry, *more, id="-".join([entry.name, *more]), marks=marks)


RUNNABLE = [entry for entry in ENTRIES if not is_missing(entry)]


# ---- The promises


@pytest.mark.parametrize(
    ("entry", "layout"),
    [case(entry, layout) for layout in LAYOUTS for entry in ENTRIES if is_tried(entry, layout)],
)
def test_a_plain_model_trains_as_in_one_process_or_is_refused(trainings: Trainings, entry: Entry, layout: str) -> None:
    outcomes = trainings.outcomes(layout, entry)
    refusal = entry.expect.refusal(layout)
    if refusal is None:
        assert_same_training(together(outcomes), trainings.reference(entry))
    else:
        assert [type(outcome) for outcome in outcomes] == [UserError] * len(outcomes)
        assert all(refusal in str(error) for error in outcomes), str(outcomes[0])


@pytest.mark.parametrize("entry", [case(entry) for entry in ENTRIES if entry.like])
def test_two_ways_to_write_a_model_give_the_same_numbers(trainings: Trainings, entry: Entry) -> None:
    assert entry.like is not None
    assert_same_training(trainings.reference(entry), trainings.reference(ZOO[entry.like]))


def together(outcomes: Outcomes) -> Record:
    """What all ranks report, with the gradients of all parameters."""
    records = [outcome for outcome in outcomes if isinstance(outcome, Record)]
    assert len(records) == len(outcomes), f"refused: {outcomes}"
    first = records[0]
    held: Tensors = {}
    for record in records:
        assert (record.losses, record.weights, record.norms) == (first.losses, first.weights, first.norms)
        for name, grad in record.gradients.items():
            assert held.setdefault(name, grad).equal(grad), f"ranks differ in {name}"
    return replace(first, gradients=held)


def assert_same_training(ours: Record, theirs: Record) -> None:
    assert ours.weights == theirs.weights
    assert ours.losses == pytest.approx(theirs.losses, rel=LOSS, abs=LOSS)
    assert list(disagreeing_gradients(ours.gradients, theirs.gradients)) == []
    assert ours.norms[0] == pytest.approx(theirs.norms[0], rel=1e-5)


# ---- The zoo itself


@pytest.mark.parametrize("entry", [case(entry) for entry in ENTRIES])
def test_what_the_zoo_says_of_a_model_is_true(trainings: Trainings, plain: dict[str, Plain], entry: Entry) -> None:
    found, expect = plain[entry.name], entry.expect
    assert (found.random, found.statistics) == (expect.random, expect.statistics)
    assert found.frozen == {name for name in found.parameters if name.startswith(expect.frozen)}
    unused = {name for name in found.parameters if name.startswith(expect.unused)}
    derived, trained = trainings.reference(entry).gradients.keys(), found.parameters - found.frozen - unused
    assert derived <= trained
    assert derived == trained or expect.random, "only draws leave a layer out"


def test_names_in_the_zoo_are_unique() -> None:
    assert len(ZOO) == len(ENTRIES)
