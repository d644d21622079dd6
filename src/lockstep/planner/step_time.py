"""Seconds of one optimizer step: a roofline of the compute, collectives by alpha and beta, overlap and the bubble."""

from __future__ import annotations

from lockstep.planner.estimate import Time
from lockstep.planner.job import Job


def estimate_time(job: Job) -> Time:
    """The step that this job would take."""
    flops = 3 * (job.model.matmul_flops + job.model.attention_flops) * job.global_batch / job.layout.world_size
    gpu = job.machine.gpu
    compute = flops / (gpu.tflops[job.precision] * 1e12 * gpu.matmul)
    bubble = compute * (job.layout.pp - 1) / (job.micro_batches * job.stages_per_rank)
    return Time(compute, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, bubble, 0.0)
