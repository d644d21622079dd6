"""The settings of a script: what it told `lockstep.init`, `run.setup`, `run.loader`, under the config's names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.schema import LaunchConfig
from lockstep.config.toml import write_toml
from lockstep.data.loader import Loader
from lockstep.engine import Engine


def script_settings(config: LaunchConfig, engine: Engine, loader: Loader) -> str:
    """All of them as TOML, in the order of a recipe's config. Nothing of the environment is in it.

    A script may have passed anything: where it cannot be written down, that is said instead, and the run goes on.
    """
    try:
        return write_toml(_without_numpy(_values(config, engine, loader)))
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        return f"# the settings of this script could not be written ({why})\n"


def _values(config: LaunchConfig, engine: Engine, loader: Loader) -> dict[str, Any]:
    values: dict[str, Any] = {"script": Path(sys.argv[0]).name, **config.model_dump()}
    values |= {**engine.setup.settings.model_dump(), "attention": engine.state.attention or "auto"}
    values |= {
        "steps": loader.steps,
        "epochs": loader.epochs,
        "global_batch": loader.order.global_batch,
        "micro_batch": loader.order.micro_batch,
        "optimizer": {"name": type(engine.optimizer).__name__, **_plain(getattr(engine.optimizer, "defaults", {}))},
        "data": {
            "shuffle": loader.order.shuffle,
            "workers": loader.workers,
            "prefetch": loader.reading.prefetch,
            "persistent": loader.reading.persistent,
        },
    }
    return values


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """What TOML can say of an optimizer's arguments: no tensors, and nothing that is unset."""
    return {key: value for key, value in _without_numpy(values).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)


def _without_numpy(value: Any) -> Any:
    """The same with plain numbers: those of numpy write themselves in another way."""
    if isinstance(value, dict):
        return {key: _without_numpy(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_numpy(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value
