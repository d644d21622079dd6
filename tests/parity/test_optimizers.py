"""Optimizers, schedulers and parameters as people use them, beside a plain loop over the whole batch on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.runtime.seeds import seed_host, seed_of
from lockstep.step.elementwise import ELEMENTWISE
from tests.parity.problems import SEED, error_of, join, unfinished
from tests.ranks import Job, RankPool

STEPS, BATCH, STOP_AFTER = 8, 8, 3
INPUTS = torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(1))
CLIP = 2.0


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    (x,) = batch
    return (model(x) - x.sum(1, keepdim=True).sin()).square().sum(), len(x)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def nothing(*_: Any) -> Callable[[int, float], None]:
    return lambda _step, _loss: None


class Case:
    """A training: what both the plain loop and Lockstep are given. `prepare` returns what is called after each step."""

    def __init__(
        self,
        build: Callable[[], nn.Module] = Blocks,
        loss: Callable[..., Any] = squares,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
        prepare: Callable[[nn.Module, torch.optim.Optimizer], Callable[[int, float], None]] = nothing,
    ) -> None:
        self.build, self.loss, self.optimizer, self.prepare = build, loss, optimizer, prepare


def plain(case: Case) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of the loop that anybody writes for one device."""
    seed_host(seed_of(SEED, "init"))
    model = case.build()
    optimizer = case.optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    after = case.prepare(model, optimizer)
    seen = []
    for step in range(STEPS):
        model.zero_grad()
        total, weight = case.loss(model, [INPUTS[step * BATCH : (step + 1) * BATCH]])
        (total / weight).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        seen.append((float(total.detach() / weight), float(norm)))
        after(step + 1, seen[-1][0])
    return seen


def train(
    job: Job, table: str, name: str, layout: str, life: int = 1, run_dir: Path | None = None, **options: Any
) -> list[tuple[float, float]]:
    """The same by Lockstep, of two lives where there is a folder: the first saves in the middle of a step's code."""
    case: Case = globals()[table][name]
    with unfinished(join(job, layout, run_dir, meeting=f"{name}-{life}")) as run:
        engine = run.setup(case.build, case.loss, optimizer=case.optimizer, clip=CLIP, **options)
        seen, after = [], None
        loader = run.loader(TensorDataset(INPUTS), BATCH, steps=STEPS, shuffle=False, workers=0)
        after = case.prepare(engine.model, engine.optimizer)
        for batch in loader:
            out = engine.step(batch)
            seen.append((out.loss, float(out.grad_norm)))
            if run_dir is not None and life == 1 and out.step == STOP_AFTER:
                run.save()
            after(out.step, out.loss)
            if run_dir is not None and life == 1 and out.step == STOP_AFTER + 1:
                break
    return seen


def close(ours: list[tuple[float, float]], truth: list[tuple[float, float]]) -> bool:
    return ours == [pytest.approx(pair, rel=1e-5, abs=1e-6) for pair in truth]


# ---- Learning rates


def scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[..., Callable[[int, float], None]]:
    def prepare(_: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int, float], None]:
        scheduler = make(optimizer)
        takes_loss = isinstance(scheduler, schedulers.ReduceLROnPlateau)
        return lambda _step, loss: scheduler.step(loss) if takes_loss else scheduler.step()

    return prepare


def by_hand(_: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int, float], None]:
    def after(_step: int, _loss: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.7

    return after


RATES = {
    "one cycle": Case(prepare=scheduled(lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=8)), optimizer=momentum),
    "plateau": Case(
        prepare=scheduled(lambda o: schedulers.ReduceLROnPlateau(o, factor=0.3, patience=0, threshold=0.3))
    ),
    "by hand": Case(prepare=by_hand),
}


def two_lives(job: Job, name: str, layout: str) -> list[tuple[float, float]]:
    folder = job.folder / "run"
    return train(job, "RATES", name, layout, 1, folder)[:STOP_AFTER] + train(job, "RATES", name, layout, 2, folder)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("single", "plateau"),
        ("dp=2", "one cycle"),
        ("fsdp=2", "by hand"),
        pytest.param("tp=2", "plateau", marks=pytest.mark.slow),
        pytest.param("pp=2", "one cycle", marks=pytest.mark.slow),
    ],
)
def test_a_rate_that_the_script_sets_counts_and_survives_a_restart(ranks: RankPool, layout: str, name: str) -> None:
    """The run was saved before the scheduler's step, as many loops do it."""
    truth = plain(RATES[name])
    for seen in ranks.run(two_lives, Layout.parse(layout).world_size, name, layout):
        assert close(seen, truth)


