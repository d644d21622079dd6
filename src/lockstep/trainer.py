"""The training loop of the recipes.

for batch in loader:                    the position is restored, the order follows from (seed, epoch, position)
    out = engine.step(batch)            one optimizer step, whatever the layout
    yield out                           code between steps is the only hook
    if validation is due: validate      and save when it is the best so far
    if a checkpoint is due: save
validate, save, show a sample, test the best checkpoint, end
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from lockstep.config.arguments import named
from lockstep.config.cadence import Cadence
from lockstep.config.layers import Layer, resolve, to_toml
from lockstep.config.schema import Config, SetupConfig
from lockstep.data.loader import Loader
from lockstep.engine import Engine, StepResult
from lockstep.init_run import init
from lockstep.planner.model.find_model import find_model
from lockstep.recipes.task import task_of
from lockstep.record.folder import write_config
from lockstep.run import Run
from lockstep.step.optim import optimizer_factory, schedule_function
from lockstep.step.scoring import Metric

SAMPLE_LENGTH = 240
TEMPERATURE = 0.7


class Trainer:
    """Trains a recipe. `fit()` goes to the end; iterating it gives every step's result to the code in between.

    lockstep.Trainer({"recipe": "digits", "epochs": 5}).fit()
    """

    @named("lockstep.Trainer")
    def __init__(self, config: Config | Mapping[str, Any], run: Run | None = None) -> None:
        if not isinstance(config, Config):
            config = resolve([Layer("the script", dict(config))]).config
        self.run = run or init(
            config.layout,
            name=config.name or config.recipe,
            seed=config.seed,
            device=config.device,
            backend=config.backend,
            share_gpu=config.share_gpu,
            timeout_minutes=config.timeout_minutes,
            profile=config.profile,
            profile_ranks=config.profile_ranks,
        )
        if config.batch_per_device is not None:
            global_batch = config.batch_per_device * self.run.layout.data_size
            config = config.model_copy(update={"global_batch": global_batch, "batch_per_device": None})
        self.config = config
        self.last_validation: dict[str, Metric] = {}
        self.last_test: dict[str, Metric] = {}
        self.run.keep_checkpoints(config.keep, config.keep_every)
        self.run.status("reading the data")
        self.task = task_of(config)
        self._validate_every = Cadence.parse(config.validate_every)
        self._save_every = Cadence.parse(config.save_every)
        self._validated = self._saved = time.monotonic()
        self._validated_step = -1
        if config.recipe == "lm":  # the others would have to be built and followed first
            self.run.planned = partial(find_model, "lm", None, {"model": config.model})
        self.engine = self._setup()
        self.loader = self._load()

    def fit(self) -> dict[str, Metric]:
        """Train to the end; returns the last validation."""
        for _ in self:
            pass
        return self.last_validation

    def __iter__(self) -> Iterator[StepResult]:
        run, engine = self.run, self.engine
        if self.task.baseline:
            name, loss = self.task.baseline
            run.journal.emit("baseline", name=name, loss=loss)
        for batch in self.loader:
            out = engine.step(batch)
            yield out
            if out.step == self.loader.total_steps:
                break  # the end validates and saves in any case
            if self._due(self._validate_every, "validate", self._validated, out.step):
                self.validate()
            if self._due(self._save_every, "save", self._saved, out.step) and run.saved_step != out.step:
                self.save()
        if self._validated_step != engine.steps_done:
            self.validate()
        if run.saved_step != engine.steps_done:
            self.save()
        if self.task.generate and self.task.prompt:
            run.status("generating a sample")
            with engine.scoring():
                text = self.task.generate(engine.model, self.task.prompt, SAMPLE_LENGTH, TEMPERATURE, self.config.seed)
            run.journal.emit("sample", step=engine.steps_done, prompt=self.task.prompt, text=text)
        self.test()
        run.close()

    def validate(self) -> dict[str, Metric]:
        """Score the validation data; a new best is saved."""
        if self.task.validation is None:
            return {}
        step = self.engine.steps_done
        self.last_validation = self.run.validate(self.task.validation, self.task.metrics, **self._scoring())
        self._validated, self._validated_step = time.monotonic(), step
        if self.run.saved_step == step:
            self._saved = self._validated
        return self.last_validation

    def test(self) -> dict[str, Metric]:
        """Score the test data with the best checkpoint, whose weights stay in the model."""
        if self.task.test is not None:
            self.last_test = self.run.test(self.task.test, self.task.metrics, **self._scoring())
        return self.last_test

    def save(self) -> None:
        """Write a checkpoint."""
        self.run.save()
        self._saved = time.monotonic()

    def _scoring(self) -> dict[str, Any]:
        return {"perplexity": self.task.perplexity, "workers": self.config.data.workers}

    def _setup(self) -> Engine:
        config, per_epoch = self.config, self._steps_per_epoch()
        total = config.steps if config.steps is not None else (config.epochs or 1) * per_epoch
        return self.run.setup(
            self.task.build_model,
            self.task.loss,
            optimizer=optimizer_factory(config.optimizer),
            schedule=schedule_function(config.schedule, total),
            **{name: getattr(config, name) for name in SetupConfig.model_fields},
        )

    def _load(self) -> Loader:
        config, data = self.config, self.config.data
        assert config.global_batch is not None
        loader = self.run.loader(
            self.task.train,
            config.global_batch,
            micro_batch=config.micro_batch,
            epochs=config.epochs,
            steps=config.steps,
            shuffle=data.shuffle,
            workers=data.workers,
            prefetch=data.prefetch,
            persistent=data.persistent,
            tokens=self.task.tokens,
        )
        settled = {"micro_batch": loader.order.micro_batch, "layout": str(self.run.layout)}
        config = config.model_copy(update=settled)
        self.run.settings = to_toml(config)
        if self.run.is_main:
            write_config(self.run.folder.path, config)
        return loader

    def _steps_per_epoch(self) -> int:
        assert self.config.global_batch is not None
        return -(-len(self.task.train) // self.config.global_batch)  # type: ignore[arg-type]

    def _due(self, cadence: Cadence, request: str, last: float, step: int) -> bool:
        """Whether it is time, on all ranks at once: a clock only asks, and the ranks agree with the next step."""
        if cadence.unit != "minutes":
            return cadence.due(step, self.loader.steps_per_epoch, 0.0)
        if request in self.run.requests.agreed:
            return True
        if cadence.due(step, None, (time.monotonic() - last) / 60):
            self.run.requests.ask(request)
        return False
