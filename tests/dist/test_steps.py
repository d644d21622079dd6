"""What one optimizer step does in the cases that layouts usually get wrong, compared with one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.engine import Engine
from lockstep.errors import NonFiniteError, UserError
from lockstep.layout import Layout
from lockstep.run import Run
from tests.marks import others_slow
from tests.parity.problems import (
    GLOBAL_BATCH,
    IGNORED,
    VOCABULARY,
    Batch,
    ConvNet,
    Images,
    Perceptron,
    RaggedTexts,
    Tensors,
    TinyGPT,
    adamw,
    disagreeing_gradients,
    error_of,
    fingerprint,
    gradients,
    image_loss,
    join,
    text_loss,
    weights,
)
from tests.ranks import Job, RankFailed, RankPool

LAYOUTS = ["dp=2", "fsdp=2", "dp=2,fsdp=2"]
QUICK = ["single", "dp=2", "fsdp=2"]


def world_size(layout: str) -> int:
    return Layout.parse(layout).world_size


def texts_without_labels(first: int, end: int) -> RaggedTexts:
    """Texts in which every sample has some label that counts, but for those from `first` to `end`."""
    texts = RaggedTexts()
    texts.labels[:, 0] = texts.tokens[:, 1]
    texts.labels[first:end] = IGNORED
    return texts


def unshuffled(run: Run, dataset: Any, micro_batch: int, steps: int) -> Any:
    return run.loader(dataset, GLOBAL_BATCH, micro_batch=micro_batch, steps=steps, shuffle=False, workers=0)


# ---- Windows in which nothing counts


def train_past_an_empty_step(job: Job, layout: str) -> tuple[list[Any], list[str], int]:
    with join(job, layout) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw, clip=0.5)
        results, prints = [], []
        for batch in unshuffled(run, texts_without_labels(8, 16), micro_batch=2, steps=3):
            out = engine.step(batch)
            results.append((out.step, out.skipped, out.weight, out.loss))
            prints.append(fingerprint(weights(engine)))
        return results, prints, engine.state.steps_skipped


@pytest.mark.parametrize("layout", others_slow(["single", *LAYOUTS], QUICK))
def test_a_step_in_which_nothing_counts_is_skipped_and_counted_on_every_rank(ranks: RankPool, layout: str) -> None:
    everybody = ranks.run(train_past_an_empty_step, world_size(layout), layout)
    for results, prints, skipped in everybody:
        assert [(step, skip) for step, skip, _, _ in results] == [(1, False), (2, True), (3, False)]
        assert results[1][2] == 0
        assert prints[0] == prints[1] != prints[2]
        assert skipped == 1
    assert len({repr(rank) for rank in everybody}) == 1


def one_step(job: Job, layout: str, case: str, micro_batch: int = 4) -> tuple[float, Tensors, Tensors]:
    """Loss and gradients of one step, and the weights after it."""
    build, loss, dataset, options = CASES[case]
    with join(job, layout, timeout_minutes=job.patient(15) / 60) as run:
        engine = run.setup(build, loss, **{"optimizer": adamw, **options})
        (batch,) = unshuffled(run, dataset(), micro_batch, steps=1)
        out = engine.step(batch)
        return out.loss, gradients(engine), weights(engine)


def assert_like_one_process(ranks: RankPool, layout: str, case: str, micro_batch: int = 4) -> tuple[Tensors, Tensors]:
    """Compares one step of a case, and returns its gradients and weights."""
    ((expected_loss, expected, after),) = ranks.run(one_step, 1, "single", case, micro_batch)
    for loss, found, weights_found in ranks.run(one_step, world_size(layout), layout, case, micro_batch):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert list(disagreeing_gradients(found, expected)) == []
        for name, weight in after.items():
            if not name.endswith("key.bias"):
                torch.testing.assert_close(weights_found[name], weight, rtol=1e-5, atol=1e-5, msg=name)
    return expected, after


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2"])
def test_a_rank_of_which_nothing_counts_takes_part(ranks: RankPool, layout: str) -> None:
    assert_like_one_process(ranks, layout, "second half ignored")


def test_a_loss_may_return_a_constant_when_nothing_counts(ranks: RankPool) -> None:
    assert_like_one_process(ranks, "dp=2", "constant when ignored")


def constant_when_ignored(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
    return text_loss(model, batch) if (batch["y"] != IGNORED).any() else (torch.zeros(()), 0)


# ---- Numbers that are not finite


class Root(nn.Module):
    """A linear model of the pixels; its gradient is infinite where `sharp` meets a picture that is all zero."""

    def __init__(self, sharp: bool = False) -> None:
        super().__init__()
        self.sharp = sharp
        self.out = nn.Linear(49, 5, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = self.out(images.flatten(1))
        if self.sharp:
            scores = scores + (images.flatten(1) @ self.out.weight[:1].T).abs().sqrt()
        return scores  # type: ignore[no-any-return]


def train_into_a_bad_sample(
    job: Job, layout: str, pixel: float, sharp: bool
) -> tuple[Exception | None, list[str], int]:
    images = Images()
    images.pixels[13] = pixel
    prints: list[str] = []
    with join(job, layout) as run:
        engine = run.setup(lambda: Root(sharp), image_loss, optimizer=adamw)

        def train() -> None:
            for batch in unshuffled(run, images, micro_batch=2, steps=3):
                engine.step(batch)
                prints.append(fingerprint(weights(engine)))

        error = error_of(train)
        return error, [*prints, fingerprint(weights(engine))], engine.steps_done


@pytest.mark.parametrize(
    ("layout", "rank"),
    [("single", 0), ("dp=2", 1), pytest.param("dp=4", 2, marks=pytest.mark.slow), ("fsdp=2", 1)],
)
def test_a_nan_in_one_sample_stops_every_rank_at_its_step_and_names_it(ranks: RankPool, layout: str, rank: int) -> None:
    for error, prints, steps_done in ranks.run(
        train_into_a_bad_sample, world_size(layout), layout, float("nan"), False
    ):
        assert isinstance(error, NonFiniteError)
        assert (error.what, error.step, error.rank, error.sample_ids) == ("loss", 2, rank, [12, 13])
        assert f"step 2 on rank {rank} (sample ids 12, 13; NaN is in sample ids 13): look at these" in str(error)
        assert len(prints) == 2, "no step after the first one was done"
        assert prints[0] == prints[1], "the weights are those of the step before"
        assert steps_done == 1


class Mixed(nn.Module):
    """Two layers, and a BatchNorm that lets samples see each other."""

    def __init__(self, normalises: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(49) if normalises else nn.Identity()
        self.first = nn.Linear(49, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(self.first(self.norm(images.flatten(1))))  # type: ignore[no-any-return]


NAN = float("nan")
BLAMED: dict[str, dict[str, Any]] = {
    "one rank": {"bad": [13]},
    "both ranks": {"bad": [9, 13]},
    "one sample that all see": {"bad": [13], "normalises": True, "micro_batch": None},
    "weights": {"broken": "first.weight"},
    "a weight of the last layer": {"broken": "out.bias"},
    "weights that blow up": {"lr": 1e30},
}


def stop_at(job: Job, layout: str, cases: list[str]) -> dict[str, NonFiniteError]:
    """What is said of step 2 of every case."""
    errors = {}
    for number, case in enumerate(cases):
        given = {"bad": [], "normalises": False, "micro_batch": 2, "broken": "", "lr": 1e-3, **BLAMED[case]}
        images = Images()
        images.pixels[given["bad"]] = NAN
        with join(job, layout, meeting=f"m{number}") as run:
            engine = run.setup(
                lambda: Mixed(given["normalises"]),  # noqa: B023 - called at once
                image_loss,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=given["lr"]),  # noqa: B023
                recover={"on_nonfinite": "skip" if given["broken"] else "stop"},
            )
            error = error_of(lambda: train_and_break(engine, run, images, given))  # noqa: B023
        assert isinstance(error, NonFiniteError), (case, error)
        errors[case] = error
    return errors


def coupled_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """Every sample is compared with the mean of those in its forward."""
    images, labels = batch["x"], batch["y"]
    scores = model(images)
    return F.cross_entropy(scores - scores.mean(0), labels, reduction="sum"), len(labels)


@pytest.mark.parametrize(("loss", "coupled"), [(image_loss, False), (coupled_loss, True)])
def test_samples_that_are_not_finite_tell_nothing_of_whether_samples_see_each_other(
    tmp_path: Path, loss: Any, coupled: bool
) -> None:
    images = Images()
    images.pixels[3] = NAN
    with lockstep.init("single", run_dir=tmp_path / "run", device="cpu") as run:
        run.setup(lambda: Mixed(False), loss, optimizer=adamw)
        loader = run.loader(images, 16, steps=2, shuffle=False, workers=0)
        assert loader.is_coupled == coupled


def train_and_break(engine: Engine, run: Run, images: Images, given: dict[str, Any]) -> None:
    for batch in unshuffled(run, images, given["micro_batch"], steps=3):
        engine.step(batch)
        for name, parameter in engine.stored:
            if name == given["broken"]:
                with torch.no_grad():
                    parameter.fill_(NAN)


def test_a_loss_that_is_not_finite_is_blamed_on_who_it_comes_from(ranks: RankPool) -> None:
    for told in ranks.run(stop_at, 2, "dp=2", list(BLAMED), timeout=60):
        seen = {case: (error.step, error.rank, error.sample_ids) for case, error in told.items()}
        assert seen == {
            "one rank": (2, 1, [12, 13]),
            "both ranks": (2, None, [8, 9, 12, 13]),
            "one sample that all see": (2, None, list(range(8, 16))),
            "weights": (2, None, []),
            "a weight of the last layer": (2, None, []),
            "weights that blow up": (2, None, list(range(8, 16))),
        }
        assert "at step 2, because first.weight was not before it: go back" in str(told["weights"])
        assert told["a weight of the last layer"].tensor == "out.bias"
        assert "NaN is in sample ids 13): look at these samples" in str(told["one sample that all see"])
        assert "the loss of every micro-batch is not finite" in str(told["weights that blow up"])
        assert "): lower the learning rate or clip" in str(told["weights that blow up"])


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "fsdp=2"])
def test_ranks_with_the_same_samples_blame_the_samples_or_the_weights_that_one_of_them_has(
    ranks: RankPool, layout: str
) -> None:
    rank = 1 if layout == "fsdp=2" else None
    for told in ranks.run(stop_at, 2, layout, ["one rank", "a weight of the last layer"], timeout=60):
        assert (told["one rank"].rank, told["one rank"].sample_ids) == (rank, [12, 13])
        assert told["a weight of the last layer"].tensor == "out.bias"


@pytest.mark.parametrize("layout", ["single", "dp=2", "fsdp=2"])
def test_an_infinite_gradient_of_a_finite_loss_stops_before_the_weights_change(ranks: RankPool, layout: str) -> None:
    for error, prints, steps_done in ranks.run(train_into_a_bad_sample, world_size(layout), layout, 0.0, True):
        assert isinstance(error, NonFiniteError)
        assert (error.what, error.step) == ("gradient", 2)
        assert 13 in error.sample_ids, "the samples it tells people to look at must have the bad one among them"
        assert len(prints) == 2
        assert prints[0] == prints[1]
        assert steps_done == 1


# ---- Parameters that not everybody trains


class WithExtra(nn.Module):
    """Has one layer that is used never, or only by micro-batches that have token 0 in front."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.inner = Perceptron()
        self.used = used
        self.extra = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.inner(tokens)
        return scores + self.extra(scores) if self.used and bool((tokens[:, 0] == 0).any()) else scores


