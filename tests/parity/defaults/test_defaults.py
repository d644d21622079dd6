"""A script that says nothing of micro-batches gives the numbers of a plain loop on every layout, or is refused.

Nothing else is green: no other number, no error of torch's, no hang, and no refusal after the first step.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest

from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.observe.monitor import Watching
from tests.parity.defaults import basics, coupled, draws
from tests.parity.defaults.case import LAYOUTS, SEED, Case
from tests.parity.defaults.cases import ALL, CASES
from tests.parity.defaults.training import train
from tests.parity.defaults.truth import plain_losses
from tests.parity.problems import join, unfinished
from tests.ranks import Job, RankFailed, RankPool

LOSS = 1e-5
"""Allowed difference of a step's loss, relative to the loss or to 1, whichever is more."""
CASES_PER_JOB = 8
QUICK = ("dp=2", "cp=2")
"""What a newcomer waits for, and the basics on one process; CI trains on all layouts."""
SHOWS = 1e-3
"""By how much training changes the last loss at least, else wrong gradients would not show."""


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of one training: losses, and what stopped it."""

    losses: list[float]
    refusal: str = ""
    crash: str = ""

    def verdict(self, truth: list[float]) -> str:
        """In words: works, refused or what else."""
        if self.crash:
            return f"crashed after {len(self.losses)} steps: {self.crash}"
        if self.refusal:
            return f"refused{f' after {len(self.losses)} steps' if self.losses else ''}: {self.refusal}"
        apart = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(self.losses, truth, strict=True)]
        first = next((step for step, far in enumerate(apart, 1) if not far <= LOSS), None)
        return "works" if first is None else f"differs from step {first} on, by up to {max(apart):.1e}"


# ---- What runs in a rank


def train_all(job: Job, layout: str, names: list[str], **where: Any) -> dict[str, Outcome]:
    """One run for each case, one after another in the same processes; without what takes longest and counts nothing."""
    quick = patch.multiple(Watching, show=DEFAULT, tell_flops=DEFAULT), patch("lockstep.run.GarbageCollection")
    with quick[0], quick[1]:
        return {name: train_one(job, layout, CASES[name], where) for name in names}


def train_one(job: Job, layout: str, case: Case, where: dict[str, Any]) -> Outcome:
    losses: list[float] = []
    try:
        with unfinished(join(job, layout, meeting=case.name, seed=SEED, **where)) as run:
            train(run, case, losses)
    except UserError as error:
        return Outcome(losses, refusal=str(error))
    except Exception as error:
        return Outcome(losses, crash="".join(traceback.format_exception(error, limit=-4)))
    return Outcome(losses)


def plain(job: Job, names: list[list[str]]) -> dict[str, tuple[list[float], list[float]]]:
    mine = [CASES[name] for name in names[job.rank]]
    return {case.name: (plain_losses(case), plain_losses(case, lr_factor=0.0)) for case in mine}


# ---- Each training once


class Trainings:
    """Trains the cases of a layout, several in one job, when the first of them is asked for.

    A training that hangs or dies takes its job along, so the cases of that job are then trained one by one.
    """

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._found: dict[tuple[str, str], list[Outcome]] = {}

    def outcomes(self, case: Case, layout: str) -> list[Outcome]:
        """What every rank saw."""
        if (case.name, layout) not in self._found:
            names = [one.name for one in cells(layout)]
            first = names.index(case.name) // CASES_PER_JOB * CASES_PER_JOB
            self._train(layout, names[first : first + CASES_PER_JOB])
        return self._found[case.name, layout]

    def _train(self, layout: str, names: list[str]) -> None:
        size = Layout.parse(layout).world_size
        try:
            by_rank = self._ranks.run(train_all, size, layout, names, timeout=20 + 4 * len(names))
        except RankFailed as failed:
            if len(names) == 1:
                self._found[names[0], layout] = [Outcome([], crash=str(failed))]
            else:
                for name in names:
                    self._train(layout, [name])
        else:
            self._found |= {(name, layout): [rank[name] for rank in by_rank] for name in names}


def cells(layout: str) -> list[Case]:
    """The cases that are trained on a layout."""
    return [case for case in ALL if layout in case.layouts]


def marks_of(case: Case, layout: str) -> list[pytest.MarkDecorator]:
    """Who waits for it. A third replica is for cases in which the number of ranks could matter."""
    if layout in QUICK or (layout == "single" and case in basics.CASES):
        return []
    if layout == "dp=3" and case not in (*draws.CASES, *coupled.CASES):
        return [pytest.mark.slow, pytest.mark.soak]
    return [pytest.mark.slow]


@pytest.fixture(scope="module")
def trainings(ranks: RankPool) -> Trainings:
    return Trainings(ranks)


@pytest.fixture(scope="module")
def truth(ranks: RankPool) -> dict[str, tuple[list[float], list[float]]]:
    """The losses of the plain loop by case, and those that it has at the first weights."""
    names = [case.name for case in ALL if "single" not in case.refused]
    halves = [names[0::2], names[1::2]]
    return {name: losses for half in ranks.run(plain, 2, halves, timeout=100) for name, losses in half.items()}


# ---- The promises


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, id=f"{case.name}-{layout}", marks=marks_of(case, layout))
        for layout in LAYOUTS
        for case in cells(layout)
    ],
)
def test_it_gives_the_numbers_of_a_plain_loop_or_is_refused(
    trainings: Trainings, truth: dict[str, tuple[list[float], list[float]]], case: Case, layout: str
) -> None:
    losses, _ = truth.get(case.name, ([], []))
    verdicts = {outcome.verdict(losses) for outcome in trainings.outcomes(case, layout)}
    wanted = case.refused.get(layout)
    if wanted is None:
        assert verdicts == {"works"}, f"{case.name} on {layout}"
    else:
        for verdict in verdicts:
            assert verdict.startswith("refused: "), f"{case.name} on {layout}"
            assert wanted in verdict, f"{case.name} on {layout}"


def test_in_every_case_a_wrong_gradient_would_show(truth: dict[str, tuple[list[float], list[float]]]) -> None:
    moved = {name: abs(a[-1] - b[-1]) / max(1.0, abs(b[-1])) for name, (a, b) in truth.items()}
    assert {name: far for name, far in moved.items() if not far > SHOWS} == {}
