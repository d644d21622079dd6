"""Which attention kernels are taken: a clear winner over what torch takes, and never where it decides on masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.step import attention
from lockstep.step.attention import BACKENDS, fastest_kernels

CPU = torch.device("cpu")


class Alone:
    """The part of Comm that is asked here, for one rank."""

    def sum(self, values: list[float]) -> list[float]:
        return values


def attend(dropout: float = 0.0) -> Callable[[], object]:
    def forward() -> object:
        query = torch.randn(2, 4, 8, 16)
        return F.scaled_dot_product_attention(query, query, query, dropout_p=dropout, is_causal=True)

    return forward


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    taken = {"torch": 10.0, "cudnn": 9.5, "flash": 9.6, "efficient": 20.0}
    names = {backend: name for name, backend in BACKENDS.items()}

    def milliseconds(calls: object, backends: list[object], _: object) -> float:
        return taken["torch" if len(backends) > 1 else names[backends[0]]] if calls else 0.0  # type: ignore[index]

    monkeypatch.setattr(attention, "_milliseconds", milliseconds)
    return taken


def test_a_clear_winner_is_taken(times: dict[str, float]) -> None:
    times["flash"] = 6.0
    assert fastest_kernels(attend(), CPU, Alone()) == "flash"  # type: ignore[arg-type]


def test_a_close_race_is_left_to_torch() -> None:
    assert fastest_kernels(attend(), CPU, Alone()) is None  # type: ignore[arg-type]


def test_attention_with_dropout_is_left_to_torch(times: dict[str, float]) -> None:
    times["flash"] = 1.0
    assert fastest_kernels(attend(dropout=0.1), CPU, Alone()) is None  # type: ignore[arg-type]


def test_a_model_without_attention_needs_no_kernels() -> None:
    assert fastest_kernels(lambda: None, CPU, Alone()) is None  # type: ignore[arg-type]


def test_the_calls_of_torchs_own_layers_are_seen(times: dict[str, float]) -> None:
    times["cudnn"] = 1.0
    layer = nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
    assert fastest_kernels(lambda: layer(torch.randn(2, 5, 16)), CPU, Alone()) == "cudnn"  # type: ignore[arg-type]
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention", "given back"
