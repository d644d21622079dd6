"""From what a user typed to the job that is planned: model, machine, batch, and what is left to be found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from lockstep.config.catalog import RECIPES
from lockstep.config.checked import flatten
from lockstep.config.layers import Layer, Resolved, parse_assignments, resolve
from lockstep.config.schema import Config, PipelineConfig
from lockstep.config.toml import read_toml
from lockstep.errors import UserError, unknown
from lockstep.layout import AUTO, Layout
from lockstep.planner.cost.checks import check_precision, settle_layout
from lockstep.planner.cost.job import Job
from lockstep.planner.machine.find_machine import find_machine
from lockstep.planner.machine.hardware import Machine
from lockstep.planner.model.find_model import find_model
from lockstep.planner.model.parts import Model
from lockstep.planner.search.rank_layouts import Asked, Zero
from lockstep.planner.show.paste import PLACEHOLDER

USUAL_TOKENS = ((1e9, 0.5e6), (2e10, 2e6), (2e11, 4e6), (float("inf"), 16e6))
"""Tokens of a step for a model of up to so many parameters.

Brown et al. 2020 (GPT-3), table 2.1: 0.5 to 3.2 million; The Llama 3 Herd of Models, section 3.4.1: 16 million for
405 B.
"""

USUAL_SAMPLES = 32
"""Of a GPU, for a model without sequences (Goyal et al. 2017)."""

MOST_A_SAMPLE = 16
"""GPUs that share a sample, where the batch is assumed: more would wait for one another too much."""

READ = (
    *("global_batch", "micro_batch", "precision", "recompute", "compile", "attention", "shard.level", "layout"),
    *("pipeline.schedule", "pipeline.micro_batches", "pipeline.stages_per_rank", "tensor.sequence"),
)
"""Keys of the config that a plan depends on, besides `model`."""


@dataclass(frozen=True)
class Typed:
    """The options of the command, as they were given."""

    model: str
    cluster: str | None
    gpus: int | None = None
    nodes: int | None = None
    layout: str | None = None
    search: bool = False
    sequence: int | None = None
    assignments: Sequence[str] = ()
    values: Mapping[str, Any] | None = None
    """Config values that have options of their own."""


@dataclass(frozen=True)
class Request:
    """What is to be planned."""

    base: Job
    """With a layout and choices that mean nothing yet, where they are left to be found."""
    world_size: int
    layout: Layout | None
    """None: all are compared."""
    asked: Asked
    remarks: list[str]
    named: str
    """What `lockstep train` is told to train: a recipe or a config, or a placeholder for one."""
    typed: Typed
    told: dict[str, Any]
    """What `--set` and the options said of the config."""


def read_request(typed: Typed, largest: int | None = None) -> Request:
    """Check and complete what was typed; `largest` is the number of GPUs of the largest size of a scaling curve."""
    if typed.layout == AUTO:
        typed = replace(typed, layout=None)
    if typed.search and typed.layout:
        raise UserError("--search compares all layouts, and --layout names one", "say one of them")
    is_recipe = typed.model in RECIPES or typed.model.endswith(".toml")
    told = parse_assignments(list(typed.assignments))
    shape = {} if is_recipe else {key: told.pop(key) for key in list(told) if key not in Config.model_fields}
    machine = _machine(typed, told)
    model = find_model(typed.model, typed.sequence, {**told, **dict(typed.values or {})} if is_recipe else shape)
    world_size = largest or machine.gpus
    resolved = _resolve(typed, told, is_recipe, model, world_size)
    layout_text = typed.layout or _layout_of(resolved, typed)
    layout = settle_layout(layout_text, world_size) if layout_text else None
    said = _said(resolved)
    base = Job(
        model=model,
        machine=machine,
        layout=layout or Layout(),
        global_batch=_batch(resolved.config, layout),
        micro_batch=1,
        sequence_parallel=_cuts_tokens(said.get("tensor.sequence", "auto"), machine),
        precision=_precision(resolved, is_recipe, machine),
        flash=said.get("attention") != "math",
        compiled=said.get("compile", "off") != "off",
    )
    unread = [key for key in said if key not in READ and not key.startswith("model.")]
    remarks = list(model.notes)
    if unread:
        remarks.append(f"a plan does not depend on {', '.join(unread)}")
    if "global_batch" not in said and "batch_per_device" not in said and not is_recipe:
        what = f"{base.tokens / 1e6:.3g} million tokens" if model.sequence > 1 else f"{USUAL_SAMPLES} a GPU"
        remarks.append(f"a global batch of {base.global_batch:,} samples ({what}) is assumed (--global-batch sets it)")
    asked = _asked(dict(flatten(resolved.config.model_dump())) if layout and is_recipe else said, base, layout)
    named = typed.model if is_recipe else PLACEHOLDER
    return Request(base, world_size, layout, asked, remarks, named, typed, told | dict(typed.values or {}))


def _machine(typed: Typed, told: Mapping[str, Any]) -> Machine:
    """The machine, with as many GPUs as the layout needs where neither says how many."""
    if typed.cluster is None:
        raise UserError("--cluster is missing", "name what is planned for, as in --cluster 64xH100, A100-40 or here")
    machine = find_machine(typed.cluster, typed.nodes, typed.gpus)
    if not machine.gpu.runs_lockstep:
        raise UserError(
            f"Lockstep does not run on {machine.gpu.name}", "name a GPU, as in --cluster H100, or laptop-cpu"
        )
    text = typed.layout or told.get("layout")
    if text and text != AUTO and not typed.search and typed.gpus is None and typed.nodes is None:
        layout = Layout.parse(text)
        if layout.auto is None and layout.world_size != machine.gpus:
            with suppress(UserError):  # 64xH100 says how many: the layout is then refused
                machine = find_machine(typed.cluster, gpus=layout.world_size)
    return machine


def _resolve(typed: Typed, told: dict[str, Any], is_recipe: bool, model: Model, world_size: int) -> Resolved:
    """The config: a recipe's own, or for other models what was said alone."""
    named = typed.layout or ""
    data = settle_layout(named, world_size).data_size if named else 1
    first: dict[str, Any] = {"global_batch": max(usual_batch(model, world_size), data)}
    if is_recipe:
        first = {"recipe": typed.model}
        if typed.model.endswith(".toml"):
            first = read_toml(Path(typed.model))
    elif {"global_batch", "batch_per_device"} & ({*told} | {*(typed.values or {})}):
        first = {}
    source = typed.model if is_recipe else "assumed"
    layers = [Layer("--set", told), Layer("the command line", dict(typed.values or {}))]
    if not is_recipe:
        layers.insert(0, Layer("assumed", {"micro_batch": None}))
    return resolve([Layer(source, first), *layers])


