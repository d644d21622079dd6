"""A pipeline changes where things are computed, and nothing else: what one process gives, a plain script gets here too.

The schedules have their table in tests/parity/test_pipeline.py; this is about everything around them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate

from lockstep.engine import Engine
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.run import Run
from lockstep.step.scoring import Metric
from tests.parity.problems import (
    GLOBAL_BATCH,
    IGNORED,
    LENGTH,
    SIZE,
    VOCABULARY,
    WIDTH,
    Batch,
    ConvNet,
    Images,
    RaggedTexts,
    Tensors,
    TinyGPT,
    adamw,
    anew,
    disagreeing_gradients,
    error_of,
    fingerprint,
    full,
    gradients,
    image_loss,
    join,
    text_loss,
    unfinished,
)
from tests.ranks import Job, RankFailed, RankPool

MICRO_BATCH = 2
STEPS = 6
"""The fifth has 5 samples: 2 micro-batches and one of a single sample."""
LOSS = 1e-6
WEIGHTS = 3e-5


# ---- Models, data and optimizers


class Perceptrons(nn.Module):
    """Dropout layers in sequences and beside them, and no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.before = nn.Dropout(0.1)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(WIDTH, WIDTH),
        )
        self.after = nn.Dropout(0.1)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.before(self.embedding(tokens))
        return self.out(self.after(x + self.body(x)))  # type: ignore[no-any-return]


class WithUnused(nn.Module):
    """Parameters that no forward uses: before, between and behind those that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(WIDTH))
        self.gpt = TinyGPT(depth=4)
        self.gpt.blocks[1].get_submodule("attention").register_parameter("spare", nn.Parameter(torch.ones(3)))
        self.old_head = nn.Linear(WIDTH, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens)  # type: ignore[no-any-return]


def frozen(*names: str) -> nn.Module:
    model = TinyGPT(tied=False, depth=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return model


def frozen_and_unused() -> nn.Module:
    model = frozen(*FIRST_HALF)
    model.register_parameter("mask_token", nn.Parameter(torch.zeros(WIDTH)))
    return model


class AllLabels(RaggedTexts):
    """Every micro-batch has something that counts, as a mean needs."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.labels[:, :2] = self.tokens[:, 1:3]


class AnyLength(RaggedTexts):
    """Every text has another length."""

    def __getitem__(self, index: int) -> Batch:
        length = 3 + index % (LENGTH - 3)
        return {name: tokens[:length] for name, tokens in super().__getitem__(index).items()}


def pad(samples: list[Batch]) -> Batch:
    return {
        "x": pad_sequence([sample["x"] for sample in samples], batch_first=True),
        "y": pad_sequence([sample["y"] for sample in samples], batch_first=True, padding_value=IGNORED),
    }


def mean_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["y"]
    return F.cross_entropy(model(batch["x"]).transpose(1, 2), labels, ignore_index=IGNORED), (labels != IGNORED).sum()


def two_groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The embedding learns faster. Only one stage has it."""
    embedding = [parameter for name, parameter in named if name.startswith("embedding")]
    others = [parameter for name, parameter in named if not name.startswith("embedding")]
    return torch.optim.AdamW([{"params": embedding, "lr": 1e-2}, {"params": others, "weight_decay": 0.0}], lr=3e-3)


class CountingSGD(torch.optim.SGD):
    """Counts the steps of every parameter in a plain number, as some optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                parameter.data.mul_(1 - 1e-3 / self.state[parameter]["count"])


def counting_sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return CountingSGD(named, lr=0.05, momentum=0.9)


# ---- Trainings that have to give the numbers of one process


def gpt(**options: Any) -> nn.Module:
    return TinyGPT(**{"depth": 4, **options})


@dataclass(frozen=True)
class Training:
    build: Callable[[], nn.Module] = gpt
    loss: Callable[[nn.Module, Any], Any] = text_loss
    data: Callable[[], Dataset[Any]] = RaggedTexts
    optimizer: Callable[..., torch.optim.Optimizer] = adamw
    collate: Callable[[list[Any]], Any] = default_collate
    options: dict[str, Any] = field(default_factory=dict)
    micro_batch: int = MICRO_BATCH
    only_layouts: dict[str, Any] = field(default_factory=dict)
    """Options for runs on several ranks, which must make no difference."""
    cuts: tuple[str, str, str] | None = None
    """Where a pipeline of four stages is cut; one of two stages at the second."""
    unused: tuple[str, ...] = ()


