"""One training script, the same numbers on any parallel layout.

    import lockstep

    run = lockstep.init()
    engine = run.setup(build_model, loss, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))
    for batch in run.loader(dataset, global_batch=64):
        out = engine.step(batch)
        run.log(loss=out.loss)

Importing this package does not import torch; using it does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lockstep.errors import NonFiniteError, UserError

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.data.corpora import TokenDataset
    from lockstep.engine import Engine, StepResult
    from lockstep.init_run import init
    from lockstep.layout import Layout
    from lockstep.load_run import generate, load
    from lockstep.run import Run
    from lockstep.step.scoring import Metric
    from lockstep.trainer import Trainer

__version__ = "0.1.0"

_HOME = {
    "Config": "config.schema",
    "Engine": "engine",
    "Layout": "layout",
    "Metric": "step.scoring",
    "Run": "run",
    "StepResult": "engine",
    "TokenDataset": "data.corpora",
    "Trainer": "trainer",
    "generate": "load_run",
    "init": "init_run",
    "load": "load_run",
}

__all__ = [
    "Config",
    "Engine",
    "Layout",
    "Metric",
    "NonFiniteError",
    "Run",
    "StepResult",
    "TokenDataset",
    "Trainer",
    "UserError",
    "generate",
    "init",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    from lockstep.faults.uncaught import answer_user_errors

    answer_user_errors()
    return getattr(importlib.import_module(f"lockstep.{_HOME[name]}"), name)
