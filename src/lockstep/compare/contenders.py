"""Who takes part in a comparison: layouts and teaching baselines, with configs that all of them can run.

Everything that can be known without building the model is checked here, before the first of them starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config.layers import Layer, Resolved, for_world, resolve
from lockstep.config.schema import Config
from lockstep.errors import UserError, unknown
from lockstep.layout import AXES, Layout
from lockstep.parallel.pipeline.timetable import check_micro_batches, choose_micro_batch

BASELINES = {
    "data-parallel": (
        "nobody should use nn.DataParallel: one process drives all GPUs, under one Python lock, copies the model to "
        "every GPU in every forward and gathers all outputs on the first; dp does the same work with a process each"
    ),
    "naive-mp": (
        "nobody should use naive model parallelism: one device works while the other waits, so that two are slower "
        "than one; pp fills the waiting with other micro-batches, and fsdp makes a model fit without any"
    ),
}
"""What is measured only to be seen, and why nobody should use it."""

NOT_IN_BASELINES = ("compile", "recompute", "attention", "numerics", "init")
"""Keys of the config that the plain loops of the baselines know nothing of."""


@dataclass(frozen=True)
class Contender:
    """What takes part: a layout, or one of the baselines, each of them one process that drives several devices."""

    name: str
    layout: Layout
    devices: int

    @property
    def is_baseline(self) -> bool:
        """Whether it is here to show why nobody does it so."""
        return self.name in BASELINES

    @property
    def processes(self) -> int:
        """How many are started."""
        return self.layout.world_size

    @property
    def replicas(self) -> int:
        """How many parts a step's samples are shared out into."""
        return self.devices if self.name == "data-parallel" else self.layout.data_size


def read_contenders(names: Sequence[str], gpus: int) -> list[Contender]:
    """What the names mean where there are so many GPUs to use."""
    found = [_read(name, gpus) for name in names]
    told = [one.name for one in found]
    if twice := next((name for name in told if told.count(name) > 1), None):
        raise UserError(f"--layouts names {twice} twice", "name each once; --repeats runs it more often")
    return found


def settle(contenders: Sequence[Contender], layers: Sequence[Layer]) -> list[Resolved]:
    """The config of each: the layers with its own layout, and with one micro-batch for all."""
    told = resolve(layers).config
    found = [_for_one(contender, layers, told) for contender in contenders]
    if told.micro_batch is None:
        size = _micro_batch_for_all(contenders, [one.config for one in found])
        found = [one.with_value("micro_batch", size, "compare: one for all layouts") for one in found]
    for contender, resolved in zip(contenders, found, strict=True):
        assert resolved.config.micro_batch is not None
        _check_batch(contender, resolved.config, resolved.config.micro_batch)
        _check_baseline(contender, resolved.config)
    return found


def _read(name: str, gpus: int) -> Contender:
    if name == "data-parallel":
        if gpus < 2:
            there = f"{'is' if gpus == 1 else 'are'} {gpus or 'none'}"
            raise UserError(
                f"data-parallel is nn.DataParallel, which shares a batch out over GPUs, and there {there}",
                "leave it out; dp=2 does the same work with one process for each device",
            )
        return Contender(name, Layout(), gpus)
    if name == "naive-mp":
        if gpus < 1:
            raise UserError(
                "naive-mp puts each half of the model on a device of its own (cuda:0 and cpu count as two), and "
                "there is only the CPU",
                "leave it out; pp=2 cuts the model between two processes",
            )
        return Contender(name, Layout(), 2)
    if "=" not in name and name != "single":
        raise unknown("layout", name, ["single", *BASELINES, *(f"{axis}=2" for axis in AXES)])
    layout = Layout.parse(name)
    if layout.auto:
        raise UserError(
            f"layout {name} leaves the number of processes open",
            f"give {layout.auto} a size, as in {layout.auto}=2",
        )
    layout = layout.resolve(layout.world_size)
    return Contender(str(layout), layout, layout.world_size)


def _for_one(contender: Contender, layers: Sequence[Layer], told: Config) -> Resolved:
    own = Layer("--layouts", {"layout": str(contender.layout), "nproc": contender.processes})
    if told.batch_per_device is not None:  # settled here: a baseline is one process with several replicas
        own.values["global_batch"] = told.batch_per_device * contender.replicas
        if told.micro_batch is not None:
            own.values["micro_batch"] = min(told.micro_batch, told.batch_per_device)
    return for_world(resolve([*layers, own]), contender.processes)


def _micro_batch_for_all(contenders: Sequence[Contender], configs: Sequence[Config]) -> int:
    """The largest that everybody can take, so that all do the same training with the same random numbers."""
    most = min(_own_micro_batch(*one) for one in zip(contenders, configs, strict=True))
    for size in range(most, 0, -1):
        if all(_takes(*one, size) for one in zip(contenders, configs, strict=True)):
            return size
    return most


def _own_micro_batch(contender: Contender, config: Config) -> int:
    """What it would take by itself."""
    assert config.global_batch is not None
    layout = contender.layout
    if layout.pp > 1:
        return choose_micro_batch(config.pipeline, layout.pp, config.global_batch, layout.data_size)
    return -(-config.global_batch // contender.replicas)


def _takes(contender: Contender, config: Config, micro_batch: int) -> bool:
    try:
        _check_batch(contender, config, micro_batch)
    except UserError:
        return False
    return True


def _check_batch(contender: Contender, config: Config, micro_batch: int) -> None:
    """Refuse micro-batches that a pipeline cannot take, or that leave ranks without any: those would seem slow."""
    layout, global_batch = contender.layout, config.global_batch
    assert global_batch is not None
    if -(-global_batch // micro_batch) < layout.data_size:
        raise UserError(
            f"layout {contender.name} shares a step out to {layout.data_size} ranks, and it has "
            f"{global_batch} samples in micro-batches of {micro_batch}: some ranks would have nothing to do",
            f"--set micro_batch={max(1, global_batch // layout.data_size)}, or a larger --set global_batch",
        )
    if layout.pp > 1:
        try:
            check_micro_batches(config.pipeline, layout, global_batch, micro_batch, micro_batch)
        except UserError as error:
            step = f"{global_batch} samples in micro-batches of {micro_batch}"
            raise UserError(f"layout {contender.name} ({step}): {error.cause}", error.fix) from None


def _check_baseline(contender: Contender, config: Config) -> None:
    """Refuse what a plain loop would leave out without a word."""
    if not contender.is_baseline:
        return
    for key in NOT_IN_BASELINES:
        if getattr(config, key) != Config.model_fields[key].default:
            raise UserError(
                f"{contender.name} is a plain loop that knows nothing of {key}, which is set",
                f"leave {key} or {contender.name} out",
            )
    if config.precision == "fp16":
        raise UserError(f"{contender.name} knows no loss scale, which fp16 needs", "compare in bf16 or fp32")