def rates_by_rank(job: Job) -> str:
    with unfinished(join(job, "dp=2")) as run:
        engine = run.setup(Blocks, squares, optimizer=adam)
        engine.optimizer.param_groups[0]["lr"] = 0.1 * (1 + job.rank)
        (batch,) = run.loader(TensorDataset(INPUTS), BATCH, steps=1, workers=0)
        return str(error_of(lambda: engine.step(batch)))


def test_rates_that_differ_between_ranks_are_refused(ranks: RankPool) -> None:
    for refusal in ranks.run(rates_by_rank, 2):
        assert "the learning rate is not the same on all ranks" in refusal


# ---- Parameters that are frozen, unfrozen, or left out


def frozen_for_a_while(model: nn.Module, _: torch.optim.Optimizer) -> Callable[[int, float], None]:
    """The first block after step 2, all that is frozen from step 5 on no more; the last layer from the beginning."""
    assert isinstance(model, Blocks)
    model.last.requires_grad_(False)

    def after(step: int, _loss: float) -> None:
        if step == 2:
            model.blocks[0].requires_grad_(False)
        if step == 5:
            model.requires_grad_(True)

    return after


def no_biases(parameters: Any) -> torch.optim.Optimizer:
    return adam([one for one in parameters if "bias" not in one[0]])


TRAINED = {
    "frozen for a while": Case(prepare=frozen_for_a_while),
    "with momentum": Case(prepare=frozen_for_a_while, optimizer=momentum),
    "left out": Case(optimizer=no_biases),
}


def several(job: Job, table: str, names: list[str], layout: str, **options: Any) -> list[list[tuple[float, float]]]:
    return [train(job, table, name, layout, **options) for name in names]


@pytest.mark.parametrize(
    ("layout", "options"),
    [("dp=2", {}), ("fsdp=2", {}), ("fsdp=2", {"shard": {"level": "zero1"}}), ("tp=2", {})],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_parameters_may_be_frozen_and_unfrozen_and_left_out(
    ranks: RankPool, layout: str, options: dict[str, Any]
) -> None:
    names = [*TRAINED] if layout == "dp=2" else ["frozen for a while"]
    for seen in ranks.run(several, 2, "TRAINED", names, layout, **options):
        for name, one in zip(names, seen, strict=True):
            assert close(one, plain(TRAINED[name])), name


def frozen_lives(job: Job) -> list[tuple[float, float]]:
    folder, name = job.folder / "run", "frozen for a while"
    return train(job, "TRAINED", name, "fsdp=2", 1, folder)[:STOP_AFTER] + train(
        job, "TRAINED", name, "fsdp=2", 2, folder
    )


def test_what_was_frozen_is_frozen_after_a_restart_too(ranks: RankPool) -> None:
    for seen in ranks.run(frozen_lives, 2):
        assert close(seen, plain(TRAINED["frozen for a while"]))


def half_frozen() -> nn.Module:
    model = Blocks()
    model.blocks[0].requires_grad_(False)
    return model


def change(engine: Any, what: str) -> None:
    model = engine.model
    if what == "unfreeze":
        model.blocks[0][0].bias.requires_grad_(True)
    elif what == "freeze":
        model.last.requires_grad_(False)
    elif what == "replace":
        model.last = nn.Linear(6, 1)
    else:
        model.blocks[1].register_parameter("scale", nn.Parameter(torch.ones(1)))


def refusal(job: Job, what: str, layout: str) -> str:
    with unfinished(join(job, layout, meeting=what)) as run:
        engine = run.setup(half_frozen, squares, optimizer=adam)
        steps = iter(run.loader(TensorDataset(INPUTS), BATCH, steps=2, workers=0))
        engine.step(next(steps))
        change(engine, what)
        return str(error_of(lambda: engine.step(next(steps))))


def refusals(job: Job, expected: list[tuple[str, str]]) -> list[str]:
    return [refusal(job, what, layout) for what, layout in expected]


def test_a_parameter_that_the_optimizer_never_got_is_refused_at_the_next_step(ranks: RankPool) -> None:
    expected = {
        ("unfreeze", "dp=2"): "the parameter blocks.0.0.bias was unfrozen (requires_grad) after run.setup",
        ("replace", "fsdp=2"): "last was replaced, added or removed after run.setup",
        ("add", "dp=2"): "blocks.1.scale was replaced, added or removed after run.setup",
        ("freeze", "pp=2"): "last.weight was frozen (requires_grad) after the model was cut into stages",
    }
    for found in ranks.run(refusals, 2, [*expected]):
        for text, sentence in zip(found, expected.values(), strict=True):
            assert sentence in text


# ---- Parameters and losses of other kinds


class Special(Blocks):
    """With a temperature, which is a single number, as CLIP has one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale.exp()


class Complex(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + (x.to(torch.complex64) @ self.turn).abs())


class Lazy(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LazyLinear(1)


class Sparse(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table((x[:, 0] > 0).long()))


def with_l2(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    total, weight = squares(model, batch)
    return total + weight * 0.01 * sum(parameter.square().sum() for parameter in model.parameters()), weight


def with_penalty(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    x = batch[0].clone().requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - 1).square().sum() + slope.square().sum(), len(x)


class Features(Blocks):
    """Forward hooks keep what blocks return, for the loss and to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[int, Any] = {}
        self.seen: list[torch.Tensor] = []
        self.last_hidden: torch.Tensor | None = None
        for number, block in enumerate(self.blocks):
            block.register_forward_hook(self.keep(number))

    def keep(self, number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            self.features[number] = (output,)

        return hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
            self.seen = [*self.seen[:1], x]
        self.last_hidden = x.detach()
        return self.last(x)  # type: ignore[no-any-return]


def with_features(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    total, weight = squares(model, batch)
    assert isinstance(model, Features)
    return total + 0.1 * sum(kept.square().sum() for (kept,) in model.features.values()), weight


def averaged(model: nn.Module, _: torch.optim.Optimizer) -> Callable[[int, float], None]:
    average = copy.deepcopy(model)

    def after(_step: int, _loss: float) -> None:
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)

    return after


SPECIAL = {
    "single number": Case(build=Special),
    "complex": Case(build=Complex),
    "l2": Case(loss=with_l2),
    "penalty": Case(loss=with_penalty),
    "copy": Case(prepare=averaged),
    "features": Case(build=Features, loss=with_features),
    "features to look at": Case(build=Features, prepare=averaged),
    "lazy": Case(build=Lazy),
    "sparse": Case(build=Sparse, optimizer=momentum),
    "closure": Case(optimizer=lambda parameters: torch.optim.LBFGS([one for _, one in parameters])),
}


@pytest.mark.parametrize(
    ("layout", "names", "options"),
    [
        ("dp=2", ["complex", "penalty"], {}),
        ("fsdp=2", ["single number", "copy", "features to look at"], {}),
        ("pp=2", ["features", "features to look at"], {}),
        ("fsdp=2", ["single number", "complex", "l2", "penalty", "copy"], {"shard": {"level": "zero1"}}),
    ],
    ids=["dp=2", "fsdp=2", "pp=2", "zero1"],
)
def test_parameters_and_losses_of_other_kinds_give_the_numbers_of_a_plain_loop(
    ranks: RankPool, layout: str, names: list[str], options: dict[str, Any]
) -> None:
    for seen in ranks.run(several, 2, "SPECIAL", names, layout, **options):
        for name, one in zip(names, seen, strict=True):
            assert close(one, plain(SPECIAL[name])), name


STOCK = {
    optimizer.__name__: Case(optimizer=lambda parameters, make=optimizer: make(parameters, lr=0.02))  # type: ignore[misc]
    for optimizer in ELEMENTWISE
}
STOCK |= {
    "fused SGD": Case(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, fused=True)),
    "fused Adagrad": Case(optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.02, fused=True)),
}


