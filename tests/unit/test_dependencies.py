"""What an installation brings: little, and no torch that nobody has tried."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_core_is_light() -> None:
    names = [re.split(r"[<>=\[]", wanted)[0] for wanted in PROJECT["dependencies"]]
    assert sorted(names) == ["numpy", "orjson", "psutil", "pydantic", "rich", "safetensors", "torch", "typer"]


def test_torch_has_an_upper_bound() -> None:
    assert any(re.fullmatch(r"torch>=[\d.]+,<[\d.]+", wanted) for wanted in PROJECT["dependencies"])


def test_make_setup_installs_tensorboard() -> None:
    assert "lockstep-train[tensorboard]" in PROJECT["optional-dependencies"]["dev"]
