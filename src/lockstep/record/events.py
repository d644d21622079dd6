"""What an event of a run looks like: the fields of every kind. docs/events.md explains each of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, TypeAlias, get_args

from lockstep.errors import UserError, unknown

Event: TypeAlias = dict[str, Any]

# A field is of a type, of one of several types, an object with fields of its own, or a list of what stands in [].
Shape: TypeAlias = "type | UnionType | Mapping[str, Shape] | list[Shape]"

NUMBER = int | float
NUMBER_OR_NULL = int | float | None
METRICS: Shape = {"*": {"sum": NUMBER, "count": NUMBER, "value": NUMBER}}

GPU: Shape = {
    "index": int,
    "name": str,
    "busy": NUMBER_OR_NULL,
    "memory": NUMBER_OR_NULL,
    "memory_total": NUMBER_OR_NULL,
    "watts": NUMBER_OR_NULL,
    "celsius": NUMBER_OR_NULL,
    "ranks": [int],
}
HOST: Shape = {
    "host": str,
    "cores": int,
    "cpu": NUMBER_OR_NULL,
    "memory": NUMBER_OR_NULL,
    "memory_total": NUMBER_OR_NULL,
    "sent": NUMBER_OR_NULL,
    "received": NUMBER_OR_NULL,
    "read": NUMBER_OR_NULL,
    "written": NUMBER_OR_NULL,
    "watts": NUMBER_OR_NULL,
    "joules": NUMBER_OR_NULL,
    "gpus": [GPU],
}

COMPARED: Shape = {"predicted": NUMBER, "measured": NUMBER_OR_NULL, "error": NUMBER_OR_NULL}

COMMON: Mapping[str, Shape] = {"time": NUMBER, "kind": str, "attempt": int}

SCHEMA: Mapping[str, Mapping[str, Shape]] = {
    # Every named field is always there. "*" stands for any further name.
    "start": {
        "run": str,
        "layout": str,
        "world_size": int,
        "nodes": int,
        "device": str,
        "precision": str,
        "formats": {"*": str},
        "resumed_from_step": int | None,
        "total_steps": int | None,
        "steps_per_epoch": int | None,
        "global_batch": int,
        "micro_batch": int,
        "item": str,
        "versions": {"lockstep": str, "torch": str, "python": str},
        "parameters": int,
        "host": str,
    },
    "status": {"text": str},
    "step": {
        "step": int,
        "epoch": NUMBER,
        "loss": NUMBER,
        "grad_norm": NUMBER,
        "lr": NUMBER,
        "weight": NUMBER,
        "items": int,
        "padding": int,
        "seconds": NUMBER,
        "skipped": bool,
        "loss_scale": NUMBER,
    },
    "validation": {
        "step": int,
        "epoch": NUMBER,
        "loss": NUMBER,
        "metrics": METRICS,
        "samples": int,
        "seconds": NUMBER,
        "best": bool,
    },
    "test": {"step": int, "loss": NUMBER, "metrics": METRICS, "samples": int, "seconds": NUMBER},
    "checkpoint": {"step": int, "path": str, "seconds": NUMBER, "stall": NUMBER, "bytes": int, "best": bool},
    "metric": {"step": int, "values": {"*": NUMBER}},
    "baseline": {"name": str, "loss": NUMBER},
    "sample": {"step": int, "prompt": str, "text": str},
    "message": {"text": str, "level": str},
    "failure": {
        "rank": int,
        "host": str,
        "cause": str,
        "text": str,
        "where": str,
        "step": int | None,
        "restarted": bool,
        "micro_batch": int | None,
    },
    "recovered": {"step": int, "seconds": {"stop": NUMBER, "start": NUMBER, "load": NUMBER, "step": NUMBER}},
    "alarm": {
        "what": str,
        "step": int,
        "rank": int | None,
        "sample_ids": list,
        "loss": NUMBER,
        "action": str,
        "text": str,
    },
    "ranks": {
        "step": int,
        "steps": int,
        "seconds": NUMBER,
        "input": [NUMBER],
        "compute": [NUMBER],
        "optimizer": [NUMBER],
        "between": [NUMBER],
        "wait": [NUMBER],
        "samples": [int],
        "memory": [int],
        "hosts": [str],
    },
    "machine": {
        "step": int,
        "hosts": [HOST],
        "ranks": {
            "cores": [NUMBER_OR_NULL],
            "memory": [NUMBER_OR_NULL],
            "threads": [int | None],
            "workers": [int | None],
        },
    },
    "timetable": {"step": int, "seconds": NUMBER, "busy": list, "lanes": list},
    "flops": {"per_sample": NUMBER_OR_NULL, "by": {"*": NUMBER}, "peak": NUMBER_OR_NULL, "source": str, "reason": str},
    "settings": {"text": str},
    "profile": {
        "rank": int,
        "host": str,
        "first_step": int,
        "last_step": int,
        "path": str,
        "seconds": {"whole": NUMBER, "compute": NUMBER, "communication": NUMBER, "overlapped": NUMBER, "idle": NUMBER},
        "kernels": list,
        "gaps": list,
        "memory": list,
        "tensors": list,
        "text": str,
    },
    "straggler": {
        "step": int,
        "rank": int | None,
        "host": str | None,
        "cause": str,
        "seconds": NUMBER,
        "others": NUMBER_OR_NULL,
        "text": str,
    },
    "job": {
        "id": str,
        "restart": int,
        "state": str,
        "reason": str,
        "nodes": str,
        "partition": str,
        "account": str,
        "exit_code": str,
    },
    "prediction": {
        "memory_bytes": NUMBER_OR_NULL,
        "step_seconds": NUMBER_OR_NULL,
        "machine": str | None,
        "band": NUMBER_OR_NULL,
        "source": str,
        "reason": str,
    },
    "prediction_error": {"step": int, "machine": str, "memory_bytes": COMPARED, "step_seconds": COMPARED},
    "stop": {"reason": str, "step": int, "text": str},
    "end": {
        "step": int,
        "loss": NUMBER,
        "best_loss": NUMBER_OR_NULL,
        "best_step": int | None,
        "metrics": METRICS,
        "seconds": NUMBER,
    },
    "config": {"*": str | int | float | bool | None},
}

CHOICES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("start", "item"): ("tokens", "samples"),
    ("message", "level"): ("info", "warning"),
    ("failure", "cause"): ("refused", "exception", "exit", "signal", "memory", "hang", "left"),
    ("alarm", "what"): ("loss", "gradient", "spike"),
    ("alarm", "action"): ("warn", "skip", "rollback", "stop"),
    ("straggler", "cause"): ("input", "compute", "communication"),
    ("stop", "reason"): ("interrupted", "terminated", "failed"),
}


_PLAIN: Mapping[Any, Mapping[str, frozenset[type]]] = {
    kind: {name: frozenset(get_args(shape) or (shape,)) for name, shape in {**COMMON, **fields}.items()}
    for kind, fields in SCHEMA.items()
    if not any(isinstance(shape, Mapping | list) for shape in fields.values())
    and "*" not in fields
    and kind not in {choice for choice, _ in CHOICES}
}
"""The types of the fields of kinds that have nothing but fields."""


def validate(event: Event, *, of_any_version: bool = False) -> None:
    """Refuse an event outside the schema, naming the field that is missing, unknown or of the wrong type.

    Where it may be `of_any_version`, kinds, fields and choices that a later one has added are fine.
    """
    kind = str(event.get("kind"))
    if _is_plainly_right(event, _PLAIN.get(kind)):  # most are, and there is one of every step
        return
    if kind not in SCHEMA and not of_any_version:
        raise unknown("event kind", kind, SCHEMA)
    _check(event, {**COMMON, **SCHEMA.get(kind, {})}, kind, "", of_any_version)
    for (choice_kind, field), options in CHOICES.items():
        if kind == choice_kind and event[field] not in options and not of_any_version:
            raise unknown(f"{field} of the {kind} event", event[field], options)


def has_head(event: Mapping[str, object]) -> bool:
    """Whether something has what every event has, each of its type."""
    return all(type(event.get(name)) in (get_args(shape) or (shape,)) for name, shape in COMMON.items())


def _is_plainly_right(event: Event, plain: Mapping[str, frozenset[type]] | None) -> bool:
    """Whether an event has just its fields, each of exactly one of its types; what else may be right is looked at."""
    if plain is None or len(event) != len(plain):
        return False
    return all(type(event.get(name, validate)) in types for name, types in plain.items())


def _check(value: object, shape: Shape, kind: str, field: str, of_any_version: bool) -> None:
    types = _types(shape)
    # To Python True is an int; to other readers of the file it is not a number.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join("null" if one is NoneType else one.__name__ for one in types)
        cause = f"the field {field!r} of the {kind} event is of type {type(value).__name__}"
        raise UserError(cause, f"make it {wanted}")
    prefix = field + "." if field else ""
    if isinstance(shape, list) and isinstance(value, list) and not are_plainly(value, shape[0]):
        for place, item in enumerate(value):
            _check(item, shape[0], kind, f"{prefix}{place}", of_any_version)
    if not isinstance(shape, Mapping) or not isinstance(value, dict):
        return
    for name in shape:
        if name != "*" and name not in value:
            raise UserError(f"the {kind} event has no field {prefix + name!r}", "add it: it is always there")
    for name, item in value.items():
        if name in shape or "*" in shape:
            _check(item, shape[name] if name in shape else shape["*"], kind, prefix + str(name), of_any_version)
        elif not of_any_version:
            raise unknown(f"field of the {kind} event", prefix + str(name), [prefix + known for known in shape])


def _types(shape: Shape) -> tuple[type, ...]:
    """What Python makes of a field of this shape."""
    if isinstance(shape, Mapping):
        return (dict,)
    return (list,) if isinstance(shape, list) else get_args(shape) or (shape,)


def are_plainly(values: list[Any], shape: Shape) -> bool:
    """Whether all are of exactly one of the types of a shape that is nothing but types; of every rank there is one."""
    return not isinstance(shape, Mapping | list) and set(map(type, values)) <= set(_types(shape))
