"""What a run tells: its events, each with its fields, written by rank 0 while the training goes on."""

from __future__ import annotations

import math
import os
import platform
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from lockstep import __version__
from lockstep.data.loader import Loader, StepBatch
from lockstep.data.transfer import HostCopy
from lockstep.engine import Engine, StepResult
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.observe.clock import StepClock
from lockstep.observe.prediction import Expected, Measured, error_of, foretell
from lockstep.record.log import EventLog
from lockstep.runtime.rank_env import Place
from lockstep.step.precision import number_formats
from lockstep.step.scoring import Metric

PER_STEP = ("step", "metric", "ranks", "machine")
SECONDS_BETWEEN_WRITES, SECONDS_AT_FIRST = 0.5, 0.1
"""Ten times a second costs each event twice as much: the processor has other things at hand every time."""
EMPTY_STEPS = 5
"""After so many steps in which nothing has counted, and none in which something has, people are told."""
FIRST_STEPS = 100
"""These are told soon: people wait for them, and a run may have no more."""


class Journal:
    """Writes a run's events on rank 0 and drops them elsewhere.

    Those of every step are written by a thread, at first soon and then twice a second: neither the disk nor a number
    that is still on a GPU holds the next step up, and the thread does not fight it for Python's lock. All others are on
    disk when the call returns, with what came before them.
    """

    def __init__(self, log: EventLog | None, clock: StepClock) -> None:
        self._log = log
        self._clock = clock
        self._waiting: deque[tuple[float, str, dict[str, Any] | _Step]] = deque()
        self._writing = threading.RLock()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._began = time.monotonic()
        self.step_seconds = 0.0
        """How long the last step took."""
        self.last_loss = math.nan
        self.last_metrics: dict[str, dict[str, float | None]] = {}
        self._empty: int | None = 0  # steps in which nothing counted; None once something has
        self._prediction: dict[str, Any] | None = None
        self._measured = Measured()
        self._writer = threading.Thread(target=self._write_now_and_then, name="lockstep-events", daemon=True)
        if log is not None:
            self._writer.start()  # not with the first event: that may come while Python shuts down

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event."""
        if self._log is None:
            return
        if kind == "alarm":
            self._empty = None  # a loss that is not finite counts for nothing either, and is told of
        if os.getpid() != self._process:
            raise UserError("a data loader's worker process cannot write events", "log from the training loop")
        self._check_open()
        self._waiting.append((time.time(), kind, fields))
        if kind not in PER_STEP:
            self._write()
        self._raise_failure()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise UserError("the run is closed and takes no more events", "log before run.close()")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def start(
        self, run: str, layout: Layout, place: Place, device: torch.device, engine: Engine, loader: Loader
    ) -> None:
        """The first step is about to begin."""
        self.emit(
            "start",
            run=run,
            layout=str(layout),
            world_size=place.world_size,
            nodes=place.nodes,
            device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
            precision=engine.setup.settings.precision,
            formats=number_formats(engine.setup.settings.precision, engine.setup.settings.numerics, device.type),
            resumed_from_step=engine.steps_done or None,
            total_steps=loader.total_steps,
            steps_per_epoch=loader.steps_per_epoch,
            global_batch=loader.order.global_batch,
            micro_batch=loader.order.micro_batch,
            item="samples" if loader.reading.tokens is None else "tokens",
            versions={"lockstep": __version__, "torch": torch.__version__, "python": platform.python_version()},
            parameters=engine.cut.parameter_count,
            host=socket.gethostname(),
        )
        order = loader.order
        if 0 < order.size < order.global_batch:
            text = f"global_batch is {order.global_batch}, and the dataset has {order.size} samples: a step is an epoch"
            self.emit("message", text=f"{text}, and sees no more than these", level="warning")
        self._clock.start()

    def foretell(self, expected: Expected) -> None:
        """What the planner expects of the steps to come."""
        if self._log is not None:
            self._prediction = foretell(expected)
            self.emit("prediction", **self._prediction)
            self._clock.start()

    def flops(self, count: Callable[[], Mapping[str, Any]]) -> None:
        """What a sample of this training costs, and what a device could do."""
        if self._log is not None:
            self.emit("flops", **count())
            self._clock.start()

    def ranks(self, step: int, fields: Mapping[str, Any], on_gpus: bool) -> None:
        """Where the time of the ranks' steps went, and what they hold."""
        if on_gpus:
            self._measured.memory = max(fields["memory"])
        self.emit("ranks", step=step, **fields)

    def step(self, result: StepResult, batch: StepBatch, epoch: float, *, profiled: bool = False) -> None:
        """One optimizer step is done; the time of a profiled one says nothing of the others."""
        self._count_empty(result)
        self.last_loss = result.loss
        samples = 0
        for part in batch.micro_batches:
            if not part.filler:
                samples += len(part.ids)
        self.step_seconds = self._clock.step_done(samples, counts=not profiled)
        if self._log is None:  # nobody would read the copy of the norm
            return
        self._check_open()
        norm = result.grad_norm  # read now: the script may change it before it is written
        told = _Step(result, HostCopy(norm) if norm.is_cuda else norm.item(), epoch, self.step_seconds, profiled)
        self._waiting.append((time.time(), "step", told))
        self._raise_failure()

    def _count_empty(self, result: StepResult) -> None:
        """A loss whose weight is always 0 trains nothing, and raises nothing either: the next batch may count."""
        if result.weight > 0 or math.isfinite(self.last_loss):  # the last step's, or that of the checkpoint
            self._empty = None
        if self._empty is not None:
            self._empty += 1
            if self._empty == EMPTY_STEPS:
                self._warn_of_empty_steps(f"nothing has counted in {EMPTY_STEPS} steps")

    def _warn_of_empty_steps(self, what: str) -> None:
        text = f"{what}: the loss function returned weight 0 each time, so all were skipped and nothing is learnt"
        fix = "let it return (sum of the losses, how many of them count)"
        self.emit("message", text=f"{text}; {fix}", level="warning")

    def validation(
        self, step: int, epoch: float, results: Mapping[str, Metric], samples: int, seconds: float, best: bool
    ) -> None:
        """The validation data were scored."""
        self.last_metrics = _as_json(results)
        self.emit(
            "validation",
            step=step,
            epoch=epoch,
            loss=results["loss"].value,
            metrics=self.last_metrics,
            samples=samples,
            seconds=seconds,
            best=best,
        )
        self._clock.start()

    def test(self, step: int, results: Mapping[str, Metric], samples: int, seconds: float) -> None:
        """The test data were scored with the weights of `step`."""
        loss, metrics = results["loss"].value, _as_json(results)
        self.emit("test", step=step, loss=loss, metrics=metrics, samples=samples, seconds=seconds)
        self._clock.start()

    def checkpoint(self, step: int, path: str, seconds: float, stall: float, size: int, best: bool) -> None:
        """A checkpoint is on disk; of the seconds it took, the training waited for some."""
        self.emit("checkpoint", step=step, path=path, seconds=seconds, stall=stall, bytes=size, best=best)

    def flush(self) -> None:
        """Write what waits: a run that goes on from here has the events of all steps before."""
        if self._log is not None:
            self._write()

    def between_steps(self) -> None:
        """What was done until now is not part of the next step's time."""
        self._clock.start()

    def failure(self, step: int, error: BaseException) -> None:
        """An exception ends this attempt."""
        self.emit("stop", reason="failed", step=step, text=f"{type(error).__name__}: {error}")

    def end(self, step: int, best: tuple[int, float] | None) -> None:
        """The run is finished."""
        best_step, best_loss = best or (None, None)
        self.flush()  # what was measured is known once it is written
        if self._empty:
            self._warn_of_empty_steps(f"nothing has counted in any of the {self._empty} steps")
        if self._prediction and not self._prediction["reason"] and self._measured.seconds:
            self.emit("prediction_error", step=step, **error_of(self._prediction, self._measured))
        self.emit(
            "end",
            step=step,
            loss=self.last_loss,
            best_loss=best_loss,
            best_step=best_step,
            metrics=self.last_metrics,
            seconds=time.monotonic() - self._began,
        )

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of the script's own. What is not one number is refused, on every rank alike."""
        self.emit("metric", step=step, values={name: _number(name, value) for name, value in values.items()})

    def close(self) -> None:
        """Write what is left and close the log."""
        if self._log is None or self._closing.is_set():
            return
        self._closing.set()
        self._writer.join()
        try:
            self._write()
        finally:
            self._log.close()
        if self._failure is not None:
            raise self._failure

    def _write_now_and_then(self) -> None:
        while not self._closing.wait(
            SECONDS_AT_FIRST if self._measured.steps < FIRST_STEPS else SECONDS_BETWEEN_WRITES
        ):
            try:
                self._write()
            except BaseException as error:  # raised by the training's next event
                self._failure = error

    def _write(self) -> None:
        """Write what waits, in order. A reader that has something to say while it reads comes here again."""
        assert self._log is not None
        with self._writing:
            while self._waiting:
                self._log.emit_all(self._take_waiting())

    def _take_waiting(self) -> Iterator[tuple[float, str, dict[str, Any]]]:
        while self._waiting:
            at, kind, told = self._waiting.popleft()
            if isinstance(told, _Step):
                if not told.profiled:
                    self._measured.step(told.seconds)
                yield at, kind, told.fields()
            else:
                yield at, kind, _plain(told)