FIRST_HALF = ("embedding", "blocks.0", "blocks.1")
SECOND_HALF = ("blocks.2", "blocks.3", "norm", "head")
QUARTERS = ("blocks.1", "blocks.2", "blocks.3")

TRAININGS = {
    "dropout in and outside of blocks": Training(partial(gpt, dropout=0.2)),
    "dropout without blocks": Training(Perceptrons),
    "recompute": Training(partial(gpt, dropout=0.2), only_layouts={"recompute": True}),
    "recompute without blocks": Training(Perceptrons, only_layouts={"recompute": True}),
    "samples of any length": Training(data=AnyLength, collate=pad),
    "mean loss": Training(loss=mean_loss, data=AllLabels, options={"loss_reduction": "mean"}),
    "a single sample at the end of an epoch": Training(data=partial(AllLabels, 2 * GLOBAL_BATCH + 1)),
    "frozen first half": Training(partial(frozen, *FIRST_HALF), cuts=QUARTERS),
    "frozen second half": Training(partial(frozen, *SECOND_HALF), cuts=QUARTERS),
    "frozen middle": Training(partial(frozen, "blocks.1", "blocks.2"), cuts=QUARTERS),
    "frozen and unused": Training(frozen_and_unused, cuts=QUARTERS, unused=("mask_token",)),
    "groups that are empty on a stage": Training(partial(gpt, tied=False), optimizer=two_groups),
    "an optimizer that counts": Training(optimizer=counting_sgd),
    "unused parameters": Training(WithUnused, unused=("mask_token", "gpt.blocks.1.attention.spare", "old_head")),
    "uneven stages": Training(cuts=("blocks.0", "blocks.3", "head")),
}
BATCH_NORM = Training(ConvNet, image_loss, Images, cuts=("norm1", "conv2", "norm2"))


@dataclass(frozen=True)
class Where:
    layout: str
    schedule: str = "1f1b"
    level: str = "zero3"

    @property
    def world_size(self) -> int:
        return Layout.parse(self.layout).world_size

    def __str__(self) -> str:
        return f"{self.layout}-{self.schedule}-{self.level}"


SINGLE = Where("single")
PIPELINES = [
    Where("pp=2"),
    Where("pp=2", "zbv"),
    Where("pp=2,dp=2"),
    Where("pp=2,fsdp=2", level="zero1"),
    Where("pp=2,fsdp=2"),
    Where("pp=2", "interleaved-1f1b"),
]
QUICK = (Where("pp=2"), Where("pp=2,fsdp=2"))
"""Where everybody runs the tests; `make test-all` runs them everywhere."""


def in_each(*values: Any) -> Any:
    """A parameter of a test, a slow one where its pipeline is not among the quick ones."""
    marks = [] if values[-1] in QUICK else [pytest.mark.slow, pytest.mark.soak]
    return pytest.param(*values, id="-".join(map(str, values)), marks=marks)


@dataclass
class Record:
    """What one rank saw of one training; of the tensors it has those of its stages."""

    steps: list[tuple[float, float]]
    norms: list[float]
    gradients: Tensors
    initial: Tensors
    final: Tensors
    buffers: Tensors


def train(job: Job, where: Where, trainings: dict[str, Training]) -> dict[str, Record]:
    """One training after another in the same processes."""
    with join(job, where.layout) as run:
        return {name: train_one(run, where, training) for name, training in trainings.items()}


def train_one(run: Run, where: Where, training: Training) -> Record:
    engine = set_up(run, where, training)
    loader = run.loader(
        training.data(),
        GLOBAL_BATCH,
        micro_batch=training.micro_batch,
        steps=STEPS,
        workers=0,
        collate=training.collate,
    )
    seen = Record([], [], {}, held(engine), {}, {})
    for batch in loader:
        out = engine.step(batch)
        seen.steps.append((out.loss, out.weight))
        seen.norms.append(out.grad_norm.item())
        if out.step == 1:
            seen.gradients = gradients(engine)
    seen.final = held(engine)
    seen.buffers = {name: buffer.clone() for name, buffer in engine.buffers}
    return seen


