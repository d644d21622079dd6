"""Hooks on gradients, and tables that change or count the rows of a forward: as in a plain loop, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import UserError
from tests.dist.test_allowed import BATCH, STEPS, Model, Sentences, plain, plain_loop_of, sgd, train_with
from tests.ranks import Job, RankPool


class Shortened(Model):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        table, self.words = self.words.weight, nn.Embedding(*self.words.weight.shape, **options)
        self.words.weight = table


def shortened() -> nn.Module:
    return Shortened(max_norm=0.5)


def counting() -> nn.Module:
    return Shortened(scale_grad_by_freq=True)


class Clipping(Model):
    """Clips the gradient of an activation, which is no matter of scale."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = super().encode(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
        return x


def clipping_parameters() -> nn.Module:
    model = Model()
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))  # type: ignore[no-untyped-call]
    return model


def hooked_module() -> nn.Module:
    model = Model()
    model.head.register_full_backward_hook(lambda _, given, __: (given[0].clamp(-1e-3, 1e-3),))  # type: ignore[index]
    return model


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clamp(-1e-3, 1e-3)


class Clamping(Model):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return Clamped.apply(super().encode(x))  # type: ignore[no-any-return,no-untyped-call]


HOOKED: dict[str, Callable[[], nn.Module]] = {
    "an activation": Clipping,
    "a parameter": clipping_parameters,
    "a module": hooked_module,
    "a function": Clamping,
}


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_see_the_gradient_of_the_mean_loss_on_one_process(tmp_path: Path, name: str) -> None:
    with lockstep.init("single", device="cpu", run_dir=tmp_path / "run") as run:
        losses = train_with(run, HOOKED[name], plain, micro_batch=BATCH)
    assert losses == pytest.approx(plain_loop_of(HOOKED[name], plain), rel=1e-5)


@pytest.mark.parametrize("build", [*HOOKED.values(), counting])
def test_a_step_of_several_forwards_is_refused(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    with (
        lockstep.init("single", device="cpu", run_dir=tmp_path / "run") as run,
        pytest.raises(UserError, match=r"4 micro-batches has no forward .*: give run\.loader micro_batch=8"),
    ):
        train_with(run, build, plain, micro_batch=2)


def refusals(job: Job, layout: str) -> dict[str, list[float] | str]:
    from tests.parity.problems import join

    found: dict[str, list[float] | str] = {}
    for name, build in {**HOOKED, "max_norm": shortened, "scale_grad_by_freq": counting}.items():
        with join(job, layout, meeting=name.replace(" ", "")) as run:
            try:
                found[name] = train_with(run, build, plain)
            except UserError as error:
                found[name] = str(error)
    with join(job, layout, meeting="late") as run:
        engine = run.setup(Model, plain, optimizer=sgd)
        loader = run.loader(Sentences(), BATCH, steps=STEPS, shuffle=False, workers=0)
        try:
            engine.model.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))  # type: ignore
            found["registered late"] = [engine.step(batch).loss for batch in loader]
        except UserError as error:
            found["registered late"] = str(error)
    return found


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "tp=2", "pp=2", "cp=2"])
def test_on_several_ranks_they_are_refused_by_name(layout: str, ranks: RankPool) -> None:
    for found in ranks.run(refusals, 2, layout, timeout=150):
        exact = {"max_norm"} if layout in ("tp=2", "pp=2") else set()
        exact |= {"scale_grad_by_freq"} if layout in ("tp=2", "pp=2") else set()
        said = {
            "an activation": "a hook on a gradient",
            "a parameter": "the parameter head.weight has a hook on its gradient",
            "a module": "head has a backward hook",
            "a function": {"pp=2": "outside of any module", "cp=2": "a tensor that cp cuts"}.get(
                layout, "the backward of Clamped is not linear"
            ),
            "max_norm": "words has max_norm",
            "scale_grad_by_freq": "words has scale_grad_by_freq",
            "registered late": "the parameter head.weight has a hook on its gradient",
        }
        for name, what in said.items():
            if name in exact:
                build = shortened if name == "max_norm" else counting
                assert found[name] == pytest.approx(plain_loop_of(build, plain), rel=1e-5)
            else:
                assert what in str(found[name]), name