class _Step(NamedTuple):
    """What is told of a step, by the training in a hurry; the writer makes an event of it."""

    result: StepResult
    grad_norm: HostCopy | float
    epoch: float
    seconds: float
    profiled: bool

    def fields(self) -> dict[str, Any]:
        return {
            "step": self.result.step,
            "epoch": self.epoch,
            "loss": self.result.loss,
            "grad_norm": _plain(self.grad_norm),
            "lr": self.result.lr,
            "weight": self.result.weight,
            "items": self.result.items,
            "padding": self.result.padding,
            "seconds": self.seconds,
            "skipped": self.result.skipped,
            "loss_scale": self.result.loss_scale,
        }


def _as_json(results: Mapping[str, Metric]) -> dict[str, dict[str, float | None]]:
    """The metrics of an evaluation, without its loss, which has a field of its own."""
    metrics = {name: metric for name, metric in results.items() if name != "loss"}
    return {name: {"sum": m.sum, "count": m.count, "value": m.value} for name, m in metrics.items()}


def _number(name: str, value: Any) -> Any:
    """A value as the event log takes it, read now: the script may change it before it is written."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return HostCopy(value) if value.is_cuda else value.item()
    plain = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise UserError(f"run.log was given {name} = {_short(value)}", "log single numbers")
    return plain


def _short(value: Any) -> str:
    return f"a tensor of {value.numel()} elements" if isinstance(value, torch.Tensor) else repr(value)[:60]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value.read()[0] if isinstance(value, HostCopy) else value
