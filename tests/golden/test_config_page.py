"""docs/config.md lists every key of the config as it is in the code."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from lockstep.config.catalog import RECIPES
from lockstep.config.schema import Config

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def rows(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += rows(field.annotation, f"{prefix}{name}.")
        elif f"{prefix}{name}" != "model":
            default = "unset" if field.default is None else f"`{field.default!r}`"
            found.append(f"| `{prefix}{name}` | {default} | {field.description} |")
    return found


def test_the_page_lists_every_key_with_its_default_and_meaning():
    page = PAGE.read_text()
    tables = {"every recipe": rows(Config)}
    tables |= {f"`{recipe.name}`": rows(recipe.model_settings, "model.") for recipe in RECIPES.values()}
    for title, wanted in tables.items():
        section = page.split(f"## Keys of {title}\n")[1].split("\n## ")[0]
        listed = [line for line in section.splitlines() if line.startswith("| `")]
        assert listed == wanted, f"bring the table of {title} in docs/config.md up to date"
