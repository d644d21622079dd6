"""`lockstep.init()` and the Run it returns: what a training script has instead of process groups."""

from __future__ import annotations

import atexit
import datetime
import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.distributed import Store
from torch.utils.data import Dataset, IterableDataset, default_collate

from lockstep import __version__
from lockstep.checkpoint.load import best_checkpoint, check_layout, latest_checkpoint, load_shard
from lockstep.checkpoint.save import mark_best, prune, save_checkpoint
from lockstep.checkpoint.state import engine_state, restore_engine
from lockstep.config import LaunchConfig, launch_config
from lockstep.data.loader import Loader, Reading, StepBatch, dataset_size, evaluation_batches
from lockstep.data.order import Order, Position
from lockstep.engine import (
    Engine,
    LossFunction,
    Metric,
    MetricFunction,
    OptimizerFactory,
    Schedule,
    StepResult,
)
from lockstep.errors import UserError
from lockstep.events import EventLog, Reader
from lockstep.faults.requests import Requests
from lockstep.folder import RunFolder, choose_folder, create_folder
from lockstep.layout import Layout
from lockstep.memory import largest_micro_batch
from lockstep.parallel.apply import parallelize
from lockstep.precision import Precision
from lockstep.runtime.comm import Comm, Reduction
from lockstep.runtime.device import choose_device, visible_gpus
from lockstep.runtime.output import redirect_to, tee_to
from lockstep.runtime.place import cpus_per_rank, find_place, place_of

LAUNCH = "LOCKSTEP_LAUNCH"
"""What Lockstep's launcher tells its workers: a JSON object with run_dir, attempt, resume and options."""

MOST_WORKERS = 8


def init(
    layout: str | None = None,
    *,
    name: str | None = None,
    run_dir: str | Path | None = None,
    resume: str = "auto",
    seed: int | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    backend: Literal["auto", "gloo", "nccl"] | None = None,
    share_gpu: bool | None = None,
    timeout_minutes: float | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    head: str | None = None,
    store: Store | None = None,
) -> Run:
    """Join the other processes of this run; call it once, first thing.

    Works the same under `lockstep run`, torchrun, srun, mpirun and plain python. Under `torch.multiprocessing.spawn`
    give `rank`, `world_size` and `head="host:port"`. What the command line says (`--layout fsdp=4`) wins over the
    arguments here, which are the script's defaults.
    """
    launch: dict[str, Any] = json.loads(os.environ.get(LAUNCH, "{}"))
    given = {
        "layout": layout,
        "seed": seed,
        "device": device,
        "backend": backend,
        "share_gpu": share_gpu,
        "timeout_minutes": timeout_minutes,
    }
    config = launch_config({k: v for k, v in given.items() if v is not None} | launch.get("options", {}))
    if (rank is None) != (world_size is None):
        raise UserError("lockstep.init got one of rank and world_size", "give both, or neither")
    if rank is not None and world_size is not None:
        explicit_head = head if store is None else head or "store:1"
        place = place_of(rank, world_size, local_rank, local_world_size, explicit_head)
    else:
        place = find_place()
    resolved = Layout.parse(config.layout).resolve(place.world_size)
    chosen = choose_device(place, config.device, config.share_gpu)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    elif "OMP_NUM_THREADS" not in os.environ or place.launcher == "torchrun":
        torch.set_num_threads(cpus_per_rank(place))
    wanted = "nccl" if chosen.type == "cuda" and not config.share_gpu else "gloo"
    comm = Comm(
        place,
        resolved,
        chosen,
        wanted if config.backend == "auto" else config.backend,
        datetime.timedelta(minutes=config.timeout_minutes),
        store,
    )

    def choose() -> list[Any]:
        folder = choose_folder(name or Path(sys.argv[0]).stem or "run", Path(run_dir) if run_dir else None, resume)
        create_folder(folder, config.model_copy(update={"layout": str(resolved)}))
        return [str(folder.path), folder.attempt]

    if launch:
        folder = RunFolder(Path(launch["run_dir"]), launch["attempt"])
        resume = launch["resume"]
    else:
        path, attempt = comm.once("run folder", choose)
        folder = RunFolder(Path(path), attempt)
    return Run(comm, resolved, chosen, config, folder, resume=resume, launched=bool(launch))