def first_sample_marked() -> RaggedTexts:
    texts = texts_without_labels(0, 0)
    texts.tokens[:, 0] = 1
    texts.tokens[0, 0] = 0
    return texts


def frozen_gpt() -> nn.Module:
    model = TinyGPT(tied=False)
    model.embedding.weight.requires_grad_(False)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    model.blocks[1].get_submodule("mlp").requires_grad_(False)
    return model


@pytest.mark.parametrize("layout", others_slow(LAYOUTS, QUICK))
def test_a_parameter_that_nothing_uses_keeps_its_value_under_weight_decay(ranks: RankPool, layout: str) -> None:
    expected, after = assert_like_one_process(ranks, layout, "extra never used", micro_batch=2)
    assert not any(name.startswith("extra") for name in expected)
    ((_, _, before),) = ranks.run(zero_steps, 1, "extra never used")
    assert before["extra.weight"].equal(after["extra.weight"])


def zero_steps(job: Job, case: str) -> tuple[None, None, Tensors]:
    with join(job, "single") as run:
        return None, None, weights(run.setup(CASES[case][0], text_loss, optimizer=adamw))


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_parameter_that_only_some_ranks_use_gets_their_gradient(ranks: RankPool, micro_batch: int) -> None:
    expected, _ = assert_like_one_process(ranks, "dp=2", "extra sometimes used", micro_batch)
    assert expected["extra.weight"].norm() > 0


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_parameter_that_only_some_shards_use_gets_their_gradient_or_is_refused(
    ranks: RankPool, micro_batch: int
) -> None:
    with refusal_is_fine():
        assert_like_one_process(ranks, "fsdp=2", "extra sometimes used", micro_batch)


