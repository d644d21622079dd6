"""Optimizers by name or import path, refused early when wrong; schedules as pure functions of the step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lockstep.config.schema import OptimizerConfig, ScheduleConfig
from lockstep.errors import UserError
from lockstep.step.optim import optimizer_factory, schedule_function


class Mine(torch.optim.SGD):
    """An optimizer of the user's own, found by its import path; its further arguments have a name of their own."""

    def __init__(self, params: Any, lr: float, **settings: Any) -> None:
        super().__init__(params, lr=lr, **settings)


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    return [("a", torch.nn.Parameter(torch.ones(2))), ("b", torch.nn.Parameter(torch.ones(3)))]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("torch.optim:RMSprop", torch.optim.RMSprop),
        ("torch.optim.Adagrad", torch.optim.Adagrad),
        (f"{__name__}:Mine", Mine),
    ],
)
def test_a_name_or_an_import_path_makes_the_optimizer(name: str, kind: type) -> None:
    optimizer = optimizer_factory(OptimizerConfig(name=name, lr=0.25))(parameters())
    assert type(optimizer).__name__ == kind.__name__
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


@pytest.mark.parametrize("name", ["sgd", f"{__name__}:Mine"])
def test_further_arguments_reach_the_optimizer(name: str) -> None:
    config = OptimizerConfig(name=name, lr=1.0, args={"momentum": 0.9, "weight_decay": 0.5})
    (group,) = optimizer_factory(config)(parameters()).param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.5)


def test_a_list_reaches_the_optimizer_as_a_tuple() -> None:
    config = OptimizerConfig(name="adamw", args={"betas": [0.9, 0.95]})
    assert optimizer_factory(config)(parameters()).param_groups[0]["betas"] == (0.9, 0.95)


def test_every_optimizer_of_a_factory_has_a_state_of_its_own() -> None:
    factory = optimizer_factory(OptimizerConfig(name="adam"))
    first, second = factory(parameters()), factory(parameters())
    first.param_groups[0]["lr"] = 7.0
    assert second.param_groups[0]["lr"] == 1e-3


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"^unknown optimizer 'adamx': did you mean 'adam'\?$"):
        optimizer_factory(OptimizerConfig(name="adamx"))
    with pytest.raises(UserError, match=r"^unknown optimizer 'lion': choose one of sgd, adam, adamw, package"):
        optimizer_factory(OptimizerConfig(name="lion"))


@pytest.mark.parametrize(
    "name",
    [
        "no_such_package:Adam",
        "no_such_package.Adam",
        "torch.optim:NoSuchOptimizer",
        "torch.optim:",
        ":AdamW",
        ".AdamW",
        "..optim:AdamW",
        "math:pi",  # not a function
        "torch.nn:Identity",  # takes every argument and is no optimizer
        "json:dumps",
        "builtins:dict",
    ],
)
def test_an_import_path_that_leads_to_no_optimizer_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(UserError) as refusal:
        optimizer_factory(OptimizerConfig(name=name))
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "args", "named"),
    [
        ("sgd", {"betas": [0.9, 0.95]}, "betas"),
        ("adamw", {"weight_deacy": 0.1}, "'weight_decay'"),
        ("adamw", {"betas": [1, 2]}, "beta"),
        ("adamw", {"betas": 3}, "betas"),
        ("adamw", {"eps": -1.0}, "eps"),
        ("adamw", {"eps": "small"}, "eps"),
        ("sgd", {"nesterov": True}, "momentum"),
        ("sgd", {"lr": 0.1}, "lr"),
        ("sgd", {"params": []}, "params"),
    ],
)
def test_arguments_an_optimizer_does_not_take_are_refused_before_there_is_a_model(
    name: str, args: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError) as refusal:
        optimizer_factory(OptimizerConfig(name=name, args=args))
    assert named in str(refusal.value).lower()
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


# Schedules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "total_steps", "factors"),
    [
        (ScheduleConfig(), 4, [1, 1, 1, 1]),
        (ScheduleConfig(), None, [1, 1, 1, 1]),
        (ScheduleConfig(warmup_steps=4), 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        (ScheduleConfig(warmup_steps=2), None, [0.5, 1, 1]),
        (ScheduleConfig(name="linear"), 5, [1, 0.75, 0.5, 0.25, 0]),
        (ScheduleConfig(name="linear", final=0.5), 3, [1, 0.75, 0.5]),
        (ScheduleConfig(name="linear", warmup_steps=2, final=0.1), 5, [0.5, 1, 1, 0.55, 0.1]),
        (ScheduleConfig(name="cosine"), 3, [1, 0.5, 0]),
        (ScheduleConfig(name="cosine", final=0.2), 5, [1, 0.6 + 0.4 * 0.5**0.5, 0.6, 0.6 - 0.4 * 0.5**0.5, 0.2]),
        (ScheduleConfig(name="cosine", warmup_steps=1, final=0.1), 4, [1, 1, 0.55, 0.1]),
        (ScheduleConfig(name="cosine"), 1, [1]),
    ],
)
def test_a_schedule_rises_over_the_warm_up_and_ends_at_its_final_value(
    schedule: ScheduleConfig, total_steps: int | None, factors: list[float]
) -> None:
    factor = schedule_function(schedule, total_steps)
    assert [factor(step) for step in range(len(factors))] == pytest.approx(factors)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_steps_after_the_last_keep_the_final_value(name: Any) -> None:
    factor = schedule_function(ScheduleConfig(name=name, final=0.1), 10)
    assert [factor(step) for step in (9, 10, 1000)] == pytest.approx([0.1, 0.1, 0.1])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_the_factor_is_a_pure_function_of_the_step(name: Any) -> None:
    schedule = ScheduleConfig(name=name, warmup_steps=5, final=0.1)
    in_order = [schedule_function(schedule, 50)(step) for step in range(50)]
    factor = schedule_function(schedule, 50)
    shuffled = random.Random(0).sample(range(50), 50)
    assert {step: factor(step) for step in shuffled} == dict(enumerate(in_order))


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_after_the_warm_up_the_factor_only_falls_and_stays_within_its_bounds(name: Any) -> None:
    factor = schedule_function(ScheduleConfig(name=name, warmup_steps=10, final=0.1), 200)
    factors = [factor(step) for step in range(200)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert min(factors) > 0
    assert max(factors) == 1


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_schedule_with_an_end_is_refused_where_the_end_is_unknown(name: Any) -> None:
    with pytest.raises(UserError, match=f"^schedule {name} needs to know the number of steps"):
        schedule_function(ScheduleConfig(name=name), None)
