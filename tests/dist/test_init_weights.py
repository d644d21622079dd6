"""Initial weights are those of one device in every layout, however the model comes into being."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.parallel.build import materialise
from tests.marks import others_slow
from tests.parity.problems import (
    GLOBAL_BATCH,
    LENGTH,
    SEED,
    VOCABULARY,
    WIDTH,
    ConvNet,
    RaggedTexts,
    Tensors,
    TinyGPT,
    adamw,
    anew,
    error_of,
    fingerprint,
    join,
    text_loss,
    weights,
)
from tests.ranks import Job, RankPool

LAYOUTS = ["dp=2", "dp=3", "fsdp=2", "fsdp=4", "dp=2,fsdp=2"]
QUICK = ["dp=2", "fsdp=2", "dp=2,fsdp=2"]


def world_size(layout: str) -> int:
    return Layout.parse(layout).world_size


# ---- Models that can initialise themselves


class Waves(nn.Module):
    """Positions as a buffer that is not saved with the model."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(LENGTH, WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.arange(LENGTH * WIDTH).view(LENGTH, WIDTH).sin())


class SelfMade(nn.Module):
    """Every module of it has `reset_parameters`, as torch's own have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.waves = Waves()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.waves.table
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class WithInitWeights(TinyGPT):
    """Initialises all of itself in one method."""

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)
        self.init_buffers()

    def init_buffers(self) -> None:
        with torch.no_grad():
            self.waves.copy_(torch.arange(LENGTH * WIDTH).view(LENGTH, WIDTH).cos())
            for block in self.blocks:
                causal = block.get_buffer("attention.causal")
                causal.copy_(torch.ones(LENGTH, LENGTH, device=causal.device).tril().bool())


class WithFirstNameOnly(WithInitWeights):
    """Its head is the embedding, and it initialises that as the embedding only."""

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if name != "head.weight":
                nn.init.normal_(parameter, std=0.1)
        self.init_buffers()


class Drawn(nn.Module):
    """Draws its weights from everything that has a global stream."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = nn.Parameter(torch.randn(5, 3))
        self.numpy = nn.Parameter(torch.from_numpy(np.random.standard_normal((4, 3)).astype(np.float32)))
        self.python = nn.Parameter(torch.tensor([random.random() for _ in range(7)]))


def on_meta(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        with torch.device("meta"):
            return build()

    return built


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tied": (TinyGPT, {}),
    "untied": (lambda: TinyGPT(tied=False), {}),
    "batch norm": (ConvNet, {}),
    "drawn": (Drawn, {}),
    "by-name": (SelfMade, {"init": "by-name"}),
    "by-name init_weights": (WithInitWeights, {"init": "by-name"}),
    "on meta": (on_meta(SelfMade), {}),
    "on meta init_weights": (on_meta(WithInitWeights), {}),
    "on meta first name only": (on_meta(WithFirstNameOnly), {}),
}


@contextmanager
def sent_by_rank_0() -> Iterator[None]:
    """Treat every model as one that is too large to be built by every rank."""
    defaults = materialise.build_initial.__kwdefaults__
    assert defaults is not None
    original = defaults["everywhere_bytes"]
    defaults["everywhere_bytes"] = 0
    try:
        yield
    finally:
        defaults["everywhere_bytes"] = original


def build(job: Job, layout: str, names: list[str], large: bool = False) -> dict[str, dict[str, str]]:
    """Fingerprints of every tensor of every model as this rank has it."""
    found = {}
    with join(job, layout) as run:
        for name in names:
            model, options = MODELS[name]
            if large:
                with sent_by_rank_0():
                    engine = anew(run).setup(model, text_loss, optimizer=adamw, **options)
            else:
                engine = anew(run).setup(model, text_loss, optimizer=adamw, **options)
            assert not any(tensor.is_meta for tensor in [*engine.model.parameters(), *engine.model.buffers()])
            found[name] = {key: fingerprint({"": value}) for key, value in weights(engine).items()}
    return found


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> dict[str, dict[str, str]]:
    return ranks.run(build, 1, "single", [name for name in MODELS if name != "on meta first name only"])[0]