def set_up(run: Run, where: Where, training: Training) -> Engine:
    options, pipeline = dict(training.options), dict[str, Any](schedule=where.schedule)
    if where is not SINGLE:
        options |= training.only_layouts
    if training.cuts:
        pipeline["cuts"] = [training.cuts[1]] if where.schedule == "1f1b" else list(training.cuts)
    return anew(run).setup(
        training.build,
        training.loss,
        optimizer=training.optimizer,
        clip=0.5,
        shard={"level": where.level},
        pipeline=pipeline,
        **options,
    )


def held(engine: Engine) -> Tensors:
    return {name: full(parameter) for name, parameter in engine.stored}


def together(records: list[Record]) -> Record:
    """What all ranks report, with the tensors of all of them; those that several hold have to be the same."""
    first = records[0]
    whole = replace(first, gradients={}, initial={}, final={}, buffers={})
    for record in records:
        assert (record.steps, record.norms) == (first.steps, first.norms)
        for kind in ("gradients", "initial", "final", "buffers"):
            for name, tensor in getattr(record, kind).items():
                assert getattr(whole, kind).setdefault(name, tensor).equal(tensor), f"ranks differ in {name}"
    return whole


def assert_same_training(ours: Record, theirs: Record) -> None:
    assert [weight for _, weight in ours.steps] == [weight for _, weight in theirs.steps]
    losses = [loss for loss, _ in ours.steps]
    assert losses == pytest.approx([loss for loss, _ in theirs.steps], rel=LOSS, abs=LOSS)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)
    assert list(disagreeing_gradients(ours.gradients, theirs.gradients)) == []
    assert ours.final.keys() == theirs.final.keys()
    for name, start in theirs.initial.items():
        assert ours.initial[name].equal(start), name
        if not name.endswith("key.bias"):  # moved by rounding errors only, and of no influence
            moved = (theirs.final[name] - start).norm()
            assert (ours.final[name] - theirs.final[name]).norm() <= WEIGHTS * moved, name


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> dict[str, Record]:
    return ranks.run(train, 1, SINGLE, {**TRAININGS, "batch norm": BATCH_NORM}, timeout=100)[0]


class Trainings:
    """Trains everything on a layout when the first of it is asked for. Where one fails they are trained one by one."""

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._found: dict[Where, list[dict[str, Record]]] = {}

    def records(self, where: Where, name: str) -> list[Record]:
        """What every rank saw."""
        if where not in self._found:
            try:
                self._found[where] = self._train(where, TRAININGS)
            except RankFailed:
                self._found[where] = []
        found = self._found[where] or self._train(where, {name: TRAININGS[name]})
        return [rank[name] for rank in found]

    def _train(self, where: Where, trainings: dict[str, Training]) -> list[dict[str, Record]]:
        return self._ranks.run(train, where.world_size, where, trainings, timeout=80)


