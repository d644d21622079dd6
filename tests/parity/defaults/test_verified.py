"""`lockstep verify` judges every training of the table as a plain loop does.

No pass where the loop has other losses, no mismatch where it has the same, and no refusal of what trains by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest

from lockstep.config.schema import LaunchConfig
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.observe.monitor import Watching
from lockstep.prove.causes import judge
from lockstep.prove.recording import Recording, read_recording
from lockstep.prove.verify import prove
from lockstep.record.folder import RunFolder, create_folder
from lockstep.runtime.rank_env import LAUNCH
from tests.parity.defaults.case import LAYOUTS, SEED
from tests.parity.defaults.cases import ALL, CASES
from tests.parity.defaults.training import train
from tests.parity.defaults.truth import plain_losses
from tests.parity.problems import join
from tests.ranks import Job, RankFailed, RankPool

STEPS = 5
LOSS = 1e-5
"""Allowed difference of a step's loss to the plain loop's, relative to the loss or to 1, whichever is more."""
QUICK = ["mlp", "ragged-epoch", "dropout", "clip", "mean-as-sum", "batchnorm-dropout", "encoder-decoder-dropout"]
"""What a newcomer waits for, on these layouts; CI proves all of them on all."""
QUICK_LAYOUTS = ["dp=2", "pp=2"]
PER_JOB = 12


# ---- What runs in a rank


def record_all(job: Job, layout: str, folders: dict[str, str], told: dict[str, Any]) -> dict[str, str]:
    """A run for each case, recorded into its folder; what stopped those that did not come to their end."""
    stopped = {}
    with patch.multiple(Watching, show=DEFAULT, tell_flops=DEFAULT), patch("lockstep.run.GarbageCollection"):
        for name, folder in folders.items():
            verify = {"verify": {"folder": folder, **told}} if told else {}
            launch = {"run_dir": f"{folder}/run", "attempt": 1, "resume": "never", "options": {}, **verify}
            with patch.dict(os.environ, {LAUNCH: json.dumps(launch)}):
                if why := train_one(job, layout, name):
                    stopped[name] = why
    return stopped


def train_one(job: Job, layout: str, name: str) -> str:
    """Train a case; returns what stopped it."""
    run = None
    try:
        with contextlib.suppress(SystemExit):  # it has recorded what it should
            run = join(job, layout, meeting=name, seed=SEED)
            train(run, CASES[name], [])
    except UserError as error:
        return f"refused: {error}"
    except Exception as error:
        return "crashed: " + "".join(traceback.format_exception(error, limit=-4))
    finally:
        if run is not None:
            run.leave()
    return ""


def plain(_job: Job, names: list[str]) -> dict[str, list[float]]:
    found = {}
    for name in names:
        with contextlib.suppress(Exception):  # what is refused need not work by itself
            found[name] = plain_losses(CASES[name])[:STEPS]
    return found


# ---- The judges


@dataclass
class Stopped(Exception):  # noqa: N818 - not every run has to come to its end
    """A run was refused, or crashed."""

    why: str
    layout: str


@dataclass
class Judged:
    """What verify says, and whether the losses under the layout are those of the plain loop."""

    verdict: str
    passes: bool
    agrees: bool


class Judges:
    """Records the runs of many cases in one job, when the first of them is asked for."""

    def __init__(self, ranks: RankPool, folder: Path, asked: list[tuple[str, str]]) -> None:
        self._ranks = ranks
        self._folder = folder
        self._asked = asked
        self._recorded: dict[tuple[str, str, str], Recording | str] = {}
        self._plain: dict[str, list[float]] = {}

    def judge(self, name: str, layout: str) -> Judged | Stopped:
        def recorded(_where: str, run_layout: Layout, more: dict[str, Any]) -> Recording:
            found = self._record(name, str(run_layout), more)
            if isinstance(found, str):
                raise Stopped(found, str(run_layout))
            return found

        try:
            found, other = prove(Layout.parse(layout), recorded)
        except Stopped as stopped:
            return stopped
        verdict = judge(found, other)
        losses = [lines[0]["loss"] for lines in found.ours.steps]
        return Judged(verdict.text, verdict.cause is None, same(losses, self._truth(name)))

    def alone(self, name: str, layout: str) -> str:
        """What stops a case that is not recorded."""
        folder = self._folders([name], layout)
        try:
            (stopped, *_) = self._ranks.run(record_all, Layout.parse(layout).world_size, layout, folder, {})
        except RankFailed as failed:
            return str(failed)
        return stopped.get(name, "")

    def _record(self, name: str, layout: str, more: dict[str, Any]) -> Recording | str:
        key = json.dumps(more)
        if (name, layout, key) not in self._recorded:
            asked = [] if more else [other for other, where in self._asked if layout in ("single", where)]
            missing = [other for other in asked if (other, layout, key) not in self._recorded]
            self._record_together(list(dict.fromkeys([name, *missing]))[:PER_JOB], layout, more, key)
        return self._recorded[name, layout, key]

    def _record_together(self, names: list[str], layout: str, more: dict[str, Any], key: str) -> None:
        folders = self._folders(names, layout)
        told = {"layout": layout, "steps": STEPS, **more}
        world = Layout.parse(layout).world_size
        try:
            stopped = self._ranks.run(record_all, world, layout, folders, told, timeout=300)
        except RankFailed as failed:
            if len(names) > 1:  # each for itself, to know whose it is
                for name in names:
                    self._record_together([name], layout, more, key)
                return
            stopped = [{names[0]: f"crashed: {failed}"}]
        for name, folder in folders.items():
            whys = [why[name] for why in stopped if name in why]
            self._recorded[name, layout, key] = whys[0] if whys else read_recording(Path(folder))

    def _folders(self, names: list[str], layout: str) -> dict[str, str]:
        folders = {}
        for name in names:
            folder = self._folder / f"{len(list(self._folder.iterdir()))}-{name}"
            create_folder(RunFolder(folder / "run", 1), LaunchConfig(seed=SEED, layout=layout))
            folders[name] = str(folder)
        return folders

    def _truth(self, name: str) -> list[float]:
        if name not in self._plain:
            names = [name, *(other for other, _ in self._asked if other not in self._plain)]
            self._plain |= self._ranks.run(plain, 1, list(dict.fromkeys(names))[: 2 * PER_JOB], timeout=300)[0]
        return self._plain[name]


def same(losses: list[float], truth: list[float]) -> bool:
    return all(abs(a - b) <= LOSS * max(1.0, abs(b)) or (a != a and b != b) for a, b in zip(losses, truth, strict=True))


LONG = [pytest.mark.slow, pytest.mark.soak]  # all rows are more than CI has time for
ROWS = [(case.name, layout) for layout in LAYOUTS[1:] for case in ALL if layout in case.layouts]


@pytest.fixture(scope="module")
def judges(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Judges:
    chosen = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params for item in chosen if isinstance(item, pytest.Function)]
    return Judges(ranks, tmp_path_factory.mktemp("judged"), [(str(one["name"]), str(one["layout"])) for one in asked])


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*row, marks=[] if row[0] in QUICK and row[1] in QUICK_LAYOUTS else LONG) for row in ROWS],
)
def test_verify_judges_as_a_plain_loop_does(judges: Judges, name: str, layout: str) -> None:
    judged = judges.judge(name, layout)
    if isinstance(judged, Stopped):
        alone = judges.alone(name, judged.layout)
        assert judged.why[:60] == alone[:60], f"recorded, {judged.why}\nalone: {alone or 'it trains'}"
    else:
        loop = "agrees" if judged.agrees else "differs"
        assert judged.passes == judged.agrees, f"the loop {loop}; {judged.verdict}"
