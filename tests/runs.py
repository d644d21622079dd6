"""Runs that never ran: event logs with known numbers, for whatever reads them.

`write_run(folder, Made(...))` writes the `events.jsonl` of a run of so many steps and ranks, with restarts and problems
as asked for. All of it is arithmetic, so that a test can say what a reader should find. Every event is one that
`lockstep.record.log.validate` accepts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep.faults.stragglers import StragglerWatch
from lockstep.layout import Layout
from lockstep.record.log import without_non_finite
from tests.events import Event

BEGIN = 1_760_000_000.0
GB = 10**9


@dataclass(frozen=True)
class Made:
    """What the run is like. Times are in seconds; a step takes as long as its slowest rank, and `communication`."""

    steps: int = 200
    ranks: int = 4
    hosts: int = 1
    layout: str | None = None
    """None: `dp=RANKS`."""
    name: str = "made"
    global_batch: int = 32
    item: str = "tokens"
    items_per_sample: int = 64
    padding: int = 0
    """Items of every step that only fill rows up."""

    input: float = 0.005
    compute: float = 0.07
    """Forward and backward."""
    optimizer: float = 0.01
    between: float = 0.005
    communication: float = 0.01
    slow_compute: dict[int, float] = field(default_factory=dict)
    """Rank -> by how many seconds of a step it computes longer."""
    slow_input: dict[int, float] = field(default_factory=dict)

    starting: float = 10.0
    """From the first event of an attempt to its first step."""
    pause: float = 20.0
    """Between two attempts."""
    fails_after: Sequence[int] = ()
    """The step after which each attempt but the last one fails; the next goes on from the last checkpoint."""
    ending: str = "end"
    """Of the last attempt: "end", "stop" (out of time), "failed", or "killed", which no event tells."""

    validate_every: int | None = 50
    validation: float = 1.0
    save_every: int | None = 50
    stall: float = 0.1
    tell_every: float = 5.0
    """Seconds between two events of ranks and machine."""
    tells_machine: bool = True
    not_finite: Sequence[int] = ()
    """Steps with a loss that is not a number; an alarm tells, and they are skipped."""
    metrics: bool = False
    samples: bool = False
    profile: tuple[int, int] | None = None
    """The first and the last step that every rank records; each takes `profile_slows` longer."""
    profile_slows: float = 0.0
    profile_writes: float = 0.0
    """From the last of them until the traces are written."""

    gpus: int = 0
    """Of each host; 0: trained on CPUs."""
    cores: int = 16
    """Of each host."""
    threads: int = 4
    workers: int = 0
    joules: bool = True
    """Whether the hosts know what they use up: 300 W for every GPU at work, 60 W for others, 100 W for a host."""
    per_sample: float | None = 1e9
    """Floating-point operations."""
    peak: float | None = 1e12
    predicted_step: float | None = 0.1

    @property
    def step_seconds(self) -> float:
        """How long every step takes."""
        return max(map(self._work, range(self.ranks))) + self.communication

    def seconds_of(self, step: int) -> float:
        """The same, with what a profile takes."""
        is_profiled = self.profile is not None and self.profile[0] <= step <= self.profile[1]
        return self.step_seconds + (self.profile_slows if is_profiled else 0.0)

    def _work(self, rank: int) -> float:
        return self._input(rank) + self._compute(rank)

    def _input(self, rank: int) -> float:
        return self.input + self.slow_input.get(rank, 0.0)

    def _compute(self, rank: int) -> float:
        """As a `ranks` event counts it: all but input and waiting."""
        return self.compute + self.optimizer + self.between + self.slow_compute.get(rank, 0.0)

    def host(self, rank: int) -> str:
        """Where a rank is."""
        return f"node{rank * self.hosts // self.ranks + 1}"

    def loss(self, step: int) -> float:
        """Of every step: falls, with a ripple, and peaks at step 77."""
        if step in self.not_finite:
            return math.nan
        return 0.5 + 4 * math.exp(-step / 100) + 0.05 * math.sin(step) + (3.0 if step == 77 else 0.0)


def write_run(folder: Path, made: Made, more: Iterable[str] = ()) -> Path:
    """Write the events of a run, and `more` lines after them as they are; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open("w", encoding="utf-8") as file:
        for event in run_events(made):
            file.write(json.dumps(without_non_finite(event)) + "\n")
        file.writelines(more)
    return folder


def run_events(made: Made) -> Iterator[Event]:
    """The events of a run, in the order of their lines."""
    now, resumed = BEGIN, 0
    ends = [*made.fails_after, made.steps]
    for attempt, last in enumerate(ends, start=1):
        writer = _Attempt(made, attempt, now)
        final = attempt == len(ends)
        yield from writer.events(resumed, last, made.ending if final else "failed", restarted=not final)
        now = writer.now + made.pause
        resumed = last // made.save_every * made.save_every if made.save_every else 0