@pytest.fixture(scope="module")
def trainings(ranks: RankPool) -> Trainings:
    return Trainings(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("where", [in_each(where) for where in PIPELINES])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_gives_the_numbers_of_one_process(
    one_process: dict[str, Record], trainings: Trainings, where: Where, name: str
) -> None:
    ours = together(trainings.records(where, name))
    assert_same_training(ours, one_process[name])
    trained = {key for key in ours.final if not ours.final[key].equal(ours.initial[key])}
    assert ours.gradients.keys() <= trained
    assert not any(key.startswith(unused) for key in ours.gradients for unused in TRAININGS[name].unused)


def test_frozen_parameters_stay_where_they_were(one_process: dict[str, Record]) -> None:
    found = one_process["frozen first half"]
    still = {name for name in found.final if found.final[name].equal(found.initial[name])}
    assert still == {name for name in found.final if name.startswith(FIRST_HALF)}


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,dp=2"])
def test_batch_norm_has_the_statistics_of_one_process(
    ranks: RankPool, one_process: dict[str, Record], layout: str
) -> None:
    where = Where(layout)
    ours = together([rank["x"] for rank in ranks.run(train, where.world_size, where, {"x": BATCH_NORM})])
    theirs = one_process["batch norm"]
    assert_same_training(ours, theirs)
    assert ours.buffers.keys() == theirs.buffers.keys()
    for name, buffer in theirs.buffers.items():
        torch.testing.assert_close(ours.buffers[name], buffer, rtol=1e-5, atol=1e-7)
        assert not buffer.equal(torch.zeros_like(buffer)), name


# ---- Between the steps


def right_labels(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    counted = batch["y"] != IGNORED
    return ((model(batch["x"]).argmax(-1) == batch["y"]) & counted).sum(), counted.sum()


def lowest_logit(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """Not of the form of the loss: a plain number of samples, and nothing of the labels."""
    return model(batch["x"]).amin((1, 2)).sum(), len(batch["x"])


def evaluate(job: Job, where: Where, sizes: tuple[int, ...]) -> list[dict[str, Metric]]:
    """Before the training, which looks at the model for the first time there, in the middle and behind it."""
    found = []
    with join(job, where.layout) as run:
        engine = set_up(run, where, TRAININGS["dropout in and outside of blocks"])

        def score() -> None:
            for size in sizes:
                metrics = {"accuracy": right_labels, "lowest logit": lowest_logit}
                found.append(run.evaluate(RaggedTexts(size), metrics, micro_batch=3, workers=0))

        score()
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=4, workers=0):
            if engine.step(batch).step % 2 == 0:
                score()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("where", [in_each(where) for where in PIPELINES])
def test_an_evaluation_gives_the_numbers_of_one_process(ranks: RankPool, where: Where) -> None:
    sizes = (1, 11, 40)
    (expected,) = ranks.run(evaluate, 1, SINGLE, sizes)
    everybody = ranks.run(evaluate, where.world_size, where, sizes)
    assert all(repr(rank) == repr(everybody[0]) for rank in everybody)
    for found, metrics in zip(everybody[0], expected, strict=True):
        for name, metric in metrics.items():
            assert found[name].count == metric.count
            assert found[name].sum == pytest.approx(metric.sum, rel=1e-6, abs=1e-9), name


def samples(_model: nn.Module, batch: Batch) -> tuple[float, int]:
    return float(batch["x"][:, 0].sum()), len(batch["x"])


def count_samples(job: Job, where: Where) -> Metric:
    with join(job, where.layout) as run:
        set_up(run, where, Training())
        return run.evaluate(RaggedTexts(11), {"samples": samples}, micro_batch=3, workers=0)["samples"]


@pytest.mark.parametrize("where", [Where("pp=2"), Where("pp=2,dp=2")], ids=str)
def test_a_metric_may_leave_the_model_alone(ranks: RankPool, where: Where) -> None:
    (expected,) = ranks.run(count_samples, 1, SINGLE)
    assert ranks.run(count_samples, where.world_size, where) == [expected] * where.world_size


def greedy(model: nn.Module) -> list[list[int]]:
    """Decoding as in a tutorial: the whole text through the model for every new token."""
    tokens = torch.tensor([[1, 2], [3, 4], [5, 6]])
    while tokens.shape[1] < LENGTH:
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    texts: list[list[int]] = tokens.tolist()
    return texts


def generate(job: Job, where: Where) -> tuple[list[list[list[int]]], torch.Tensor, list[float]]:
    texts, losses = [], []
    with join(job, where.layout) as run:
        engine = set_up(run, where, TRAININGS["dropout in and outside of blocks"])
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=4, workers=0):
            losses.append(engine.step(batch).loss)
            engine.model.eval()
            texts.append(greedy(engine.model))
        logits = engine.model(RaggedTexts().tokens[:4, :-1])
        return texts, logits.detach(), losses


@pytest.mark.slow
@pytest.mark.parametrize("where", [in_each(where) for where in PIPELINES])
def test_calling_the_model_gives_the_whole_models_output_on_every_rank(ranks: RankPool, where: Where) -> None:
    ((texts, logits, losses),) = ranks.run(generate, 1, SINGLE)
    for found_texts, found_logits, found_losses in ranks.run(generate, where.world_size, where):
        assert found_texts == texts
        torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-5)
        assert found_losses == pytest.approx(losses, rel=LOSS)


