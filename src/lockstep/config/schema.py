"""The keys of a config, typed, each with its meaning: what decides what a run computes and where."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lockstep.config.cadence import Cadence, parse_duration
from lockstep.config.checked import Nested, checked, flatten
from lockstep.config.selection import check_in_reach, parse_ranks, parse_steps
from lockstep.errors import UserError, unknown
from lockstep.layout import AUTO, Layout


class Section(BaseModel):
    """A table of the config: no unknown keys, no silent conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class OptimizerConfig(Section):
    name: str = Field("adamw", description="sgd, adam, adamw, or an import path such as package.module:Class")
    lr: float = Field(1e-3, gt=0, description="learning rate the schedule multiplies")
    args: dict[str, Any] = Field({}, description="further arguments of the optimizer, such as weight_decay")


class ScheduleConfig(Section):
    name: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps of linear rise from 0 at the start")
    final: float = Field(0.0, ge=0, le=1, description="the last step's share of lr (linear and cosine)")


class DataConfig(Section):
    path: str | None = Field(
        None, description="a file or folder of your own instead of the recipe's data (docs/data.md)"
    )
    workers: int | None = Field(None, ge=0, description="loader processes per rank; unset: from the CPUs of a rank")
    prefetch: int = Field(2, gt=0, description="steps each worker prepares ahead")
    persistent: bool = Field(True, description="keep the workers from epoch to epoch")
    shuffle: bool = Field(True, description="a new order every epoch")


Attention = Literal["auto", "cudnn", "flash", "efficient", "math"]
BatchNorm = Literal["auto", "micro-batch", "sync"]
Compile = Literal["off", "blocks", "model"]
Format = Literal["fp32", "bf16", "fp16"]
"""A number format a run can be told to use."""


class NumericsConfig(Section):
    """Number formats beside `precision`, which says what matrix products are computed in."""

    tf32: bool = Field(False, description="let fp32 matmuls and convolutions on a GPU round their inputs to tf32")
    storage_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="what weights are kept in; bf16 with a stock optimizer has to be accepted by name"
    )
    param_dtype: Format | None = Field(
        None, description="round all weights to this for forward and backward, and gather shards in it"
    )
    reduce_dtype: Format = Field("fp32", description="what gradients are summed over ranks in")
    buffer_dtype: Format | None = Field(None, description="round the model's buffers to this (running statistics stay)")
    loss_scale: float = Field(65536.0, ge=1, description="what the loss is multiplied by at first (fp16)")
    loss_scale_window: int = Field(2000, gt=0, description="steps without overflow after which the scale doubles")
    accept: list[Literal["bf16-weights", "slow-fp16"]] = Field(
        [], description="what is refused unless it stands here: bf16-weights, slow-fp16"
    )


class ShardConfig(Section):
    """How the fsdp axis shards."""

    level: Literal["zero1", "zero2", "zero3"] = Field(
        "zero3",
        description="zero1: optimizer state alone; zero2: gradients too; zero3: weights too, gathered when needed",
    )
    units: Literal["auto", "blocks", "size"] = Field(
        "auto", description="what is gathered at once: a block, or modules by size; auto: blocks where there are any"
    )
    min_params: int = Field(100_000, gt=0, description="parameters of a unit at least (units by size)")

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, values: Any) -> Any:
        level = (
            str(values.get("level", "")).upper().removeprefix("SHARDINGSTRATEGY.") if isinstance(values, dict) else ""
        )
        ours = {
            "FULL_SHARD": "zero3",
            "HYBRID_SHARD": "zero3",
            "SHARD_GRAD_OP": "zero2",
            "_HYBRID_SHARD_ZERO2": "zero2",
        }
        if level in ours:
            raise ValueError(f"shard.level is {level}, torch's name: write {ours[level]}")
        if level == "NO_SHARD":
            raise ValueError("shard.level is NO_SHARD: use the axis dp instead of fsdp in the layout")
        return values


Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"]
"""The orders in which a pipeline does its forwards and backwards (parallel/pipeline/timetable.py)."""


class PipelineConfig(Section):
    """How the pp axis cuts a model and runs it."""

    schedule: Schedule = Field("1f1b", description="the order of forwards and backwards (docs/pipeline.md)")
    micro_batches: int | None = Field(
        None,
        gt=0,
        description="micro-batches of a step per data rank; unset: by micro_batch, or about 4 a rank",
    )
    stages_per_rank: int | None = Field(
        None, gt=0, description="stages of a rank; unset: 1 for gpipe and 1f1b, 2 for the others"
    )
    cuts: list[str] | None = Field(
        None, description="modules the stages after the first begin with; unset: by measured work"
    )

    @property
    def per_rank(self) -> int:
        """How many stages every rank has."""
        return self.stages_per_rank or (1 if self.schedule in ("gpipe", "1f1b") else 2)


