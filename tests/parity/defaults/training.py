"""A case as a script that uses Lockstep and gives it no option."""

from __future__ import annotations

from pathlib import Path

from lockstep.run import Run
from tests.parity.defaults.case import SEED, STEPS, Case

SCRIPT = """\
import sys

sys.path.insert(0, {root!r})

import lockstep
from tests.parity.defaults.cases import CASES
from tests.parity.defaults.training import train

train(lockstep.init(seed={seed}), CASES[{name!r}], [])
"""


def train(run: Run, case: Case, losses: list[float]) -> None:
    """Train on this run's layout; `losses` gets the loss of each step when it is done."""
    engine = run.setup(case.build, case.loss, optimizer=case.optimizer, **case.options)
    loader = run.loader(case.dataset, case.global_batch, steps=STEPS, collate=case.collate, workers=0)
    after_step = case.begin(engine.model, engine.optimizer) if case.begin else lambda _: None
    for batch in loader:
        losses.append(engine.step(batch).loss)
        after_step(len(losses))


def write_script(case: Case, folder: Path) -> Path:
    """The case as a script for `lockstep run` and `lockstep verify`."""
    path = folder / f"{case.name}.py"
    path.write_text(SCRIPT.format(root=str(Path(__file__).parents[3]), seed=SEED, name=case.name))
    return path