def draw(job: Job, where: Where) -> list[float]:
    drawn = []
    with join(job, where.layout) as run:
        engine = set_up(run, where, TRAININGS["dropout in and outside of blocks"])
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=3, workers=0):
            engine.step(batch)
            drawn.append(torch.rand(()).item())
    return drawn


def test_code_between_the_steps_draws_the_numbers_of_one_process(ranks: RankPool) -> None:
    (expected,) = ranks.run(draw, 1, SINGLE)
    assert ranks.run(draw, 2, Where("pp=2", "zbv")) == [expected] * 2


# ---- Checkpoints


@dataclass
class Life:
    """What one rank saw of a run from one start to the next stop."""

    first_step: int
    losses: list[float]
    draws: list[float]
    weights: str
    moments: str

    def __add__(self, later: Life) -> Life:
        return Life(self.first_step, self.losses + later.losses, self.draws + later.draws, later.weights, later.moments)


# Stated cuts: two runs of one model may be cut in different places, and their norms be rounded differently.
RESUMED = {
    "dropout": Training(partial(gpt, dropout=0.2), cuts=QUARTERS),
    "groups": Training(partial(gpt, tied=False), optimizer=two_groups, cuts=QUARTERS),
    "counting": Training(optimizer=counting_sgd, cuts=QUARTERS),
    "frozen": Training(partial(frozen, *FIRST_HALF), cuts=QUARTERS),
    "batch norm": BATCH_NORM,
}
STOPPED = [(name, Where("pp=2")) for name in RESUMED] + [("dropout", where) for where in PIPELINES[1:]]
STOPPED += [("groups", Where("pp=2", "zbv")), ("frozen", Where("pp=2,fsdp=2", level="zero1"))]


def live(job: Job, where: Where, name: str, folder: str, life: int = 1, stop_after: int | None = None) -> Life:
    with unfinished(join(job, where.layout, job.folder / folder, meeting=f"{folder}-{life}")) as run:
        training = RESUMED[name]
        engine = set_up(run, where, training)
        loader = run.loader(training.data(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=STEPS, workers=0)
        seen = Life(engine.steps_done + 1, [], [], "", "")
        for batch in loader:
            out = engine.step(batch)
            seen.losses.append(out.loss)
            seen.draws.append(torch.rand(()).item())
            if out.step == stop_after:
                run.save()
                break
        seen.weights = fingerprint(held(engine) | {name: buffer.clone() for name, buffer in engine.buffers})
        seen.moments = fingerprint(moments(engine))
    return seen


def moments(engine: Engine) -> Tensors:
    """What the optimizer remembers of every parameter."""
    return {
        f"{name} {key}": full(torch.as_tensor(value))
        for name, parameter in engine.stored
        for key, value in engine.optimizer.state.get(parameter, {}).items()
    }


def with_and_without_a_stop(job: Job, where: Where, name: str) -> tuple[Life, Life, Life]:
    before = live(job, where, name, "stopped", stop_after=3)
    after = live(job, where, name, "stopped", life=2)
    return live(job, where, name, "whole"), before, after


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), [in_each(*one) for one in STOPPED])
def test_a_run_that_stopped_has_the_bits_of_one_that_did_not(ranks: RankPool, name: str, where: Where) -> None:
    for whole, before, after in ranks.run(with_and_without_a_stop, where.world_size, where, name):
        assert after.first_step == 4
        assert before + after == whole


def begin(job: Job, run_dir: Path) -> list[str]:
    """A run of two stages that does a step and is left; where it is cut nobody has said."""
    with unfinished(join(job, "pp=2", run_dir)) as run:
        engine = run.setup(gpt, text_loss, optimizer=adamw)
        loader = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=STEPS, workers=0)
        engine.step(next(iter(loader)))
        run.save(wait=True)
        return [name for name, _ in engine.stored]


def come_back(job: Job, run_dir: Path, layout: str, pipeline: dict[str, Any]) -> list[str] | Exception:
    """The parameters that a rank has in the next life of the run, or why there is none."""
    found: list[str] = []

    def start() -> None:
        with unfinished(join(job, layout, run_dir, meeting="again")) as run:
            engine = run.setup(gpt, text_loss, optimizer=adamw, pipeline=pipeline)
            run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=STEPS, workers=0)
            found.extend(name for name, _ in engine.stored)

    return error_of(start) or found


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    run_dir = tmp_path_factory.mktemp("pipeline") / "run"
    return run_dir, ranks.run(begin, 2, run_dir)


