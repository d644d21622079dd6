"""Two ways to use several devices that courses begin with, measured beside one process: nobody should use them.

    python benchmarks/baselines.py                             naive-mp against single, on the recipe lm
    python benchmarks/baselines.py data-parallel naive-mp --recipe digits --steps 50 --repeats 5 --set global_batch=64

data-parallel   nn.DataParallel: one process copies the model to every GPU in every forward and gathers on the first
naive-mp        the first half of the layers on one device, the rest on another, which wait for each other: two GPUs, or
                cuda:0 and the CPU

They are plain loops. Data, loss, optimizer and learning rate are those of `lockstep train` on one device, and so are
the losses where nothing draws random numbers. What a run leaves is an event log like any other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep import __version__
from lockstep.compare.table import SAME_LOSS, Timed, read_run
from lockstep.config.layers import Layer, for_world, from_toml, parse_assignments, resolve, to_toml
from lockstep.config.schema import Config
from lockstep.data.loader import Loader, Reading, StepBatch
from lockstep.data.order import Order
from lockstep.errors import UserError
from lockstep.follow.blocks import find_blocks
from lockstep.recipes.task import Task, task_of
from lockstep.record.folder import CONFIG, EVENTS
from lockstep.record.log import EventLog, read_events
from lockstep.run import MOST_WORKERS
from lockstep.runtime.seeds import seed_everything, seed_host, seed_of
from lockstep.runtime.torch_private import tree_map
from lockstep.step.optim import optimizer_factory, schedule_function
from lockstep.step.precision import compute_in, number_formats
from lockstep.text.units import bytes_text, seconds_text
from lockstep.trial.fits import peak_bytes

IDLE = "idle "
"""How the metrics are called that tell how long a device did nothing, before the device's name."""

WHY_NOT = {
    "data-parallel": (
        "nobody should use nn.DataParallel: one process drives all GPUs, under one Python lock, copies the model to "
        "every GPU in every forward and gathers all outputs on the first; dp does the same work with a process each"
    ),
    "naive-mp": (
        "nobody should use naive model parallelism: one device works while the other waits, so that two are slower "
        "than one; pp fills the waiting with other micro-batches, and fsdp makes a model fit without any"
    ),
}

