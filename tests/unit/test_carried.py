"""What forwards carry from call to call is found wherever it stands, and is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.follow.carried import differs, note_values, places_of, put_back, watch_numbers

CALLS = 0
SEEN: dict[str, int] = {"calls": 0}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history = 0, [0.5]
        self.state: torch.Tensor | None = None
        self.dice = torch.Generator().manual_seed(0)

    def forward(self) -> None:
        self.calls += 1
        self.state = torch.rand(2, generator=self.dice)
        self.history.append(1.5)


class OfAClass:
    calls = [0]

    def loss(self) -> None:
        self.calls[0] += 1


def of_a_module() -> None:
    global CALLS
    CALLS += 1
    SEEN["calls"] += 1


def in_a_closure() -> Callable[[], None]:
    calls = 0

    def loss() -> None:
        nonlocal calls
        calls += 1

    return loss


LOSSES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "variables": (of_a_module, {"the variable CALLS", "the variable SEEN"}),
    "a closure": (in_a_closure(), {"the variable calls"}),
    "a list of a class": (OfAClass().loss, {"the attribute calls of the loss"}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_counter_is_found_and_put_back(name: str) -> None:
    loss, words = LOSSES[name]
    places = places_of([], loss)
    before = note_values(places)
    with put_back(places):
        loss()
        now = note_values(places)
        assert {place.words for place, a, b in zip(places, before, now, strict=True) if differs(a, b)} == words
    assert not any(differs(a, b) for a, b in zip(before, note_values(places), strict=True))


def test_what_a_module_keeps_is_found_and_put_back() -> None:
    model = Counting()
    places = places_of([model], in_a_closure())
    before = note_values(places)
    with put_back(places):
        model()
        changed = [
            place.words for place, a, b in zip(places, before, note_values(places), strict=True) if differs(a, b)
        ]
        assert changed == [f"the attribute {name} of the model" for name in ("calls", "history", "state", "dice")]
    assert (model.calls, model.state, model.history) == (0, None, [0.5])
    assert torch.equal(model.dice.get_state(), torch.Generator().manual_seed(0).get_state())


@pytest.mark.parametrize(
    ("use", "decides"),
    [
        (lambda n: n + 1, False),
        (lambda n: f"step {n}: {2 * n}", False),
        (lambda n: n % 3 == 0, True),
        (lambda n: (n + 1) > 5, True),
        (lambda n: min(1.0, n / 5), True),
        (lambda n: bool(n), True),
        (lambda n: float(n), True),
    ],
)
@pytest.mark.parametrize("number", [4, 4.5])
def test_a_number_tells_when_something_is_decided_by_it(use: Any, decides: bool, number: float) -> None:
    model: Any = nn.Module()
    model.calls = number
    (place,) = [one for one in places_of([model], in_a_closure()) if "calls of" in one.words]
    with watch_numbers([place]) as found:
        result, was_said = use(model.calls), bool(found)
    assert was_said == decides
    assert result == use(number)
    assert type(model.calls) is type(number)
    assert model.calls == number