# ---- The same weights


@pytest.mark.parametrize("layout", others_slow(LAYOUTS, QUICK))
def test_a_small_model_starts_with_the_weights_of_one_process(
    ranks: RankPool, one_process: dict[str, dict[str, str]], layout: str
) -> None:
    names = ["tied", "untied", "batch norm", "drawn"]
    for found in ranks.run(build, world_size(layout), layout, names):
        assert found == {name: one_process[name] for name in names}


@pytest.mark.parametrize("layout", others_slow(LAYOUTS, QUICK))
def test_a_large_model_that_rank_0_sends_starts_with_the_weights_of_one_process(
    ranks: RankPool, one_process: dict[str, dict[str, str]], layout: str
) -> None:
    names = ["tied", "untied", "batch norm"]
    for found in ranks.run(build, world_size(layout), layout, names, large=True):
        assert found == {name: one_process[name] for name in names}


@pytest.mark.parametrize("layout", others_slow(LAYOUTS, QUICK))
def test_a_model_that_initialises_itself_starts_alike_in_every_layout(
    ranks: RankPool, one_process: dict[str, dict[str, str]], layout: str
) -> None:
    names = ["by-name", "by-name init_weights", "on meta", "on meta init_weights"]
    for found in ranks.run(build, world_size(layout), layout, names):
        assert found == {name: one_process[name] for name in names}


def test_one_process_starts_as_plain_torch_under_the_seed(ranks: RankPool, one_process: dict[str, Any]) -> None:
    (plain,) = ranks.run(plain_torch, 1)
    assert plain == one_process["tied"]


def plain_torch(_job: Job) -> dict[str, str]:
    from lockstep.runtime.seeds import seed_of

    torch.manual_seed(seed_of(SEED, "init"))
    model = TinyGPT()
    tensors = {key: value.detach() for key, value in [*model.named_parameters(), *model.named_buffers()]}
    return {key: fingerprint({"": value}) for key, value in tensors.items()}


def test_by_name_and_on_meta_are_the_same_initialisation(one_process: dict[str, dict[str, str]]) -> None:
    assert one_process["by-name"] == one_process["on meta"]
    assert one_process["by-name init_weights"] == one_process["on meta init_weights"]


def test_modules_of_one_kind_start_apart(one_process: dict[str, dict[str, str]]) -> None:
    """Each module has a seed of its own name; with one seed for all, every block would start as the same block."""
    for name in ("by-name", "tied"):
        tensors = one_process[name]
        first = [key for key in tensors if key.startswith("blocks.0") and "norm" not in key and "causal" not in key]
        assert first
        for key in first:
            assert tensors[key] != tensors[key.replace("blocks.0", "blocks.1")]


def buffers_on_rank(job: Job, layout: str, names: list[str]) -> dict[str, list[bool]]:
    """Whether each buffer has its values."""
    found = {}
    with join(job, layout) as run, sent_by_rank_0():
        for name in names:
            model, options = MODELS[name]
            engine = anew(run).setup(model, text_loss, optimizer=adamw, **options)
            found[name] = right_buffers(name, dict(engine.model.named_buffers()))
    return found


def right_buffers(name: str, buffers: Tensors) -> list[bool]:
    positions = torch.arange(LENGTH * WIDTH).view(LENGTH, WIDTH)
    if name == "by-name":
        return [torch.equal(buffers["waves.table"], positions.sin())]
    if name == "by-name init_weights":
        return [torch.equal(buffers["waves"], positions.cos())]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return [torch.equal(buffers[f"blocks.{i}.attention.causal"], causal) for i in range(2)] + [
        torch.equal(buffers["waves"], TinyGPT().waves)
    ]


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2"])
def test_buffers_that_no_checkpoint_holds_are_right_on_every_rank(ranks: RankPool, layout: str) -> None:
    for found in ranks.run(buffers_on_rank, 2, layout, ["tied", "by-name", "by-name init_weights"]):
        assert found == {"tied": [True] * 3, "by-name": [True], "by-name init_weights": [True]}


