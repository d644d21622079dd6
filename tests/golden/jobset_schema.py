"""The schema of a JobSet, and what of a manifest is against it.

`python -m tests.golden.jobset_schema CRD.yaml` makes jobset-schema.json.gz anew.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

SCHEMA = Path(__file__).with_name("jobset-schema.json.gz")

CHECKED = {
    *("type", "properties", "required", "items", "additionalProperties", "enum", "minimum", "maxItems"),
    *("pattern", "minLength", "maxLength", "x-kubernetes-int-or-string", "x-kubernetes-list-map-keys"),
}
NOT_CHECKED = {
    *("description", "default", "format", "x-kubernetes-list-type", "x-kubernetes-map-type"),
    "x-kubernetes-validations",  # about changes of a JobSet, its startup policy and claims that it makes
    "anyOf",  # only says again that a value is a number or a string
}
TYPES: dict[str, type] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def load_schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    return schema


def errors(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """What is wrong with a value, each with its place. A field that the schema does not name is an error."""
    is_either = schema.get("x-kubernetes-int-or-string", False)
    kind = schema["type"] if not is_either else "integer" if isinstance(value, int) else "string"
    is_kind = isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
    if not is_kind:
        yield f"{where}: {value!r} is no {kind}"
    elif isinstance(value, dict):
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        yield from (f"{where}.{key} is missing" for key in schema.get("required", ()) if key not in value)
        for key, inner in value.items():
            if key in fields or others:
                yield from errors(inner, fields.get(key, others), f"{where}.{key}")
            elif fields:
                yield f"{where}.{key} is not a field"
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            yield f"{where} has {len(value)} items"
        for number, inner in enumerate(value):
            yield from errors(inner, schema["items"], f"{where}[{number}]")
        if keys := schema.get("x-kubernetes-list-map-keys"):
            named = [tuple(item.get(key) for key in keys) for item in value]
            yield from (f"{where} has {name} twice" for name in set(named) if named.count(name) > 1)
    elif isinstance(value, str):
        is_long = not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        if is_long or not re.search(schema.get("pattern", ""), value):
            yield f"{where}: {value!r} is not allowed"
    elif value < schema.get("minimum", value):
        yield f"{where}: {value} is too small"
    if value not in schema.get("enum", [value]):
        yield f"{where}: {value!r} is none of {schema['enum']}"


def checked_part(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with nothing but what `errors` looks at."""
    unknown = schema.keys() - CHECKED - NOT_CHECKED
    if unknown:
        raise ValueError(f"{unknown} is neither checked nor known to be of no use")
    kept = {key: schema[key] for key in CHECKED & schema.keys()}
    if "properties" in kept:
        kept["properties"] = {name: checked_part(inner) for name, inner in kept["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in kept:
            kept[key] = checked_part(kept[key])
    return kept


if __name__ == "__main__":
    definition = yaml.safe_load(Path(sys.argv[1]).read_text())
    (version,) = [one for one in definition["spec"]["versions"] if one["name"] == "v1alpha2"]
    whole = version["schema"]["openAPIV3Schema"]
    del whole["properties"]["status"]
    text = json.dumps(checked_part(whole), sort_keys=True, separators=(",", ":"))
    SCHEMA.write_bytes(gzip.compress(text.encode(), mtime=0))
