"""Who takes part in a comparison, with micro-batches that everybody can take, or a refusal before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.compare.contenders import Contender, read_contenders, settle
from lockstep.config.layers import Layer
from lockstep.config.schema import Config
from lockstep.errors import UserError
from lockstep.layout import Layout


def configs(names: str, gpus: int = 0, **values: Any) -> list[Config]:
    layers = [Layer("test", {"recipe": "linear", "micro_batch": None, **values})]
    return [one.config for one in settle(read_contenders(names.split("; "), gpus), layers)]


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
    found = configs("single; dp=2; pp=2; dp=2,tp=2; data-parallel", gpus=4, batch_per_device=8)
    assert [config.global_batch for config in found] == [8, 16, 8, 16, 32]
    assert {config.micro_batch for config in found} == {1}, "a pipeline of two takes eight"
    assert [config.micro_batch for config in configs("single; dp=2", batch_per_device=8)] == [8, 8]
    assert [config.micro_batch for config in configs("single; dp=2", batch_per_device=8, micro_batch=4)] == [4, 4]
    assert [config.micro_batch for config in configs("single; dp=2", batch_per_device=8, micro_batch=12)] == [8, 8]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"compile": "blocks"}, "naive-mp is a plain loop that knows nothing of compile"),
        ({"recompute": True}, "knows nothing of recompute, which is set: leave recompute or naive-mp out"),
        ({"numerics": {"tf32": True}}, "knows nothing of numerics"),
        ({"precision": "fp16"}, "naive-mp knows no loss scale, which fp16 needs: compare in bf16 or fp32"),
    ],
)
def test_a_baseline_refuses_what_it_would_leave_out(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        configs("single; naive-mp", gpus=1, **values)
    assert configs("single; dp=2", gpus=1, **values), "layouts can"
    assert configs("single; naive-mp", gpus=1, precision="bf16")


def test_a_baseline_is_one_process_with_several_devices() -> None:
    naive, parallel, tp = read_contenders(["naive-mp", "data-parallel", "tp=4,dp=2"], gpus=3)
    assert (naive.processes, naive.devices, naive.replicas) == (1, 2, 1)
    assert (parallel.processes, parallel.devices, parallel.replicas) == (1, 3, 3)
    assert tp == Contender("dp=2,tp=4", Layout(dp=2, tp=4), 8)
    assert (tp.processes, tp.replicas) == (8, 2)