@contextmanager
def refusal_is_fine() -> Iterator[None]:
    try:
        yield
    except RankFailed as failure:
        if failure.type_name != "UserError":
            raise


@pytest.mark.parametrize("layout", others_slow(LAYOUTS, QUICK))
def test_frozen_parameters_stay_and_the_others_train(ranks: RankPool, layout: str) -> None:
    expected, after = assert_like_one_process(ranks, layout, "frozen", micro_batch=2)
    ((_, _, before),) = ranks.run(zero_steps, 1, "frozen")
    moved = {name for name in after if not after[name].equal(before[name])}
    assert moved == set(expected)
    assert not any(name.startswith(("embedding", "blocks.0", "blocks.1.mlp")) for name in moved)
    assert any(name.startswith("blocks.1.attention") for name in moved)


# ---- What a loss function may do


def mean_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    logits, labels = model(batch["x"]), batch["y"]
    mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    return mean, int((labels != IGNORED).sum())


@pytest.mark.parametrize("layout", ["single", "dp=2", "fsdp=2"])
def test_a_mean_with_its_weight_is_as_good_as_a_sum(ranks: RankPool, layout: str) -> None:
    ((loss, expected, _),) = ranks.run(one_step, 1, "single", "sum", 2)
    found_loss, found, _ = ranks.run(one_step, world_size(layout), layout, "mean", 2)[0]
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert list(disagreeing_gradients(found, expected)) == []


