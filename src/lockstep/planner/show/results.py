"""A plan for programs: what `lockstep plan --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lockstep.planner.cost.checks import capacity, verdict
from lockstep.planner.cost.estimate import TIME_TERMS, Memory, Time, fullest_of
from lockstep.planner.cost.figures import figures
from lockstep.planner.cost.job import Job
from lockstep.planner.search.rank_layouts import Candidate
from lockstep.planner.search.scale import Point, ScalingCurves
from lockstep.planner.show.paste import settings


def plan_json(job: Job, gpus: int) -> dict[str, Any]:
    """What all candidates of a plan have in common."""
    return {
        "model": job.model.name,
        "parameters": job.model.parameters,
        "sequence": job.model.sequence,
        "gpu": job.machine.gpu.name,
        "gpus": gpus,
        "global_batch": job.global_batch,
        "precision": job.precision,
    }


def job_json(job: Job) -> dict[str, Any]:
    """What is planned."""
    return {
        **plan_json(job, job.layout.world_size),
        "layout": str(job.layout),
        "micro_batch": job.micro_batch,
        "micro_batches": job.micro_batches,
        "recompute": job.recompute,
        "schedule": job.schedule if job.layout.pp > 1 else None,
        "stages_per_rank": job.stages_per_rank,
        "shard_level": f"zero{job.effective_zero}" if job.layout.fsdp > 1 else None,
        "settings": settings(job),
    }


def memory_json(job: Job, memories: Sequence[Memory]) -> dict[str, Any]:
    """Bytes by stage, and whether they fit."""
    fullest = fullest_of(memories)
    return {
        "verdict": verdict(fullest, job.machine.gpu),
        "capacity": capacity(job.machine.gpu),
        "total": fullest.total,
        "band": fullest.band,
        "stages": [{**asdict(memory), "total": memory.total} for memory in memories],
    }


def time_json(job: Job, time: Time, items: float | None) -> dict[str, Any]:
    """Seconds by term, and what follows from them."""
    found = figures(job, time)
    amount = items or found.usual_amount
    return {
        "step": time.total,
        "terms": {name: getattr(time, name) for name in TIME_TERMS},
        "hidden": time.hidden,
        f"{found.item}_per_second": found.items_per_second,
        "mfu": found.mfu,
        "communication_share": found.communication,
        "bottleneck": found.bottleneck,
        "watts_per_gpu": found.watts,
        found.item: amount,
        "gpu_hours": found.gpu_hours(job, amount),
        "kilowatt_hours": found.kilowatt_hours(job, amount),
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """One line of a ranked table."""
    found = figures(candidate.job, candidate.time)
    return {
        **job_json(candidate.job),
        "memory": candidate.memory.total,
        "band": candidate.memory.band,
        "step": candidate.time.total,
        f"{found.item}_per_second": found.items_per_second,
        "mfu": found.mfu,
        "bottleneck": found.bottleneck,
    }


def scaling_json(scaling: ScalingCurves) -> dict[str, Any]:
    """Both curves, and what failures leave."""
    return {
        "strong": [_point_json(point) for point in scaling.strong],
        "weak": [_point_json(point) for point in scaling.weak],
        "savings": [
            {"gpus": gpus, **asdict(saving), "interval": saving.interval, "goodput": saving.goodput}
            for gpus, saving in scaling.savings.items()
        ],
    }


def _point_json(point: Point) -> dict[str, Any]:
    found: dict[str, Any] = {"gpus": point.gpus, "global_batch": point.global_batch, "efficiency": point.efficiency}
    if point.best is not None:
        found |= candidate_json(point.best)
    if point.figures is not None:
        found["communication_share"] = point.figures.communication
    return found