def stock(job: Job, layout: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in STOCK:
        try:
            found[name] = train(job, "STOCK", name, layout)
        except UserError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("layout", ["fsdp=2", pytest.param("tp=2", marks=pytest.mark.slow)])
def test_every_stock_optimizer_does_on_parts_what_it_does_on_the_whole_or_is_refused(
    ranks: RankPool, layout: str
) -> None:
    refused = {
        "Rprop": f"torch's Rprop cannot update parts of parameters, which ranks hold under layout {layout}",
        "fused SGD": "torch's SGD with fused=True cannot update parts of parameters",
        "fused Adagrad": "torch's Adagrad with fused=True cannot update parts of parameters",
    }
    for found in ranks.run(stock, 2, layout, timeout=120):
        for name, seen in found.items():
            if name in refused:
                assert refused[name] in seen
            else:
                assert close(seen, plain(STOCK[name])), name


def why_not(job: Job, names: list[str]) -> list[str]:
    return [str(error_of(lambda name=name: train(job, "SPECIAL", name, "fsdp=2"))) for name in names]  # type: ignore[misc]


def test_what_shards_cannot_do_is_said_in_one_sentence(ranks: RankPool) -> None:
    expected = {
        "complex": "the parameter turn is complex",
        "l2": "a penalty on model.parameters(): use shard.level = zero1",
        "penalty": "the loss computes a gradient itself (torch.autograd.grad)",
        "lazy": "build_model left last.weight without a shape",
        "sparse": "table has sparse gradients",
        "closure": "the optimizer LBFGS wants a closure",
    }
    for found in ranks.run(why_not, 2, [*expected]):
        for text, sentence in zip(found, expected.values(), strict=True):
            assert sentence in text