@pytest.mark.parametrize("layout", ["single", "dp=2"])
def test_a_mean_over_nothing_counts_nothing(ranks: RankPool, layout: str) -> None:
    ((loss, expected, _),) = ranks.run(one_step, 1, "single", "second half ignored", 2)
    found_loss, found, _ = ranks.run(one_step, world_size(layout), layout, "mean, second half ignored", 2)[0]
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert list(disagreeing_gradients(found, expected)) == []


def test_a_mean_over_nothing_is_refused_where_the_model_is_sharded(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="a micro-batch of weight 0 has no mean loss") as failure:
        ranks.run(one_step, 2, "fsdp=2", "mean, second half ignored", 2)
    assert failure.value.type_name == "UserError"


def bare_loss(model: nn.Module, batch: Batch) -> Any:
    return text_loss(model, batch)[0]


def loss_by_label(model: nn.Module, batch: Batch) -> Any:
    logits, labels = model(batch["x"]), batch["y"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none"), labels.numel()


def scaled_in_place(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = model(batch["x"]), batch["y"]
    logits /= 2.0
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def refusal(job: Job, layout: str, case: str) -> Exception | None:
    return error_of(lambda: one_step(job, layout, case))


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("bare loss", "the loss function returned Tensor: return (sum of the losses, how many of them count)"),
        ("loss by label", 'a loss that is not one number: use reduction="sum"'),
    ],
)
def test_a_loss_of_another_kind_is_refused_on_every_rank(ranks: RankPool, case: str, sentence: str) -> None:
    for error in ranks.run(refusal, 2, "dp=2", case):
        assert isinstance(error, UserError)
        assert sentence in str(error)


