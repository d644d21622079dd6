"""What the planner expects of a run, told before its first step, and how far off it was, told at the end.

A run must neither fail nor wait for this: a model that would have to be followed first has no prediction, and whatever
goes wrong is the reason that stands in the event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from lockstep.config.schema import SetupConfig
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.parallel.build.apply import cuts_tokens
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.memory import estimate_memory
from lockstep.planner.cost.step_time import estimate_time
from lockstep.planner.machine.find_machine import HERE, find_machine
from lockstep.planner.machine.hardware import GpuKind, Machine
from lockstep.planner.machine.here import newest_bench, shared_cpu
from lockstep.planner.model.parts import Model
from lockstep.runtime.rank_env import Place

UNKNOWN = "the planner knows the model of a script or recipe only after it has followed a forward: see lockstep plan"
WARM_UP = 2
"""Steps that are not counted: memory is found and kernels are chosen in them."""
KEPT_STEPS = 1000


@dataclass(frozen=True)
class Expected:
    """What is known of a run when its first step is about to begin."""

    model: Callable[[], Model] | None
    cutting: SetupConfig
    layout: Layout
    place: Place
    device: torch.device
    precision: Any
    global_batch: int
    micro_batch: int
    attention: str | None = None
    """The kernels of attention, None: as torch chooses."""


@dataclass
class Measured:
    """What a run has shown so far."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    steps: int = 0
    memory: int | None = None
    """Of the fullest rank; None on CPUs, where nobody counts tensors apart from all else that a process holds."""

    def step(self, seconds: float) -> None:
        """One more step is done."""
        self.steps += 1
        if self.steps > WARM_UP:
            self.seconds.append(seconds)


def foretell(expected: Expected) -> dict[str, Any]:
    """The fields of the event `prediction`; its numbers are None where there is a reason why."""
    nothing = {"memory_bytes": None, "step_seconds": None, "machine": None, "band": None, "source": ""}
    if expected.model is None:
        return {**nothing, "reason": UNKNOWN}
    try:
        job = _job(expected, expected.model(), machine_of(expected))
        memories, time = estimate_memory(job), estimate_time(job)
    except Exception as error:  # whatever it is, the run goes on
        return {**nothing, "reason": f"{type(error).__name__}: {error}"}
    # Slack is what an allocator holds and no tensor has, and is not measured.
    fullest = max(memories, key=lambda memory: memory.allocated)
    return {
        "memory_bytes": round(fullest.allocated),
        "step_seconds": time.total,
        "machine": job.machine.name,
        "band": fullest.band,
        "source": _source(job.machine.gpu),
        "reason": "",
    }


def _source(gpu: GpuKind) -> str:
    """Where the numbers of a machine are from, for people who do not know the catalogue's names for its sources."""
    if gpu.source.startswith("lockstep bench"):
        return gpu.source.split("; ")[0]
    return "a guess, from the planner's catalogue" if gpu.is_cpu else "data sheets, from the planner's catalogue"


def error_of(prediction: dict[str, Any], measured: Measured) -> dict[str, Any]:
    """The fields of the event `prediction_error`: an error is above 0 where too much was predicted."""
    seconds = median(measured.seconds) if measured.seconds else None
    return {
        "machine": prediction["machine"],
        "memory_bytes": _compared(prediction["memory_bytes"], measured.memory),
        "step_seconds": _compared(prediction["step_seconds"], seconds),
    }


def machine_of(expected: Expected) -> Machine:
    """The machine at hand: as `lockstep bench` measured it, else as the catalogue has its GPU, or some CPU."""
    place = expected.place
    try:
        if newest_bench().device == expected.device.type:
            return find_machine(HERE, place.nodes, place.world_size)
    except UserError:
        pass  # never measured, or with fewer ranks
    if expected.device.type == "cuda":
        return find_machine(torch.cuda.get_device_name(expected.device), place.nodes, place.world_size)
    laptop = find_machine("laptop-cpu")
    gpu = shared_cpu(laptop.gpu, 1 / place.local_world_size)
    return replace(laptop, gpu=gpu, gpus_per_node=place.local_world_size, nodes=place.nodes)


def _job(expected: Expected, model: Model, machine: Machine) -> Job:
    cutting = expected.cutting
    return Job(
        model=model,
        machine=machine,
        layout=expected.layout,
        global_batch=expected.global_batch,
        micro_batch=expected.micro_batch,
        recompute="full" if cutting.recompute else "none",
        zero={"zero1": 1, "zero2": 2, "zero3": 3}[cutting.shard.level],  # type: ignore[arg-type]
        schedule=cutting.pipeline.schedule,
        stages_per_rank=cutting.pipeline.per_rank if expected.layout.pp > 1 else 1,
        # With a pipeline the engine leaves the tokens whole.
        sequence_parallel=cuts_tokens(cutting, expected.device) and expected.layout.pp == 1,
        precision=expected.precision,
        flash=expected.attention != "math",
        compiled=cutting.compile != "off",
    )


def _compared(predicted: float, measured: float | None) -> dict[str, float | None]:
    error = predicted / measured - 1 if measured else None
    return {"predicted": predicted, "measured": measured, "error": error}
