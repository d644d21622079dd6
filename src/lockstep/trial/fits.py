"""How many samples one forward can hold: measured on one sample, before the first step."""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch

from lockstep.data.loader import MicroBatch, Reading, read_steps
from lockstep.data.order import MicroBatchPlan, Order, Position, StepPlan
from lockstep.data.transfer import Transfers
from lockstep.engine import Engine
from lockstep.follow.forward import following
from lockstep.runtime.comm import Comm
from lockstep.runtime.dtensors import local_part

SHARE_FOR_ACTIVATIONS = 0.5
"""The part of the free memory that activations may take: gradients and optimizer state come on top later."""


def largest_micro_batch(engine: Engine, dataset: Any, order: Order, reading: Reading, comm: Comm) -> Order:
    """The order with its micro-batch made small enough for the memory of the tightest rank."""

    def kept_for(samples: int) -> int:
        part = MicroBatchPlan(0, np.zeros(samples, dtype=np.int64))
        plan = StepPlan(0, samples, [part], Position())
        # By a process where loaders have any: they must not share what a dataset opens when it is first read.
        [batch] = read_steps(dataset, [plan], order, replace(reading, workers=min(1, reading.workers), pin=False))
        return activation_bytes(engine, batch.micro_batches[0])

    # The difference of two sizes leaves out what does not grow with the batch: gathered parameters, masks.
    per_sample = max(1, kept_for(2) - kept_for(1))
    fitting = SHARE_FOR_ACTIVATIONS * free_bytes(engine.device) / _sharers(engine.device, comm.place.local_world_size)
    most = comm.reduce(int(fitting // per_sample), "min")
    return replace(order, micro_batch=max(1, min(order.micro_batch, most)))


def activation_bytes(engine: Engine, micro_batch: MicroBatch) -> int:
    """What autograd keeps for the backward pass of one micro-batch."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> None:
        storage = local_part(tensor).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()

    data = Transfers(engine.device).send(micro_batch.data).take()
    # Scoring, because measuring must not count as a batch in running statistics; eager, because a resumed run, which
    # does not measure, has to find the same variants compiled.
    with engine.scoring(), torch.compiler.set_stance("force_eager"), following(keeps=keep):
        loss, _ = engine.forwards.forward(micro_batch, data)
        del loss
    return sum(kept.values())


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a GPU, or on this node."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else psutil.virtual_memory().available


def _sharers(device: torch.device, local_ranks: int) -> int:
    """How many ranks take from that memory."""
    return -(-local_ranks // torch.cuda.device_count()) if device.type == "cuda" else local_ranks


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held so far: of a GPU's memory, or on CPUs of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rank_memory() -> dict[str, int]:
    """How many bytes a GPU of this machine has, 0 without one, and how many the host."""
    cuda = torch.cuda.mem_get_info(0)[1] if torch.cuda.is_available() else 0
    return {"cuda": int(cuda), "host": psutil.virtual_memory().total}
