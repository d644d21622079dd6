"""The settings of a script are told as TOML, whatever the script has passed, and never fail its run."""

from __future__ import annotations

import tomllib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lockstep.config.schema import LaunchConfig, SetupConfig
from lockstep.config.toml import write_toml
from lockstep.observe.settings import script_settings


def settings_with(optimizer: Any, clip: Any = None) -> str:
    """Those of a script that passes these."""
    engine: Any = SimpleNamespace(
        optimizer=optimizer,
        setup=SimpleNamespace(settings=SetupConfig(clip=clip)),
        state=SimpleNamespace(attention=None),
    )
    loader: Any = SimpleNamespace(
        steps=np.int64(5),
        epochs=None,
        workers=0,
        order=SimpleNamespace(global_batch=8, micro_batch=2, shuffle=True),
        reading=SimpleNamespace(prefetch=2, persistent=True),
    )
    return script_settings(LaunchConfig(), engine, loader)


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(1))]


def test_numbers_of_numpy_are_numbers() -> None:
    optimizer = torch.optim.AdamW(weights(), lr=np.float64(3e-4), betas=(np.float64(0.5), 0.75))
    told = tomllib.loads(settings_with(optimizer, clip=np.float64(0.5)))
    assert (told["optimizer"]["lr"], told["optimizer"]["betas"]) == (3e-4, [0.5, 0.75])
    assert (told["clip"], told["steps"]) == (0.5, 5)


def test_an_optimizer_around_another_has_a_name_at_least() -> None:
    """As many are written: they never call what an optimizer of torch is made by."""
    told = tomllib.loads(settings_with(SimpleNamespace(param_groups=[])))
    assert told["optimizer"] == {"name": "SimpleNamespace"}


def test_names_that_need_quotes_get_them() -> None:
    values = {"a b": 1, "unset too": None, "a table": {"weight decay": 0.5, "plain": True}}
    assert tomllib.loads(write_toml(values)) == {"a b": 1, "a table": {"weight decay": 0.5, "plain": True}}


def test_what_cannot_be_written_is_said_and_fails_nothing() -> None:
    class Strange:
        @property
        def defaults(self) -> dict[str, Any]:
            raise RuntimeError("not\nyet")

    told = settings_with(Strange())
    assert told == "# the settings of this script could not be written (RuntimeError: not yet)\n"
    assert tomllib.loads(told) == {}