def usual_batch(model: Model, world_size: int) -> int:
    """Samples of a step where nobody says: as many as were used for models of this size."""
    if model.sequence <= 1:
        return USUAL_SAMPLES * world_size
    tokens = next(tokens for most, tokens in USUAL_TOKENS if model.parameters <= most)
    power = max(0, round(math.log2(tokens / model.sequence)))
    return max(1 << power, world_size // MOST_A_SAMPLE)


def _said(resolved: Resolved) -> dict[str, Any]:
    """What the user has decided: not by default, nor by a recipe."""
    values = dict(flatten(resolved.config.model_dump()))
    sources = {key: source for key, source in resolved.origin.items() if key in values and values[key] is not None}
    chosen = [key for key, source in sources.items() if source not in ("default", "assumed")]
    return {key: values[key] for key in chosen if not sources[key].startswith("recipe ") and key not in _NAMES}


_NAMES = ("recipe", "name")


def _layout_of(resolved: Resolved, typed: Typed) -> str | None:
    """The layout that a config file or `--set` names."""
    named = resolved.config.layout if resolved.origin.get("layout") != "default" else AUTO
    is_a_recipe_s = resolved.origin.get("layout", "").startswith("recipe ")
    return None if named == AUTO or typed.search or is_a_recipe_s else named


def _batch(config: Config, layout: Layout | None) -> int:
    if config.global_batch is not None:
        return config.global_batch
    if layout is None:
        raise UserError(
            "batch_per_device makes another training of every layout, so that they cannot be compared",
            "say --global-batch, or name one --layout",
        )
    return cast(int, config.batch_per_device) * layout.data_size


def _precision(resolved: Resolved, is_recipe: bool, machine: Machine) -> Literal["fp32", "fp16", "bf16"]:
    """What was said, or a recipe trains in; else the fastest format that needs no care."""
    peaks = machine.gpu.tflops
    chosen = resolved.config.precision
    if not is_recipe and resolved.origin.get("precision", "default") in ("default", "recipe lm"):
        usual = [name for name in ("bf16", "fp16") if peaks.get(name, 0.0) > peaks.get("fp32", 0.0)]
        chosen = cast(Literal["fp32", "fp16", "bf16"], usual[0] if usual else "fp32")
    check_precision(chosen, machine)
    return chosen


def _asked(said: Mapping[str, Any], base: Job, layout: Layout | None) -> Asked:
    """What the search has to keep; with a layout all that `train` would do by itself is decided."""
    asked = Asked(
        layout=layout,
        micro_batch=said.get("micro_batch"),
        recompute={True: "full", False: "none", None: None}[said.get("recompute")],
        zero=cast(Zero, int(said["shard.level"][-1])) if "shard.level" in said else None,
        schedule=said.get("pipeline.schedule"),
        stages_per_rank=said.get("pipeline.stages_per_rank"),
    )
    if layout is None:
        return asked
    schedule = asked.schedule or "1f1b"
    stages = asked.stages_per_rank or PipelineConfig(schedule=schedule).per_rank
    asked = replace(asked, recompute=asked.recompute or "none", zero=asked.zero or 3, schedule=schedule)
    asked = replace(asked, stages_per_rank=stages)
    if (number := said.get("pipeline.micro_batches")) is not None and asked.micro_batch is None:
        asked = replace(asked, micro_batch=max(1, base.global_batch // layout.data_size // number))
    return asked


def _cuts_tokens(asked: str, machine: Machine) -> bool:
    """As `train` has it: on GPUs unless it is said otherwise."""
    return asked == "on" or (asked == "auto" and not machine.gpu.is_cpu)


def check_choice(option: str, value: str | None, options: Sequence[str]) -> None:
    """Refuse a word that an option does not know."""
    if value is not None and value not in options:
        raise unknown(option, value, options)
