"""The Run that `lockstep.init()` returns: what a training script has instead of process groups."""

from __future__ import annotations

import atexit
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Literal, NoReturn, Self

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from lockstep.checkpoint.disk.code import refuse_changed_code
from lockstep.checkpoint.disk.format import Group, open_or_refuse, step_folder
from lockstep.checkpoint.exchange.export import check_target, export
from lockstep.checkpoint.manage import Checkpoints, SavedBeside
from lockstep.checkpoint.resume import cut_as_before
from lockstep.checkpoint.state import check_groups, optimizer_groups
from lockstep.config.arguments import check_counts, check_dataset, check_setup, checked_builder, named
from lockstep.config.cadence import parse_duration
from lockstep.config.schema import (
    Attention,
    BatchNorm,
    Compile,
    Format,
    LaunchConfig,
    NumericsConfig,
    PipelineConfig,
    RecoverConfig,
    ShardConfig,
    TensorConfig,
    setup_config,
)
from lockstep.data.alike import EVALUATION, DataCheck
from lockstep.data.first_samples import Read, first_micro_batch
from lockstep.data.loader import (
    Collate,
    Loader,
    MicroBatch,
    Reading,
    StepBatch,
    Tokens,
    changed_settings,
    dataset_size,
    evaluation_batches,
    kept_random_state,
    settings_of,
)
from lockstep.data.order import Order, Position
from lockstep.data.progress import Progress
from lockstep.data.sets import cache_folder
from lockstep.engine import Engine, LossFunction, StepResult
from lockstep.errors import StoppedTogetherError, UserError, unknown
from lockstep.faults.emergency import NEVER, on_uncaught, refused_alike
from lockstep.faults.recover import Alarm, Recovery, Surroundings
from lockstep.faults.requests import STOPS, Requests
from lockstep.faults.stop import StopConditions
from lockstep.faults.watchdog import Watchdog
from lockstep.layout import Layout
from lockstep.observe.clock import StepClock
from lockstep.observe.journal import Journal
from lockstep.observe.monitor import Watching
from lockstep.observe.output import show_run
from lockstep.observe.settings import script_settings
from lockstep.page.report import leave_report
from lockstep.parallel.build.apply import CutFor, Look, check_goes_together, cut_model, plan_model
from lockstep.parallel.build.compile import check_compile, keep_on_disk
from lockstep.parallel.pipeline.timetable import check_micro_batches
from lockstep.parallel.replicate.statistics import batch_norm_line
from lockstep.parallel.tensor.context import sequence_length
from lockstep.parallel.tensor.plan_matrices import most_ranks
from lockstep.planner.model.parts import Model
from lockstep.prove.explain import describe
from lockstep.prove.recording import Recorder, VerifySettings
from lockstep.record.failure import is_ours, lines_of
from lockstep.record.folder import REPORT, RunFolder, take_back
from lockstep.record.identity import LocalCode
from lockstep.record.log import EventLog, without_non_finite
from lockstep.runtime import process, stop_signals
from lockstep.runtime.comm import Comm, Reduction
from lockstep.runtime.device import unused_gpus
from lockstep.runtime.dtensors import local_part
from lockstep.runtime.garbage import GarbageCollection
from lockstep.runtime.rank_env import AGREED, cpus_per_rank
from lockstep.runtime.torch_private.seen import require
from lockstep.step.optim import OptimizerFactory, Schedule
from lockstep.step.precision import check_can_compute
from lockstep.step.scoring import Metric, MetricFunction, Perplexity
from lockstep.training.engine_parts import Around
from lockstep.training.prepare import use_backends
from lockstep.training.setup import Setup
from lockstep.trial.fits import rank_memory
from lockstep.trial.micro_batch import default_micro_batch
from lockstep.trial.settle import LoaderPlan, check_still_uncoupled, coupled_score, settle_micro_batch

MOST_WORKERS = 8


@dataclass(frozen=True)
class Beginning:
    """How this start of a run came about: what its launcher told, where it goes on, and what it made and holds.

    `made` are folders that this process made, where no launcher of ours did, and `locks` keep others from the run.
    """

    resume: str
    launch: Mapping[str, Any]
    locks: Sequence[IO[str]] = ()
    made: Sequence[Path] = ()
    verify: VerifySettings | None = None
    code_may_differ: bool = False


