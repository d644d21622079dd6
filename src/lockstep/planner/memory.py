"""Bytes of a rank at its fullest moment, for the first and the last pipeline stage."""

from __future__ import annotations

from lockstep.planner.estimate import Memory
from lockstep.planner.job import Job


def estimate_memory(job: Job) -> tuple[Memory, ...]:
    """One estimate a pipeline stage that differs: the first, and with pp the last."""
    share = job.model.parameters / job.layout.pp / job.layout.tp
    states = (4 * share, 4 * share, 8 * share)
    return (Memory(0, *states, activations=0.0, logits=0.0, communication=0.0, slack=0.0, band=0.1),)
