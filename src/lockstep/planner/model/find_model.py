"""The model a user names: built-in, a Hugging Face config, shape numbers, a recipe, a function that builds it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.catalog import RECIPES, LmSettings
from lockstep.config.layers import Layer, resolve
from lockstep.config.toml import read_toml
from lockstep.errors import UserError, nearest, unknown
from lockstep.planner.model.convnet import RESNETS, resnet
from lockstep.planner.model.huggingface import from_config
from lockstep.planner.model.parts import Model
from lockstep.planner.model.transformer_shape import build, describe, from_catalogue, from_text, known_models

IN_PYTHON = re.compile(r"(?P<where>[\w./~-]+\.py|\w+(\.\w+)*):(?P<function>\w+)")


def find_model(text: str, sequence: int | None = None, overrides: Mapping[str, Any] | None = None) -> Model:
    """The model that `text` means, for samples of `sequence` tokens (unset: what the model is usually trained on).

    A built-in name (`llama-3-8b`), a recipe, a config.toml of Lockstep, a Hugging Face config.json or its folder, shape
    numbers (`layers=32,hidden=4096,heads=32`), or `module:function` and `file.py:function` that build an nn.Module.
    `overrides` are values of `--set`: of the config for a recipe, else shape numbers.
    """
    if sequence is not None and sequence < 1:
        raise UserError(f"samples of {sequence} tokens were asked for", "give at least one: --seq 1024")
    values = dict(overrides or {})
    name = text.strip().lower()
    path = Path(text).expanduser()
    if name in known_models():
        return build(from_catalogue(name, values), sequence)
    if name in RESNETS:
        _refuse_overrides(text, values)
        return resnet(name)
    if text in RECIPES:
        return _of_recipe(text, [Layer("MODEL", {"recipe": text})], values, sequence)
    if path.suffix == ".toml":
        return _of_recipe(path.stem, [Layer(str(path), read_toml(path))], values, sequence)
    if path.suffix == ".json" or path.is_dir():
        return build(from_config(path, values), sequence)
    if match := IN_PYTHON.fullmatch(text):
        from lockstep.planner.model.module import model_of_function

        _refuse_overrides(text, values)
        return model_of_function(match["where"], match["function"], sequence)
    if "=" in text:
        return build(from_text(text, values), sequence)
    raise _unknown(text)


def _unknown(text: str) -> UserError:
    options = [*known_models(), *RESNETS, *RECIPES]
    if nearest(text.lower(), options):
        return unknown("model", text.lower(), options)
    return UserError(
        f"unknown model {text!r}",
        f"name one of {', '.join(options)}, a config.json, a config.toml, module:function, or numbers such as "
        "layers=32,hidden=4096,heads=32",
    )


def _refuse_overrides(text: str, values: Mapping[str, Any]) -> None:
    if values:
        raise UserError(f"{text} has no numbers to set, and {', '.join(values)} were set", "leave --set out")


def _of_recipe(name: str, layers: list[Layer], values: dict[str, Any], sequence: int | None) -> Model:
    """The model of a recipe; `lm` by its numbers, the others by building them."""
    config = resolve([*layers, Layer("--set", values)]).config
    if config.recipe == "lm":
        settings = LmSettings(**config.model)
        numbers = {
            "layers": settings.layers,
            "hidden": settings.width,
            "heads": settings.heads,
            "vocab": 256,
            "positions": sequence or settings.context,
            "dropout": settings.dropout > 0,
            "sequence": sequence or settings.context,
        }
        return build(describe(name, numbers), sequence)
    from lockstep.planner.model.module import model_of_recipe

    return model_of_recipe(name, config, sequence)
