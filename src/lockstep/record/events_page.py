"""`python -m lockstep.record.events_page > docs/events.md`: the page of all events, from their declarations."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, NotRequired, get_args, get_origin

from typing_extensions import is_typeddict

from lockstep.record.events import KINDS

EXAMPLES = Path(__file__).with_name("events_examples.jsonl")
"""One event of every kind."""
PREFACE = Path(__file__).with_name("events_preface.md")
"""What all of them have in common."""
HEAD_FIELDS = ("time", "attempt", "kind")


def events_page() -> str:
    """The whole page, as Markdown."""
    examples = {json.loads(line)["kind"]: line for line in EXAMPLES.read_text(encoding="utf-8").splitlines()}
    sections = (_section(kind, declared, examples[kind]) for kind, declared in KINDS.items())
    return "\n".join([PREFACE.read_text(encoding="utf-8"), *sections])


def _section(kind: str, declared: type, example: str) -> str:
    fields = (_field(name, of) for name, of in declared.__annotations__.items() if name not in HEAD_FIELDS)
    return f"**{kind}**: {_said(declared)} {'; '.join(fields)}.\n```json\n{example}\n```\n"


def _said(declared: type) -> str:
    text = inspect.getdoc(declared) or ""
    return text[0].lower() + text[1:]


def _field(name: str, annotation: Any) -> str:
    """A field, its choices and its description, and those of the object that it is."""
    if get_origin(annotation) is NotRequired:
        annotation = get_args(annotation)[0]
    of, description = get_args(annotation)
    choices = [f"`{one}`" for one in get_args(of) if isinstance(one, str) and f"`{one}`" not in description]
    null = " (or `null`)" if type(None) in get_args(of) and "`null`" not in description else ""
    told = f" ({', '.join(choices)})" if choices else ""
    inner = next((one for one in (of, *get_args(of)) if is_typeddict(one)), None)
    fields = "; ".join(_field(*field) for field in inner.__annotations__.items()) if inner else ""
    return f"`{name}`{told}: {description}{null}" + (f" [{fields}]" if fields else "")


if __name__ == "__main__":
    print(events_page(), end="")
