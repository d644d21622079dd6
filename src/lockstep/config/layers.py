"""Where a config's values come from: defaults, the recipe, a TOML file, options, `--set`; a later layer wins.

An unknown key, a wrong type or a contradiction is a UserError that names the key and what would be right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.catalog import find_recipe
from lockstep.config.checked import Nested, checked, flatten
from lockstep.config.schema import Config, LaunchConfig
from lockstep.config.toml import MOST_LEVELS, parse_toml, read_toml, write_toml
from lockstep.errors import UserError
from lockstep.layout import Layout

EXCLUSIVE = {
    "steps": "epochs",
    "epochs": "steps",
    "global_batch": "batch_per_device",
    "batch_per_device": "global_batch",
    "pipeline.micro_batches": "micro_batch",
}
"""Two ways to say one thing: a layer that says it one way takes back what an earlier layer said the other way."""


@dataclass(frozen=True)
class Layer:
    """Values of one source, for example the file or the `--set` options."""

    source: str
    values: Nested


@dataclass(frozen=True)
class Resolved:
    """A checked config and, for every key, the source of its value."""

    config: Config
    origin: Mapping[str, str]

    def with_value(self, key: str, value: Any, source: str) -> Resolved:
        """The same with one more decided value (a dotted key), checked again."""
        values = self.config.model_dump()
        _put(values, key, value)
        return Resolved(checked(Config, values, {**self.origin, key: source}), {**self.origin, key: source})


def resolve(layers: Sequence[Layer]) -> Resolved:
    """Merge the layers, later ones winning, over the defaults of Config and of the recipe they name."""
    name = "lm"
    for layer in layers:
        name = layer.values.get("recipe", name)
    recipe = find_recipe(name) if isinstance(name, str) else None
    if recipe:
        layers = [Layer(f"recipe {recipe.name}", recipe.defaults), *layers]
    merged: Nested = {}
    origin: dict[str, str] = {}
    for layer in layers:
        for key, value in flatten(layer.values):
            if key in EXCLUSIVE and EXCLUSIVE[key] not in layer.values:
                merged.pop(EXCLUSIVE[key], None)
                origin.pop(EXCLUSIVE[key], None)
            if key == "optimizer.name" and value != merged.get("optimizer", {}).get("name", value):
                merged["optimizer"].pop("args", None)  # they were meant for the optimizer before
                origin.pop("optimizer.args", None)
            try:
                _put(merged, key, value)
            except TypeError:
                raise UserError(
                    f"{key} (from {layer.source}) is not a key", "what stands before a dot is a table"
                ) from None
            origin[key] = layer.source
    if recipe:
        _make_room(merged, origin, layers[0].source)
    settings_keys = [f"model.{name}" for name in recipe.model_settings.model_fields] if recipe else []
    config = checked(Config, merged, origin, also=settings_keys)
    if recipe:
        settings = checked(recipe.model_settings, config.model, origin, prefix="model.")
        config = config.model_copy(update={"model": settings.model_dump()})
    everything = {key: origin.get(key, "default") for key, _ in flatten(config.model_dump())}
    return Resolved(config, everything)


def _make_room(values: Nested, origin: dict[str, str], recipe: str) -> None:
    """Let what a recipe chose for its own size give way to a smaller run the user asked for."""
    steps, warmup = values.get("steps"), values.get("schedule", {}).get("warmup_steps", 0)
    if origin.get("schedule.warmup_steps") == recipe and isinstance(steps, int) and 0 < steps <= warmup:
        values["schedule"]["warmup_steps"] = steps // 10
        origin["schedule.warmup_steps"] = f"{recipe}, shortened to fit {steps} steps"
    batch, micro_batch = values.get("global_batch"), values.get("micro_batch", 0)
    if origin.get("micro_batch") == recipe and isinstance(batch, int) and 0 < batch < micro_batch:
        values["micro_batch"] = batch
        origin["micro_batch"] = f"{recipe}, cut down to global_batch"


def parse_assignments(assignments: Sequence[str], example: str = "optimizer.lr=0.01") -> Nested:
    """The values of `--set a.b=c`: c is read as TOML where it is TOML (3, 1e-3, true, [1, 2]), else as text.

    The word unset takes a value away: `--set clip=unset`. `example` is shown to who has written it otherwise.
    """
    values: Nested = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip() or key.count(".") > MOST_LEVELS:
            raise UserError(f"cannot read --set {assignment[:100]!r}", f"write --set key=value, as in --set {example}")
        value = _read_value(text, f"--set {key.strip()}")
        try:
            _put(values, key.strip(), value)
        except TypeError:
            raise UserError(f"--set {key} contradicts another --set", "a key is either a value or a table") from None
    return values


def _read_value(text: str, source: str) -> Any:
    """A value of `--set`: TOML, or a table as JSON has it, or text."""
    try:
        return parse_toml(f"value = {text}", source)["value"]
    except UserError:
        raise
    except ValueError:
        if text.strip().startswith("{"):
            with suppress(ValueError, RecursionError):
                return json.loads(text)
    return None if text.strip() == "unset" else text.strip()


def to_toml(config: LaunchConfig) -> str:
    """The config as TOML with every value; what is unset stands as a comment."""
    return write_toml(config.model_dump())


def from_toml(path: Path) -> Config:
    """The config a run folder holds."""
    values = read_toml(path)  # every value is there: the recipe's defaults must not fill in what was unset
    return checked(Config, values, {key: str(path) for key, _ in flatten(values)})


def _put(values: Nested, dotted: str, value: Any) -> None:
    *tables, leaf = dotted.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise TypeError(dotted)
    if dotted == "optimizer.args" and isinstance(value, dict):
        before = values.get(leaf, {})
        if not isinstance(before, dict):
            raise TypeError(dotted)
        value = {**before, **value}
    values[leaf] = value


def for_world(resolved: Resolved, world_size: int) -> Resolved:
    """The config with layout and global batch settled for a world size."""
    layout = Layout.parse(resolved.config.layout).resolve(world_size)
    if str(layout) != resolved.config.layout:
        resolved = resolved.with_value("layout", str(layout), f"{resolved.config.layout} on {world_size} processes")
    per_device = resolved.config.batch_per_device
    if per_device is not None:
        values = resolved.config.model_dump()
        values.update(batch_per_device=None, global_batch=per_device * layout.data_size)
        source = f"batch_per_device {per_device} x {layout.data_size} replicas"
        origin = {**resolved.origin, "global_batch": source, "batch_per_device": "default"}
        _make_room(values, origin, f"recipe {resolved.config.recipe}")
        resolved = Resolved(checked(Config, values, origin), origin)
    return resolved
