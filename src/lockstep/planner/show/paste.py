"""A plan as what a user pastes: the layout and the settings that `lockstep train` takes."""

from __future__ import annotations

from lockstep.planner.cost.job import Job

PLACEHOLDER = "CONFIG.toml"
"""What `train` is told to train where the model of a plan is no recipe and no config."""


def settings(job: Job) -> dict[str, str]:
    """Config keys and their values as `--set` takes them; what the layout leaves without meaning is left out."""
    found = {
        "global_batch": str(job.global_batch),
        "micro_batch": str(job.micro_batch),
        "precision": job.precision,
        "recompute": "true" if job.recompute == "full" else "false",
    }
    if job.compiled:
        found["compile"] = "blocks"
    if job.layout.fsdp > 1:
        found["shard.level"] = f"zero{job.effective_zero}"
    if job.layout.pp > 1:
        found["pipeline.schedule"] = job.schedule
        found["pipeline.stages_per_rank"] = str(job.stages_per_rank)
    return found


def options(job: Job) -> str:
    """The same as options of the command."""
    said = [f"--set {key}={value}" for key, value in settings(job).items()]
    return " ".join([f"--layout {job.layout}", *said])
