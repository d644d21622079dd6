"""The search finds what trying everything would find, and only proposes what fits."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import get_args

import pytest

from lockstep.config.layers import Layer, parse_assignments, resolve
from lockstep.config.schema import Schedule
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.planner.cost.checks import check_job, divisors, verdict
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.step_time import estimate_time
from lockstep.planner.machine.find_machine import find_machine
from lockstep.planner.model.find_model import find_model
from lockstep.planner.search.fitting import enough_gpus, ways_to_fit
from lockstep.planner.search.rank_layouts import Asked, fullest, search
from lockstep.planner.show.paste import settings


def base(model: str, cluster: str, gpus: int, global_batch: int) -> Job:
    return Job(find_model(model), find_machine(cluster, gpus=gpus), Layout(), global_batch, 1)


@pytest.mark.parametrize("samples", [16, 18])
def test_the_fastest_is_the_one_that_trying_everything_finds(samples: int) -> None:
    start = replace(base("gpt2-large", "V100-16", 4, samples), precision="fp16")
    tried = {choices(job): estimate_time(job).total for job in everything(start, 4)}
    found = {choices(one.job): one.time.total for one in search(start, 4).fitting}
    assert len(tried) > 100
    assert found == tried
    assert min(tried.values()) == next(iter(found.values()))


def choices(job: Job) -> tuple[object, ...]:
    return (job.layout, job.micro_batch, job.recompute, job.effective_zero, job.schedule, job.stages_per_rank)


def everything(start: Job, gpus: int) -> list[Job]:
    """All jobs that can be and fit, in the plainest way."""
    found = []
    for pp, dp, fsdp, cp, tp in itertools.product(divisors(gpus), repeat=5):
        layout = Layout(pp, dp, fsdp, cp, tp)
        if layout.world_size != gpus or (layout.cp > 1 and layout.pp > 1) or layout.cp > start.model.sequence // 512:
            continue
        variants = itertools.product(
            (1, 2, 4, 8, 16), ("none", "full"), (1, 2, 3) if layout.fsdp > 1 else (3,), get_args(Schedule), (1, 2, 4)
        )
        for micro_batch, recompute, zero, schedule, stages in variants:
            if layout.pp == 1 and (schedule, stages) != ("1f1b", 1):
                continue
            if micro_batch > start.global_batch // layout.data_size:
                continue
            job = replace(
                start,
                layout=layout,
                micro_batch=micro_batch,
                recompute=recompute,  # type: ignore[arg-type]
                zero=zero,  # type: ignore[arg-type]
                schedule=schedule,
                stages_per_rank=stages,
                sequence_parallel=layout.pp == 1,
            )
            try:
                check_job(job)
            except UserError:
                continue
            if verdict(fullest(job), job.machine.gpu) == "fits":
                found.append(job)
    return found


def test_all_that_is_looked_at_is_accounted_for_and_the_front_is_not_beaten() -> None:
    found = search(base("llama-3-8b", "H100", 16, 64), 16)
    assert found.considered == len(found.fitting) + sum(found.refused.values())
    times = [one.time.total for one in found.fitting]
    assert times == sorted(times)
    for kept in found.front:
        assert not any(
            one.time.total < kept.time.total and one.memory.total <= kept.memory.total for one in found.fitting
        )
    assert found.front[0] is found.fitting[0]
    assert found.front[-1].memory.total == min(one.memory.total for one in found.fitting)


def test_what_was_asked_for_is_kept() -> None:
    start = base("llama-3-8b", "H100", 16, 64)
    asked = Asked(micro_batch=2, recompute="full", zero=1, schedule="zbv")
    for one in search(start, 16, asked).fitting:
        assert (one.job.micro_batch, one.job.recompute) == (2, "full")
        assert one.job.zero == 1 or one.job.layout.fsdp == 1
        assert one.job.schedule == "zbv" or one.job.layout.pp == 1
    only = search(start, 16, Asked(layout=Layout(fsdp=8, tp=2)))
    assert {one.job.layout for one in only.fitting} == {Layout(fsdp=8, tp=2)}


def test_a_model_of_405_billion_on_16384_gpus_takes_about_a_second() -> None:
    start = base("llama-3-405b", "H100", 16384, 2048)
    before = time.process_time()
    found = search(start, 16384)
    seconds = time.process_time() - before
    assert found.considered > 10_000
    assert found.fitting
    assert seconds < 4, "with room for a slow machine"


def test_one_micro_batch_in_a_pipeline_keeps_one_rank_busy_however_many_stages_it_has() -> None:
    job = replace(base("llama-3-8b", "H100", 2, 1), layout=Layout(pp=2), schedule="gpipe")
    looped = replace(job, schedule="looped-bfs", stages_per_rank=4)
    assert estimate_time(looped).bubble == pytest.approx(estimate_time(job).bubble, rel=0.05)


def test_ways_to_fit_do_fit_and_differ() -> None:
    job = replace(base("llama-3-8b", "H100", 8, 64), layout=Layout(dp=8), micro_batch=2)
    assert verdict(fullest(job), job.machine.gpu) == "does not fit"
    ways = ways_to_fit(job)
    assert len(ways) == 3
    assert len({way.text for way in ways}) == 3
    for way in ways:
        check_job(way.candidate.job)
        assert verdict(fullest(way.candidate.job), job.machine.gpu) == "fits"
    here = [way.candidate for way in ways if way.candidate.job.layout.world_size == 8]
    assert [one.time.total for one in here] == sorted(one.time.total for one in here)


def test_no_way_is_proposed_where_none_is_known_to_fit() -> None:
    job = replace(base("llama-3-405b", "V100-16", 1, 1), precision="fp16")
    assert ways_to_fit(job) == []


def test_the_smallest_number_of_gpus_is_one_node_more_than_too_few() -> None:
    start = base("llama-3-70b", "H100", 8, 512)
    assert not search(start, 8).fitting
    found = enough_gpus(start, Asked())
    assert found is not None
    assert found.is_least
    gpus, job = found.gpus, found.job
    assert gpus % 8 == 0
    assert verdict(fullest(job), job.machine.gpu) == "fits"
    fewer = replace(start, machine=find_machine("H100", gpus=gpus - 8))
    assert not search(fewer, gpus - 8).fitting


def test_one_micro_batch_a_step_is_tried_as_well_where_many_do_not_fit() -> None:
    start = base("llama-3-405b", "H100", 8, 2048)
    found = enough_gpus(start, Asked())
    assert found is not None
    assert verdict(fullest(found.job), found.job.machine.gpu) == "fits"
    assert found.is_least == (found.gpus <= 64 * 8), "beyond that not all smaller numbers are tried"
    sizes = [1024, 2048, 4096, 8192, 16384]
    enough = [size for size in sizes if search(base("llama-3-405b", "H100", size, 2048), size, quick=True).fitting]
    assert enough
    assert found.gpus <= enough[0]


def test_a_quick_search_keeps_the_level_of_sharding_that_was_asked_for() -> None:
    start = base("gpt2", "H100", 8, 64)
    assert {one.job.zero for one in search(start, 8, Asked(zero=1, layout=Layout(fsdp=8)), quick=True).fitting} == {1}


def test_more_gpus_are_whole_nodes_of_the_catalogue_with_all_axes() -> None:
    start = base("llama-3-405b", "H100", 1, 64)
    ways = ways_to_fit(start)
    assert len(ways) == 3
    jobs = [way.candidate.job for way in ways]
    assert all(job.machine.gpus_per_node == min(8, job.layout.world_size) for job in jobs)
    assert all(job.machine.gpus == job.layout.world_size for job in jobs)
    assert any(job.layout.tp > 1 for job in jobs)


def test_compiled_blocks_are_not_planned_with_schedules_that_split_the_backward() -> None:
    start = base("llama-3-8b", "H100", 8, 64)
    schedules = {one.job.schedule for one in search(start, 8).fitting}
    compiled = {one.job.schedule for one in search(replace(start, compiled=True), 8).fitting}
    assert schedules - compiled == {"zbv", "dualpipev", "interleaved-zero-bubble"}
    job = replace(start, layout=Layout(pp=8), compiled=True, schedule="zbv", stages_per_rank=2)
    with pytest.raises(UserError, match=r"zbv splits the backward of a block.*use --set compile=off"):
        check_job(job)


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_what_is_to_be_pasted_is_what_the_config_says(schedule: Schedule) -> None:
    layout, stages = Layout(pp=2, fsdp=2, tp=2), 1 if schedule in ("gpipe", "1f1b") else 2
    job = replace(
        base("llama-3-8b", "H100", 8, 64),
        layout=layout,
        micro_batch=2,
        recompute="full",
        zero=2,
        schedule=schedule,
        stages_per_rank=stages,
        compiled=True,
    )
    values = parse_assignments([f"{key}={value}" for key, value in settings(job).items()])
    config = resolve([Layer("--set", {**values, "layout": str(layout)})]).config
    assert (config.global_batch, config.micro_batch, config.precision) == (64, 2, "bf16")
    assert (config.recompute, config.compile, config.shard.level) == (True, "blocks", "zero2")
    assert (config.pipeline.schedule, config.pipeline.per_rank) == (schedule, stages)
    assert Layout.parse(config.layout) == layout