class TensorConfig(Section):
    """How the tp axis cuts the matrices of a model."""

    roles: dict[str, Literal["column", "row", "whole"]] = Field(
        {}, description="how modules are cut, by patterns of their names; the others are found out (docs/tensor.md)"
    )
    sequence: Literal["auto", "on", "off"] = Field(
        "auto", description="whether norms and residuals work on some tokens a rank; auto: on GPUs, where it goes"
    )


class RecoverConfig(Section):
    """What a run does when its numbers are not as they should be (docs/faults.md)."""

    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="when loss or gradients are NaN or infinite: stop, skip the step, or go back to a checkpoint",
    )
    on_spike: Literal["warn", "skip", "rollback", "stop"] = Field(
        "warn", description="when the loss jumps far above that of the steps before"
    )
    check_every: int = Field(
        500,
        ge=0,
        description="steps between checks that replicas are equal; so is the first step, and every save; 0: saves only",
    )


class CommandConfig(Section):
    """What of `run.setup` the command line may say too."""

    pipeline: PipelineConfig = PipelineConfig()
    tensor: TensorConfig = TensorConfig()


class SetupConfig(CommandConfig):
    """How a model is cut and computed: the keywords of `run.setup`, the config's keys of the same names."""

    precision: Format = Field("fp32", description="what matmuls are computed in; weights and optimizer stay fp32")
    clip: float | None = Field(None, gt=0, description="largest global gradient norm")
    recompute: bool = Field(False, description="recompute the blocks' activations in the backward pass")
    compile: Compile = Field("off", description="torch.compile of each block, or of model and loss as a whole")
    attention: Attention = Field(
        "auto",
        description="the kernels of scaled_dot_product_attention on a GPU; auto: the fastest, measured once and kept",
    )
    batch_norm: BatchNorm = Field(
        "auto",
        description="what BatchNorm normalises over: auto: the global batch, or where micro_batch is given that; or "
        "always the micro-batch, or those of all data ranks (sync)",
    )
    init: Literal["auto", "by-name"] = Field(
        "auto", description="by-name: each module from its own seed, for huge models"
    )
    numerics: NumericsConfig = NumericsConfig()
    shard: ShardConfig = ShardConfig()
    recover: RecoverConfig = RecoverConfig()

    @property
    def kernels(self) -> str | None:
        """The attention kernels that were asked for; None: as torch chooses, or as they are measured."""
        return None if self.attention == "auto" else self.attention

    @model_validator(mode="after")
    def _formats_go_together(self) -> Self:
        check_numerics(self.precision, self.numerics)
        return self


class LaunchConfig(CommandConfig):
    """Where and how processes run: what a script under `lockstep run` can be told."""

    name: str | None = Field(None, description="the run's name under runs/; unset: the recipe's or script's")
    seed: int = Field(0, ge=0, lt=2**64, description="the one seed everything random follows from")
    layout: str = Field("dp=auto", description="mesh axes, such as dp=2,fsdp=4; auto: chosen for model and machine")
    nproc: int | None = Field(None, gt=0, description="processes on this node; unset: one a GPU, or 2 on CPUs")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="what computes")
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="who communicates; auto: nccl on CUDA, else gloo"
    )
    share_gpu: bool = Field(False, description="let several ranks use one GPU (over gloo)")
    timeout_minutes: float = Field(10.0, gt=0, description="how long a rank waits for the others before it is a hang")
    restarts: int = Field(3, ge=0, description="failures in a row, without a checkpoint between, that are tried again")
    on_oom: Literal["shrink", "stop"] | None = Field(
        None, description="shrink: go on with half the micro-batch when memory is full; unset: shrink in `train`"
    )
    max_time: str | None = Field(
        None, description='save and stop before this is over, as in "2h", "90m" or "1-12:00:00"; exit code 75'
    )
    steps: int | None = Field(None, gt=0, description="optimizer steps to do in all (or say epochs)")
    profile: str | None = Field(None, description='steps to profile, such as "10-12" or "10" (docs/profile.md)')
    profile_ranks: str = Field("0", description='ranks to profile, such as "0,3", or "all"')
    log_to: list[Literal["wandb", "mlflow"]] = Field(
        [], description="also tell W&B or MLflow of the run: wandb, mlflow (docs/console.md)"
    )

    @field_validator("profile", "profile_ranks", mode="before")
    @classmethod
    def _number_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _launchable(self) -> Self:
        if self.share_gpu and self.backend == "nccl":
            raise ValueError("share_gpu and backend nccl contradict each other: nccl refuses two ranks on one GPU")
        if self.device == "cpu" and self.backend == "nccl":
            raise ValueError("backend nccl needs device cuda: leave backend out on CPUs")
        if self.device == "cpu" and self.share_gpu:
            raise ValueError("share_gpu and device cpu contradict each other: say one of them")
        if self.max_time is not None:
            parse_duration(self.max_time)
        if self.profile is not None:
            parse_steps(self.profile)
        parse_ranks(self.profile_ranks)
        try:
            check_in_reach(self.profile, self.steps)
            if self.layout != AUTO:
                Layout.parse(self.layout)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self


