"""Learning rates that a script sets, by hand or by torch's schedulers: what a restart has to give back."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from lockstep.errors import UserError
from lockstep.step.rates import Rates, RateState, decode, encode

STEPS, STOP_AFTER = 14, 5
PARAMETER = nn.Parameter(torch.ones(2))

KINDS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "step": lambda o: schedulers.StepLR(o, 3, 0.5),
    "milestones": lambda o: schedulers.MultiStepLR(o, [3, 6, 6, 9]),
    "linear": lambda o: schedulers.LinearLR(o, total_iters=9),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 10),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=3), schedulers.CosineAnnealingLR(o, 10)], [3]
    ),
    "chain": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, total_iters=9), schedulers.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
}


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """Schedulers are looked for among all objects, of which a test process has very many."""
    gc.freeze()
    yield
    gc.unfreeze()


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([PARAMETER], lr=0.1, momentum=0.9)


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([PARAMETER], lr=0.1)


def move(scheduler: Any) -> None:
    scheduler.step(1.0) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else scheduler.step()


def options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def plain(make: Callable[[], torch.optim.Optimizer], kind: str) -> list[dict[str, Any]]:
    optimizer = make()
    scheduler, seen = KINDS[kind](optimizer), []
    for _ in range(STEPS):
        seen.append(options(optimizer))
        optimizer.step()
        move(scheduler)
    return seen


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_scheduler_of_the_script_goes_on_where_it_was(make: Callable[[], torch.optim.Optimizer], kind: str) -> None:
    seen, saved = [], ""
    before: dict[str, Any] = {}
    for steps in (range(STOP_AFTER), range(STOP_AFTER, STEPS)):
        optimizer = make()
        rates = Rates(optimizer, None)
        if saved:
            optimizer.param_groups[0].update({key: value for key, value in before.items() if key != "lr"})
            rates.restore(RateState(**json.loads(saved)))
        scheduler = KINDS[kind](optimizer)
        rates.settle()
        for step in steps:
            assert rates.begin(step) == optimizer.param_groups[0]["lr"]
            seen.append(options(optimizer))
            optimizer.step()
            move(scheduler)
        saved, before = json.dumps(asdict(rates.state()), allow_nan=False), options(optimizer)
        del scheduler
    assert seen == plain(make, kind)


def test_a_rate_set_by_hand_counts_from_then_on_and_after_a_restart() -> None:
    optimizer = sgd()
    rates = Rates(optimizer, None)
    assert rates.begin(0) == 0.1
    optimizer.param_groups[0]["lr"] = 1.0
    assert [rates.begin(step) for step in range(1, 3)] == [1.0, 1.0]
    again = Rates(sgd(), None)
    again.restore(rates.state())
    assert again.begin(4) == 1.0


def test_a_rate_that_nobody_set_is_the_one_the_optimizer_is_made_with_now() -> None:
    rates = Rates(sgd(), lambda step: 1 / (1 + step))
    rates.begin(3)
    assert rates.state() == RateState([None])
    optimizer = torch.optim.SGD([PARAMETER], lr=0.5)
    again = Rates(optimizer, None)
    again.restore(rates.state())
    assert again.begin(4) == 0.5


def test_what_a_restart_could_not_give_back_is_refused() -> None:
    optimizer = sgd()
    with_schedule = Rates(optimizer, lambda _: 1.0)
    scheduler = schedulers.StepLR(optimizer, 3)
    with pytest.raises(UserError, match="both schedule= and StepLR"):
        with_schedule.settle()
    alone = Rates(optimizer, None)
    alone.settle()
    late = schedulers.ExponentialLR(optimizer, 0.9)
    with pytest.raises(UserError, match="ExponentialLR was made over"):
        alone.state()
    del late
    state = alone.state()
    without = Rates(sgd(), None)
    without.restore(state)
    with pytest.raises(UserError, match="the state of StepLR, which the script has not made"):
        without.settle()
    second = schedulers.StepLR(optimizer, 4)
    with pytest.raises(UserError, match="several schedulers of class StepLR"):
        Rates(optimizer, None).settle()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(UserError, match="a parameter group was added"):
        alone.begin(1)
    del scheduler, second


def test_plain_data_comes_back_from_json() -> None:
    data = {"a": [1, (2.5, None)], "b": {3: float("inf"), 4: -float("inf")}, "c": {"d": True, "e": "text"}}
    assert decode(json.loads(json.dumps(encode(data), allow_nan=False))) == data
    assert encode({"rate": torch.tensor(0.5), "function": print, "objects": [object()]}) == {"rate": 0.5}


def test_a_rate_set_by_hand_beside_a_schedule_is_refused() -> None:
    optimizer = sgd()
    rates = Rates(optimizer, lambda _: 0.5)
    assert rates.begin(0) == 0.05
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(UserError, match="schedule= and the script both set the learning rate"):
        rates.begin(1)


def test_the_rate_of_every_group_is_in_what_ranks_compare() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups)
    rates = Rates(optimizer, None)
    rates.begin(0)
    before = rates.mark
    optimizer.param_groups[1]["lr"] = 0.3
    assert rates.begin(1) == 0.1
    assert rates.mark != before
