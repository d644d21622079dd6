"""What it costs to see a run: steps of about 10 ms, with everything that a run writes and measures, and without.

    python benchmarks/events.py

Both take turns in one process, and so does a second one without, which shows what chance does on this machine. With
events means: the journal of a run writes every step to `events.jsonl` and to TensorBoard's files, the clock measures
the parts of every step, a thread looks at the host, and `ranks` and `machine` are told as often as in a run.

The last table counts within each turn the CPU time of the process, all threads, against that of the steps alone: what
else the machine does hardly changes it. Ends with 1 where its median is over 1 % of 10 ms, or where the middle half of
the wall clock's ratios is over 1 %.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measuring import in_turn, machine_text, options_of, ratio_cells, summary
from torch import nn

from lockstep.data.loader import MicroBatch, StepBatch
from lockstep.data.order import Position
from lockstep.engine import StepResult
from lockstep.faults.stragglers import StragglerWatch, ranks_event
from lockstep.layout import Layout
from lockstep.observe.clock import StepClock
from lockstep.observe.journal import Journal
from lockstep.observe.telemetry import Telemetry, machine_event
from lockstep.record.log import EventLog
from lockstep.runtime.garbage import GarbageCollection
from lockstep.runtime.rank_env import find_place
from lockstep.sinks.tensorboard import TensorBoard
from lockstep.trial.fits import peak_bytes

STEP_SECONDS = 0.01
STEPS_OF_A_TURN = 500
"""Five seconds: each turn has one report of the ranks, as have every five seconds of a run."""
MOST = 0.01
OBSERVED = "with events"
CONTENDERS = ["without", "without again", OBSERVED]
LAYERS, WIDTH = 6, 128
"""Of the model: small, as is all that has steps of 10 ms on a CPU, so that Python's lock is wanted often."""
BATCH = StepBatch([MicroBatch(0, list(range(8)), None)], 8, 8, 0, Position(0, 8))


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    work = Work()
    steps = 10 if options.quick else STEPS_OF_A_TURN
    print(f"{machine_text()}; torch {torch.__version__}; {work.samples} samples a step")
    tables: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in CONTENDERS} for what in ("wall clock", "processor", "processor of the steps")
    }
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, options.rounds):  # the first round warms up
            for name in in_turn(CONTENDERS, number):
                taken = turn(work, steps, Path(folder) / f"run-{number}" if name == OBSERVED else None)
                if number >= 0:
                    for times, seconds in zip(tables.values(), taken, strict=True):
                        times[name].append(seconds / steps * 1e3)
    found = {
        what: {name: summary(tables[what][name], tables[what]["without"]) for name in CONTENDERS}
        for what in ("wall clock", "processor")
    }
    alone = tables["processor of the steps"]
    found["accounted"] = {name: summary(tables["processor"][name], alone[name]) for name in CONTENDERS}
    for what, contenders in found.items():
        print(f"| {what} | ms/step | us more | ratio | middle half | all rounds |\n|---|---|---|---|---|---|")
        for name, one in contenders.items():
            print(f"| {name} | {one['median_ms']:.2f} | {one['extra_us']:.0f} | {ratio_cells(one)} |")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine_text(), "steps": steps, **found}, indent=1) + "\n")
    # To read the clocks around a step is no cost of events.
    more = found["accounted"][OBSERVED]["extra_us"] - found["accounted"]["without"]["extra_us"]
    share = more / 1e6 / STEP_SECONDS
    print(f"with events the processor has {more:.0f} us a step more to do: {share:.2%} of a step of 10 ms")
    too_much = share > MOST
    raise SystemExit(too_much or found["wall clock"][OBSERVED]["ratio_middle_half"][0] > 1 + MOST)


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.set_defaults(rounds=10)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    return options


class Work:
    """A training by hand, with as many samples in a step as take 10 ms here."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self._model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4, fused=True)
        self.samples = 1
        while (seconds := statistics.median(self._seconds_of(self.samples) for _ in range(20))) < 0.9 * STEP_SECONDS:
            self.samples = math.ceil(self.samples * min(2.0, STEP_SECONDS / seconds))

        self.garbage = GarbageCollection()  # as in a run: between steps alone

    def _seconds_of(self, samples: int) -> float:
        self.samples, began = samples, time.thread_time()  # whatever else the machine does
        self.step(0)
        return time.thread_time() - began

    def step(self, number: int) -> StepResult:
        """One step, and what the engine would tell of it."""
        self._optimizer.zero_grad()
        loss = self._model(torch.ones(self.samples, WIDTH)).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return StepResult(number, loss.item(), self.samples, norm, 3e-4, False, 1.0, False, self.samples, 0)


def turn(work: Work, steps: int, folder: Path | None) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds, and CPU seconds of the steps alone, observed in a run folder or not at all."""
    alone = 0.0
    with observer(folder) if folder else unobserved() as observe:
        began, processor_began = time.perf_counter(), time.process_time()
        for step in range(1, steps + 1):
            before = time.thread_time()
            result = work.step(step)
            work.garbage.after_step(step)
            alone += time.thread_time() - before
            observe(result)
        observe(None)
        return time.perf_counter() - began, time.process_time() - processor_began, alone


@contextmanager
def unobserved() -> Iterator[Any]:
    yield lambda *_: None


@contextmanager
def observer(folder: Path) -> Iterator[Any]:
    """What a run does beside its steps: for every step, and at the end."""
    clock, place, device = StepClock(torch.device("cpu")), find_place(), torch.device("cpu")
    log = EventLog(folder / "events.jsonl", 1, [TensorBoard(folder / "tb", print)])
    journal, telemetry, stragglers = Journal(log, clock), Telemetry(place, device), StragglerWatch(Layout())
    telemetry.start()
    telemetry.take()
    clock.start()

    def report(step: int) -> None:
        own = {**asdict(clock.take(last=False)), "memory": peak_bytes(device), "host": socket.gethostname()}
        event = ranks_event([own])
        journal.ranks(step, event, on_gpus=False)
        journal.emit("machine", step=step, **machine_event([telemetry.take(2)], event["hosts"]))
        stragglers.look(event)
        journal.between_steps()

    def observe(result: StepResult | None) -> None:
        if result is None:
            journal.flush()
            return
        with clock.optimizing():
            pass
        with clock.optimizing():
            pass
        journal.step(result, BATCH, result.step / 100)
        with clock.stalled("input"):
            pass
        if clock.is_due:
            report(result.step)

    yield observe
    telemetry.close()
    journal.close()


if __name__ == "__main__":
    main()