class ScriptConfig(LaunchConfig):
    """What `lockstep run` was told."""

    script: str
    args: list[str] = []


class Config(SetupConfig, LaunchConfig):
    """Everything that decides what `lockstep train` computes and where."""

    recipe: str = Field("lm", description="what to train: lockstep train --list")
    epochs: int | None = Field(None, gt=0, description="passes over the data to do in all (or say steps)")
    global_batch: int | None = Field(None, gt=0, description="samples of one optimizer step over all devices")
    batch_per_device: int | None = Field(
        None, gt=0, description="samples of one step per replica (dp x fsdp), instead of global_batch"
    )
    micro_batch: int | None = Field(
        None, gt=0, description="samples of one forward; unset: what suits the layout, or what the training needs"
    )
    validate_every: str = Field(
        "1 epoch", description='"100 steps", "1 epoch", "10 minutes" or "never"; the end is always scored'
    )
    save_every: str = Field("1 epoch", description="as validate_every; the end is always saved")
    keep: int = Field(2, gt=0, description="how many of the last checkpoints stay, beside the best")
    keep_every: int | None = Field(None, gt=0, description="checkpoints at multiples of so many steps stay for good")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    data: DataConfig = DataConfig()
    model: dict[str, Any] = Field({}, description="the recipe's own settings")

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        for key in ("validate_every", "save_every"):
            try:
                Cadence.parse(getattr(self, key))
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
        for key, other in (("steps", "epochs"), ("global_batch", "batch_per_device")):
            if getattr(self, key) is not None and getattr(self, other) is not None:
                raise ValueError(f"{key} and {other} contradict each other: say one of them")
            if getattr(self, key) is None and getattr(self, other) is None:
                raise ValueError(f"neither {key} nor {other} is given: say one of them")
        if self.micro_batch and self.global_batch and self.micro_batch > self.global_batch:
            raise ValueError(
                f"micro_batch {self.micro_batch} is larger than global_batch {self.global_batch}: lower one of them"
            )
        if self.steps is not None and self.schedule.warmup_steps >= self.steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} leaves nothing of {self.steps} steps: shorten one"
            )
        return self


def check_numerics(precision: str, numerics: NumericsConfig) -> None:
    """Refuse number formats that do not go together."""
    if numerics.param_dtype not in (None, "fp32", precision):
        raise ValueError(
            f"numerics.param_dtype {numerics.param_dtype} needs products computed in it: set precision = "
            f'"{numerics.param_dtype}" as well'
        )
    if numerics.reduce_dtype == "fp16" and precision != "fp16":
        raise ValueError(
            'numerics.reduce_dtype fp16 loses small gradients without a loss scale: set precision = "fp16" as well'
        )
    if numerics.storage_dtype == "bf16" and precision != "bf16":
        raise ValueError('numerics.storage_dtype bf16 needs products computed in it: set precision = "bf16" as well')


def setup_config(command: CommandConfig, **keywords: Any) -> SetupConfig:
    """The checked keywords of `run.setup`; of what the command line may say too, that wins key by key."""
    values: Nested = {}
    for name, field in SetupConfig.model_fields.items():
        given = keywords.get(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            section = (
                given
                if isinstance(given, field.annotation)
                else checked(field.annotation, dict(given or {}), {}, f"{name}.")
            )
            if isinstance(told := getattr(command, name, None), Section):
                both = section.model_dump(exclude_unset=True) | told.model_dump(exclude_unset=True)
                section = checked(field.annotation, both, {}, f"{name}.")
            values[name] = section
        elif name in keywords:
            choices = get_args(field.annotation)
            if get_origin(field.annotation) is Literal and given not in choices:
                raise unknown(name, str(given), choices)
            values[name] = given
    return checked(SetupConfig, values, {})


def script_config(values: Nested, source: str) -> ScriptConfig:
    """The checked options of `lockstep run`."""
    return checked(ScriptConfig, values, {key: source for key, _ in flatten(values)})


def launch_config(values: Nested) -> LaunchConfig:
    """The checked arguments of `lockstep.init`."""
    return checked(LaunchConfig, values, {})
