"""What the planner answers: bytes of a rank and seconds of a step, each as a sum of named terms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Memory:
    """The fullest moment of one rank, in bytes, term by term."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    communication: float
    """Gathered weights, buckets, what pipeline neighbours send."""
    slack: float
    """What the allocator holds and nobody uses, and workspaces of libraries."""
    band: float
    """The share by which the total may be wrong, either way."""
    shared: float = 0.0
    """What two of these terms hold one after the other: gradients come into being where activations were."""
    host: float = 0.0
    """Memory of the HOST, not of the GPU: where a background save puts its copy of the rank's weights and state."""

    @property
    def total(self) -> float:
        """What has to fit."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.communication + self.slack - self.shared

    @property
    def allocated(self) -> float:
        """The part of it that tensors hold, as torch.cuda.max_memory_allocated counts."""
        return self.total - self.slack


def fullest_of(memories: Iterable[Memory]) -> Memory:
    """The estimate of the rank that needs most."""
    return max(memories, key=lambda memory: memory.total)


@dataclass(frozen=True)
class TimeTerm:
    """How a term of a step is told: in a sentence, in a table, and what makes it smaller."""

    text: str
    short: str
    remedy: str = ""


TIME_TERMS = {
    "compute": TimeTerm("products and attention", "compute"),
    "memory_bound": TimeTerm("norms, residuals, activations", "norms etc.", "--set compile=blocks fuses them"),
    "launch": TimeTerm(
        *("waiting for kernels to start", "kernel starts"),
        "a larger micro-batch (or --set compile=blocks) starts fewer of them",
    ),
    "tensor": TimeTerm(
        *("exposed communication of tp", "tp"), "a smaller tp, or one that stays inside a node, talks less"
    ),
    "context": TimeTerm("exposed communication of cp", "cp", "a smaller cp talks less"),
    "pipeline": TimeTerm(
        *("exposed communication of pp", "pp"), "a smaller pp, or larger micro-batches, send fewer messages"
    ),
    "data": TimeTerm(
        *("exposed communication of dp and fsdp", "dp, fsdp"),
        "more samples a GPU (--global-batch), or fewer shards in each group, hide more of it",
    ),
    "bubble": TimeTerm(
        *("idle in the pipeline's bubble", "bubble"),
        "more micro-batches (a larger --global-batch) or more stages a rank make it smaller",
    ),
    "optimizer": TimeTerm("optimizer", "optimizer", "more samples a step, or more shards, leave less of it"),
}


@dataclass(frozen=True)
class Time:
    """One optimizer step, in seconds, term by term; they add up to `total`."""

    compute: float
    """Products and attention."""
    memory_bound: float
    """Norms, activations, residuals: as fast as memory is read."""
    launch: float
    """Waiting for kernels to be started."""
    tensor: float
    """Exposed communication of tp, and so on for each axis."""
    context: float
    pipeline: float
    data: float
    """fsdp and dp, as far as it is not hidden behind compute."""
    bubble: float
    optimizer: float
    hidden: dict[str, float] = field(default_factory=dict)
    """Communication behind compute, by axis: not part of the total."""

    @property
    def total(self) -> float:
        """The step."""
        parts = (self.compute, self.memory_bound, self.launch, self.tensor, self.context, self.pipeline, self.data)
        return sum(parts) + self.bubble + self.optimizer
