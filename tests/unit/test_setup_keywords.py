"""A setting of `run.setup` is declared once, in SetupConfig: its keywords, the config and the record follow from it."""

from __future__ import annotations

import inspect

from lockstep.config.schema import Config, SetupConfig
from lockstep.run import Run

NO_SETTINGS = {"self", "build_model", "loss", "optimizer", "schedule", "loss_reduction"}
"""Functions, and how the loss is to be read: no config can say these."""


def test_the_keywords_of_setup_are_the_settings_with_their_defaults() -> None:
    keywords = inspect.signature(Run.setup).parameters
    assert set(keywords) - NO_SETTINGS == set(SetupConfig.model_fields)
    for name, field in SetupConfig.model_fields.items():
        is_table = isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields")
        assert keywords[name].default == (None if is_table else field.default), name


def test_the_config_has_them_all() -> None:
    assert issubclass(Config, SetupConfig)