class Run:
    """One training, from start to end over all its restarts, as one rank sees it."""

    def __init__(
        self,
        comm: Comm,
        layout: Layout,
        device: torch.device,
        config: LaunchConfig,
        folder: RunFolder,
        code: LocalCode,
        start: Beginning,
    ) -> None:
        launch = start.launch
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.is_main = comm.rank == 0
        self.layout = layout
        self.device = device
        self.seed = config.seed
        self.folder = folder
        self.requests = Requests()
        self.engine: Engine | None = None
        self.planned: Callable[[], Model] | None = None
        """What the planner knows of the model, where it knows it without looking."""
        self.settings: str | None = None
        """The resolved config, where there is more of it than what a script has said."""
        self._checkpoints: Checkpoints = None  # type: ignore[assignment]  # until the run folder was looked at
        self._comm = comm
        self._config = config
        self._code = code
        self._start = start
        self._recorder = Recorder(start.verify, layout, comm.rank) if start.verify else None
        self._announced = self._closed = False
        self._tried: tuple[Read, int] | None = None  # samples to try out again
        self._are_coupled: dict[tuple[Any, ...], tuple[bool, Any]] = {}  # metrics of an evaluation
        self._global_batch = 1
        self._attention: str | None = None
        self._best_in_model = (-1, -1)  # when the best weights were loaded into the model, and of which step they are
        self._garbage: GarbageCollection | None = None
        self._launch = launch
        self._times = {"joined": time.time()}
        self._stops = StopConditions(
            folder.path, launch.get("began", time.time()), parse_duration(config.max_time) if config.max_time else None
        )
        self._undo_output, readers = show_run(folder, self.rank, bool(launch), config.log_to, self.message)
        self._undo_hook = on_uncaught(self._save_in_emergency)
        self._clock = StepClock(device, self.world_size)
        log = EventLog(folder.events, folder.attempt, readers) if self.is_main else None
        self.journal = Journal(log, self._clock)
        self._watching = Watching(comm, layout, device, folder.path, config, self._clock, self.journal, self.requests)
        if not launch:
            self.message(folder.announce())
            if line := unused_gpus(comm.place, device):
                self.message(line, "warning")
        self._watchdog = Watchdog(comm, 60 * config.timeout_minutes, folder.path, launch)
        try:
            warn = partial(self.message, level="warning")
            self._checkpoints = Checkpoints(folder, start.resume, self.seed, comm, warn)
        except BaseException:
            self.leave()
            raise
        self._progress = Progress(self._loaders_before)
        self._data = DataCheck(comm, self.seed, warn)
        self._stops.is_overtaken = self._checkpoints.is_overtaken
        if self.is_main:
            self._stops.begin()
        self._watchdog.start()
        self._watching.start()
        if threading.current_thread() is threading.main_thread():
            atexit.unregister(stop_signals.ignore)
            atexit.register(stop_signals.ignore)  # after whatever else is done then: no stop changes the code any more
            self.requests.heard = self._heard
            self.requests.listen()
        atexit.register(self._at_exit)

    # What a script calls ------------------------------------------------------------------------------------------

    @named("run.setup")
    def setup(
        self,
        build_model: Callable[[], nn.Module],
        loss: LossFunction,
        *,
        optimizer: OptimizerFactory,
        schedule: Schedule | None = None,
        clip: float | None = None,
        precision: Format = "fp32",
        numerics: NumericsConfig | Mapping[str, Any] | None = None,
        recompute: bool = False,
        compile: Compile = "off",
        attention: Attention = "auto",
        shard: ShardConfig | Mapping[str, Any] | None = None,
        pipeline: PipelineConfig | Mapping[str, Any] | None = None,
        tensor: TensorConfig | Mapping[str, Any] | None = None,
        batch_norm: BatchNorm = "auto",
        init: Literal["auto", "by-name"] = "auto",
        loss_reduction: Literal["sum", "mean"] = "sum",
        recover: RecoverConfig | Mapping[str, Any] | None = None,
    ) -> Engine:
        """Build the model as if on one device, cut it for the layout, and load the run's last checkpoint if it has one.

        `loss(model, batch)` returns (sum, weight): a sum over what counts, and how much counted; with
        `loss_reduction="mean"` the first is a mean. `optimizer` is called with this rank's (name, parameter) pairs.
        `schedule(step)` is the factor on the learning rate; torch's schedulers over `engine.optimizer` work, too.
        docs/config.md explains the other arguments: they are the config's keys of the same names. What the command
        line says of `pipeline` and `tensor` wins.

        A layout with pp, tp or cp cuts the model when the first samples are known, by `run.loader` or `run.evaluate`.
        A run has one model, optimizer and loss.
        """
        if self.engine is not None:
            raise UserError(
                "run.setup was called a second time, and a run has one model and one optimizer so far: its checkpoints "
                "would hold only the last",
                "put the networks into one nn.Module with one loss, or train each in a run of its own",
            )
        check_setup(build_model, loss, optimizer, schedule, clip)
        build_model = checked_builder(build_model)
        if loss_reduction not in ("sum", "mean"):
            raise unknown("loss_reduction", str(loss_reduction), ("sum", "mean"))
        settings = setup_config(
            self._config,
            clip=clip,
            precision=precision,
            numerics=numerics,
            recompute=recompute,
            compile=compile,
            attention=attention,
            shard=shard,
            pipeline=pipeline,
            tensor=tensor,
            batch_norm=batch_norm,
            init=init,
            recover=recover,
        )
        if self._recorder:
            build_model = self._recorder.with_fewer_blocks(build_model)
            settings = self._recorder.plain_numbers(settings)
        self._comm.once(
            "check the number formats",
            lambda: check_can_compute(settings.precision, settings.numerics, self.device.type),
        )
        if settings.compile != "off":
            check_compile(settings.compile, self.layout, settings.shard, settings.numerics, settings.batch_norm)
            keep_on_disk(cache_folder() / "compile")
        before = self._checkpoints.training
        if before is not None and self.layout.pp > 1:
            cut_alike = cut_as_before(settings.pipeline, self.layout.pp, before.pipeline)
            settings = settings.model_copy(update={"pipeline": cut_alike})
        if self.is_main and not self._recorder:
            build_model = self._watching.uncut.watching(build_model)
        use_backends(settings, self.layout, self.device)
        needs_samples = self.layout.pp > 1 or self.layout.team > 1
        if needs_samples:
            check_goes_together(self.layout, settings, self.device.type == "cuda")
        self.engine = Engine(
            Setup(build_model, loss, optimizer, schedule, loss_reduction, settings, self.seed),
            self._comm,
            self.layout,
            self.device,
            requests=self.requests,
            recovery=Recovery(
                settings.recover,
                Surroundings(self._alarm, lambda: self._checkpoints.last_step, self._roll_back),
            ),
            around=Around(
                self._clock.script_ends, self._observe, self._clock.optimizing, self._watching.profiler.marked
            ),
            begins_at=self._checkpoints.step,
        )
        if not needs_samples and not self._explains:
            self._cut(self.engine, None)
        return self.engine

    @named("run.loader")
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
        collate: Collate = default_collate,
        tokens: Tokens | None = None,
        name: str = "train",
    ) -> Loader:
        """The steps of a training: iterate it and give each to `engine.step`. A restarted run goes on where it was.

        Without `epochs` and `steps` it is one epoch. `micro_batch` is what one forward sees. Without it, it is what
        suits this layout and fits in memory where the loss of a sample depends on the sample alone, which is tried
        out; else one forward sees the whole global batch, and layouts that cannot have that are refused. With
        `tokens(batch)` throughput counts tokens rather than samples: it returns how many a batch has, or (tokens, how
        many of these only fill rows up), which a batch with an `attention_mask` says by itself.
        """
        engine = self._need_engine("loader")
        check_dataset("run.loader", dataset)
        call: dict[str, Any] = {"global_batch": global_batch, "micro_batch": micro_batch, "epochs": epochs}
        call |= {"steps": steps, "shuffle": shuffle, "collate": collate, "tokens": tokens}
        self._check_alike(_called(name), dataset, call, self._reading(workers, prefetch, persistent, collate))
        check_counts(global_batch=global_batch, micro_batch=micro_batch, epochs=epochs, steps=steps)
        if name in self._progress.loaders:
            raise UserError(
                f"the loader {name!r} of this run exists already",
                "make it once, before the loop, with epochs=...; a second dataset needs a name of its own",
            )
        if (first := self._progress.first) and (first.reading.tokens is None) != (tokens is None):
            raise UserError("one loader of this run counts tokens and another one samples", "give tokens=... to both")
        if self._recorder:
            micro_batch = self._recorder.micro_batch(name, micro_batch)
        steps = self._config.steps or steps
        if epochs is None and steps is None:
            epochs = 1
        samples = dataset_size(dataset, name)
        saved = self._progress.saved(name, samples=samples, global_batch=global_batch, shuffle=shuffle)
        given = micro_batch or (saved["micro_batch"] if saved and saved["micro_batch_given"] else None)
        chosen = given or default_micro_batch(engine.setup.settings.pipeline, self._target_layout, global_batch)
        if self._target_layout.pp > 1 and engine.setup.settings.pipeline.micro_batches is not None:
            given = chosen
        order = self._order(dataset, name, global_batch, chosen, shuffle)
        self._global_batch = global_batch
        reading = self._reading(workers, prefetch, persistent, collate, tokens)
        if self._target_layout.pp > 1:
            check_micro_batches(engine.setup.settings.pipeline, self._target_layout, global_batch, chosen, micro_batch)
        # Nobody has decided yet how many samples one forward sees, and some models take no single one (BatchNorm).
        several = order if given else replace(order, micro_batch=min(max(2, chosen), global_batch))
        settings = settings_of(dataset)
        with self._own_random_state():
            self._show_first(dataset, several, reading)
            saved = self._progress.saved(name)  # a checkpoint that turned out to be damaged has given way to another
            before, most = saved.get("micro_batch"), self._launch.get("most")
            wanted = LoaderPlan(dataset, order, reading, given, before, most, self._progress.first is None)
            show = None if self._recorder else partial(self._watching.show, engine)
            settled = settle_micro_batch(engine, self._comm, wanted, self.message, self.status, show)
        if settled.again is not None:
            self._tried = settled.again
        if given is None and before is None:
            self.journal.emit("config", micro_batch=settled.order.micro_batch)
        loader = Loader(
            dataset,
            settled.order,
            reading,
            Position(*saved.get("position", (0, 0))),
            epochs=None if steps is not None else epochs,
            steps=steps,
            name=name,
            before_step=self._boundary,
            reading_samples=self._watching.reading_samples,
            steps_done=saved.get("steps_done", 0),
            micro_batch_given=given is not None,
            is_coupled=settled.coupling.any_cause is not None,
            changes_itself=changed_settings(settings, settings_of(dataset)),
        )
        self._progress.add(loader)
        return loader

    @named("run.evaluate")
    def evaluate(
        self,
        dataset: Dataset[Any],
        metrics: Mapping[str, MetricFunction] | None = None,
        *,
        perplexity: bool = False,
        micro_batch: int | None = None,
        workers: int | None = None,
        collate: Collate = default_collate,
    ) -> dict[str, Metric]:
        """Loss and metrics over a whole dataset, each sample once, whatever the number of ranks.

        A metric is a function (model, batch) -> (sum, count); the result's `.value` is their ratio. With `perplexity`
        there is one more, the exp of the mean loss. Nothing is recorded: `validate` and `test` do that.
        """
        return self._score(dataset, metrics, perplexity, micro_batch, workers, collate)[0]

    def validate(
        self, dataset: Dataset[Any], metrics: Mapping[str, MetricFunction] | None = None, **options: Any
    ) -> dict[str, Metric]:
        """`evaluate`, with its options, shown on the console and in TensorBoard; saves where the loss is the lowest.

        That checkpoint stays until there is a better one, and `load_best` and `test` use it.
        """
        self._need_engine("validate")
        self.status("validating")
        started = time.monotonic()
        results, samples = self._score(dataset, metrics, **options)
        loss = results["loss"].value
        best = math.isfinite(loss) and (self.best is None or loss < self.best[1])
        self.journal.validation(
            self._steps_done, self._progress.epoch(), results, samples, time.monotonic() - started, best
        )
        if best:
            self.save(best_loss=loss)
        return results

    def test(
        self, dataset: Dataset[Any], metrics: Mapping[str, MetricFunction] | None = None, **options: Any
    ) -> dict[str, Metric]:
        """`load_best` and `evaluate`, with its options, shown like a validation: once, after the last step."""
        if self._need_engine("test").steps_done == 0:
            raise UserError("run.test scores a trained model, and no step was done", "use run.evaluate before training")
        step = self.load_best()
        self.status("testing")
        started = time.monotonic()
        results, samples = self._score(dataset, metrics, **options)
        self.journal.test(step, results, samples, time.monotonic() - started)
        return results

    def load_best(self) -> int:
        """Put the weights of the best checkpoint into the model; returns the step they are of.

        For after the last step: the optimizer stays where it is. Where the training stands is saved first. Without a
        best checkpoint (nothing was validated) the weights stay too.
        """
        engine = self._need_engine("load_best")
        if self.best is None:
            return engine.steps_done
        if self.saved_step != engine.steps_done:
            self.save()
        self._finish_saving()
        self.status(f"loading the best checkpoint, of step {self.best[0]}")
        self._best_in_model = (engine.steps_done, self._checkpoints.load_best(engine.state))
        return self._best_in_model[1]

    def save(self, best_loss: float | None = None, *, wait: bool = False, emergency: str | None = None) -> None:
        """Write a checkpoint of the whole run; every rank calls it. With `best_loss` it is marked as the best one.

        The training goes on while it is written, from a copy; with `wait` it is on disk when this returns. One that
        cannot be written stops the run at the next step. Ranks that hold different values of the same weight are
        refused: no rank had the model that such a checkpoint would hold. `emergency` marks one as saved before a
        failure, and why.
        """
        engine = self._need_engine("save")
        began = time.monotonic()
        engine.check_last_gradient()
        self._finish_saving()
        if self.saved_step != engine.steps_done:
            self._check_replicas()
        self.journal.flush()
        loss = self.journal.last_loss
        self._checkpoints.save(
            engine.state,
            SavedBeside(
                self._progress.positions,
                self._code.files(),
                loss if math.isfinite(loss) else None,
                without_non_finite(self.journal.last_metrics),
            ),
            best_loss=best_loss,
            emergency=emergency,
            wait=wait,
            began=began,
        )
        self._report_saved()
        self.journal.between_steps()

    @named("run.keep", 'give a name and what it names, as in ema = run.keep("ema", ema)')
    def keep(self, name: str, state: Any) -> Any:
        """Let checkpoints hold state of the script's own; returns it, as it was saved where the run goes on.

        `state` has state_dict and load_state_dict, or is a dict, list or deque of numbers, texts, tensors and arrays,
        which is saved as it is at each save: `early = run.keep("early", {"best": math.inf, "bad": 0})`. It is restored
        in place, on any layout. Every rank calls it, before the first step, and keeps the same.
        """
        if self._steps_done > self._checkpoints.step:
            raise UserError(f"run.keep({name!r}) was called after a step", "call it before the loop")
        return self._checkpoints.kept.add(name, state, self._checkpoints.start)

    def export(self, path: str | Path, *, optimizer: bool = False) -> None:
        """Write the whole model, as it is now, to one file that any PyTorch program reads; every rank calls it.

        NAME.pt is for `torch.load(path, weights_only=True)` and may have the optimizer too, NAME.safetensors for
        safetensors, a folder gets shards with an index. It is a checkpoint first, from which rank 0 copies tensor by
        tensor: no rank ever holds more of the model than one tensor.
        """
        engine = self._need_engine("export")
        self._stop_if_asked()
        self.save(wait=True)  # whatever is wrong with the path, nothing of the training is lost
        self._finish_saving()
        done, loaded = self._best_in_model
        step = loaded if done == engine.steps_done else engine.steps_done
        try:
            self._comm.agree(lambda: check_target(Path(path), optimizer))
        except UserError as error:
            later = f"lockstep ckpt export {self.folder.path} --step {step} -o OTHER"
            raise UserError(error.cause, f"{error.fix}; step {step} is saved, and `{later}` exports it now") from None
        self.status(f"writing {path}")

        def write() -> None:
            export(open_or_refuse(step_folder(self.folder.path, step)), Path(path), optimizer=optimizer)

        self._comm.once("export the model", write)

    @named("run.log", "give each number by a name of its own, as in run.log(loss=out.loss)")
    def log(self, **values: Any) -> None:
        """Record numbers of the script's own (also of numpy and torch) with the current step."""
        self.journal.metrics(self._steps_done, values)

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
        self.journal.emit("status", text=text)

    def message(self, text: str, level: Literal["info", "warning"] = "info") -> None:
        """Say something once to the people who watch the run."""
        self.journal.emit("message", text=text, level=level)

    def close(self) -> None:
        """End the run: it is finished, and the next one of its name is a new one."""
        if self._closed:
            return
        if self.engine is not None:
            self.engine.check_last_gradient()
        self._check_replicas(again=False)
        self._finish_saving()
        if (steps := self._watching.profiler.steps) is not None:
            self.message(f"the run has ended before {steps} could be profiled", "warning")
        self.journal.end(self._steps_done, self.best)
        self.leave()

    def leave(self) -> None:
        """Leave without ending the run: it stays unfinished and can be continued."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        with ExitStack() as everything:  # whatever one of them raises, all of them are given back
            everything.callback(self.requests.close)  # last: until then a stop changes nothing
            if self.is_main and self._announced and not self._launch:  # else the launcher writes it
                everything.callback(self._report)
            for lock in self._start.locks:
                everything.callback(lock.close)
            everything.callback(process.put_back)
            everything.callback(self._undo_output)
            everything.callback(self._undo_hook)
            everything.callback(self._comm.close)
            everything.callback(self._watchdog.close)
            everything.callback(self.journal.close)
            if self._checkpoints is not None:
                everything.callback(self._checkpoints.leave)
            if self._garbage:
                everything.callback(self._garbage.restore)
            everything.callback(self._watching.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._save_in_emergency(error)
            self._leave_after(error)

    def _save_in_emergency(self, error: BaseException) -> None:
        """Save what was done since the last checkpoint before an error ends the run; never raises.

        All ranks have to take part: either they all fail together, or there is only one.
        """
        with suppress(Exception):  # who judges the failure reads in the events how far the run was
            self.journal.flush()
        if not isinstance(error, Exception) or isinstance(error, NEVER) or not self.has_unsaved_steps:
            return
        if self.world_size > 1 and not isinstance(error, StoppedTogetherError):
            return
        try:
            engine = self._need_engine("save")
            engine.undo_half_a_step()
            finite = all(bool(local_part(one.detach()).isfinite().all()) for _, one in engine.cut.trained)
            if self.reduce(int(engine.state.is_sound and finite), "min") == 0:
                return
            self.save(wait=True, emergency=f"{type(error).__name__}: {error}"[:500])
            self.message(
                f"saved an emergency checkpoint of step {engine.steps_done}: the same command goes on from it",
                "warning",
            )
        except Exception as failed:
            with suppress(Exception):  # the error that ends the run is the one to show
                self.message(f"no emergency checkpoint could be saved: {failed}", "warning")

    def _leave_after(self, error: BaseException) -> None:
        """An error ends the script; one that refused it before anything was begun leaves nothing behind."""
        is_refused = isinstance(error, UserError) and not (self._announced or self._launch or self._closed)
        takes_back = is_refused and refused_alike(self._comm, error) and bool(self._start.made)
        with suppress(Exception):  # the script's own error is the one to show
            if not takes_back and not isinstance(error, SystemExit | KeyboardInterrupt):
                self.journal.failure(self._steps_done, error)
        self.leave()
        if takes_back:
            take_back(self.folder, list(self._start.made))

    # What the trainer calls too -----------------------------------------------------------------------------------

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and validation loss of the best checkpoint so far."""
        return self._checkpoints.best

    @property
    def saved_step(self) -> int:
        """The last step that was saved, -1 before that."""
        return self._checkpoints.saved_step

    @property
    def has_unsaved_steps(self) -> bool:
        """Whether steps were done that no checkpoint has."""
        is_ready = self.engine is not None and self.engine.is_ready and not self._closed
        return is_ready and self._steps_done > max(self.saved_step, self._checkpoints.step)

    def keep_checkpoints(self, count: int, every: int | None = None) -> None:
        """How many of the last checkpoints stay beside the best, and those of every so many steps."""
        for what, value in (("count", count), ("every", every)):
            if value is not None and value < 1:
                raise UserError(f"keep_checkpoints was given {what} = {value}", "give a whole number from 1")
        self._checkpoints.keep, self._checkpoints.keep_every = count, every

    # Inside -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _forgotten_if_refused(self) -> Iterator[None]:
        """A script may answer a refusal by another setup."""
        try:
            yield
        except UserError:
            self.engine = None
            raise

    def _restore(self, engine: Engine) -> None:
        """Load the run's checkpoint, if it goes on from one."""
        if (start := self._checkpoints.start) is not None:
            self.status(f"loading {start.folder.name}")
            self._checkpoints.restore(engine.state)
            self._progress.go_on_from(self._loaders_before)
            if (training := self._checkpoints.training) is not None:
                self.journal.last_loss = math.nan if training.loss is None else training.loss
                self.journal.last_metrics = dict(training.metrics)
        self._checkpoints.check_room(engine.state)

    def _alarm(self, alarm: Alarm) -> None:
        self.journal.emit("alarm", **asdict(alarm))

    def _roll_back(self, step: int) -> None:
        """Put the last checkpoint into the engine, which goes on from `step`."""
        self._finish_saving()
        back = self._checkpoints.roll_back(self._need_engine("setup").state)
        taken = f"step {step} is" if step == back + 1 else f"steps {back + 1}-{step} are"
        text = f"{taken} taken back: weights and optimizer are those of step {back} again"
        self.message(f"{text}; the steps count on from there, and their samples are passed over", "warning")
        self.journal.between_steps()

    @property
    def _loaders_before(self) -> dict[str, dict[str, Any]]:
        """Where the loaders stood in the checkpoint that the run goes on from."""
        training = self._checkpoints.training
        return {name: state.model_dump() for name, state in training.loaders.items()} if training else {}

    def _check_replicas(self, again: bool = True) -> None:
        """Before a save, and once after the last step: ranks that should hold the same do. A proof compares itself."""
        if self.engine is not None and self.engine.is_ready and self._steps_done > 0 and not self._recorder:
            self.engine.check_replicas(again)

    def _report_saved(self) -> None:
        """Tell of a checkpoint that is complete on disk by now."""
        if (saved := self._checkpoints.completed()) is not None:
            path = step_folder(self.folder.path, saved.step).relative_to(self.folder.path)
            self.journal.checkpoint(saved.step, str(path), saved.seconds, saved.stall, saved.bytes, saved.best)

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        self._checkpoints.wait()
        self._report_saved()

    def _check_alike(self, where: str, dataset: Any, call: Mapping[str, Any], reading: Reading) -> None:
        """Before a dataset is read for the first time: it is the same everywhere, and so is what was imported since."""
        now, before, step = self._code.files(), self._checkpoints.code, self._checkpoints.step
        self._data.check(where, dataset, call, now, reading)
        if before and not self._start.code_may_differ:
            self._comm.agree(lambda: refuse_changed_code(step, before, now))

    @property
    def _target_layout(self) -> Layout:
        """The layout of this run, or the one that it is to explain."""
        if self._recorder and self._recorder.settings.explain:
            return Layout.parse(self._recorder.settings.layout)
        return self.layout

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """What is tried out inside draws for nobody: the script goes on as on one process, and alike on every rank."""
        with kept_random_state(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            yield

    def _show_first(self, dataset: Any, order: Order, reading: Reading) -> None:
        """Cut a model that has to be looked at first: with a micro-batch, the same one on every rank."""
        if self.engine is not None and not self.engine.is_ready:
            first = first_micro_batch(dataset, order, reading)
            self._watching.show(self.engine, first)
            if self._explains:
                self._explain(self.engine, first.data)
            self._cut(self.engine, self.engine.look_at(first.data))

    def _cut(self, engine: Engine, look: Look | None) -> None:
        """Build the model as if on one device, plan, cut, give it its values, make the optimizer, and restore.

        A layout with pp, tp or cp plans by what `look` shows of a forward.
        """
        self.status("building the model" if look is None else "looking at the model, to cut it")
        with self._forgotten_if_refused():
            cut = cut_model(engine.setup.build_model, look, self._cut_for(engine))
            self._comm.agree(lambda: engine.take(cut))
            if look is not None:
                groups = [group.model_dump(mode="json") for group in optimizer_groups(engine.state)]
                check_groups([[Group.model_validate(one) for one in rank] for rank in self._comm.gather(groups)])
        if cut.pipeline is not None:
            self.message(f"{engine.setup.settings.pipeline.schedule} pipeline: {cut.pipeline.describe()}")
        for line in cut.notes:
            self.message(line)
        with self._forgotten_if_refused():
            self._restore(engine)

    def _cut_for(self, engine: Engine) -> CutFor:
        return CutFor(self.layout, self._comm, self.device, engine.setup.settings, self.seed)

    @property
    def _explains(self) -> bool:
        """Whether this start only says how the model would be cut (`lockstep verify --explain`)."""
        return self._recorder is not None and self._recorder.settings.explain

    def _explain(self, engine: Engine, data: Any) -> NoReturn:
        """Leave how a layout would cut the model where the command finds it, and end."""
        assert self._recorder is not None
        target, settings, look = self._target_layout, engine.setup.settings, engine.look_at(data)
        planned = plan_model(engine.setup.build_model, look, replace(self._cut_for(engine), layout=target))
        facts = {
            "heads": most_ranks(planned.skeleton, look),
            "sequence": sequence_length(data),
            "global_batch": self._global_batch,
            "memory": rank_memory(),
        }
        self._recorder.explain({**describe(planned, target, settings.pipeline), "facts": facts})
        self.leave()
        raise SystemExit(0)

    @property
    def _steps_done(self) -> int:
        return self.engine.steps_done if self.engine else 0

    @named("run.evaluate")  # and that of validate and test, which hand their options on
    def _score(
        self,
        dataset: Dataset[Any],
        metrics: Mapping[str, MetricFunction] | None,
        perplexity: bool = False,
        micro_batch: int | None = None,
        workers: int | None = None,
        collate: Collate = default_collate,
    ) -> tuple[dict[str, Metric], int]:
        """The results of an evaluation and the number of samples it read, over all ranks."""
        engine = self._need_engine("evaluate")
        self._stop_if_asked()
        check_dataset("run.evaluate", dataset)
        check_counts(micro_batch=micro_batch)
        if metrics is not None and not isinstance(metrics, Mapping):
            raise UserError(f"metrics is a {type(metrics).__name__}", 'name each: {"accuracy": function}')
        call: dict[str, Any] = {"micro_batch": micro_batch, "collate": collate, "metrics": sorted(metrics or {})}
        reading = self._reading(workers, 2, False, collate)
        self._check_alike(EVALUATION, dataset, call, reading)
        train = self._progress.first
        chosen = micro_batch or (train.order.micro_batch if train else 32)
        order = self._order(dataset, "evaluation", chosen, chosen, shuffle=False)
        self._show_first(dataset, order, reading)
        if micro_batch is None and train is not None and not train.micro_batch_given:
            order = self._evaluation_order(LoaderPlan(dataset, order, reading), metrics or {}, train.order.global_batch)
        read: list[int] = []

        def counted(batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
            for batch in batches:
                read.append(0 if batch.filler else len(batch.ids))
                yield batch

        with self._clock.paused():
            results = engine.evaluate(counted(evaluation_batches(dataset, order, reading)), metrics)
            samples = int(self._comm.sum_over_data([float(sum(read))])[0])
        if perplexity:
            results["perplexity"] = Perplexity(results["loss"].sum, results["loss"].count)
        return results, samples

    def _evaluation_order(self, wanted: LoaderPlan, metrics: Mapping[str, MetricFunction], global_batch: int) -> Order:
        """The order, with forwards of the global batch where a score depends on who shares one: on any layout alike."""
        key = tuple((name, id(getattr(metric, "__code__", metric))) for name, metric in metrics.items())
        if key not in self._are_coupled:
            with self._clock.paused(), self._own_random_state():
                name = coupled_score(self._need_engine("evaluate"), wanted, metrics)
            if name is not None:
                self.message(
                    f"one forward of an evaluation sees {global_batch} samples, the global batch, because its {name} "
                    "would depend on those who share a forward; micro_batch=... says another number"
                )
            self._are_coupled[key] = name is not None, metrics  # kept, so that no other has its id
        size = global_batch if self._are_coupled[key][0] else wanted.order.micro_batch
        return replace(wanted.order, global_batch=size, micro_batch=size)

    def _observe(self, result: StepResult, batch: StepBatch) -> None:
        self._progress.step_done(batch)
        self._report_recovery(result.step)
        self._watching.profiler.end_step(result.step)
        profiled = self._watching.profiler.touches(result.step)
        self.journal.step(result, batch, self._progress.epoch(batch), profiled=profiled)
        self._watching.step_done(result.step, last=self._progress.is_read)
        if self.engine and self.engine.state.attention != self._attention:
            self._attention = self.engine.state.attention
            self.journal.emit("config", attention=self._attention)
        if result.overflowed:
            at = f"step {result.step} overflowed at the loss scale {result.loss_scale:g}"
            self.message(f"the gradients of {at}: the step is skipped, the scale halved")
        if self._clock.steps and ("ranks" in self.requests.agreed or self._progress.is_read):
            self._report_ranks(last=self._progress.is_read)
        if self._recorder and self._recorder.step(result, batch, self._progress.loaders[batch.loader]):
            self._comm.barrier()  # nobody leaves while another one still gathers tensors
            self.leave()
            raise SystemExit(0)

    def _report_recovery(self, step: int) -> None:
        """After the first step of a start that follows a failure: where the time between went."""
        if (failed := self._launch.get("restart")) and "done" not in self._times:
            self._times["done"] = time.time()
            moments = [failed["failed"], failed["stopped"], *(self._times[at] for at in ("joined", "ready", "done"))]
            spans = dict(zip(("stop", "start", "load", "step"), map(operator.sub, moments[1:], moments), strict=True))
            self.journal.emit("recovered", step=step, seconds=spans)

    def _report_ranks(self, *, last: bool) -> None:
        self._watching.report_ranks(self._need_engine("setup"), self._progress.workers, last=last)

    def _report(self) -> None:
        """Write the report of a run that has ended."""
        with suppress(OSError, ValueError):  # nobody may be there to hear of it
            print(leave_report(self.folder.path) or f"report: {self.folder.path / REPORT}", flush=True)

    def _announce(self, coming: StepBatch | None) -> None:
        """Before the first step: tell what begins, and what is expected of it."""
        self._announced = True
        self._times["ready"] = time.time()
        engine, loader = self._need_engine("loader"), self._progress.first
        engine.state.settle()  # before objects are hidden from its search
        self._garbage = GarbageCollection()
        assert loader is not None
        self.journal.start(self.folder.path.name, self.layout, self._comm.place, self.device, engine, loader)
        if self.is_main:
            settings = self.settings or script_settings(self._config, engine, loader)
            self.journal.emit("settings", text=settings)
        self._watching.foretell(engine, loader.order, self.planned)
        if not self._recorder:  # of a proof nobody wants to know
            if coming is not None and coming.micro_batches:
                self._watching.show(engine, coming.micro_batches[0])
            self._watching.tell_flops(engine)
        require("random draws")  # after FLOPs were counted: no fork can derive anything once this process has
        if engine.setup.settings.compile != "off":
            self.status("compiling: the first steps take longer")
        if line := batch_norm_line(
            engine.model, engine.setup.settings.batch_norm, loader.order, loader.micro_batch_given
        ):
            self.message(line)
        if self._recorder:
            self._recorder.begin(engine)
        self._watching.begin(engine, loader.total_steps)

    def _boundary(self, coming: StepBatch | None) -> None:
        """Between two steps: act on what all ranks agreed on."""
        if coming is not None and coming.first_samples is not None:
            self._data.check_first(_called(coming.loader), coming.first_samples)
        if not self._announced:
            self._announce(coming)
        self._checkpoints.catch_up(self._need_engine("loader").state)
        loader = self._progress.first if coming is None else self._progress.loaders[coming.loader]
        if loader is not None and self._tried is not None:
            steps, alone = self._steps_done - max(0, self._checkpoints.step), self._own_random_state()
            check_still_uncoupled(self._need_engine("loader"), loader, self._tried, steps, alone, coming is None)
        if self._garbage:
            self._garbage.after_step(self._steps_done)
        if self.is_main and (why := self._stops.reason(self._checkpoints.save_seconds, self.journal.step_seconds)):
            self.requests.ask("terminate", why)
        if self.is_main:
            self._watching.ask()
        if coming is None:
            self._check_replicas(again=False)
        if self._progress.is_read:  # a stream, whose last step did not know that it was
            self._watching.end_profile(self._steps_done)
            if self._clock.steps:
                self._report_ranks(last=True)
        if "unsaved" in self.requests.agreed:
            self._finish_saving()
        elif self._checkpoints.has_failed:
            self.requests.ask("unsaved")
        else:
            self._report_saved()
        if coming is None:
            self._stop_if_asked()
        self._stop_if_agreed()
        self._clock.script_begins()

    def _stop_if_asked(self) -> None:
        """Outside of the loop no step carries what a rank was asked for, so all are asked here; every rank calls it."""
        if self._progress.is_read:
            self.requests.agree(self._comm.sum(self.requests.votes(STOPS)), STOPS)
            self._stop_if_agreed()

    def _stop_if_agreed(self) -> None:
        for request, code in stop_signals.CODES.items():
            if request in self.requests.agreed:
                self.requests.settle()
                if "scratch" in self._launch:
                    Path(self._launch["scratch"], AGREED).touch()
                text = self.requests.why.get(request, "asked by a signal")
                if self._steps_done > 0:
                    self.status("saving before the stop")
                    if self.has_unsaved_steps or not self._progress.is_read:
                        self.save(wait=True)
                    self._finish_saving()
                    text += f"; the checkpoint of step {self._steps_done} is complete"
                reason = {"interrupt": "interrupted", "terminate": "terminated"}[request]
                text += ", and the same command goes on"
                self.journal.emit("stop", reason=reason, step=self._steps_done, text=text)
                self.leave()
                raise SystemExit(code)

    def _heard(self, frame: FrameType | None) -> None:
        """A stop came. In the script's own code behind the loop a single process need not wait for others."""
        if self.world_size == 1 and not self._closed and not is_ours(lines_of(frame)):
            self._stop_if_asked()

    def _order(self, dataset: Any, what: str, global_batch: int, micro_batch: int, shuffle: bool) -> Order:
        return Order(
            size=dataset_size(dataset, what),
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=self.seed,
            data_rank=self.layout.data_rank(self.rank),
            data_size=self.layout.data_size,
            equal_counts=self.layout.fsdp > 1 or self._need_engine(what).setup.settings.batch_norm == "sync",
            shuffle=shuffle,
        )

    def _reading(
        self, workers: int | None, prefetch: int, persistent: bool, collate: Collate, tokens: Tokens | None = None
    ) -> Reading:
        if workers is None:
            workers = min(MOST_WORKERS, cpus_per_rank(self._comm.place) - 1)
        return Reading(workers, prefetch, persistent, self.device.type == "cuda", collate, tokens)

    def _need_engine(self, what: str) -> Engine:
        if self.engine is None:
            raise UserError(f"run.{what} needs a model", "call run.setup(...) before it")
        return self.engine

    def _at_exit(self) -> None:
        """A script that ends without run.close(): finished if its loaders were read to the end."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._leave_after(error)
        elif self._progress.is_read:
            try:
                self.close()
            except Exception as failed:
                # Python would print it and exit with 0.
                self.journal.failure(self._steps_done, failed)
                self.leave()
                print(f"lockstep: {failed}", file=sys.stderr, flush=True)
                os._exit(1)
        else:
            self.leave()


def _called(loader: str) -> str:
    """The call that made a loader, to stand inside of a sentence."""
    return f"run.loader(name={loader!r})"
