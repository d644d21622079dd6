"""What a run tells: its events, each with its fields, written by rank 0 without waiting for a GPU."""

from __future__ import annotations

import math
import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

import torch

from lockstep import __version__
from lockstep.data.loader import Loader, StepBatch
from lockstep.engine import Engine, Metric, StepResult
from lockstep.events import EventLog
from lockstep.layout import Layout
from lockstep.runtime.place import Place


class Journal:
    """Writes a run's events on rank 0 and drops them elsewhere.

    An event with a number that is still on a GPU is written together with the next one: by then it has arrived.
    """

    def __init__(self, log: EventLog | None) -> None:
        self._log = log
        self._pending: tuple[str, dict[str, Any]] | None = None
        self._item, self._items_per_sample = "samples", 1
        self._began = self._step_began = time.monotonic()
        self._last_loss = math.nan
        self._last_metrics: Mapping[str, Metric] = {}

    def count_in(self, item: str, items_per_sample: int) -> None:
        """What throughput counts: so many items in each sample."""
        self._item, self._items_per_sample = item, items_per_sample

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event."""
        if self._log is None:
            return
        self._flush()
        self._pending = (kind, fields)
        if not _is_on_gpu(fields):
            self._flush()

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
            precision=engine.precision,
            resumed_from_step=engine.steps_done or None,
            total_steps=loader.total_steps,
            steps_per_epoch=loader.steps_per_epoch,
            global_batch=loader.order.global_batch,
            micro_batch=loader.order.micro_batch,
            item=self._item,
            versions={"lockstep": __version__, "torch": torch.__version__, "python": platform.python_version()},
            parameters=sum(parameter.numel() for parameter in engine.model.parameters()),
            host=socket.gethostname(),
        )
        self._step_began = time.monotonic()

    def step(self, result: StepResult, batch: StepBatch, epoch: float) -> None:
        """One optimizer step is done."""
        now = time.monotonic()
        self._last_loss = result.loss
        self.emit(
            "step",
            step=result.step,
            epoch=epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            weight=result.weight,
            items=batch.samples * self._items_per_sample,
            seconds=now - self._step_began,
            skipped=result.skipped,
        )
        self._step_began = now

    def validation(
        self, step: int, epoch: float, results: Mapping[str, Metric], samples: int, seconds: float, best: bool
    ) -> None:
        """The validation data were scored."""
        self._last_metrics = {name: metric for name, metric in results.items() if name != "loss"}
        loss = results["loss"].value
        metrics = _as_json(self._last_metrics)
        self.emit(
            "validation",
            step=step,
            epoch=epoch,
            loss=loss,
            metrics=metrics,
            samples=samples,
            seconds=seconds,
            best=best,
        )
        self._step_began = time.monotonic()

    def checkpoint(self, step: int, path: str, seconds: float, size: int, best: bool) -> None:
        """A checkpoint is on disk."""
        self.emit("checkpoint", step=step, path=path, seconds=seconds, bytes=size, best=best)
        self._step_began = time.monotonic()

    def failure(self, step: int, error: BaseException) -> None:
        """An exception ends this attempt."""
        self.emit("stop", reason="failed", step=step, text=f"{type(error).__name__}: {error}")

    def end(self, step: int, best: tuple[int, float] | None) -> None:
        """The run is finished."""
        best_step, best_loss = best or (None, None)
        self.emit(
            "end",
            step=step,
            loss=self._last_loss,
            best_loss=best_loss,
            best_step=best_step,
            metrics=_as_json(self._last_metrics),
            seconds=time.monotonic() - self._began,
        )

    def close(self) -> None:
        """Write what is left and close the log."""
        self._flush()
        if self._log:
            self._log.close()

    def _flush(self) -> None:
        if self._pending and self._log:
            (kind, fields), self._pending = self._pending, None
            self._log.emit(kind, **_plain(fields))


def _as_json(metrics: Mapping[str, Metric]) -> dict[str, dict[str, float]]:
    return {name: {"sum": m.sum, "count": m.count, "value": m.value} for name, m in metrics.items()}


def _is_on_gpu(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_is_on_gpu(part) for part in value.values())
    return bool(getattr(value, "is_cuda", False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return value.item() if hasattr(value, "item") else value
