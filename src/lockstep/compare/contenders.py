"""Who takes part in a comparison: layouts, with configs that all of them can run.

Everything that can be known without building the model is checked here, before the first of them starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config.layers import Layer, Resolved, for_world, resolve
from lockstep.config.schema import Config
from lockstep.errors import UserError, unknown
from lockstep.layout import AXES, Layout
from lockstep.parallel.pipeline.timetable import check_micro_batches, choose_micro_batch

BASELINES = ("data-parallel", "naive-mp")
"""Ways of courses that nobody should use: no layouts, and measured apart."""


def read_contenders(names: Sequence[str]) -> list[Layout]:
    """The layouts of these names."""
    found = [_read(name) for name in names]
    if twice := next((layout for layout in found if found.count(layout) > 1), None):
        raise UserError(f"--layouts names {twice} twice", "name each once; --repeats runs it more often")
    return found


def settle(layouts: Sequence[Layout], layers: Sequence[Layer]) -> list[Resolved]:
    """The config of each: the layers with its own layout, and with one micro-batch for all."""
    told = resolve(layers).config
    found = [_for_one(layout, layers, told) for layout in layouts]
    if told.micro_batch is None:
        size = _micro_batch_for_all(layouts, [resolved.config for resolved in found])
        found = [resolved.with_value("micro_batch", size, "compare: one for all layouts") for resolved in found]
    for layout, resolved in zip(layouts, found, strict=True):
        assert resolved.config.micro_batch is not None
        _check_batch(layout, resolved.config, resolved.config.micro_batch)
    return found


def _read(name: str) -> Layout:
    if name in BASELINES:
        raise UserError(
            f"{name} is no layout, but a baseline that nobody should train with",
            "benchmarks/baselines.py of Lockstep's repository measures it; leave it out here",
        )
    if "=" not in name and name != "single":
        raise unknown("layout", name, ["single", *(f"{axis}=2" for axis in AXES)])
    layout = Layout.parse(name)
    if layout.auto:
        raise UserError(
            f"layout {name} leaves the number of processes open", f"give {layout.auto} a size, as in {layout.auto}=2"
        )
    return layout.resolve(layout.world_size)


def _for_one(layout: Layout, layers: Sequence[Layer], told: Config) -> Resolved:
    own = Layer("--layouts", {"layout": str(layout), "nproc": layout.world_size})
    if told.batch_per_device is not None:
        own.values["global_batch"] = told.batch_per_device * layout.data_size
        if told.micro_batch is not None:
            own.values["micro_batch"] = min(told.micro_batch, told.batch_per_device)
    return for_world(resolve([*layers, own]), layout.world_size)


def _micro_batch_for_all(layouts: Sequence[Layout], configs: Sequence[Config]) -> int:
    """The largest that everybody can take, so that all do the same training with the same random numbers."""
    entrants = list(zip(layouts, configs, strict=True))
    most = min(_own_micro_batch(layout, config) for layout, config in entrants)
    for size in range(most, 0, -1):
        if all(_takes(layout, config, size) for layout, config in entrants):
            return size
    return most


def _own_micro_batch(layout: Layout, config: Config) -> int:
    """What it would take by itself."""
    assert config.global_batch is not None
    if layout.pp > 1:
        return choose_micro_batch(config.pipeline, layout.pp, config.global_batch, layout.data_size)
    return -(-config.global_batch // layout.data_size)


def _takes(layout: Layout, config: Config, micro_batch: int) -> bool:
    try:
        _check_batch(layout, config, micro_batch)
    except UserError:
        return False
    return True


def _check_batch(layout: Layout, config: Config, micro_batch: int) -> None:
    """Refuse micro-batches that a pipeline cannot take, or that leave ranks without any: those would seem slow."""
    global_batch = config.global_batch
    assert global_batch is not None
    if -(-global_batch // micro_batch) < layout.data_size:
        raise UserError(
            f"layout {layout} shares a step out to {layout.data_size} ranks, and it has "
            f"{global_batch} samples in micro-batches of {micro_batch}: some ranks would have nothing to do",
            f"--set micro_batch={max(1, global_batch // layout.data_size)}, or a larger --set global_batch",
        )
    if layout.pp > 1:
        try:
            check_micro_batches(config.pipeline, layout, global_batch, micro_batch, micro_batch)
        except UserError as error:
            step = f"{global_batch} samples in micro-batches of {micro_batch}"
            raise UserError(f"layout {layout} ({step}): {error.cause}", error.fix) from None
