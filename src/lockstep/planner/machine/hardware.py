"""What a model is planned for: a kind of GPU, nodes of them, and the links between."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.errors import UserError
from lockstep.links.collective_cost import Link


@dataclass(frozen=True)
class GpuKind:
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
    best_flash: float | None = None
    """The same of the fastest kernel there is, where that is not the one of version 2."""
    usable: float = 1.0
    """The share of its memory that a process can have (driver and context are off)."""
    is_cpu: bool = False
    runs_lockstep: bool = True
    """False: known for published runs alone."""


@dataclass(frozen=True)
class Machine:
    """So many equal nodes of equal GPUs."""

    name: str
    gpu: GpuKind
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
    cards: int | None = None
    """Network cards of a node; None: one a GPU."""
    host_gb: float | None = None
    """Memory of a node beside that of its GPUs, where it is known."""
    whole: Machine | None = None
    """Where a part of each node is used: one whole node, to grow from."""

    @property
    def gpus(self) -> int:
        """In all."""
        return self.gpus_per_node * self.nodes

    def with_gpus(self, gpus: int, nodes: int | None = None) -> Machine:
        """The same machine with so many GPUs: whole nodes, an equal part of each, or a part of one."""
        whole = self.whole or replace(self, nodes=1)
        most = whole.gpus_per_node
        if nodes is None:
            least = -(-gpus // most)
            nodes = next((count for count in range(least, 2 * least + 1) if gpus % count == 0), None)
            if nodes is None:
                full = gpus // most * most
                raise UserError(
                    f"{gpus} GPUs cannot be shared out evenly over nodes of {most}", f"use {full} or {full + most} GPUs"
                )
        elif gpus % nodes or gpus // nodes > most:
            near = max(1, min(most, round(gpus / nodes))) * nodes
            raise UserError(f"{gpus} GPUs are not {nodes} equal nodes of at most {most}", f"use {near} GPUs")
        if nodes > 1 and not self.outside.beta:
            raise UserError(
                f"{gpus} GPUs are more than a node of {self.name}, and what is between nodes was not measured",
                "run lockstep bench on two nodes, or name a GPU of the catalogue",
            )
        each = gpus // nodes
        if each == most:
            return replace(whole, nodes=nodes)
        if nodes == 1:
            return replace(whole, gpus_per_node=each, whole=whole)
        # A card belongs to a GPU or to several of them: with fewer GPUs than cards, cards are idle.
        cards = whole.cards or most
        return replace(
            whole,
            nodes=nodes,
            gpus_per_node=each,
            outside=replace(whole.outside, beta=whole.outside.beta * cards / min(each, cards)),
            warnings=(*whole.warnings, f"{each} of the {most} GPUs of each node are used"),
            whole=whole,
        )
