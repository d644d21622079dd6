"""What a run measures of itself while it trains: ranks' time, the machine, a pipeline's timetable, profiles.

All ranks call all of this alike: the numbers of every rank are gathered at steps on which the ranks agreed.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.config.schema import LaunchConfig
from lockstep.data.loader import MicroBatch
from lockstep.data.order import Order
from lockstep.engine import Engine
from lockstep.faults.requests import Requests
from lockstep.faults.stragglers import StragglerWatch, ranks_event
from lockstep.layout import Layout
from lockstep.observe.clock import StepClock
from lockstep.observe.device_peak import find_peak
from lockstep.observe.flops import UncutModel, flops_event
from lockstep.observe.journal import Journal
from lockstep.observe.prediction import Expected
from lockstep.observe.profiling import Profiler
from lockstep.observe.telemetry import Telemetry, machine_event
from lockstep.parallel.pipeline.timeline import Lane, timetable_event
from lockstep.planner.model.parts import Model
from lockstep.runtime.comm import Comm
from lockstep.step.precision import number_formats
from lockstep.trial.fits import peak_bytes

SECONDS_BETWEEN_TIMETABLES = 300.0


class Watching:
    """Measures a run on one rank, and tells of all ranks on the first."""

    def __init__(
        self,
        comm: Comm,
        layout: Layout,
        device: torch.device,
        folder: Path,
        config: LaunchConfig,
        clock: StepClock,
        journal: Journal,
        requests: Requests,
    ) -> None:
        self.profiler = Profiler(config.profile, config.profile_ranks, comm.rank, comm.world_size, device)
        self._comm = comm
        self._layout = layout
        self._device = device
        self._folder = folder
        self._clock = clock
        self._journal = journal
        self._requests = requests
        self._telemetry = Telemetry(comm.place, device)
        self._stragglers = StragglerWatch(layout)
        self._timetable_at = -math.inf
        self._engine: Engine | None = None
        self._share_gpu = config.share_gpu
        self.uncut = UncutModel()

    def start(self) -> None:
        """The ranks have met."""
        self._telemetry.start()
        if self._comm.world_size > 1:
            self._clock.listen()

    def begin(self, engine: Engine, total_steps: int | None) -> None:
        """The first step is about to begin, and with it what is told of the machine."""
        self._engine = engine
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)  # what was tried out is no part of the training
        self._telemetry.take()
        for line in self.profiler.out_of_reach(engine.steps_done, total_steps):
            self._say(line, "warning")
        self.profiler.begin_step(engine.steps_done + 1, engine)

    def foretell(self, engine: Engine, order: Order, planned: Callable[[], Model] | None) -> None:
        """Tell what the planner expects of the steps to come, where it knows the model."""
        where = (engine.setup.settings, self._layout, self._comm.place, self._device)
        batches = (order.global_batch, order.micro_batch)
        self._journal.foretell(
            Expected(planned, *where, engine.setup.settings.precision, *batches, engine.state.attention)
        )

    def show(self, engine: Engine, first: MicroBatch) -> None:
        """A first micro-batch is known, with which the first rank counts what a sample costs."""
        if self._comm.rank == 0:
            with self._comm.beat.busy():
                self.uncut.show(engine.setup.loss, first, engine.setup.settings.precision)

    def tell_flops(self, engine: Engine) -> None:
        """Tell what a sample costs, and what the device of a rank could do."""

        def event() -> dict[str, Any]:
            formats = number_formats(engine.setup.settings.precision, engine.setup.settings.numerics, self._device.type)
            peak = find_peak(self._device, formats["matrix products"], self._comm.place, self._share_gpu)
            return flops_event(self.uncut, peak)

        self._journal.flops(event)

    def close(self) -> None:
        """Measure nothing more."""
        with ExitStack() as everything:
            everything.callback(self._clock.restore)
            everything.callback(self._telemetry.close)
            everything.callback(self.profiler.discard)

    def ask(self) -> None:
        """On the first rank: ask all of them for what is due."""
        if not self._clock.is_due:
            return
        self._requests.ask("ranks")
        if self._layout.pp > 1 and time.monotonic() - self._timetable_at >= SECONDS_BETWEEN_TIMETABLES:
            self._requests.ask("timetable")

    @contextmanager
    def reading_samples(self) -> Iterator[None]:
        """Around the wait for the samples of the next step, with which it begins."""
        if self._engine is not None:  # else there is more to do before the first step
            self.profiler.begin_step(self._engine.steps_done + 1, self._engine)
        with self._clock.stalled("input"), self.profiler.marked("data"):
            yield

    def step_done(self, step: int, *, last: bool) -> None:
        """A step is counted: where it was the last that is profiled, tell of the profile."""
        if self.profiler.is_complete(step):
            self._finish_profile(step)
        elif last:
            self.end_profile(step)

    def end_profile(self, step: int) -> None:
        """No step follows: tell of those that were recorded."""
        if self.profiler.has_recorded(step):
            self._finish_profile(step)
        else:
            self.profiler.discard()

    def _finish_profile(self, step: int) -> None:
        """Tell what every rank that recorded the profiled steps has found."""
        with self._clock.paused():
            with self._comm.beat.busy():
                own = self.profiler.finish(step, self._folder)
            told = [digest for digest in self._comm.gather(own) if digest is not None]
        for digest in told:
            self._journal.emit("profile", **digest)
            where = f"; the trace is {self._folder / digest['path']}" if digest["path"] else ""
            self._say(f"{digest['text']}{where}", "info" if digest["kernels"] else "warning")
        self._journal.between_steps()

    def report_ranks(self, engine: Engine, workers: int, *, last: bool) -> None:
        """Tell where the time of the ranks' steps went since this was told before, and who is slow."""
        spent = self._clock.take(last=last)
        own = {**asdict(spent), "memory": peak_bytes(self._device), "host": socket.gethostname()}
        own["machine"] = self._telemetry.take(workers)
        own["did"] = self._what_it_did(engine, last)
        ranks = self._comm.gather(own)
        if self._comm.rank == 0:
            self._tell(engine.steps_done, ranks)
        self._journal.between_steps()

    def _tell(self, step: int, ranks: list[dict[str, Any]]) -> None:
        event = ranks_event(ranks)
        self._journal.ranks(step, event, self._device.type == "cuda")
        self._journal.emit("machine", step=step, **machine_event([rank["machine"] for rank in ranks], event["hosts"]))
        if (slow := self._stragglers.look(event)) is not None:
            self._journal.emit("straggler", step=step, **asdict(slow))
            self._say(slow.text, "warning")
        if did := [rank for rank in ranks if rank["did"]]:
            nodes = [rank["machine"]["node"] for rank in did]
            if (timetable := timetable_event([rank["did"] for rank in did], nodes)) is not None:
                self._journal.emit("timetable", step=step, **timetable)

    def _what_it_did(self, engine: Engine, last: bool) -> Lane:
        """What this rank did in the last step, where a timetable is told and it is the first of its place."""
        asked = "timetable" in self._requests.agreed
        if engine.pipeline is None or not (asked or (last and self._timetable_at < 0)):
            return []
        self._timetable_at = time.monotonic()
        return engine.pipeline.last_step() if self._comm.rank in self._layout.ranks_along("pp")[0] else []

    def _say(self, text: str, level: Literal["info", "warning"]) -> None:
        self._journal.emit("message", text=text, level=level)
