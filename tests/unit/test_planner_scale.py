"""Scaling curves, and how often to save: the formulas against numbers that were worked out by hand."""

from __future__ import annotations

import math

import pytest

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.planner.cost.job import Job
from lockstep.planner.machine.find_machine import find_machine
from lockstep.planner.model.find_model import find_model
from lockstep.planner.search.rank_layouts import Asked
from lockstep.planner.search.scale import Costs, daly, goodput, measured_costs, parse_sizes, scale, young
from tests.events import Event


def test_the_interval_between_checkpoints_is_young_s_and_a_little_more() -> None:
    # d = 200 s, M = 10,000 s: sqrt(2 d M) = 2000; d / 2M = 0.01, so that 2000 (1 + 0.1 / 3 + 0.01 / 9) - 200.
    assert young(200, 10_000) == 2000
    assert daly(200, 10_000) == pytest.approx(2000 * (1 + 0.033333333 + 0.001111111) - 200)
    assert daly(200, 10_000) == pytest.approx(1868.889, abs=1e-3)


def test_where_saving_takes_longer_than_two_failures_are_apart_the_interval_is_their_distance() -> None:
    assert daly(300, 100) == 100


def test_goodput_by_hand_and_best_at_the_interval_of_daly() -> None:
    # M = 100, tau = 9, d = 1, R = 0: 9 / (100 (e^0.1 - 1)) = 9 / 10.517.
    assert goodput(9, 1, 0, 100) == pytest.approx(9 / 10.5171, rel=1e-5)
    assert goodput(9, 1, 10, 100) == pytest.approx(9 / 10.5171 / math.exp(0.1), rel=1e-5)
    assert goodput(9, 1, 0, math.inf) == 0.9
    for save, between in ((1, 100), (30, 3000), (600, 11_000)):
        best = goodput(daly(save, between), save, 60, between)
        for factor in (0.7, 0.9, 1.1, 1.4):
            assert goodput(factor * daly(save, between), save, 60, between) < best


def test_by_default_16384_gpus_fail_as_often_as_those_of_llama_3() -> None:
    saving = Costs().saving(405_000_000_000, find_machine("H100", gpus=16384))
    assert saving.between_failures == pytest.approx(54 * 86400 / 419)
    # 12 bytes a parameter at 2 TB/s for all.
    assert saving.save == pytest.approx(12 * 405e9 / 2e12)
    # A node of 72 has as much of that as 72 GPUs elsewhere.
    rack = Costs().saving(405_000_000_000, find_machine("GB200", gpus=144))
    assert rack.save == pytest.approx(12 * 405e9 / (2e12 * 144 / 16384))
    assert Costs(save_seconds=20.0).saving(1, find_machine("H100")).save == 20


def test_a_run_tells_how_fast_its_nodes_save() -> None:
    start: Event = {"kind": "start", "nodes": 2}
    saves: list[Event] = [
        {"kind": "checkpoint", "seconds": 4.0, "stall": 1.0, "bytes": size} for size in (8e9, 16e9, 24e9)
    ]
    back: Event = {"kind": "recovered", "seconds": {"stop": 1.0, "start": 5.0, "load": 3.0, "step": 1.0}}
    costs = measured_costs([start, *saves, back], Costs(), "runs/lm")
    assert (costs.node_gb_s, costs.waited, costs.restart) == (2.0, 0.25, 10.0)
    assert costs.source == "3 checkpoints of runs/lm"
    # 1.2 TB from 8 nodes of 2 GB/s each takes 75 s, of which a quarter is waited for.
    assert costs.saving(100_000_000_000, find_machine("H100", nodes=8)).save == pytest.approx(75 / 4)
    with pytest.raises(UserError, match="runs/lm has saved no checkpoint: name a run that has, or say --save-seconds"):
        measured_costs([start], Costs(), "runs/lm")


def test_sizes_are_doubled_up_to_the_end() -> None:
    assert parse_sizes("1..8") == [1, 2, 4, 8]
    assert parse_sizes("8..100") == [8, 16, 32, 64, 100]
    assert parse_sizes("4..4") == [4]
    for wrong in ("8", "a..b", "8..1", "0..8", "1..99999999"):
        with pytest.raises(UserError, match="--scale"):
            parse_sizes(wrong)


def test_strong_scaling_keeps_the_batch_and_weak_scaling_the_samples_of_a_gpu() -> None:
    base = Job(find_model("llama-3-8b"), find_machine("H100"), Layout(), 64, 1)
    curves = scale(base, [1, 8, 16, 32, 64], Asked(), Costs())
    assert [point.global_batch for point in curves.strong] == [64] * 5
    assert [point.global_batch for point in curves.weak] == [1, 8, 16, 32, 64]
    assert curves.strong[0].best is None
    assert curves.strong[0].why is not None
    assert "GB a GPU at least" in curves.strong[0].why
    assert curves.strong[1].efficiency == 1
    assert all(point.best and point.best.job.layout.world_size == point.gpus for point in curves.weak[1:])
    # They meet at the largest size.
    assert curves.strong[-1].figures == curves.weak[-1].figures
    communication = [point.figures.communication for point in curves.strong if point.figures]
    assert communication[-1] > communication[0]


def test_sizes_that_are_no_whole_nodes_fail_as_often_as_they_have_gpus() -> None:
    base = Job(find_model("gpt2"), find_machine("H100"), Layout(), 48, 1)
    savings = scale(base, [12, 24], Asked(), Costs(gpu_hours_between_failures=24.0)).savings
    assert [savings[gpus].between_failures for gpus in (12, 24)] == [7200, 3600]
    # The same bytes from twice as many GPUs.
    assert savings[12].save == pytest.approx(2 * savings[24].save)
