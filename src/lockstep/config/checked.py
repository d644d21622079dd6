"""Values as a typed model, or the first mistake in them as a sentence: which key, whose value, what is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lockstep.errors import UserError, nearest

Nested = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)


def checked(
    model: type[Model], values: Nested, origin: Mapping[str, str], prefix: str = "", also: Sequence[str] = ()
) -> Model:
    """Values as a model, or the first mistake in them as a sentence; `origin` says where each key came from."""
    try:
        return model.model_validate(values, strict=True)
    except ValidationError as error:
        raise _sentence(error, model, origin, prefix, also) from None


def _sentence(
    error: ValidationError, model: type[BaseModel], origin: Mapping[str, str], prefix: str, also: Sequence[str]
) -> UserError:
    """The first mistake pydantic found, in a user's words."""
    first = error.errors()[0]
    key = prefix + ".".join(str(part) for part in first["loc"])
    source = origin.get(key) or next((origin[k] for k in origin if k.startswith(f"{key}.")), None)
    where = f" (from {source})" if source else ""
    if first["type"] == "extra_forbidden":
        known = [*_keys(model, prefix), *also]
        same_leaf = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
        close = same_leaf[0] if same_leaf else nearest(key, known)
        fix = f"did you mean {close!r}?" if close else f"the keys are {', '.join(known)}"
        return UserError(f"unknown key {key!r}{where}", fix)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        cause, _, fix = message.partition(": ")
        return UserError(f"{prefix}{cause}" if prefix else cause, fix or "change one of them")
    for ours, pydantic_text in (
        ("a whole number", "Input should be a valid integer"),
        ("a number", "Input should be a valid number"),
        ("text", "Input should be a valid string"),
        ("true or false", "Input should be a valid boolean"),
        ("a table, set key by key", "Input should be a valid dictionary"),
        (f"a list, as in --set '{key}=[\"...\"]'", "Input should be a valid list"),
    ):
        if message.startswith(pydantic_text):
            message = f"it has to be {ours}"
    message = message.replace("Input should be", "it has to be").replace("String should", "it has to")
    given = repr(first["input"])
    given = given if len(given) <= 100 else f"{given[:100]}..."
    return UserError(f"{key} = {given}{where} is not valid", message)


def _keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _keys(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; `optimizer.args` and other free tables stay whole."""
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and dotted not in ("optimizer.args", "tensor.roles"):
            yield from flatten(value, f"{dotted}.")
        else:
            yield dotted, value
