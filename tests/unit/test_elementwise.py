"""Optimizers on parts of parameters: known or proven to be the same as on the whole, else refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.step.elementwise import refuse_closure, refuse_coupled

SHARDS = Layout(fsdp=2)
Pairs = list[tuple[str, nn.Parameter]]


class Own(torch.optim.Optimizer):
    """What the optimizers below have in common. `settings` has no default: nobody can make it from its defaults."""

    def __init__(self, parameters: Any, settings: dict[str, float]) -> None:
        self.settings = settings
        super().__init__(parameters, {"lr": settings["lr"]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                parameter.sub_(self.update(parameter, parameter.grad, state) * group["lr"])

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


class Sign(Own):
    """Elementwise, with state in float32 that does not go with other formats."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        average = state.setdefault("average", torch.zeros_like(parameter, dtype=torch.float32))
        average.lerp_(gradient, 0.1)
        return torch.sign(average)


class Lamb(Own):
    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, _: dict[str, Any]) -> torch.Tensor:
        return torch.mul(gradient, parameter.norm() / gradient.norm())


class Muon(Own):
    def update(self, _: torch.Tensor, gradient: torch.Tensor, __: dict[str, Any]) -> torch.Tensor:
        if gradient.dim() != 2:
            return gradient
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        return torch.mm(left, right)


class Shampoo(Own):
    """Looks at rows and columns only after 25 steps."""

    def update(self, _: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return gradient if state["steps"] < 25 else gradient / gradient.norm(dim=0, keepdim=True)


class Rows(Own):
    """Right where whole rows are shared out, wrong where columns are."""

    def update(self, _: torch.Tensor, gradient: torch.Tensor, __: dict[str, Any]) -> torch.Tensor:
        return torch.nn.functional.normalize(gradient, dim=-1)


class Large(Own):
    """Leaves small matrices alone."""

    def update(self, _: torch.Tensor, gradient: torch.Tensor, __: dict[str, Any]) -> torch.Tensor:
        return gradient / gradient.norm() if gradient.numel() > 20000 else gradient


class Together(Own):
    """Moves all parameters by what all of them have in common, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        parameters = self.param_groups[0]["params"]
        norm = sum(parameter.grad.square().sum() for parameter in parameters) ** 0.5
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm * self.settings["lr"])


class Sam(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise ValueError("Sharpness Aware Minimization requires a closure")


def centred(parameters: Pairs) -> torch.optim.Optimizer:
    """A stock optimizer with something added to it."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def centre(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad -= parameter.grad.mean()

    optimizer.register_step_pre_hook(centre)
    return optimizer


def by_name(parameters: Pairs) -> torch.optim.Optimizer:
    groups = [[one for one in parameters if "bias" not in one[0]], [one for one in parameters if "bias" in one[0]]]
    return Sign([{"params": group} for group in groups], {"lr": 1e-4})


def own(kind: Callable[..., torch.optim.Optimizer], lr: float = 1e-6) -> Callable[[Pairs], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, {"lr": lr})


def refusal(make: Callable[[Pairs], torch.optim.Optimizer], layout: Layout) -> str | None:
    model = nn.Sequential(nn.Linear(160, 160), nn.Conv2d(40, 40, 3), nn.LayerNorm(12))
    named = list(model.named_parameters())
    before = [parameter.detach().clone() for _, parameter in named]
    try:
        refuse_coupled(make(named), make, named, layout)
    except UserError as error:
        return str(error)
    finally:
        assert all(torch.equal(one, parameter) for one, (_, parameter) in zip(before, named, strict=True))
    return None


@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, torch.optim.Adagrad, own(Sign), own(Sign, lr=0.0), by_name],
    ids=["AdamW", "Adagrad", "Sign", "Sign from 0", "by name"],
)
@pytest.mark.parametrize("layout", [SHARDS, Layout(pp=2, tp=2)], ids=str)
def test_an_elementwise_optimizer_is_taken(make: Any, layout: Layout) -> None:
    assert refusal(make, layout) is None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.optim.Adafactor, "Adafactor"),
        (own(Lamb), "Lamb"),
        (own(Muon), "Muon"),
        (own(Shampoo), "Shampoo"),
        (own(Rows), "Rows"),
        (own(Large), "Large"),
        (own(Together), "Together"),
        (centred, "SGD"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_that_treats_a_part_otherwise_than_the_whole_is_refused(make: Any, name: str) -> None:
    for layout in (SHARDS, Layout(tp=2)):
        assert f"the optimizer {name} updates a part of a parameter in another way" in str(refusal(make, layout))
    assert refusal(make, Layout(dp=2)) is None


def test_one_that_needs_all_parameters_is_refused_where_stages_have_some() -> None:
    assert "where it has not all the others, and under layout pp=2" in str(refusal(own(Together), Layout(pp=2)))
    assert refusal(own(Lamb), Layout(pp=2)) is None


def test_one_that_cannot_be_tried_out_is_refused() -> None:
    assert "(ValueError: Sharpness Aware Minimization requires a closure)" in str(refusal(own(Sam), SHARDS))
    everything = Own([nn.Parameter(torch.ones(2))], {"lr": 0.1})
    assert "makes it for other parameters than it is given" in str(refusal(lambda _: everything, SHARDS))


def test_one_that_computes_the_loss_itself_is_refused_on_every_layout() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    refuse_closure(torch.optim.AdamW(parameters))
    with pytest.raises(UserError, match="the optimizer LBFGS wants a closure"):
        refuse_closure(torch.optim.LBFGS(parameters))
