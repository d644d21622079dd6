"""The settings of a script: what it told `lockstep.init`, `run.setup` and `run.loader`, under the config's names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lockstep.config import LaunchConfig
from lockstep.data.loader import Loader
from lockstep.engine import Engine
from lockstep.parallel.apply import Cutting
from lockstep.toml import write_toml


def script_settings(config: LaunchConfig, cutting: Cutting, engine: Engine, loader: Loader) -> str:
    """All of them as TOML, in the order of a recipe's config. Nothing of the environment is in it."""
    values: dict[str, Any] = {"script": Path(sys.argv[0]).name, **config.model_dump()}
    values |= {
        "steps": loader.steps,
        "epochs": loader.epochs,
        "global_batch": loader.order.global_batch,
        "micro_batch": loader.order.micro_batch,
        "precision": engine.precision,
        "clip": engine.clip,
        "recompute": cutting.recompute,
        "compile": cutting.compile,
        "attention": engine.attention or "auto",
        "batch_norm": cutting.batch_norm,
        "init": "by-name" if cutting.init_by_name else "auto",
        "pipeline": cutting.pipeline.model_dump(),
        "tensor": cutting.tensor.model_dump(),
        "numerics": engine.numerics.model_dump(),
        "shard": cutting.shard.model_dump(),
        "recover": engine.recovery.config.model_dump(),
        "optimizer": {"name": type(engine.optimizer).__name__, **_plain(engine.optimizer.defaults)},
        "data": {
            "shuffle": loader.order.shuffle,
            "workers": loader.workers,
            "prefetch": loader.reading.prefetch,
            "persistent": loader.reading.persistent,
        },
    }
    return write_toml(values)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """What TOML can say of an optimizer's arguments: no tensors, and nothing that is unset."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)
