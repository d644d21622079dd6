"""Who takes part in a comparison, with micro-batches that everybody can take, or a refusal before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.compare.contenders import read_contenders, settle
from lockstep.config.layers import Layer
from lockstep.config.schema import Config
from lockstep.errors import UserError
from lockstep.layout import Layout


def configs(names: str, **values: Any) -> list[Config]:
    layers = [Layer("test", {"recipe": "linear", "micro_batch": None, **values})]
    return [one.config for one in settle(read_contenders(names.split("; ")), layers)]


@pytest.mark.parametrize(
    ("names", "values", "size"),
    [
        ("single; dp=2", {}, 16),
        ("single; dp=3", {}, 11),
        ("single; pp=2", {}, 4),  # 8 micro-batches, 4 for each stage
        ("single; pp=2; dp=16", {}, 2),
        ("single; pp=2; dp=4", {"pipeline": {"micro_batches": 4}}, 8),
        ("single; pp=4", {"pipeline": {"schedule": "interleaved-1f1b"}}, 2),
    ],
)
def test_one_micro_batch_suits_all(names: str, values: dict[str, Any], size: int) -> None:
    found = configs(names, **values)
    assert {config.global_batch for config in found} == {32}
    assert {config.micro_batch for config in found} == {size}


def test_ranks_that_would_have_no_micro_batch_make_it_smaller() -> None:
    """Nine samples by four ranks are micro-batches of three, and one rank would have none."""
    assert [config.micro_batch for config in configs("single; dp=4", global_batch=9)] == [2, 2]


@pytest.mark.parametrize(
    ("names", "values", "said"),
    [
        ("single; pp=2", {"micro_batch": 32}, r"layout pp=2 .*needs at least 2 micro-batches in a step, not 1: give 2"),
        ("single; pp=8", {"global_batch": 4}, r"layout pp=8 .*needs at least 8 micro-batches in a step, not 4"),
        ("single; pp=2", {"micro_batch": 8, "pipeline": {"micro_batches": 8}}, "say one of them"),
        ("single; dp=8", {"micro_batch": 8}, "some ranks would have nothing to do: --set micro_batch=4"),
    ],
)
def test_what_a_layout_cannot_take_is_refused_by_its_name(names: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        configs(names, **values)


def test_a_batch_per_device_is_one_of_every_replica() -> None:
    """A pipeline of two is one replica, and its step has the samples of one device."""
    found = configs("single; dp=2; pp=2; dp=2,tp=2; dp=4", batch_per_device=8)
    assert [config.global_batch for config in found] == [8, 16, 8, 16, 32]
    assert {config.micro_batch for config in found} == {1}, "a pipeline of two takes eight"
    assert [config.micro_batch for config in configs("single; dp=2", batch_per_device=8)] == [8, 8]
    assert [config.micro_batch for config in configs("single; dp=2", batch_per_device=8, micro_batch=4)] == [4, 4]
    assert [config.micro_batch for config in configs("single; dp=2", batch_per_device=8, micro_batch=12)] == [8, 8]


@pytest.mark.parametrize("name", ["naive-mp", "data-parallel"])
def test_a_baseline_is_refused_with_where_it_is_measured(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} is no layout, .* benchmarks/baselines.py"):
        read_contenders(["single", name])


def test_a_layout_has_one_name_however_it_is_written() -> None:
    assert read_contenders(["tp=4,dp=2", "dp=1"]) == [Layout(dp=2, tp=4), Layout()]