def test_a_loss_may_change_the_output_of_the_model_in_place(ranks: RankPool) -> None:
    assert_like_one_process(ranks, "dp=2", "scaled in place")


def test_a_loss_may_change_the_output_of_a_sharded_model_in_place_or_is_refused(ranks: RankPool) -> None:
    """torch's sharding loses its hook on an output that is a view, and gives wrong gradients without an error."""
    with refusal_is_fine():
        assert_like_one_process(ranks, "fsdp=2", "scaled in place")


def step_on_a_plain_batch(job: Job) -> Exception | None:
    with join(job, "single") as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        return error_of(lambda: engine.step({"x": torch.zeros(1)}))  # type: ignore[arg-type]


def test_a_batch_from_elsewhere_is_refused(ranks: RankPool) -> None:
    (error,) = ranks.run(step_on_a_plain_batch, 1)
    assert str(error) == "engine.step was given a dict: give it what run.loader(...) yields"


Case = tuple[Callable[[], nn.Module], Any, Callable[[], Any], dict[str, Any]]

CASES: dict[str, Case] = {
    "sum": (TinyGPT, text_loss, lambda: texts_without_labels(0, 0), {}),
    "mean": (TinyGPT, mean_loss, lambda: texts_without_labels(0, 0), {"loss_reduction": "mean"}),
    "second half ignored": (TinyGPT, text_loss, lambda: texts_without_labels(4, 8), {}),
    "mean, second half ignored": (TinyGPT, mean_loss, lambda: texts_without_labels(4, 8), {"loss_reduction": "mean"}),
    "constant when ignored": (TinyGPT, constant_when_ignored, lambda: texts_without_labels(4, 8), {}),
    "extra never used": (lambda: WithExtra(False), text_loss, first_sample_marked, {}),
    "extra sometimes used": (lambda: WithExtra(True), text_loss, first_sample_marked, {}),
    "frozen": (frozen_gpt, text_loss, RaggedTexts, {}),
    "bare loss": (TinyGPT, bare_loss, RaggedTexts, {}),
    "loss by label": (TinyGPT, loss_by_label, RaggedTexts, {}),
    "scaled in place": (Perceptron, scaled_in_place, lambda: texts_without_labels(0, 0), {}),
}


# ---- How often gradients travel


def count_gradient_sums(job: Job, layout: str, micro_batch: int) -> dict[str, int]:
    """The collectives that add up gradients in the second step; the first one also sets things up."""
    counted: Counter[str] = Counter()
    # Every version of torch has another name for what FSDP calls.
    summing = [name for name in dir(dist) if name == "all_reduce" or name.startswith("reduce_scatter")]
    originals = {name: getattr(dist, name) for name in summing}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            # Small ones are decisions and norms; no gradients of this model are that small.
            if tensors[0].is_floating_point() and tensors[0].numel() > 64:
                counted["all_reduce" if name == "all_reduce" else "reduce_scatter"] += 1
            return originals[name](*args, **kwargs)

        return call

    with join(job, layout) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw, clip=0.5)
        steps = iter(unshuffled(run, texts_without_labels(0, 0), micro_batch, steps=2))
        engine.step(next(steps))
        try:
            for name in originals:
                setattr(dist, name, counting(name))
            engine.step(next(steps))
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
    return dict(counted)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("dp=2", {"all_reduce": 1}),
        ("fsdp=2", {"reduce_scatter": 3}),  # two blocks and the rest of the model
        ("dp=2,fsdp=2", {"reduce_scatter": 3, "all_reduce": 3}),
    ],
)
def test_gradients_are_summed_once_a_step_however_many_micro_batches(
    ranks: RankPool, layout: str, expected: dict[str, int]
) -> None:
    data_size = world_size(layout)
    for accumulation in (1, 4 if data_size == 2 else 2):
        micro_batch = GLOBAL_BATCH // (data_size * accumulation)
        assert ranks.run(count_gradient_sums, data_size, layout, micro_batch) == [expected] * data_size, accumulation


