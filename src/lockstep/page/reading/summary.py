"""A run in numbers: what headline, advice, comparison and the closing table of the console are made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.record.run_state import State


@dataclass(frozen=True)
class AttemptSummary:
    """One start of the run, until it ended."""

    number: int
    begin: float
    end: float
    """Of its last event; Unix time."""
    state: State
    layout: str
    world_size: int
    first_step: int | None
    """The first step it did; None where it did none."""
    last_step: int | None
    why: str = ""
    """How it ended, in a sentence: that of its failure, or of its stop."""
    job: str = ""
    """The Slurm job it ran in."""
    unsaved: float = 0.0
    """Seconds in steps that were done again, or are to be, because it ended before it had saved them."""


@dataclass(frozen=True)
class TimeSpent:
    """Where the seconds of a run went, from its first event to its last; together they are all of it."""

    useful: float = 0.0
    """In steps whose result was kept, without what is named below."""
    input: float = 0.0
    communication: float = 0.0
    """Exposed: the ranks stood still in collectives."""
    optimizer: float = 0.0
    between: float = 0.0
    """The script's own code between steps."""
    validation: float = 0.0
    """Test and samples are part of it."""
    checkpoints: float = 0.0
    """The training waited for them."""
    repeated: float = 0.0
    """In steps that were done again after a restart, or are to be as nobody saved them, or taken back, or skipped."""
    starting: float = 0.0
    """From the start of an attempt to its first step: processes, model, checkpoint, compiling; no validation."""
    stopped: float = 0.0
    """Between two attempts: in a queue, or until somebody started it again."""
    profiling: float = 0.0
    """Writing traces, and what profiled steps take longer than others."""
    other: float = 0.0
    """What no event accounts for."""

    @property
    def whole(self) -> float:
        """All of it."""
        return float(sum(vars(self).values()))

    @property
    def steps(self) -> float:
        """In steps whose result was kept: useful, optimizer, communication, input and between."""
        return float(sum(getattr(self, name) for name in IN_KEPT_STEPS))

    @property
    def goodput(self) -> float | None:
        """The share of the time in steps whose result was kept."""
        return self.steps / self.whole if self.whole > 0 else None


PARTS_OF_TIME = {
    "useful": "compute",
    "optimizer": "optimizer",
    "communication": "exposed communication",
    "input": "input",
    "between": "between steps",
    "validation": "validation",
    "checkpoints": "checkpoint stalls",
    "profiling": "profiling",
    "repeated": "repeated or skipped steps",
    "starting": "starting",
    "stopped": "stopped",
    "other": "other",
}
"""What people read for the fields of `TimeSpent`, the same wherever they are told."""
IN_KEPT_STEPS = ("useful", "optimizer", "communication", "input", "between")
"""The goodput."""


@dataclass(frozen=True)
class RankSummary:
    """One rank over the last attempt that told of its ranks: seconds of a mean step, weighted by steps."""

    rank: int
    host: str
    input: float
    compute: float
    """Without optimizer and between."""
    optimizer: float
    between: float
    wait: float
    memory: int
    """The most it has held, in bytes."""
    cores: float | None = None
    """How many it kept busy, with its data workers."""
    threads: int | None = None
    workers: int | None = None


@dataclass(frozen=True)
class GpuSummary:
    """One GPU of a node over the last attempt; `ranks` may be empty: nobody uses it."""

    host: str
    index: int
    name: str
    busy: float | None
    memory: int | None
    """The most that was held, by whomever."""
    memory_total: int | None
    watts: float | None
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class HostSummary:
    """One host over the last attempt; means."""

    host: str
    cores: int
    cpu: float | None
    """The share of all its cores that was busy."""
    ranks: int
    """How many of the run are on it."""


@dataclass(frozen=True)
class StragglerSummary:
    """Who held the steps up and why, as the run itself found: the last word on each rank and cause."""

    rank: int | None
    host: str | None
    cause: str
    """input, compute or communication."""
    seconds: float
    others: float | None
    text: str
    times: int
    """How often it was said."""


@dataclass(frozen=True)
class Compared:
    """Predicted and measured; `error` is predicted / measured - 1."""

    predicted: float
    measured: float | None
    error: float | None


@dataclass(frozen=True)
class Summary:
    """Everything that is said of a run in one number each. None: not known, and never a guess."""

    name: str
    state: State
    layout: str
    world_size: int
    nodes: int
    device: str
    precision: str
    parameters: int
    item: str
    steps: int
    """The last step that was done."""
    total_steps: int | None
    begin: float
    end: float
    attempts: list[AttemptSummary]
    spent: TimeSpent
    loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    test_loss: float | None = None
    step_seconds: float | None = None
    """The median step of the last attempt, warm-up left out, and profiled steps where there are others."""
    is_profiled: bool = False
    """A profiler slowed all steps of the last attempt down, so that the median is of these."""
    items_per_second: float | None = None
    """Items of a step over its seconds, at the median step: does not depend on how the batch is split."""
    items: int = 0
    """Tokens or samples used up in steps that counted."""
    padding: int = 0
    """Of these, what only fills rows up."""
    trained: float = 0.0
    """The weight by which the loss sum is divided, summed over the same steps."""
    flops_per_second: float | None = None
    """Of the model, on all ranks together."""
    peak_flops: float | None = None
    """Of all ranks' devices together."""
    peak_source: str = ""
    mfu: float | None = None
    mfu_reason: str = ""
    """Why there is no MFU, or what is wrong with it."""
    device_hours: float = 0.0
    """GPUs in use, or processes on CPUs, times the hours of their attempts."""
    kwh: float | None = None
    kwh_without_cpus: bool = False
    """Whether it is that of GPUs alone: nobody may read the counters of the CPUs."""
    kwh_reason: str = ""
    """What the energy leaves out, or why it is not known."""
    memory: int | None = None
    """The most that any rank has held."""
    predicted_step: Compared | None = None
    predicted_memory: Compared | None = None
    ranks: list[RankSummary] = field(default_factory=list)
    hosts: list[HostSummary] = field(default_factory=list)
    gpus: list[GpuSummary] = field(default_factory=list)
    stragglers: list[StragglerSummary] = field(default_factory=list)
    checkpoints: int = 0
    checkpoint_stalls: float = 0.0
    """Seconds that the training waited for checkpoints, and how many there were."""
    checkpoint_bytes: int = 0
    """Of the largest."""
    alarms: int = 0
    skipped_steps: int = 0
    warnings: int = 0
    saved_step: int | None = None
    """Of the last complete checkpoint, where the run can go on; None where it has saved none."""
    steps_per_epoch: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    """Samples; of the last attempt, as it was chosen while running."""
    not_finite: str = ""
    """What was not finite, where the last attempt stopped because of that: "loss of step 20"."""
    diverged_step: int | None = None
    """The last step that was not skipped, where its loss is not finite: nothing is learnt any more."""


def fullest_rank(summary: Summary) -> tuple[RankSummary, int] | None:
    """Of the last attempt: the rank whose tensors fill its GPU the most, and the memory of that GPU."""
    totals = {rank: gpu.memory_total for gpu in summary.gpus for rank in gpu.ranks if gpu.memory_total}
    known = [(rank, totals[rank.rank]) for rank in summary.ranks if rank.rank in totals]
    return max(known, key=lambda one: one[0].memory / one[1], default=None)


def is_over_the_peak(summary: Summary) -> bool:
    """Whether the run was faster than its devices can be: an error of which `mfu_reason` tells."""
    rate, peak = summary.flops_per_second, summary.peak_flops
    return rate is not None and peak is not None and rate > peak
