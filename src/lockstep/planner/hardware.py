"""What a model is planned for: a kind of GPU, nodes of them, and the links between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lockstep.comm.model import Link

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]


@dataclass(frozen=True)
class Gpu:
    """One accelerator, by its data sheet and by what measurements of others reached."""

    name: str
    tflops: dict[str, float]
    """Peak of dense products by number format."""
    matmul: float
    """The share of the peak that the best large product reaches."""
    memory_gb: float
    """Decimal gigabytes, as sold."""
    memory_gb_s: float
    multiprocessors: int
    watts: float
    """Of the whole accelerator at full load (TDP)."""
    idle_watts: float
    source: str
    flash: float = 0.5
    """The share of the speed of products that the forward of a flash attention kernel reaches with long heads."""
    usable: float = 1.0
    """The share of its memory that a process can have (driver and context are off)."""
    is_cpu: bool = False


@dataclass(frozen=True)
class Machine:
    """So many equal nodes of equal GPUs."""

    name: str
    gpu: Gpu
    gpus_per_node: int
    nodes: int
    inside: Link
    """Between two GPUs of a node: seconds a message, seconds a byte (one way, each GPU)."""
    outside: Link
    """Between two nodes: seconds a byte of the whole node, all its cards together."""
    congestion: float = 0.05
    """Bandwidth between nodes falls with the number of nodes to the power of this."""
    warnings: tuple[str, ...] = ()
    """What was simplified: unequal nodes count as the smallest."""

    @property
    def gpus(self) -> int:
        """In all."""
        return self.gpus_per_node * self.nodes

    def with_gpus(self, count: int) -> Machine:
        """The same machine with so many GPUs: part of a node, or whole nodes."""
        if count <= self.gpus_per_node:
            return replace(self, nodes=1, gpus_per_node=count)
        return replace(self, nodes=-(-count // self.gpus_per_node))
