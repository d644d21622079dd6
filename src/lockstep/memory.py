"""How many samples one forward can hold: measured on one sample, before the first step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from lockstep.data.loader import MicroBatch, Reading, read_steps
from lockstep.data.order import Order, Position, StepPlan, deal
from lockstep.runtime.comm import Comm

if TYPE_CHECKING:
    from lockstep.engine import Engine

SHARE_FOR_ACTIVATIONS = 0.5
"""The part of the free memory that activations may take: gradients and optimizer state come on top later."""


def largest_micro_batch(engine: Engine, dataset: Any, order: Order, reading: Reading, comm: Comm) -> Order:
    """The order with its micro-batch made small enough for the memory of the tightest rank."""
    first = deal(np.zeros(1, dtype=np.int64), 1, 0, 1, equal_counts=False)
    plan = StepPlan(0, 1, first, Position())
    sample = next(read_steps(dataset, [plan], order, replace(reading, workers=0, pin=False))).micro_batches[0]
    fitting = SHARE_FOR_ACTIVATIONS * free_bytes(engine.device, comm.place.local_world_size)
    most = int(fitting // max(1, activation_bytes(engine, sample)))
    return replace(order, micro_batch=max(1, min(order.micro_batch, comm.reduce(most, "min"))))


def activation_bytes(engine: Engine, micro_batch: MicroBatch) -> int:
    """What autograd keeps for the backward pass of one micro-batch, without the parameters themselves."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    engine.model.eval()  # measuring must not count as a batch in running statistics
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward(micro_batch)
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


def free_bytes(device: torch.device, local_ranks: int) -> int:
    """Memory this rank may still take: of its GPU, or its part of the node's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available // local_ranks)
