"""Ranks that do not run the same thing, or do not read the same data, are refused at once on all of them."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from lockstep.checkpoint.disk.format import read_index, step_folder
from lockstep.data.alike import sample_digests
from lockstep.data.loader import Reading
from lockstep.errors import UserError
from lockstep.record import identity
from lockstep.record.failure import short_host
from tests.events import read_events
from tests.parity.problems import join
from tests.ranks import Job, RankPool


def refusal(job: Job, layouts: list[str], odd: dict[str, Any], told: dict[str, Any]) -> tuple[str, bool]:
    """What the last rank, which is `told` other things, and the others hear; whether groups were made."""
    is_odd = job.rank == job.world_size - 1

    def facts_of(*args: Any) -> identity.Facts:
        facts = identity.facts_of(*args)
        return facts | {kind: facts[kind] | values for kind, values in odd.items() if is_odd}

    try:
        with mock.patch("lockstep.init_run.facts_of", facts_of):
            join(job, layouts[is_odd], **(told if is_odd else {})).leave()
    except UserError as error:
        return str(error), dist.is_initialized()
    return "", True


@pytest.mark.parametrize(
    ("layouts", "odd", "told", "sentence"),
    [
        (["dp=3", "fsdp=3"], {}, {}, "has layout = fsdp=3 and rank {usual} on {host} layout = dp=3: say the same"),
        (["dp=3", "dp=4"], {}, {}, "has layout = dp=4 and rank {usual} on {host} layout = dp=3: say the same"),
        (["dp=3", "dp=3"], {}, {"seed": 77}, "has seed = 77 and rank {usual} on {host} seed = "),
        (["dp=3", "dp=3"], {"versions": {"torch": "2.1"}}, {}, "has torch = 2.1 and rank {usual} on {host} torch = 2."),
        (["dp=3", "dp=3"], {"code": {"train.py": "other"}}, {}, ""),
        (["dp=3", "dp=auto"], {}, {}, ""),
    ],
    ids=["layout", "wrong layout", "seed", "version", "a file of one rank alone", "the same layout"],
)
def test_ranks_that_were_told_or_have_different_things_are_refused_before_groups_are_made(
    ranks: RankPool, layouts: list[str], odd: dict[str, Any], told: dict[str, Any], sentence: str
) -> None:
    found = ranks.run(refusal, 3, layouts, odd, told)
    texts = {text for text, _ in found}
    assert len(texts) == 1
    host = short_host()
    text = texts.pop()
    assert any(sentence.format(usual=rank, host=host) in text for rank in (0, 1)), text
    if sentence:
        assert text.startswith(f"rank 2 on {host} has ")
        assert not any(made for _, made in found)


# ---- Data


class Files(Dataset[torch.Tensor]):
    """A sample for every file, augmented by draws of every kind."""

    def __init__(self, files: list[int]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(()).item() + random.random() + float(np.random.rand())
        return torch.full((8,), float(self.files[index])) + noise


class Unsteady(Files):
    """Draws from a generator that nobody seeds."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(np.random.default_rng().random()))


class Unreadable(Files):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 55:
            raise OSError("this file is broken")
        return super().__getitem__(index)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, files: list[int]) -> None:
        self.files = files

    def __iter__(self) -> Any:
        return (torch.full((8,), float(file)) for file in self.files)


def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).square().sum(), len(x)


def mine(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


def dataset_of(case: str, rank: int) -> Any:
    files = list(range(56))
    if case == "short" and rank == 1:
        files = files[:40]
    if case == "empty" and rank == 1:
        files = []
    if case in ("sharded", "sharded stream"):
        files = files[rank::2]
    if case == "another order" and rank == 1:
        files = files[::-1]
    kinds = {"unsteady": Unsteady, "stream": Stream, "sharded stream": Stream}
    return kinds.get(case, Files)(files)


def use(job: Job, case: str) -> str:
    """Train a step and score; what is refused, or nothing."""
    run = join(job, "dp=2")
    engine = run.setup(lambda: nn.Linear(8, 1), loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    scored = case.startswith("scored ")
    options: dict[str, Any] = {"micro_batch": 2, "workers": 0, "steps": 1}
    is_odd = job.rank == 1
    if case == "batch":
        options["micro_batch"] = 2 + 2 * is_odd
    if case == "collate" and is_odd:
        options["collate"] = mine
    try:
        for batch in run.loader(dataset_of("same" if scored else case, job.rank), 8, **options):
            engine.step(batch)
        run.evaluate(dataset_of(case.removeprefix("scored "), job.rank), workers=0)
    except UserError as error:
        run.leave()
        return str(error)
    run.close()
    return ""


LOADER = "in run.loader(name='train') rank 1 on {host} has "


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("same", ""),
        ("short", LOADER + "len(dataset) = 40 and rank 0 on {host} len(dataset) = 56: give every rank the whole"),
        ("empty", LOADER + "len(dataset) = 0 and rank 0"),
        ("sharded", LOADER + "another sample 0, sample 14 and sample 27 than rank 0 on {host}: give every rank"),
        ("another order", LOADER + "another sample 0, sample 28 and sample 55 than rank 0"),
        ("batch", LOADER + "micro_batch = 4 and rank 0 on {host} micro_batch = 2: call it with the same arguments"),
        ("collate", LOADER + "collate = tests.dist.test_alike.mine and rank 0"),
        ("stream", ""),
        ("sharded stream", LOADER + "another first samples than rank 0"),
        ("unsteady", "in run.loader(name='train') sample 0 is another one whenever it is read"),
        ("scored short", "in an evaluation rank 1 on {host} has len(dataset) = 40"),
    ],
)
def test_ranks_whose_data_differ_are_refused_by_what_differs(ranks: RankPool, case: str, sentence: str) -> None:
    found = ranks.run(use, 2, case)
    assert found[0] == found[1]
    if sentence:
        assert found[0].startswith(sentence.format(host=short_host()))
    else:
        assert found[0] == ""