# ---- BatchNorm


def train_batch_norm(job: Job, layout: str, micro_batch: int) -> tuple[list[float], Tensors, Tensors]:
    with join(job, layout) as run:
        engine: Engine = run.setup(ConvNet, image_loss, optimizer=adamw, clip=1.0)
        losses: list[float] = []
        first: Tensors = {}
        for batch in run.loader(Images(), GLOBAL_BATCH, micro_batch=micro_batch, steps=6, workers=0):
            losses.append(engine.step(batch).loss)
            first = first or gradients(engine)
        return losses, first, weights(engine)


@pytest.mark.parametrize(
    ("layout", "micro_batch"),
    others_slow([("dp=2", 4), ("dp=3", 2), ("fsdp=2", 2), ("fsdp=3", 2)], [("dp=2", 4), ("fsdp=3", 2)]),
)
def test_batch_norm_has_the_statistics_and_gradients_of_one_process(
    ranks: RankPool, layout: str, micro_batch: int
) -> None:
    ((expected_losses, expected, after),) = ranks.run(train_batch_norm, 1, "single", micro_batch)
    everybody = ranks.run(train_batch_norm, world_size(layout), layout, micro_batch)
    losses, found, state = everybody[0]
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert list(disagreeing_gradients(found, expected)) == []
    for name in after:
        torch.testing.assert_close(state[name], after[name], rtol=1e-5, atol=1e-6, msg=name)
    # 37 samples by 8: four steps of the first epoch are full, the fifth has 5, the sixth is the next epoch's.
    assert int(state["norm1.num_batches_tracked"]) == 5 * (8 // micro_batch) + -(-5 // micro_batch)
    assert not state["norm1.running_mean"].equal(torch.zeros(4))
    assert len({fingerprint(rank[2]) for rank in everybody}) == 1


class Seeing(nn.Module):
    """A block that notes in which order torch would try the kernels of attention, in every forward."""

    def __init__(self, seen: list[list[int]]) -> None:
        super().__init__()
        self.linear = nn.Linear(VOCABULARY, VOCABULARY)
        self._seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._seen.append(list(torch._C._get_sdp_priority_order()))  # private in torch 2.11 and 2.13
        return self.linear(x)  # type: ignore[no-any-return]


def kernels_of_recomputed_blocks(job: Job) -> list[list[int]]:
    seen: list[list[int]] = []

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY), *(Seeing(seen) for _ in range(2)))

    with join(job, "single") as run:
        engine = run.setup(build, text_loss, optimizer=adamw, recompute=True, attention="efficient")
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=GLOBAL_BATCH, steps=1, workers=0):
            seen.clear()  # of trials
            engine.step(batch)
    return seen


def test_a_block_that_is_computed_again_has_the_same_kernels_of_attention(ranks: RankPool) -> None:
    """What another kernel keeps has other shapes: torch refuses to go back through it."""
    (seen,) = ranks.run(kernels_of_recomputed_blocks, 1)
    assert len(seen) == 4, "two blocks, each computed twice"
    assert seen == [seen[0]] * 4
    assert seen[0] != list(torch._C._get_sdp_priority_order())


def draws_from_step_2_on(job: Job) -> str:
    def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = text_loss(model, batch)
        return total * (torch.rand(()) if engine.steps_done else 1.0), weight

    with join(job, "single") as run:
        engine = run.setup(TinyGPT, loss, optimizer=adamw)
        batches = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=4, steps=3, workers=0)
        return str(error_of(lambda: [engine.step(batch) for batch in batches]))


def test_draws_that_begin_in_a_later_step_are_refused_by_name(ranks: RankPool) -> None:
    (told,) = ranks.run(draws_from_step_2_on, 1)
    assert told.startswith("the forward of step 2 draws random numbers, and at the start it drew none: let it draw")
