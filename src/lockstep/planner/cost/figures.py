"""What follows from a predicted step: tokens a second, MFU, GPU-hours, energy, and the bottleneck in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.parallel.pipeline.timetable import SPLITS_BACKWARD
from lockstep.planner.cost.estimate import TIME_TERMS, Time
from lockstep.planner.cost.job import Job
from lockstep.text.units import percent

NODE_OVERHEAD = 0.8
"""Watts of the rest of a node (CPUs, memory, network cards, fans, power supplies) for every watt of its GPUs' TDP.

NVIDIA's data sheet gives 10.2 kW for a DGX H100 at most, whose GPUs have 8 x 700 W: 0.82. Cooling of the building is
not in it.
"""

COMMUNICATION = ("tensor", "context", "pipeline", "data")


@dataclass(frozen=True)
class Figures:
    """The numbers that people compare."""

    step: float
    items_per_second: float
    """Tokens, or samples for a model without sequences; over all GPUs."""
    item: str
    mfu: float
    """FLOPs that the model needs (causal attention by half, no recompute), over the peak of all GPUs."""
    communication: float
    """The share of a step that waits for others."""
    watts: float
    """Of a GPU with its share of the node."""
    bottleneck: str

    @property
    def usual_amount(self) -> float:
        """What a cost is given for where nobody says: a billion tokens, or a million samples."""
        return 1e9 if self.item == "tokens" else 1e6

    def gpu_hours(self, job: Job, items: float) -> float:
        """For so many tokens."""
        return items / self.items_per_second * job.layout.world_size / 3600

    def kilowatt_hours(self, job: Job, items: float) -> float:
        """For so many tokens."""
        return self.gpu_hours(job, items) * self.watts / 1000


def figures(job: Job, time: Time) -> Figures:
    """What follows from a step of so many seconds."""
    is_text = job.model.sequence > 1
    flops = model_flops(job)
    peak = job.machine.gpu.tflops[job.precision] * 1e12 * job.layout.world_size
    return Figures(
        step=time.total,
        items_per_second=job.tokens / time.total,
        item="tokens" if is_text else "samples",
        mfu=flops / time.total / peak,
        communication=communication_share(time),
        watts=_watts(job, time),
        bottleneck=_bottleneck(job, time),
    )


def model_flops(job: Job) -> float:
    """Of a step over all GPUs: the forward once and the backward twice, and nothing that is computed again."""
    return 3 * (job.model.matmul_flops + job.model.attention_flops) * job.global_batch


def communication_share(time: Time) -> float:
    """Of a step that waits for others, the bubble not counted."""
    return sum(float(getattr(time, name)) for name in COMMUNICATION) / time.total


def largest_loss(time: Time) -> tuple[str, float]:
    """The largest term of a step besides products, and its share."""
    name = max((name for name in TIME_TERMS if name != "compute"), key=lambda name: float(getattr(time, name)))
    return name, getattr(time, name) / time.total


def _watts(job: Job, time: Time) -> float:
    """Idle, and as much more of the TDP as the GPU is busy; the rest of the node on top."""
    gpu = job.machine.gpu
    busy = (time.compute + time.memory_bound + time.optimizer) / time.total
    return gpu.idle_watts + busy * (gpu.watts - gpu.idle_watts) + NODE_OVERHEAD * gpu.watts


def _bottleneck(job: Job, time: Time) -> str:
    """Products are what a step is for; so the largest of the rest is named unless it is small."""
    name, lost = largest_loss(time)
    compute = time.compute / time.total
    if compute >= 0.5 and lost < 0.15:
        again = ", a quarter of it recomputed" if job.recompute == "full" else ""
        return f"{TIME_TERMS['compute'].text}, {percent(compute)} of a step{again}"
    told = f"{TIME_TERMS[name].text}, {percent(lost)} of a step"
    cannot_compile = job.compiled or (job.layout.pp > 1 and job.schedule in SPLITS_BACKWARD)
    return told if name == "memory_bound" and cannot_compile else f"{told}: {TIME_TERMS[name].remedy}"
