"""The starts of a run: when each began and ended, how, and what it spent outside of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.page.reading.damage import Fields, cut, inner, text, whole, whole_or_none
from lockstep.page.reading.summary import AttemptSummary
from lockstep.record.run_state import AttemptState


@dataclass(frozen=True)
class Started:
    """What the `start` event of an attempt says."""

    run: str
    layout: str
    world_size: int
    nodes: int
    device: str
    precision: str
    formats: Mapping[str, str]
    versions: Mapping[str, str]
    total_steps: int | None
    steps_per_epoch: int | None
    global_batch: int
    micro_batch: int
    item: str
    parameters: int
    resumed_from_step: int | None


def started_of(event: Fields) -> Started:
    """The event as far as it is used."""
    return Started(
        run=text(event, "run", 120),
        layout=text(event, "layout", 120),
        world_size=whole(event, "world_size", 1),
        nodes=whole(event, "nodes", 1),
        device=text(event, "device", 120),
        precision=text(event, "precision", 40),
        formats=_texts(inner(event, "formats")),
        versions=_texts(inner(event, "versions")),
        total_steps=whole_or_none(event, "total_steps"),
        steps_per_epoch=whole_or_none(event, "steps_per_epoch"),
        global_batch=whole(event, "global_batch", 1),
        micro_batch=whole(event, "micro_batch", 1),
        item=text(event, "item", 20),
        parameters=whole(event, "parameters"),
        resumed_from_step=whole_or_none(event, "resumed_from_step"),
    )


def _texts(fields: Fields) -> dict[str, str]:
    return {cut(name): cut(str(value)) for name, value in list(fields.items())[:50]}


@dataclass
class Attempt(AttemptState):
    """One start of the run, as far as it was read."""

    started: Started | None = None
    last_step: int | None = None
    first_done: float = 0.0
    """When the first step ended, and how long it took."""
    first_seconds: float = 0.0
    saved_step: int = 0
    """Of the last checkpoint that it wrote."""
    done_until: float = 0.0
    """When the last step ended, or what came after it."""
    in_steps: float = 0.0
    """Seconds of all its steps."""
    validation: float = 0.0
    stalls: float = 0.0
    profiling: float = 0.0
    """All ranks waited for traces to be written."""
    profiled: set[tuple[int, int]] = field(default_factory=set)
    """First and last steps that were recorded."""
    before_steps: float = 0.0
    """Of validation, stalls and profiling, what came before its first step."""
    told_seconds: float = 0.0
    """How long the steps were of which the ranks have told, and how much of it was what: means over ranks."""
    parts: dict[str, float] = field(default_factory=dict)
    joules: dict[str, float | None] = field(default_factory=dict)
    """Of every host, until the last look."""
    measured_cpus: set[str] = field(default_factory=set)
    """The hosts whose joules have those of their CPUs in them."""
    sharing: int = 0
    """How many ranks use a GPU that an earlier rank uses already."""

    @property
    def seconds(self) -> float:
        """From its first event to its last."""
        return max(0.0, self.end - self.begin)

    @property
    def devices(self) -> int:
        """How many GPUs it held, or processes on CPUs."""
        return max(0, self.started.world_size - self.sharing) if self.started else 0

    @property
    def accounted(self) -> float:
        """Seconds that its events account for: all but starting, and what nobody tells of."""
        return self.in_steps + self.stalls + self.validation + self.profiling

    @property
    def starting(self) -> float:
        """Seconds until its first step began, or it ended without one, less those of validation and checkpoints."""
        if self.first_step is None:
            return max(0.0, self.seconds - self.accounted)
        return max(0.0, self.first_done - self.first_seconds - self.begin - self.before_steps)

    def summary(self, now: float, unsaved: float, *, is_last: bool) -> AttemptSummary:
        """For those who only want to know."""
        state = self.state(now, is_last=is_last)
        why = self.why
        if not why and state == "lost":
            why = "no event tells how it ended: it was killed, or lost its disk"
        elif not why and self.job_state:
            why = f"Slurm says that job {self.job} is {self.job_state}"
        return AttemptSummary(
            number=self.number,
            begin=self.begin,
            end=self.end,
            state=state,
            layout=self.started.layout if self.started else "",
            world_size=self.started.world_size if self.started else 0,
            first_step=self.first_step,
            last_step=self.last_step,
            why=why,
            job=self.job,
            unsaved=unsaved,
        )
