"""Summaries of runs with round numbers, for tests of what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.page.reading.summary import (
    AttemptSummary,
    Compared,
    GpuSummary,
    HostSummary,
    RankSummary,
    StragglerSummary,
    Summary,
    TimeSpent,
)

GB = 10**9


def a_rank(rank: int, host: str = "node1", **changes: Any) -> RankSummary:
    """A rank of steps of 0.4 s: 4 ms input, 320 ms compute, 28 ms optimizer, 8 ms between, 40 ms waiting."""
    usual = RankSummary(
        rank, host, input=0.004, compute=0.32, optimizer=0.028, between=0.008, wait=0.04, memory=80 * GB, cores=2.0,
        threads=8, workers=4,
    )  # fmt: skip
    return replace(usual, **changes)


def a_gpu(index: int, host: str = "node1", **changes: Any) -> GpuSummary:
    """A GPU that the rank of the same number keeps busy, and 60 % full."""
    usual = GpuSummary(host, index, "NVIDIA H200", 0.95, 90 * GB, 150 * GB, 600.0, (index,))
    return replace(usual, **changes)


def an_attempt(number: int = 1, **changes: Any) -> AttemptSummary:
    """An attempt of 440 s that did steps 1 to 1000."""
    usual = AttemptSummary(number, 1000.0, 1440.0, "finished", "dp=4", 4, 1, 1000)
    return replace(usual, **changes)


def a_straggler(rank: int | None, cause: str, seconds: float, others: float | None, times: int = 1) -> StragglerSummary:
    """What the run itself has found."""
    host = None if rank is None else "node1"
    return StragglerSummary(rank, host, cause, seconds, others, "so it was", times)


SPENT = TimeSpent(
    useful=320, input=4, communication=40, optimizer=28, between=8, validation=10, checkpoints=4, starting=20, other=6
)
"""440 s, of which 400 in steps."""


def healthy(**changes: Any) -> Summary:
    """1000 steps of 0.4 s on four GPUs of a node, in which nothing is wrong."""
    usual = Summary(
        name="lm",
        state="finished",
        layout="dp=4",
        world_size=4,
        nodes=1,
        device="NVIDIA H200",
        precision="bf16",
        parameters=812_345,
        item="tokens",
        steps=1000,
        total_steps=1000,
        begin=1000.0,
        end=1440.0,
        attempts=[an_attempt()],
        spent=SPENT,
        loss=1.847,
        best_loss=1.9,
        best_step=900,
        step_seconds=0.4,
        items_per_second=163_840.0,
        items=65_536_000,
        padding=655_360,
        trained=64_880_640.0,
        flops_per_second=1.6e15,
        peak_flops=4e15,
        peak_source="data sheet, dense bf16",
        mfu=0.4,
        device_hours=4 * 440 / 3600,
        kwh=0.3,
        kwh_reason="without node2",
        memory=80 * GB,
        predicted_step=Compared(0.44, 0.4, 0.1),
        predicted_memory=Compared(78.0 * GB, 80.0 * GB, -0.025),
        ranks=[a_rank(rank) for rank in range(4)],
        hosts=[HostSummary("node1", 64, 0.3, 4)],
        gpus=[a_gpu(index) for index in range(4)],
        checkpoints=4,
        checkpoint_stalls=4.0,
        checkpoint_bytes=10 * GB,
        saved_step=1000,
        steps_per_epoch=500,
        global_batch=64,
        micro_batch=8,
    )
    return replace(usual, **changes)
