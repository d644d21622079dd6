"""What ranks measure, with real ones over gloo: every collective of every axis, and every pair."""

from __future__ import annotations

import datetime
import math
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lockstep.checkup.bench import COLLECTIVES, BenchWork, measure_pairs, sweep
from lockstep.layout import Layout
from lockstep.links.measured import Row
from lockstep.links.slow_links import find_slow
from lockstep.runtime.comm import Comm
from lockstep.runtime.rank_env import Place
from tests.ranks import Job

CPU = torch.device("cpu")
SIZES = (4000, 100_001)


def join(job: Job, layout: str) -> Comm:
    place = Place(job.rank, job.world_size, job.rank, job.world_size, 0, 1, "store:1", "explicit")
    store = dist.FileStore(str(job.store_path), job.world_size)
    return Comm(place, Layout.parse(layout), CPU, "gloo", datetime.timedelta(seconds=job.patient(15)), store)


def all_sweeps(job: Job, layout: str) -> list[Row]:
    comm = join(job, layout)
    work = BenchWork(Layout.parse(layout), SIZES, COLLECTIVES, "cpu", share_gpu=False)
    groups = {axis: dist.group.WORLD if axis == "world" else comm.group(axis) for axis in work.axes}
    rows = [
        row
        for axis, group in groups.items()
        if group is not None
        for collective in COLLECTIVES
        for row in sweep(comm, axis, group, collective, SIZES, CPU, seconds=0.01)
    ]
    comm.close()
    return rows


def test_every_collective_of_every_axis_is_timed_alike_on_every_rank(ranks) -> None:
    found = ranks.run(all_sweeps, 4, "dp=2,tp=2")
    assert found[0] == found[1] == found[2] == found[3]
    keys = [(row.axis, row.ranks, row.collective, row.bytes) for row in found[0]]
    wanted = [("dp", 2, 100_000), ("tp", 2, 100_000), ("world", 4, 100_000)]
    assert keys == [
        (axis, size, collective, count)
        for axis, size, largest in wanted
        for collective in COLLECTIVES
        for count in (4000, largest)
    ], "whole numbers for every rank: 100001 bytes are 100000"
    for row in found[0]:
        assert 0 < (row.fastest or 0) <= (row.seconds or 0) <= (row.slowest or 0)
        assert row.iterations >= 3
        assert row.busbw_gb_s


def unsupported(job: Job) -> list[Row]:
    comm = join(job, "dp=2")
    group = comm.group("dp")
    assert group is not None
    refusal = RuntimeError("ProcessGroupNCCL does not support gather\nand more")
    with mock.patch.object(dist, "gather", side_effect=refusal):
        rows = list(sweep(comm, "dp", group, "gather", SIZES, CPU, seconds=0.01))
    comm.close()
    return rows


def test_what_the_backend_does_not_have_is_a_row_that_says_so(ranks) -> None:
    for rows in ranks.run(unsupported, 2):
        (only,) = rows
        assert only.seconds is None
        assert only.note == "not on this backend: ProcessGroupNCCL does not support gather"


def too_much(job: Job, longest: float) -> list[Row]:
    comm = join(job, "dp=2")
    group = comm.group("dp")
    assert group is not None
    huge = 10**15
    with mock.patch("lockstep.checkup.bench.LONGEST_CALL", longest):
        rows = list(sweep(comm, "dp", group, "broadcast", [4000, huge, 2 * huge], CPU, seconds=0.01))
    comm.close()
    return rows


@pytest.mark.parametrize(
    ("longest", "said"),
    [(0.0, "left out: a call would take about"), (math.inf, "left out: there is not enough memory")],
)
def test_a_size_that_takes_too_long_or_too_much_memory_is_left_out_and_said(ranks, longest, said) -> None:
    for first, left_out in ranks.run(too_much, 2, longest):
        assert first.seconds
        assert left_out.seconds is None
        assert left_out.note.startswith(said)


def pairs_with_a_slow_rank(job: Job, slow: int | None) -> list[Any]:
    comm = join(job, "dp=4")
    send = dist.send

    def late(message: torch.Tensor, other: int) -> None:
        time.sleep(job.patient(0.03) if message.nbytes > 8 else 0.0)
        send(message, other)

    with mock.patch.object(dist, "send", late if job.rank == slow else send):
        found = list(measure_pairs(comm, 0, CPU))
    comm.close()
    return found


def test_every_pair_is_measured_and_a_slow_rank_is_named(ranks) -> None:
    found = ranks.run(pairs_with_a_slow_rank, 4, 2)
    assert found[0] == found[1] == found[2] == found[3]
    assert [(pair.a, pair.b) for pair in found[0]] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    named = [finding.where for finding in find_slow(found[0], [0] * 4, ["here"] * 4)]
    assert "rank 2 (here)" in named


@pytest.mark.parametrize(
    ("layout", "axes"),
    [("single", []), ("dp=2", ["dp"]), ("pp=2,dp=2,tp=2", ["pp", "dp", "tp", "world"])],
)
def test_axes_that_are_larger_than_one_and_all_ranks_are_measured(layout: str, axes: list[str]) -> None:
    assert BenchWork(Layout.parse(layout), (), (), "cpu", share_gpu=False).axes == axes
