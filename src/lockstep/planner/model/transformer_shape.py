"""The numbers of a transformer as people write them: checked, and with what they leave out filled in."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from lockstep.config.layers import parse_assignments
from lockstep.errors import UserError, unknown
from lockstep.planner.model.parts import Model, Shape
from lockstep.planner.model.transformer import transformer

SEQUENCE = 2048
"""Tokens of a sample where neither the user nor the model says."""
VOCABULARY = 50257
"""Of GPT-2: where shape numbers leave it out."""
LIKE: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"gated": True, "tied": False, "biases": False, "norm": "rms"},
    "mpt": {"vocab": 50368},
}
"""What families of models have in common."""
COUNTS = ("layers", "hidden", "heads", "ffn", "vocab", "kv_heads", "head_dim", "positions", "sequence")
MAY_BE_ZERO = ("kv_heads", "head_dim", "positions")
REQUIRED = ("layers", "hidden", "heads")


@dataclass(frozen=True)
class Described:
    """A transformer by its numbers, with parameters that the formulas of Shape do not have."""

    name: str
    shape: Shape
    sequence: int
    extra_block: int = 0
    extra_head: int = 0
    positions_follow: bool = False
    """As many learned positions as a sample has tokens."""


def build(described: Described, sequence: int | None) -> Model:
    """The model for samples of `sequence` tokens; without a number, for those that it is usually trained on."""
    tokens = sequence or described.sequence
    shape = described.shape
    if described.positions_follow:
        shape = replace(shape, positions=tokens)
    if 0 < shape.positions < tokens:
        raise UserError(
            f"{described.name} has {shape.positions} learned positions, and samples of {tokens} tokens were asked for",
            f"use at most {shape.positions} tokens, or --set positions={tokens}",
        )
    model = transformer(described.name, shape, tokens)
    parts = []
    for part in model.parts:
        if part.name == "block" and described.extra_block:
            part = replace(
                part,
                parameters=part.parameters + described.extra_block,
                cut_parameters=part.cut_parameters + max(0, described.extra_block),
            )
        if part.name == "head" and described.extra_head:
            part = replace(part, parameters=part.parameters + described.extra_head)
        parts.append(part)
    return replace(model, parts=tuple(parts))


def from_text(text: str, overrides: Mapping[str, Any]) -> Described:
    """`layers=32,hidden=4096,heads=32`, and what else differs from a GPT: `like=llama`, `vocab=32000`, `seq=4096`."""
    values = parse_assignments([part for part in text.split(",") if part.strip()])
    return describe("shape", {**values, **overrides})


def from_catalogue(name: str, overrides: Mapping[str, Any]) -> Described:
    """A model of models.toml."""
    return describe(name, {**known_models()[name], **overrides})


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """The numbers of the models that have a name."""
    return tomllib.loads((resources.files("lockstep.planner.model") / "models.toml").read_text(encoding="utf-8"))


def describe(name: str, values: Mapping[str, Any]) -> Described:
    """Numbers by name, checked; what is wrong is a UserError that names values that are right."""
    found = dict(values)
    if "seq" in found:
        found["sequence"] = found.pop("seq")
    like = found.pop("like", "gpt")
    if like not in LIKE:
        raise unknown("family (like=)", str(like), LIKE)
    for key in REQUIRED:
        if key not in found:
            raise UserError(f"the model needs {key}", "write at least layers=32,hidden=4096,heads=32")
    found = {**LIKE[like], **found}
    found.setdefault("vocab", VOCABULARY)
    _check_types(found)
    found.setdefault("ffn", _usual_ffn(found["hidden"], bool(found.get("gated"))))
    extras = {key: found.pop(key) for key in ("extra_block", "extra_head") if key in found}
    sequence = found.pop("sequence", SEQUENCE)
    shape = Shape(**found)
    check_shape(shape)
    return Described(name, shape, sequence, **extras, positions_follow=like == "mpt" and not shape.positions)


def check_shape(shape: Shape) -> None:
    """Refuse numbers that no transformer can have."""
    if not shape.head_dim and shape.hidden % shape.heads:
        below = shape.hidden // shape.heads * shape.heads
        near = sorted({below, below + shape.heads} - {0})
        divisors = _nearest_divisors(shape.hidden, shape.heads)
        raise UserError(
            f"hidden {shape.hidden} is not divisible by heads {shape.heads}",
            f"use hidden {_either(near)}, or heads {_either(divisors)}",
        )
    if shape.kv_heads and shape.heads % shape.kv_heads:
        divisors = _nearest_divisors(shape.heads, shape.kv_heads)
        raise UserError(
            f"heads {shape.heads} is not divisible by kv_heads {shape.kv_heads}", f"use kv_heads {_either(divisors)}"
        )


def _check_types(found: Mapping[str, Any]) -> None:
    known = {field.name: field for field in fields(Shape)}
    for key, value in found.items():
        if key in COUNTS:
            least = 0 if key in MAY_BE_ZERO else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{key}={value} is not valid", f"give a whole number of at least {least}")
        elif key == "norm":
            if value not in ("layer", "rms"):
                raise unknown("norm", str(value), ("layer", "rms"))
        elif key in known:
            assert known[key].default is not MISSING
            if not isinstance(value, bool):
                raise UserError(f"{key}={value} is not valid", f"write {key}=true or {key}=false")
        elif key not in ("extra_block", "extra_head"):
            raise unknown("number of a model", key, [*known, "seq", "like"])


def _usual_ffn(hidden: int, gated: bool) -> int:
    """4 x hidden; with a gate two thirds of it, in multiples of 256, so that the MLP has as many parameters."""
    return -(-8 * hidden // 3 // 256) * 256 if gated else 4 * hidden


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of a number just below and just above one that is none."""
    below = max(count for count in range(1, wanted + 1) if number % count == 0)
    above = next((count for count in range(wanted, number + 1) if number % count == 0), None)
    return [below] if above is None else [below, above]


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