class _Attempt:
    """One start of the run, and its clock."""

    def __init__(self, made: Made, number: int, now: float) -> None:
        self.made, self.number, self.now = made, number, now
        self._began = self._told = now
        self._steps_told = self._resumed = 0
        self._best, self._best_step = math.inf, 0
        self._stragglers = StragglerWatch(Layout.parse(made.layout or f"dp={made.ranks}"))

    def _event(self, kind: str, **fields: object) -> Event:
        return {"time": round(self.now, 6), "kind": kind, "attempt": self.number, **fields}

    def events(self, resumed: int, last: int, ending: str, restarted: bool) -> Iterator[Event]:
        made = self.made
        yield self._event("status", text="building the model")
        self.now += made.starting
        yield from self._start(resumed)
        self._told = self.now
        self._steps_told = self._resumed = resumed
        for step in range(resumed + 1, last + 1):
            self.now += made.seconds_of(step)
            yield self._step(step)
            if self.number > 1 and step == resumed + 1:
                seconds = {"stop": 0.5, "start": made.pause, "load": made.starting, "step": made.step_seconds}
                yield self._event("recovered", step=step, seconds=seconds)
            yield from self._after(step, last)
        yield from self._end(last, ending, restarted)

    def _start(self, resumed: int) -> Iterator[Event]:
        made = self.made
        names = ("weights", "matrix products", "gradient sums over ranks", "optimizer state")
        yield self._event(
            "start",
            run=made.name,
            layout=made.layout or (f"dp={made.ranks}" if made.ranks > 1 else "single"),
            world_size=made.ranks,
            nodes=made.hosts,
            device="NVIDIA H200" if made.gpus else "cpu",
            precision="fp32",
            formats=dict.fromkeys(names, "fp32"),
            resumed_from_step=resumed or None,
            total_steps=made.steps,
            steps_per_epoch=120,
            global_batch=made.global_batch,
            micro_batch=8,
            item=made.item,
            versions={"lockstep": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
            parameters=812345,
            host=made.host(0),
        )
        yield self._event("settings", text='recipe = "lm"\nsteps = ' + f"{made.steps}\n")
        source = "NVIDIA H200: data sheet, dense bf16" if made.peak else ""
        reason = "" if made.peak and made.per_sample else "nobody has measured what this device can do"
        yield self._event(
            "flops",
            per_sample=made.per_sample,
            by={"products": made.per_sample} if made.per_sample else {},
            peak=made.peak,
            source=source,
            reason=reason,
        )
        yield self._event(
            "prediction",
            memory_bytes=GB if made.predicted_step else None,
            step_seconds=made.predicted_step,
            machine="here",
            band=0.1,
            source="measured by lockstep bench",
            reason="" if made.predicted_step else "only the recipe lm is known beforehand",
        )
        if self.number == 1:
            yield self._event("baseline", name="bigram", loss=2.42)

    def _step(self, step: int) -> Event:
        made = self.made
        items = made.global_batch * made.items_per_sample
        return self._event(
            "step",
            step=step,
            epoch=step / 120,
            loss=made.loss(step),
            grad_norm=1.0 + 0.1 * math.cos(step),
            lr=3e-4 * min(1.0, step / 20),
            weight=float(items - made.padding),
            items=items,
            padding=made.padding,
            seconds=made.seconds_of(step),
            skipped=step in made.not_finite,
            loss_scale=1.0,
        )

    def _after(self, step: int, last: int) -> Iterator[Event]:
        made = self.made
        if step in made.not_finite:
            text = f"the loss is not finite at step {step} on rank 0 (sample id 12): the step is skipped"
            alarm = {"what": "loss", "rank": 0, "sample_ids": [12], "loss": math.nan, "action": "skip", "text": text}
            yield self._event("alarm", step=step, **alarm)
        if made.profile and step == made.profile[1]:
            self.now += made.profile_writes
            yield from (self._profile(rank, *made.profile) for rank in range(made.ranks))
        if made.metrics:
            yield self._event("metric", step=step, values={"temperature": 1.0 / step})
        if step == self._resumed + 5 or self.now - self._told >= made.tell_every or step == last:
            yield from self._tell(step)
        if made.validate_every and step % made.validate_every == 0:
            yield from self._validate(step)
        if made.save_every and step % made.save_every == 0:
            self.now += made.stall
            path = f"checkpoints/step-{step:08d}"
            seconds = {"seconds": made.stall + 0.3, "stall": made.stall}
            yield self._event("checkpoint", step=step, path=path, bytes=9812345, best=True, **seconds)

    def _validate(self, step: int) -> Iterator[Event]:
        made = self.made
        self.now += made.validation
        loss = made.loss(step) + 0.1 if step not in made.not_finite else math.nan
        best = loss < self._best
        if best:
            self._best, self._best_step = loss, step
        metrics = {"accuracy": {"sum": 90 + step % 90, "count": 180, "value": (90 + step % 90) / 180}}
        scores = {"loss": loss, "metrics": metrics, "samples": 180, "seconds": made.validation, "best": best}
        yield self._event("validation", step=step, epoch=step / 120, **scores)
        if made.samples:
            yield self._event("sample", step=step, prompt="To be", text=f" or not to be, at step {step}")

    def _profile(self, rank: int, first: int, last: int) -> Event:
        whole = (last - first + 1) * self.made.seconds_of(first)
        seconds = {"whole": whole, "compute": whole / 2, "communication": 0.0, "overlapped": 0.0, "idle": whole / 2}
        where = {"host": self.made.host(rank), "path": f"profile/{rank}.pt.trace.json.gz"}
        found = {"kernels": [["aten::mm", 10, whole / 4]], "gaps": [], "memory": [], "tensors": []}
        text = f"rank {rank} computed 50 % of the time, and was idle 50 %"
        steps = {"first_step": first, "last_step": last}
        return self._event("profile", rank=rank, **where, **steps, seconds=seconds, **found, text=text)

    def _tell(self, step: int) -> Iterator[Event]:
        """Where the time went on every rank and what the hosts did."""
        made, everyone = self.made, range(self.made.ranks)
        steps, seconds = step - self._steps_told, made.step_seconds
        ranks = self._event(
            "ranks",
            step=step,
            steps=steps,
            seconds=seconds,
            input=[made._input(rank) for rank in everyone],
            compute=[made._compute(rank) for rank in everyone],
            optimizer=[made.optimizer] * made.ranks,
            between=[made.between] * made.ranks,
            wait=[seconds - made._work(rank) for rank in everyone],
            samples=[steps * made.global_batch // made.ranks] * made.ranks,
            memory=[GB + rank * 1000 for rank in everyone],
            hosts=[made.host(rank) for rank in everyone],
        )
        yield ranks
        if made.tells_machine:
            of_each = {"cores": 1.0, "memory": 2 * GB, "threads": made.threads, "workers": made.workers}
            processes = {name: [value] * made.ranks for name, value in of_each.items()}
            hosts = [self._host(f"node{number + 1}") for number in range(made.hosts)]
            yield self._event("machine", step=step, hosts=hosts, ranks=processes)
        if (slow := self._stragglers.look(ranks)) is not None:
            yield self._event("straggler", step=step, **asdict(slow))
        self._told, self._steps_told = self.now, step

    def _host(self, host: str) -> Event:
        made = self.made
        here = [rank for rank in range(made.ranks) if made.host(rank) == host]
        gpus = [self._gpu(index, here[index : index + 1]) for index in range(made.gpus)]
        watts = 100.0 + sum(gpu["watts"] for gpu in gpus)
        return {
            "host": host,
            "cores": made.cores,
            "cpu": min(1.0, len(here) / made.cores),
            "memory": 10 * GB,
            "memory_total": 64 * GB,
            "sent": 1.2e6,
            "received": 1.3e6,
            "read": 5.2e7,
            "written": 0.0,
            "watts": 100.0 if made.joules else None,
            "joules": watts * (self.now - self._began) if made.joules else None,
            "gpus": gpus,
        }

    def _gpu(self, index: int, ranks: list[int]) -> Event:
        used = {"busy": 0.9, "memory": 60 * GB, "watts": 300.0, "celsius": 60.0}
        unused = {"busy": 0.0, "memory": GB // 2, "watts": 60.0, "celsius": 30.0}
        whole = {"index": index, "name": "NVIDIA H200", "memory_total": 150 * GB, "ranks": ranks}
        return {**whole, **(used if ranks else unused)}

    def _end(self, last: int, ending: str, restarted: bool) -> Iterator[Event]:
        made = self.made
        if ending == "failed":
            self.now += 0.5
            yield self._event("stop", reason="failed", step=last, text="ValueError: something broke")
            text = f"rank 0 on {made.host(0)} raised ValueError: something broke"
            cause = {"rank": 0, "host": made.host(0), "cause": "exception", "where": "lm.py:12"}
            rest = {"step": last or None, "restarted": restarted, "micro_batch": None}
            yield self._event("failure", text=text, **cause, **rest)
        elif ending == "stop":
            yield self._event("stop", reason="terminated", step=last, text="out of time; the same command goes on")
        elif ending == "end":
            if made.predicted_step:
                error = made.predicted_step / made.step_seconds - 1
                step = {"predicted": made.predicted_step, "measured": made.step_seconds, "error": error}
                memory = {"predicted": GB, "measured": None, "error": None}
                yield self._event("prediction_error", step=last, machine="here", memory_bytes=memory, step_seconds=step)
            validated = math.isfinite(self._best)
            yield self._event(
                "end",
                step=last,
                loss=made.loss(last),
                best_loss=self._best if validated else None,
                best_step=self._best_step if validated else None,
                metrics={},
                seconds=self.now - self._began,
            )
