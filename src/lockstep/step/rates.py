"""The learning rates of a training: what stands in the optimizer's groups, times the factor of the schedule.

A script may set `group["lr"]` between steps, or make one of torch's schedulers over `engine.optimizer` and step it:
what stands in the groups when a step begins counts. A checkpoint has it, and the state of such schedulers; a script
that starts again makes them anew, and before its first step they are put back to where they were.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import UserError
from lockstep.runtime.torch_private import schedulers_inside


@dataclass(frozen=True)
class RateState:
    """What of the rates a checkpoint has to know; all of it goes into JSON."""

    rates: list[float | None]
    """By parameter group: the rate that the script set, None where it is the one that the optimizer was made with."""
    schedulers: dict[str, Any] = field(default_factory=dict)
    """The state of the schedulers that the script made, by class."""


class Rates:
    """The learning rates of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Callable[[int], float] | None) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._made_with = [float(group["lr"]) for group in optimizer.param_groups]
        self._bases = list(self._made_with)
        self._left = list(self._made_with)  # what stood in the groups when a step was last begun
        self.mark = 0.0
        """One number that is another one as soon as a rate of the step is."""
        self._schedulers: dict[str, LRScheduler] = {}
        self._is_settled = False
        self._before: tuple[dict[str, Any], list[dict[str, Any]]] | None = None

    def of_step(self, step: int) -> list[float]:
        """The rates of the step after so many, by parameter group."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._left):
            raise UserError(
                "a parameter group was added to the optimizer after run.setup, and a restart would not have it",
                "make all groups in optimizer=..., with lr=0 as long as one is not to train",
            )
        for number, (group, left) in enumerate(zip(groups, self._left, strict=True)):
            if (rate := float(group["lr"])) != left:
                if self._schedule is not None:
                    raise UserError(
                        f'schedule= and the script both set the learning rate: group["lr"] was {left:g}, is {rate:g}',
                        "leave schedule= out, or put what the script does into it",
                    )
                self._bases[number] = self._left[number] = rate
        factor = 1.0 if self._schedule is None else self._schedule(step)
        return [base * factor for base in self._bases]

    def begin(self, step: int) -> float:
        """Give the optimizer the rates of a step; returns that of the first group."""
        self._left = self.of_step(step)
        self.mark = sum(rate * math.sqrt(number + 1) for number, rate in enumerate(self._left))
        for group, rate in zip(self._optimizer.param_groups, self._left, strict=True):
            if group["lr"] != rate:
                group["lr"] = rate
        return self._left[0]

    def settle(self) -> None:
        """Before the first step: look for schedulers, and let them go on where a checkpoint has them."""
        if self._is_settled:
            return
        self._is_settled = True
        self._schedulers = self._made()
        if self._schedulers and self._schedule is not None:
            raise UserError(
                f"both schedule= and {next(iter(self._schedulers))} over engine.optimizer set the learning rate",
                "leave one of them out",
            )
        if self._before is None:
            return
        (states, options), self._before = self._before, None
        if missing := sorted(states.keys() - self._schedulers.keys()):
            raise UserError(
                f"the run goes on from a checkpoint with the state of {missing[0]}, which the script has not made",
                "make it over engine.optimizer before the first step, or start anew with --resume never",
            )
        self._load(states, options)

    def state(self) -> RateState:
        """Where the rates stand now."""
        if self._is_settled and (late := sorted(self._made().keys() - self._schedulers.keys())):
            raise UserError(
                f"{late[0]} was made over engine.optimizer after the first step, and a restart would not have it",
                "make it before the loop; SequentialLR begins one after another",
            )
        self.of_step(0)
        changed = zip(self._bases, self._made_with, strict=True)
        states = {name: encode(scheduler.state_dict()) for name, scheduler in self._schedulers.items()}
        return RateState([base if base != made else None for base, made in changed], states)

    def restore(self, state: RateState) -> None:
        """Go on as a checkpoint has it, whose other options of the groups are restored by now."""
        for number, (group, rate) in enumerate(zip(self._optimizer.param_groups, state.rates, strict=True)):
            self._bases[number] = self._made_with[number] if rate is None else rate
            group["lr"] = self._left[number] = self._bases[number]
        if not state.schedulers:
            return
        # What a scheduler does to the groups when it is made anew is undone.
        options = [{key: value for key, value in g.items() if key != "params"} for g in self._optimizer.param_groups]
        if self._is_settled:
            self._load(state.schedulers, options)
        else:
            self._before = state.schedulers, options

    def _load(self, states: dict[str, Any], options: list[dict[str, Any]]) -> None:
        for name, state in states.items():
            scheduler = self._schedulers[name]
            new = scheduler.state_dict()
            old = {key: _like(new.get(key), value) for key, value in decode(state).items()}
            scheduler.load_state_dict({**new, **old})
        for group, before in zip(self._optimizer.param_groups, options, strict=True):
            group.update(before)

    def _made(self) -> dict[str, LRScheduler]:
        """The schedulers of this optimizer, by class, but for those that are inside of others.

        An optimizer does not know of them, but their classes do.
        """
        found = [
            scheduler for scheduler in gc.get_referrers(*_classes(LRScheduler)) if isinstance(scheduler, LRScheduler)
        ]
        mine = [scheduler for scheduler in found if getattr(scheduler, "optimizer", None) is self._optimizer]
        inside = {id(inner) for scheduler in mine for inner in schedulers_inside(scheduler)}
        outside = [scheduler for scheduler in mine if id(scheduler) not in inside]
        names = Counter(type(scheduler).__name__ for scheduler in outside)
        if twice := [name for name, count in names.items() if count > 1]:
            raise UserError(
                f"engine.optimizer has several schedulers of class {twice[0]}, and a restart cannot tell them apart",
                "put them into one: torch.optim.lr_scheduler.ChainedScheduler or SequentialLR",
            )
        return {type(scheduler).__name__: scheduler for scheduler in outside}


def _classes(base: type[LRScheduler]) -> list[type[LRScheduler]]:
    """A class and all that derive from it."""
    found = [base]
    for derived in base.__subclasses__():
        found += _classes(derived)
    return found


def encode(value: Any) -> Any:
    """Plain data as JSON can hold it; in a dict, what is not plain is left out."""
    if isinstance(value, dict):
        pairs = [(key, encode(item)) for key, item in value.items() if _is_plain(item)]
        if all(isinstance(key, str) for key in value):
            return dict(pairs)
        return {"": "pairs", "of": [list(pair) for pair in pairs]}
    if isinstance(value, list | tuple):
        items = [encode(item) for item in value]
        return items if isinstance(value, list) else {"": "tuple", "of": items}
    if isinstance(value, torch.Tensor):
        return encode(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return {"": "float", "of": str(value)}
    return value


def decode(value: Any) -> Any:
    """What `encode` was given, a tensor of one number as that number."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(""):
        case "pairs":
            return {key: decode(item) for key, item in value["of"]}
        case "tuple":
            return tuple(decode(item) for item in value["of"])
        case "float":
            return float(value["of"])
        case _:
            return {key: decode(item) for key, item in value.items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int | float) for key in value)
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, str | bool | int | float)


def _like(new: Any, old: Any) -> Any:
    return Counter(old) if isinstance(new, Counter) else old