class Run:
    """One training, from start to end over all its restarts, as one rank sees it."""

    def __init__(
        self,
        comm: Comm,
        layout: Layout,
        device: torch.device,
        config: LaunchConfig,
        folder: RunFolder,
        *,
        resume: str = "auto",
        launched: bool = False,
    ) -> None:
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.is_main = comm.rank == 0
        self.layout = layout
        self.device = device
        self.seed = config.seed
        self.folder = folder
        self.requests = Requests()
        self.engine: Engine | None = None
        self.best: tuple[int, float] | None = None
        self._comm = comm
        self._config = config
        self._keep = 2
        self._loaders: dict[str, Loader] = {}
        self._progress: dict[str, dict[str, Any]] = {}
        self._started = time.monotonic()
        self._step_started = self._started
        self._event_log: EventLog | None = None
        self._pending: tuple[str, dict[str, Any]] | None = None
        self._announced = False
        self._closed = False
        self._last_loss = math.nan
        self._last_metrics: dict[str, Metric] = {}
        self.item, self.items_per_sample = "samples", 1
        log = folder.log(socket.gethostname().split(".")[0], comm.rank)
        if launched:
            self._undo_output: Callable[[], None] = lambda: None
        else:
            self._undo_output = tee_to(log) if self.is_main else redirect_to(log)
        if self.is_main:
            self._event_log = EventLog(folder.events, folder.attempt, self._readers(launched))
        if not launched:
            self._say_once(folder.announce())
        self._warn_unused_gpus()
        self._checkpoint = self._find_checkpoint(resume)
        if _in_main_thread():
            self.requests.listen()
        atexit.register(self._at_exit)

    # What a script calls ------------------------------------------------------------------------------------------

    def setup(
        self,
        build_model: Callable[[], nn.Module],
        loss: LossFunction,
        *,
        optimizer: OptimizerFactory,
        schedule: Schedule | None = None,
        clip: float | None = None,
        precision: Precision = "fp32",
        recompute: bool = False,
        init: Literal["auto", "by-name"] = "auto",
        loss_reduction: Literal["sum", "mean"] = "sum",
    ) -> Engine:
        """Build the model as if on one device, cut it for the layout, and load the run's last checkpoint if it has one.

        `loss(model, batch)` returns (sum, weight): a sum over what counts, and how much counted; with
        `loss_reduction="mean"` the first is a mean. `optimizer` is called with this rank's (name, parameter) pairs.
        `schedule(step)` is the factor on the learning rate.
        """
        self.status("building the model")
        parallel = parallelize(
            build_model,
            self.layout,
            self._comm,
            self.device,
            seed=self.seed,
            init_by_name=init == "by-name",
            recompute_blocks=recompute,
        )
        self.engine = Engine(
            parallel,
            loss,
            optimizer,
            layout=self.layout,
            comm=self._comm,
            device=self.device,
            requests=self.requests,
            seed=self.seed,
            schedule=schedule,
            clip=clip,
            precision=precision,
            loss_reduction=loss_reduction,
            observe=self._observe,
        )
        if self._checkpoint is not None:
            self.status(f"loading {self._checkpoint.name}")
            restore_engine(self.engine, *load_shard(self._checkpoint, self.layout.coordinate(self.rank)["fsdp"]))
        return self.engine

    def loader(
        self,
        dataset: Dataset[Any],
        global_batch: int,
        *,
        micro_batch: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool = True,
        workers: int | None = None,
        prefetch: int = 2,
        persistent: bool = True,
        collate: Callable[[list[Any]], Any] = default_collate,
        name: str = "train",
    ) -> Loader:
        """The steps of a training: iterate it and give each to `engine.step`. A restarted run goes on where it was.

        Without `epochs` and `steps` it is one epoch. `micro_batch` is chosen once, by what fits in memory, and kept.
        """
        for what, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("epochs", epochs)):
            if value is not None and value < 1:
                raise UserError(f"{what} is {value}", "give a whole number from 1")
        steps = self._config.steps or steps
        if epochs is None and steps is None:
            epochs = 1
        saved = self._saved("loaders").get(name, {})
        order = Order(
            size=dataset_size(dataset, name),
            global_batch=global_batch,
            micro_batch=saved.get("micro_batch") or micro_batch or -(-global_batch // self.layout.data_size),
            seed=self.seed,
            data_rank=self.layout.data_rank(self.rank),
            data_size=self.layout.data_size,
            equal_counts=self.layout.fsdp > 1,
            shuffle=shuffle,
        )
        reading = self._reading(workers, prefetch, persistent, collate)
        if not saved and micro_batch is None:
            if self.engine is not None and not isinstance(dataset, IterableDataset):
                self.status("measuring how many samples one forward can hold")
                order = largest_micro_batch(self.engine, dataset, order, reading, self._comm)
            self._emit("config", micro_batch=order.micro_batch)
        loader = Loader(
            dataset,
            order,
            reading,
            Position(*saved.get("position", (0, 0))),
            epochs=None if steps is not None else epochs,
            steps=steps,
            name=name,
            before_step=self._boundary,
            steps_done=saved.get("steps_done", 0),
        )
        self._loaders[name] = loader
        self._record_progress(loader, loader.position, loader.steps_done)
        return loader

    def evaluate(
        self,
        dataset: Dataset[Any],
        metrics: Mapping[str, MetricFunction] | None = None,
        *,
        micro_batch: int | None = None,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> dict[str, Metric]:
        """Loss and metrics over a whole dataset, each sample once, whatever the number of ranks.

        A metric is a function (model, batch) -> (sum, count); the result's `.value` is their ratio.
        """
        engine = self._need_engine("evaluate")
        train = next(iter(self._loaders.values()), None)
        size = dataset_size(dataset, "evaluation")
        order = Order(
            size=size,
            global_batch=max(size, 1),
            micro_batch=micro_batch or (train.order.micro_batch if train else 32),
            seed=self.seed,
            data_rank=self.layout.data_rank(self.rank),
            data_size=self.layout.data_size,
            equal_counts=self.layout.fsdp > 1,
            shuffle=False,
        )
        reading = self._reading(workers, 2, False, collate)
        return engine.evaluate(evaluation_batches(dataset, order, reading), metrics)

    def save(self, best_loss: float | None = None) -> None:
        """Write a checkpoint of the whole run; every rank calls it. With `best_loss` it is marked as the best one."""
        engine = self._need_engine("save")
        engine.check_last_gradient()
        started = time.monotonic()
        tensors, meta = engine_state(engine)
        meta["seed"] = self.seed
        meta["loaders"] = self._progress
        at = self.layout.coordinate(self.rank)
        size = save_checkpoint(self.folder.path, tensors, meta, comm=self._comm, shard=at["fsdp"], writes=at["dp"] == 0)
        step = engine.steps_done
        if best_loss is not None:
            self.best = (step, best_loss)
        if self.is_main:
            if best_loss is not None:
                mark_best(self.folder.path, step, best_loss)
            prune(self.folder.path, self._keep, self.best[0] if self.best else None)
        self._emit(
            "checkpoint",
            step=step,
            path=f"checkpoints/step-{step:08d}",
            seconds=time.monotonic() - started,
            bytes=size,
            best=best_loss is not None,
        )
        self._step_started = time.monotonic()

    def log(self, **values: float | torch.Tensor) -> None:
        """Record numbers of the script's own with the current step; they show in the bar, TensorBoard and events."""
        self._emit("metric", step=self.engine.steps_done if self.engine else 0, values=values)

    def print(self, *values: object) -> None:
        """Print on the console, once, not once per rank."""
        if self.is_main:
            print(*values, flush=True)

    def reduce(self, value: Any, how: Reduction) -> Any:
        """Combine a number or tensor of every rank by "sum", "mean", "min" or "max"; all ranks get the result."""
        return self._comm.reduce(value, how)

    def once(self, name: str, prepare: Callable[[], Any]) -> Any:
        """Let one process prepare something while the others wait as long as it takes; all get its JSON result."""
        return self._comm.once(name, prepare)

    def status(self, text: str) -> None:
        """Say what the run is waiting for."""
        self._emit("status", text=text)

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        """Say something once to the people who watch the run."""
        self._emit("message", text=text, level=level)

    def close(self) -> None:
        """End the run: it is finished, and the next one of its name is a new one."""
        if self._closed:
            return
        best_step, best_loss = self.best or (None, None)
        self._emit(
            "end",
            step=self.engine.steps_done if self.engine else 0,
            loss=self._last_loss,
            best_loss=best_loss,
            best_step=best_step,
            metrics=_as_json(self._last_metrics),
            seconds=time.monotonic() - self._started,
        )
        self.leave()

    def leave(self) -> None:
        """Leave without ending the run: it stays unfinished and can be continued."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._flush_event()
        self.requests.close()
        if self._event_log:
            self._event_log.close()
        self._comm.close()
        self._undo_output()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            if not isinstance(error, SystemExit | KeyboardInterrupt):
                self._emit_failure(error)
            self.leave()

    # What the trainer calls too -----------------------------------------------------------------------------------

    def keep_checkpoints(self, count: int) -> None:
        """How many of the last checkpoints stay beside the best."""
        self._keep = count

    def record_validation(self, results: Mapping[str, Metric], samples: int, seconds: float, best: bool) -> None:
        """Put a validation into the event log."""
        engine = self._need_engine("record_validation")
        metrics = {name: metric for name, metric in results.items() if name != "loss"}
        self._last_metrics = metrics
        self._emit(
            "validation",
            step=engine.steps_done,
            epoch=self._epoch(),
            loss=results["loss"].value,
            metrics=_as_json(metrics),
            samples=samples,
            seconds=seconds,
            best=best,
        )
        self._step_started = time.monotonic()

    def emit(self, kind: str, **fields: Any) -> None:
        """Put an event into the log; only rank 0 writes."""
        self._emit(kind, **fields)

    # Inside -------------------------------------------------------------------------------------------------------

    def _observe(self, result: StepResult, batch: StepBatch) -> None:
        now = time.monotonic()
        self._last_loss = result.loss
        # Not when the loader hands a batch out: a save before its step must not count it.
        self._record_progress(self._loaders[batch.loader], batch.after, self._progress[batch.loader]["steps_done"] + 1)
        self._emit(
            "step",
            step=result.step,
            epoch=self._epoch(batch),
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            weight=result.weight,
            items=batch.samples * self.items_per_sample,
            seconds=now - self._step_started,
            skipped=result.skipped,
        )
        self._step_started = now

    def _record_progress(self, loader: Loader, position: Position, steps_done: int) -> None:
        self._progress[loader.name] = {
            "position": [position.epoch, position.consumed],
            "steps_done": steps_done,
            "micro_batch": loader.order.micro_batch,
        }

    def _epoch(self, batch: StepBatch | None = None) -> float:
        loader = self._loaders.get("train")
        if loader is None:
            return 0.0
        position = batch.after if batch else loader.position
        return position.epoch + (position.consumed / loader.order.size if loader.order.size else 0.0)

    def _boundary(self) -> None:
        """Between two steps: act on what all ranks agreed on."""
        if not self._announced:
            self._announce()
        for request, reason, code in (("interrupt", "interrupted", 130), ("terminate", "terminated", 75)):
            if request in self.requests.agreed:
                engine = self._need_engine("step")
                self.status("saving before the stop")
                self.save()
                text = f"stopped after step {engine.steps_done} with a complete checkpoint; the same command goes on"
                self._emit("stop", reason=reason, step=engine.steps_done, text=text)
                self.leave()
                raise SystemExit(code)

    def _announce(self) -> None:
        self._announced = True
        loader = self._loaders.get("train") or next(iter(self._loaders.values()))
        engine = self.engine
        self._emit(
            "start",
            run=self.folder.path.name,
            layout=str(self.layout),
            world_size=self.world_size,
            nodes=self._comm.place.nodes,
            device=self.device.type if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            precision=engine.precision if engine else "fp32",
            resumed_from_step=engine.steps_done if engine and engine.steps_done else None,
            total_steps=loader.total_steps,
            steps_per_epoch=loader.steps_per_epoch,
            global_batch=loader.order.global_batch,
            micro_batch=loader.order.micro_batch,
            item=self.item,
            versions={
                "lockstep": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            parameters=sum(p.numel() for p in engine.model.parameters()) if engine else 0,
            host=socket.gethostname(),
        )
        self._step_started = time.monotonic()

    def _find_checkpoint(self, resume: str) -> Path | None:
        def find() -> str | None:
            if resume not in ("auto", "never"):
                return resume
            found = latest_checkpoint(self.folder.path, lambda text: self.message(text, "warning"))
            return str(found) if found and resume == "auto" else None

        found = self._comm.once("checkpoint", find)
        if found is None:
            return None
        if resume == "auto":
            self.best = best_checkpoint(self.folder.path)
        check_layout(Path(found), self.layout)
        return Path(found)

    def _saved(self, key: str) -> dict[str, Any]:
        if self._checkpoint is None:
            return {}
        from lockstep.checkpoint.format import read_index

        value = read_index(self._checkpoint)[key]
        assert isinstance(value, dict)
        return value

    def _reading(
        self, workers: int | None, prefetch: int, persistent: bool, collate: Callable[[list[Any]], Any]
    ) -> Reading:
        if workers is None:
            workers = min(MOST_WORKERS, cpus_per_rank(self._comm.place) - 1)
        return Reading(workers, prefetch, persistent, self.device.type == "cuda", collate)

    def _readers(self, launched: bool) -> list[Reader]:
        from lockstep.sinks.tensorboard import TensorBoard

        readers: list[Reader] = [TensorBoard(self.folder.path / "tb", self._say_once)]
        if not launched:
            from rich.console import Console as Terminal

            from lockstep.sinks.console import Console

            readers.append(Console(Terminal()))
        return readers

    def _say_once(self, text: str) -> None:
        self.message(text)

    def _warn_unused_gpus(self) -> None:
        place = self._comm.place
        gpus = visible_gpus() if place.launcher in ("python", "torchrun", "explicit") else 0
        used = place.local_world_size if self.device.type == "cuda" else 0
        if gpus > used:
            self.message(
                f"{gpus} GPUs are visible and {used} {'is' if used == 1 else 'are'} used: "
                f"lockstep run --nproc {gpus} {Path(sys.argv[0]).name} uses all of them",
                "warning",
            )

    def _need_engine(self, what: str) -> Engine:
        if self.engine is None:
            raise UserError(f"run.{what} needs a model", "call run.setup(...) before it")
        return self.engine

    def _emit(self, kind: str, **fields: Any) -> None:
        """Write the event before this one; a number that is still on a GPU has arrived by then."""
        if self._event_log is None:
            return
        self._flush_event()
        self._pending = (kind, fields)
        if not any(_on_gpu(value) for value in fields.values()):
            self._flush_event()

    def _flush_event(self) -> None:
        if self._pending and self._event_log:
            (kind, fields), self._pending = self._pending, None
            self._event_log.emit(kind, **_plain(fields))

    def _emit_failure(self, error: BaseException) -> None:
        step = self.engine.steps_done if self.engine else 0
        self._emit("stop", reason="failed", step=step, text=f"{type(error).__name__}: {error}")

    def _at_exit(self) -> None:
        """A script that ends without run.close(): finished if it ended by itself, unfinished after an exception."""
        error = getattr(sys, "last_value", None)
        if error is None:
            self.close()
        else:
            self._emit_failure(error)
            self.leave()


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def _as_json(metrics: Mapping[str, Metric]) -> dict[str, dict[str, float]]:
    return {name: {"sum": m.sum, "count": m.count, "value": m.value} for name, m in metrics.items()}


def _on_gpu(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_on_gpu(part) for part in value.values())
    return isinstance(value, torch.Tensor) and value.is_cuda


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return value.item() if isinstance(value, torch.Tensor) else value