def test_a_run_that_comes_back_is_cut_where_it_was(ranks: RankPool, saved: tuple[Path, list[list[str]]]) -> None:
    run_dir, before = saved
    assert ranks.run(come_back, 2, run_dir, "pp=2", {}) == before
    assert ranks.run(come_back, 2, run_dir, "pp=2", {"schedule": "gpipe"}) == before


@pytest.mark.parametrize(
    ("layout", "pipeline"),
    [
        ("single", {}),
        ("pp=4", {}),
        ("pp=2,fsdp=2", {}),
        ("pp=2", {"schedule": "zbv"}),
        ("pp=2", {"cuts": ["head"]}),
    ],
    ids=str,
)
def test_a_run_comes_back_as_another_pipeline_or_none(
    ranks: RankPool, saved: tuple[Path, list[list[str]]], layout: str, pipeline: dict[str, Any]
) -> None:
    found = ranks.run(come_back, Layout.parse(layout).world_size, saved[0], layout, pipeline)
    lists = [names for names in found if isinstance(names, list)]
    assert len(lists) == len(found)
    assert {name for names in lists for name in names} == {name for names in saved[1] for name in names}


# ---- Where a model is cut


def places(job: Job, layout: str, pipelines: list[dict[str, Any]], build: Callable[[], nn.Module]) -> list[set[str]]:
    """The parameters this rank has, for each way to cut the model."""
    found = []
    with join(job, layout) as run:
        for pipeline in pipelines:
            engine = anew(run).setup(build, text_loss, optimizer=adamw, pipeline=pipeline)
            run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=MICRO_BATCH, steps=1, workers=0)
            found.append({name for name, _ in engine.stored})
    return found


def beginning_with(*prefixes: str) -> set[str]:
    return {name for name, _ in gpt().named_parameters() if name.startswith(prefixes)}


def test_stages_begin_where_the_cuts_are(ranks: RankPool) -> None:
    pipelines = [
        {"cuts": ["blocks.1"]},
        {"cuts": ["head"]},
        {"cuts": ["blocks.0"]},
        {"schedule": "looped-bfs", "cuts": ["blocks.1", "blocks.2", "norm"]},
        {"schedule": "zbv", "cuts": ["blocks.1", "blocks.2", "norm"]},
    ]
    first, second = ranks.run(places, 2, "pp=2", pipelines, gpt)
    tied = {"embedding.weight"}
    assert first[0] == beginning_with("embedding", "blocks.0")
    assert second[0] == beginning_with("blocks.1", "blocks.2", "blocks.3", "norm") | tied
    assert first[1] == beginning_with("")
    assert second[1] == tied
    assert first[2] == tied
    assert second[2] == beginning_with("")
    assert first[3] == beginning_with("embedding", "blocks.0", "blocks.2", "blocks.3")
    assert second[3] == beginning_with("blocks.1", "norm") | tied
    assert first[4] == beginning_with("embedding", "blocks.0", "norm")
    assert second[4] == beginning_with("blocks.1", "blocks.2", "blocks.3")


@pytest.mark.slow
@pytest.mark.parametrize("depth", [3, 5, 7])
def test_stages_of_any_depth_have_all_layers_together_and_each_once(ranks: RankPool, depth: int) -> None:
    build = partial(TinyGPT, tied=False, depth=depth)
    pipelines: list[dict[str, Any]] = [{}, {"schedule": "looped-bfs"}]
    for parts in zip(*ranks.run(places, 4, "pp=4", pipelines, build), strict=True):
        assert all(parts)
        assert sorted(name for part in parts for name in part) == sorted(name for name, _ in build().named_parameters())


# ---- Refusals


@dataclass(frozen=True)
class Mistake:
    pipeline: dict[str, Any]
    loader: dict[str, Any]
    cause: str
    fix: str