def warned(job: Job) -> list[str]:
    assert use(job, "scored unsteady") == ""
    return [event["text"] for event in read_events(job.folder / "run" / "events.jsonl") if event["kind"] == "message"]


def test_scored_samples_that_differ_whenever_they_are_read_are_told_of(ranks: RankPool) -> None:
    texts = ranks.run(warned, 2)[0]
    assert any("in an evaluation sample 0 is another one whenever it is read" in text for text in texts)


def test_a_sample_that_cannot_be_read_is_not_compared() -> None:
    assert sample_digests(Unreadable(list(range(56))), 56, 0, Reading()).keys() == {"sample 0", "sample 28"}
    whole = [sample_digests(Files(list(range(56))), 56, 0, Reading(workers)) for workers in (0, 2)]
    assert whole[0] == whole[1]
    assert whole[0].keys() == {"sample 0", "sample 28", "sample 55"}


# ---- From start to start


def train_on(job: Job, steps: int) -> str:
    run = join(job, "dp=2", meeting=str(steps), run_dir=job.folder / "run")
    engine = run.setup(lambda: nn.Linear(8, 1), loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    importlib.import_module("helper_that_changes")  # late, as inside of a function that builds a model
    try:
        for batch in run.loader(Files(list(range(16))), 8, micro_batch=2, workers=0, steps=steps):
            engine.step(batch)
        run.save(wait=True)
    except UserError as error:
        return str(error)
    finally:
        run.leave()
    return ""


def train_twice(job: Job, accepts: bool) -> tuple[str, str, dict[str, str]]:
    helper = Path(job.folder, "helper_that_changes.py")
    sys.path.insert(0, str(job.folder))
    said = []
    for steps in (1, 2):
        if job.rank == 0:
            helper.write_text(f"LR = 0.{steps}\n")
        while not helper.exists() or helper.read_text() != f"LR = 0.{steps}\n":
            time.sleep(0.01)
        sys.modules.pop("helper_that_changes", None)
        if accepts:
            os.environ["LOCKSTEP_ACCEPT"] = "changed-script"
        said.append(train_on(job, steps))
    sys.path.remove(str(job.folder))
    sys.modules.pop("helper_that_changes", None)
    newest = 2 if accepts else 1
    training = read_index(step_folder(job.folder / "run", newest)).training
    assert training is not None
    return said[0], said[1], training.code


@pytest.mark.parametrize("accepts", [False, True])
def test_what_is_imported_late_and_has_changed_since_the_checkpoint_is_refused_too(
    ranks: RankPool, accepts: bool
) -> None:
    for first, second, code in ranks.run(train_twice, 2, accepts):
        assert first == ""
        assert code["helper_that_changes.py"] == identity.digest_of(b"LR = 0.2\n" if accepts else b"LR = 0.1\n")
        if accepts:
            assert second == ""
        else:
            assert second.startswith("helper_that_changes.py has changed since the checkpoint of step 1 was written: ")
            assert "--accept changed-script" in second


def test_facts_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.config.schema import LaunchConfig
    from lockstep.runtime.rank_env import find_place

    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    facts = identity.facts_of(identity.LocalCode(), LaunchConfig(nproc=2), find_place({}), "cpu", "gloo")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["environment"]["NVIDIA_TF32_OVERRIDE"] == "0"
    assert facts["versions"].keys() == {"lockstep", "torch", "python", "numpy"}
    assert "nproc" not in facts["config"], "nodes may have other numbers of processes"
    assert facts["config"]["layout"] == "single"