# ---- Ties


def ties(job: Job, layout: str, cases: list[tuple[str, bool]]) -> dict[tuple[str, bool], list[bool]]:
    """Whether head and embedding are one parameter: after the set-up, and after a step."""
    found = {}
    with join(job, layout) as run:
        for name, large in cases:
            model, options = MODELS[name]
            with sent_by_rank_0() if large else nullcontext():
                engine = anew(run).setup(model, text_loss, optimizer=adamw, **options)
            built: Any = engine.model
            tied = found[name, large] = [built.head.weight is built.embedding.weight]
            engine.step(next(iter(run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, workers=0))))
            tied.append(built.head.weight is built.embedding.weight)
            tied.append("head.weight" not in dict(built.named_parameters()))
    return found


@pytest.mark.parametrize("layout", ["single", "dp=2", "fsdp=2"])
def test_tied_weights_stay_one_parameter(ranks: RankPool, layout: str) -> None:
    cases = [("tied", False), ("tied", True), ("by-name", False), ("by-name init_weights", False), ("on meta", False)]
    for found in ranks.run(ties, world_size(layout), layout, cases):
        assert found == {case: [True] * 3 for case in cases}


@pytest.mark.parametrize("layout", ["single", "fsdp=2"])
def test_a_tied_weight_may_be_initialised_under_one_of_its_names(ranks: RankPool, layout: str) -> None:
    case = ("on meta first name only", False)
    for found in ranks.run(ties, world_size(layout), layout, [case]):
        assert found == {case: [True] * 3}


# ---- Refusals


class Scale(nn.Module):
    """Owns a parameter and cannot initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))


class HalfDone(nn.Module):
    """Forgets its buffer."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.ones(3), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def holding(part: Callable[[], nn.Module]) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(3, 3)])
    model.part = part()
    return model


def different_on_rank_1() -> nn.Module:
    model = TinyGPT()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.norm.bias.add_(1e-7)
    return model


def more_on_rank_1() -> nn.Module:
    model = TinyGPT()
    if dist.get_rank() == 1:
        model.more = nn.Linear(2, 2)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "no way to initialise": (
        on_meta(lambda: holding(Scale)),
        {},
        "these modules cannot initialise themselves: part (Scale): give them reset_parameters() or init_weights()",
    ),
    "by-name, no way": (
        lambda: holding(Scale),
        {"init": "by-name"},
        "these modules cannot initialise themselves: part (Scale)",
    ),
    "uninitialised buffer": (
        on_meta(lambda: holding(HalfDone)),
        {},
        "part.table is left uninitialised by HalfDone: set it in reset_parameters",
    ),
    "different on rank 1": (
        different_on_rank_1,
        {},
        "build_model gives other values for norm.bias on rank 1 than on rank 0",
    ),
    "more on rank 1": (more_on_rank_1, {}, "build_model gives other parameter names on some ranks"),
}


def refusals(job: Job, layout: str, names: list[str]) -> dict[str, Exception | None]:
    with join(job, layout) as run:
        return {
            name: error_of(partial(run.setup, REFUSED[name][0], text_loss, optimizer=adamw, **REFUSED[name][1]))
            for name in names
        }


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2"])
def test_a_model_without_sure_weights_is_refused_by_name_on_every_rank(ranks: RankPool, layout: str) -> None:
    for errors in ranks.run(refusals, 2, layout, list(REFUSED)):
        assert_refused(errors)


def test_one_process_refuses_what_several_would(ranks: RankPool) -> None:
    (errors,) = ranks.run(refusals, 1, "single", ["no way to initialise", "by-name, no way", "uninitialised buffer"])
    assert_refused(errors)


def assert_refused(errors: dict[str, Exception | None]) -> None:
    for name, error in errors.items():
        assert isinstance(error, UserError), name
        assert REFUSED[name][2] in str(error)