MISTAKES = {
    "too few micro-batches": Mistake(
        {},
        {"micro_batch": 8},
        "schedule 1f1b on 2 ranks needs at least 2 micro-batches in a step, not 1",
        "give 2 or more (a smaller micro_batch, or a larger global_batch), or use schedule gpipe",
    ),
    "too few for the schedule": Mistake(
        {"schedule": "dualpipev"},
        {"micro_batch": 4},
        "schedule dualpipev on 2 ranks needs at least 4 micro-batches in a step, not 2",
        "give 4 or more (a smaller micro_batch, or a larger global_batch), or use schedule zbv",
    ),
    "rounds of unequal size": Mistake(
        {"schedule": "interleaved-1f1b"},
        {"micro_batch": 1, "global_batch": 5},
        "schedule interleaved-1f1b on 2 ranks cannot take 5 micro-batches, which are not 2 rounds of equal size",
        "give 3, 4 or 6 micro-batches, or use schedule looped-bfs",
    ),
    "a batch that does not divide": Mistake(
        {"micro_batches": 5},
        {},
        "pipeline.micro_batches is 5, which schedule 1f1b on 2 ranks and a global batch of 8 over 1 data rank do not "
        "allow",
        "give 2, 3 or 4, or another global_batch",
    ),
    "said twice": Mistake(
        {"micro_batches": 4},
        {"micro_batch": 4},
        "pipeline.micro_batches is 4, and micro_batch 4 makes 2 of a step",
        "say one of them",
    ),
    "one stage too many": Mistake(
        {"stages_per_rank": 2},
        {},
        "schedule 1f1b needs exactly 1 stage per rank, not 2",
        "give 1 stage per rank, or use schedule interleaved-1f1b",
    ),
    "three stages in a V": Mistake(
        {"schedule": "zbv", "stages_per_rank": 3},
        {},
        "schedule zbv needs exactly 2 stages per rank, not 3",
        "give 2 stages per rank, or use schedule interleaved-zero-bubble",
    ),
    "more stages than parts": Mistake(
        {"schedule": "looped-bfs", "stages_per_rank": 50},
        {},
        "a pipeline of 100 stages was asked for, and this model can be cut into at most ",
        " stages (ranks of pp x stages per rank)",
    ),
    "a cut at an unknown module": Mistake(
        {"cuts": ["block.2"]},
        {},
        "pipeline.cuts names 'block.2', which is no part of this model that a stage can begin with",
        "did you mean blocks.2?",
    ),
    "a cut at nothing alike": Mistake(
        {"cuts": ["encoder"]},
        {},
        "pipeline.cuts names 'encoder', which is no part of this model that a stage can begin with",
        "use some of dropout, blocks.0, blocks.1, blocks.2, blocks.3, norm, head",
    ),
    "too many cuts": Mistake(
        {"cuts": ["blocks.1", "blocks.2"]},
        {},
        "pipeline.cuts names 2 modules, and 2 stages have 1 ",
        "modules that the stages after the first begin with",
    ),
    "cuts in another order": Mistake(
        {"schedule": "looped-bfs", "cuts": ["blocks.2", "blocks.1", "norm"]},
        {},
        "pipeline.cuts names blocks.2, blocks.1, norm, which is not the order in which the model calls them",
        "name each once, in the order of the forward, and not the first part",
    ),
    "a cut before the first part": Mistake(
        {"cuts": ["embedding"]},
        {},
        "pipeline.cuts names embedding, which is not the order in which the model calls them",
        "name each once, in the order of the forward, and not the first part",
    ),
}


def make_mistakes(job: Job) -> dict[str, Exception | None]:
    with join(job, "pp=2") as run:

        def start(mistake: Mistake) -> None:
            anew(run).setup(gpt, text_loss, optimizer=adamw, pipeline=mistake.pipeline)
            run.loader(RaggedTexts(), **{"global_batch": GLOBAL_BATCH, "steps": 1, "workers": 0, **mistake.loader})

        return {name: error_of(partial(start, mistake)) for name, mistake in MISTAKES.items()}


@pytest.fixture(scope="module")
def errors(ranks: RankPool) -> list[dict[str, Exception | None]]:
    return ranks.run(make_mistakes, 2)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_on_every_rank_with_what_would_work(
    errors: list[dict[str, Exception | None]], name: str
) -> None:
    for error in (rank[name] for rank in errors):
        assert isinstance(error, UserError)
        assert MISTAKES[name].cause in error.cause
        assert MISTAKES[name].fix in error.fix