UNKNOWN = ("compile", "recompute", "attention", "numerics", "init")
"""Keys of the config that these plain loops know nothing of."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all in turns, each in a process of its own, and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="data-parallel | naive-mp", help="default: naive-mp")
    parser.add_argument("--recipe", default="lm")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the config")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    told = parser.parse_args(arguments)
    if told.run is not None:
        train(told.run[0], Path(told.run[1]))
        return 0
    try:
        names = told.names or ["naive-mp"]
        config = config_of(told.recipe, told.steps, told.set)
        check(names, config, torch.cuda.device_count())
    except UserError as error:
        print(f"baselines: {error}", file=sys.stderr)
        return 2
    runs: dict[str, list[Path]] = {name: [] for name in ("single", *names)}
    with tempfile.TemporaryDirectory() as temporary:
        for turn in range(told.repeats):
            for name, folders in runs.items():
                folder = Path(temporary, f"{name}-{turn}")
                folder.mkdir()
                (folder / CONFIG).write_text(to_toml(config), encoding="utf-8")
                subprocess.run([sys.executable, __file__, "--run", name, str(folder)], check=True, stdout=sys.stderr)
                folders.append(folder)
        figures = [figures_of(name, runs[name], runs["single"], config.precision) for name in runs]
    print(f"{told.recipe}, {config.global_batch} samples a step")
    for row in figures:
        idle = "".join(f", {device} idle {100 * share:.0f} %" for device, share in row["idle"].items())
        print(
            f"{row['name']:14} {seconds_text(row['step_seconds'])} a step, speed-up {row['speed_up']:.2f}, "
            f"{bytes_text(row['memory'])}{idle}{'' if row['same_loss'] else ', ANOTHER LOSS'}"
        )
    for name in names:
        print(f"- {WHY_NOT[name]}")
    if told.json is not None:
        told.json.write_text(json.dumps(figures), encoding="utf-8")
    return int(not all(row["same_loss"] for row in figures))


def config_of(recipe: str, steps: int, assignments: list[str]) -> Config:
    """The config of a recipe on one device, with nothing but its steps."""
    only_steps = {"validate_every": "never", "save_every": "never", "profile": None, "layout": "single", "nproc": 1}
    layers = [Layer("--recipe", {"recipe": recipe}), Layer("--set", parse_assignments(assignments))]
    return for_world(resolve([*layers, Layer("baselines", {**only_steps, "steps": steps})]), 1).config


def check(names: Sequence[str], config: Config, gpus: int) -> None:
    """Refuse what cannot run here, and what a plain loop would leave out without a word."""
    for name in names:
        if name not in WHY_NOT:
            raise UserError(f"there is no baseline {name}", f"there are {' and '.join(WHY_NOT)}")
        if name == "data-parallel" and gpus < 2:
            there = f"{'is' if gpus == 1 else 'are'} {gpus or 'none'}"
            raise UserError(f"data-parallel shares a batch out over GPUs, and there {there}", "leave it out")
        if name == "naive-mp" and gpus < 1:
            raise UserError(
                "naive-mp puts each half of the model on a device of its own (cuda:0 and cpu count as two), and "
                "there is only the CPU",
                "leave it out",
            )
        for key in UNKNOWN:
            if getattr(config, key) != Config.model_fields[key].default:
                raise UserError(f"{name} is a plain loop that knows nothing of {key}, which is set", f"leave {key} out")
        if config.precision == "fp16":
            raise UserError(f"{name} knows no loss scale, which fp16 needs", "compare in bf16 or fp32")
        if config.model.get("dropout"):
            raise UserError(f"{name} draws other masks for dropout, so losses say nothing", "--set model.dropout=0")


def figures_of(name: str, folders: list[Path], base: list[Path], precision: str) -> dict[str, Any]:
    """What the runs of one took, beside those of one process in the same turns."""
    ours, theirs = ([timed_of(folder) for folder in group] for group in (folders, base))
    loss, other = ours[-1].loss, theirs[0].loss
    is_same = loss is other or (
        loss is not None and other is not None and math.isclose(loss, other, rel_tol=SAME_LOSS[precision])
    )
    idle = [idle_of(folder) for folder in folders]
    return {
        "name": name,
        "step_seconds": statistics.median(run.step for run in ours),
        "speed_up": statistics.median(run.rate / one.rate for run, one in zip(ours, theirs, strict=True)),
        "memory": max(run.memory for run in ours),
        "idle": {device: statistics.median(shares[device] for shares in idle) for device in idle[0]},
        "loss": loss,
        "same_loss": is_same,
    }


def timed_of(folder: Path) -> Timed:
    """The median step of a run, and what it held."""
    return read_run(read_events(folder / EVENTS))


def idle_of(folder: Path) -> dict[str, float]:
    """The share of a step that each device did nothing."""
    told = [event["values"] for event in read_events(folder / EVENTS) if event["kind"] == "metric"]
    return {key.removeprefix(IDLE): value for values in told for key, value in values.items() if key.startswith(IDLE)}


def train(name: str, folder: Path) -> None:
    """Do the steps of the config in a run folder as a baseline does them, and write them to its event log."""
    config = from_toml(folder / CONFIG)
    if name == "single":
        with lockstep.init("single", run_dir=folder) as run:
            trainer = lockstep.Trainer(config, run)
            for out in trainer:
                if out.step == trainer.loader.total_steps:
                    return
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
            return _Cross.apply(value, to, busy) if value.is_floating_point() else value.to(to)  # type: ignore[no-untyped-call]

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
        (total.float() / batch.global_batch).backward()  # type: ignore[no-untyped-call]
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


if __name__ == "__main__":
    raise SystemExit(main())
