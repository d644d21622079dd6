"""Two ways to use several devices that courses begin with, as plain loops, so that they can be measured.

data-parallel   nn.DataParallel: one process copies the model to every GPU in every forward and gathers on the first
naive-mp        the first half of the layers on one device, the rest on another, which wait for each other

Data, loss, optimizer and learning rate are those of `lockstep train` on one device, and so are the losses where nothing
draws random numbers. What a run leaves is an event log like any other.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import __version__
from lockstep.compare.table import IDLE
from lockstep.config.layers import from_toml
from lockstep.config.schema import Config
from lockstep.data.loader import Loader, Reading, StepBatch
from lockstep.data.order import Order
from lockstep.errors import UserError
from lockstep.follow.blocks import find_blocks
from lockstep.recipes.task import Task, task_of
from lockstep.record.folder import CONFIG, EVENTS
from lockstep.record.log import EventLog
from lockstep.run import MOST_WORKERS
from lockstep.runtime.seeds import seed_everything, seed_host, seed_of
from lockstep.runtime.torch_private import tree_map
from lockstep.step.optim import optimizer_factory, schedule_function
from lockstep.step.precision import compute_in, number_formats
from lockstep.trial.fits import peak_bytes


def train_baseline(name: str, folder: Path) -> None:
    """Do the steps of the config in a run folder as a baseline does them, and write them to its event log."""
    config = from_toml(folder / CONFIG)
    task = task_of(config)
    seed_host(seed_of(config.seed, "init"))
    model = task.build_model().train()
    log = EventLog(folder / EVENTS, 1)
    try:
        if name == "data-parallel":
            _train_data_parallel(config, task, model, log)
        else:
            train_in_halves(config, task, model, two_devices(), log)
    finally:
        log.close()


def two_devices() -> tuple[torch.device, torch.device]:
    """Two GPUs, or the one and the CPU."""
    second = torch.device("cuda", 1) if torch.cuda.device_count() > 1 else torch.device("cpu")
    return torch.device("cuda", 0), second


def _train_data_parallel(config: Config, task: Task, model: nn.Module, log: EventLog) -> None:
    gpus = torch.cuda.device_count()
    devices = [torch.device("cuda", number) for number in range(gpus)]
    copied = nn.DataParallel(model.to(devices[0]))
    loader = _loader(config, task, gpus * _micro_batch(config))
    optimizer = optimizer_factory(config.optimizer)(list(model.named_parameters()))
    schedule = schedule_function(config.schedule, loader.total_steps)
    _start_event("data-parallel", config, task, model, devices, loader, log)
    times = _Times(log, task, devices)
    for batch in times.reading(loader):
        loss, weight = _forward_backward(config, task, copied, batch, devices, times.steps)
        norm = _scale_and_clip(config, model, batch.global_batch / weight)
        lr = _update(optimizer, config.optimizer.lr * schedule(times.steps))
        torch.cuda.synchronize()
        times.step_done(batch, loss / weight, weight, norm, lr)
    times.end()


def train_in_halves(
    config: Config, task: Task, model: nn.Module, devices: tuple[torch.device, torch.device], log: EventLog
) -> None:
    """Train with the first half of the layers on one device and the rest on another."""
    busy = Busy(devices)
    place_in_halves(model, devices, busy)
    loader = _loader(config, task, _micro_batch(config))
    make = optimizer_factory(config.optimizer)
    held = {d: [(name, p) for name, p in model.named_parameters() if p.device == d] for d in devices}
    optimizers = [(device, make(named)) for device, named in held.items() if named]
    schedule = schedule_function(config.schedule, loader.total_steps)
    _start_event("naive-mp", config, task, model, list(devices), loader, log)
    times = _Times(log, task, list(devices))
    lr = 0.0
    for batch in times.reading(loader):
        busy.turn_to(devices[0])
        loss, weight = _forward_backward(config, task, model, batch, list(devices), times.steps)
        norm = _scale_and_clip(config, model, batch.global_batch / weight)
        for device, optimizer in optimizers:
            busy.turn_to(device)
            lr = _update(optimizer, config.optimizer.lr * schedule(times.steps))
        busy.turn_to(None)
        times.step_done(batch, loss / weight, weight, norm, lr)
        if times.steps == 1:  # it warms up
            busy.clear()
    whole = times.seconds_after_the_first or 1.0
    idle = {f"{IDLE}{device}": max(0.0, 1 - spent / whole) for device, spent in busy.seconds.items()}
    log.emit("metric", step=times.steps, values=idle)
    times.end()


class Busy:
    """How long each of the devices worked: one at a time does, and it is waited for before the other begins."""

    def __init__(self, devices: tuple[torch.device, torch.device]) -> None:
        self._at: torch.device | None = None
        self._since = 0.0
        self._devices = devices
        self.clear()

    def clear(self) -> None:
        """Count from now on."""
        self.seconds = dict.fromkeys(self._devices, 0.0)

    def turn_to(self, device: torch.device | None) -> None:
        """From now on this device works, or none of them."""
        if device == self._at:
            return
        if self._at is not None:
            if self._at.type == "cuda":
                torch.cuda.synchronize(self._at)
            self.seconds[self._at] += time.perf_counter() - self._since
        self._at, self._since = device, time.perf_counter()


class _Cross(torch.autograd.Function):
    """Brings a value to another device, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, device: torch.device, busy: Busy) -> torch.Tensor:
        ctx.source, ctx.busy = value.device, busy
        busy.turn_to(device)
        return value.to(device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.busy.turn_to(ctx.source)
        return gradient.to(ctx.source), None, None


def place_in_halves(model: nn.Module, devices: tuple[torch.device, torch.device], busy: Busy) -> None:
    """Put the layers before the middle block on one device and all from there on, as the model lists them, on another.

    A weight that both halves use stays on the first. What is called finds its inputs on its own device, and the output
    comes back to the first, where the labels are.
    """
    first, second = devices
    parts = [block for _, block in find_blocks(model)]
    parts = parts or [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    if len(parts) < 2:
        raise UserError("naive-mp cuts a model between its layers, and this one has a single one", "leave it out")
    model.to(first)
    border, beyond = parts[len(parts) // 2], False
    placed: dict[nn.Parameter, nn.Parameter] = {}  # by what it was before: tied weights stay tied
    for module in model.modules():
        beyond = beyond or module is border
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight not in placed:
                placed[weight] = nn.Parameter(weight.to(second), weight.requires_grad) if beyond else weight
            setattr(module, name, placed[weight])
        for name, buffer in list(module.named_buffers(recurse=False)) if beyond else ():
            setattr(module, name, buffer.to(second))

    def bring(values: Any, to: torch.device) -> Any:
        def move(value: Any) -> Any:
            is_elsewhere = isinstance(value, torch.Tensor) and value.device != to
            if not is_elsewhere:
                return value
            return _Cross.apply(value, to, busy) if value.is_floating_point() else value.to(to)

        return tree_map(move, values)

    def before_call(module: nn.Module, args: Any, options: Any) -> Any:
        to = next(iter(module.parameters())).device
        return bring(args, to), bring(options, to)

    inside = {module for part in parts for module in part.modules()} - set(parts)
    for module in model.modules():
        has_own = next(module.parameters(recurse=False), None) is not None
        if module in parts or (has_own and module not in inside and module is not model):
            module.register_forward_pre_hook(before_call, with_kwargs=True)
    model.register_forward_hook(lambda _module, _args, output: bring(output, first))


# ---- What both loops do


def _micro_batch(config: Config) -> int:
    assert config.global_batch is not None
    return config.micro_batch or config.global_batch


def _loader(config: Config, task: Task, micro_batch: int) -> Loader:
    assert config.global_batch is not None
    order = Order(
        size=len(task.train),  # type: ignore[arg-type]
        global_batch=config.global_batch,
        micro_batch=min(micro_batch, config.global_batch),
        seed=config.seed,
        data_rank=0,
        data_size=1,
        equal_counts=False,
        shuffle=config.data.shuffle,
    )
    workers = config.data.workers
    if workers is None:
        workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 1)
    return Loader(
        task.train,
        order,
        Reading(workers, config.data.prefetch, pin=torch.cuda.is_available(), tokens=task.tokens),
        steps=config.steps,
    )


def _forward_backward(
    config: Config, task: Task, model: nn.Module, batch: StepBatch, devices: list[torch.device], step: int
) -> tuple[float, float]:
    """Gradients of the loss sum / global batch; returns the sum and its weight."""
    loss, weight = torch.zeros((), device=devices[0]), torch.zeros((), device=devices[0])
    for parameter in model.parameters():
        parameter.grad = None
    for part in batch.micro_batches:
        data = tree_map(lambda x: x.to(devices[0]) if isinstance(x, torch.Tensor) else x, part.data)
        seed_everything(seed_of(config.seed, "forward", step, part.index))
        with _computing(config, devices):
            total, count = task.loss(model, data)
        (total.float() / batch.global_batch).backward()
        loss, weight = loss + total.detach(), weight + count
    return float(loss), float(weight)


@contextmanager
def _computing(config: Config, devices: list[torch.device]) -> Iterator[None]:
    with ExitStack() as formats:
        for kind in {device.type for device in devices}:
            formats.enter_context(compute_in(config.precision, torch.device(kind)))
        yield


def _scale_and_clip(config: Config, model: nn.Module, factor: float) -> float:
    """Make the sums gradients of the mean loss, and no longer than `clip`; returns the norm before that."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor
    return float(nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf))


def _update(optimizer: torch.optim.Optimizer, lr: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return lr


def _start_event(
    name: str,
    config: Config,
    task: Task,
    model: nn.Module,
    devices: list[torch.device],
    loader: Loader,
    log: EventLog,
) -> None:
    log.emit(
        "start",
        run=name,
        layout=name,
        world_size=1,
        nodes=1,
        device=" + ".join(map(str, devices)),
        precision=config.precision,
        formats=number_formats(config.precision, config.numerics, devices[0].type),
        resumed_from_step=None,
        total_steps=loader.total_steps,
        steps_per_epoch=loader.steps_per_epoch,
        global_batch=loader.order.global_batch,
        micro_batch=loader.order.micro_batch,
        item="samples" if task.tokens is None else "tokens",
        versions={"lockstep": __version__, "torch": torch.__version__, "python": platform.python_version()},
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        host=socket.gethostname(),
    )


class _Times:
    """The step and ranks events of a run in one process."""

    def __init__(self, log: EventLog, task: Task, devices: list[torch.device]) -> None:
        self._log, self._task, self._devices = log, task, devices
        self._loss = 0.0
        self._began = time.perf_counter()
        self._reading = 0.0
        self._samples = 0
        self._sums = (0.0, 0.0)
        self.steps = 0

    @property
    def seconds_after_the_first(self) -> float:
        """How long all steps took but the first."""
        return self._sums[0]

    def reading(self, loader: Loader) -> Iterator[StepBatch]:
        """The batches, with the time they are waited for."""
        batches = iter(loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self._reading = time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def step_done(self, batch: StepBatch, loss: float, weight: float, norm: float, lr: float) -> None:
        """One optimizer step is done, on all devices."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self.steps += 1
        self._loss = loss
        if self.steps > 1:
            self._sums = self._sums[0] + seconds, self._sums[1] + self._reading
            self._samples += batch.samples
        self._log.emit(
            "step",
            step=self.steps,
            epoch=batch.epoch + batch.after.consumed / len(self._task.train),  # type: ignore[arg-type]
            loss=loss,
            grad_norm=norm,
            lr=lr,
            weight=weight,
            items=batch.items[0],
            padding=batch.items[1],
            seconds=seconds,
            skipped=False,
            loss_scale=1.0,
        )

    def end(self) -> None:
        """The run is done."""
        count = max(1, self.steps - 1)
        seconds, reading = (total / count for total in self._sums)
        memory = [peak_bytes(device) for device in self._devices]
        self._log.emit(
            "ranks",
            step=self.steps,
            steps=count,
            seconds=seconds,
            input=[reading],
            compute=[seconds - reading],
            optimizer=[0.0],
            between=[0.0],
            wait=[0.0],
            samples=[self._samples],
            memory=memory,
            hosts=[socket.gethostname()],
        )
        self._log.emit(
            "end",
            step=self.steps,
            loss=self._loss,
            best_loss=None,
            best_step=None,
            metrics={},
            seconds=seconds * self.steps,
        )
