"""Replicas that drift apart, gradients that were not exchanged, a model that is not the one that is trained."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint.disk.format import steps_on_disk
from lockstep.data.loader import StepBatch
from lockstep.engine import Engine
from lockstep.errors import InvariantError, SpikeError, UserError
from lockstep.parallel.replicate.buckets import _Bucket
from lockstep.runtime.dtensors import local_part
from lockstep.runtime.tensor_digest import digests_of
from tests.parity.problems import (
    GLOBAL_BATCH,
    ConvNet,
    Images,
    RaggedTexts,
    TinyGPT,
    adamw,
    error_of,
    image_loss,
    join,
    text_loss,
)
from tests.parity.test_tensor import GPT, Texts
from tests.ranks import Job, RankPool

EVERY_STEP = {"check_every": 1}


# ---- No false alarm, whatever the layout


def train_checked(job: Job, layouts: list[str]) -> dict[str, tuple[str | None, int]]:
    """What went wrong in three checked steps of each layout, and how many were done."""
    told = {}
    for number, text in enumerate(layouts):
        layout, _, level = text.partition(" ")
        with join(job, layout, meeting=f"m{number}") as run:
            build = partial(GPT, dropout=0.1, fused=True)
            shard = {"level": level} if level else None
            engine = run.setup(build, text_loss, optimizer=adamw, clip=0.3, recover=EVERY_STEP, shard=shard)
            loader = run.loader(Texts(), 8, micro_batch=2, steps=3, workers=0)
            error = error_of(partial(do_all, engine, loader))
            told[text] = (repr(error) if error else None, engine.steps_done)
    return told


def do_all(engine: Engine, loader: Iterable[StepBatch]) -> None:
    for batch in loader:
        engine.step(batch)


@pytest.mark.parametrize(
    "layouts",
    [
        ["dp=2", "fsdp=2", "tp=2", "cp=2", "pp=2"],
        ["dp=2,fsdp=2"],
        pytest.param(["dp=2,fsdp=2 zero1", "pp=2,tp=2", "fsdp=2,tp=2", "dp=2,cp=2"], marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "4 ranks", "more of 4 ranks"],
)
def test_a_sound_training_passes_every_check_on_every_layout(ranks: RankPool, layouts: list[str]) -> None:
    for told in ranks.run(train_checked, 2 if "dp=2" in layouts else 4, layouts, timeout=90):
        assert told == dict.fromkeys(layouts, (None, 3))


def train_batch_norm(job: Job) -> None:
    for number, how in enumerate(("micro-batch", "sync")):
        with join(job, "dp=2", meeting=f"m{number}") as run:
            engine = run.setup(ConvNet, image_loss, optimizer=adamw, recover=EVERY_STEP, batch_norm=how)  # type: ignore[arg-type]
            for batch in run.loader(Images(), GLOBAL_BATCH, micro_batch=2, steps=3, workers=0):
                engine.step(batch)


def test_running_statistics_are_equal_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(train_batch_norm, 2)


# ---- Planted violations


def change_a_weight(engine: Engine, rank: int) -> None:
    """What a script does that adds noise under its own random numbers on one rank, to one number of one weight."""
    if engine.rank == rank:
        for name, parameter in engine.stored:
            if name == "blocks.1.mlp.0.weight":
                with torch.no_grad():
                    local_part(parameter.data).view(-1)[3] += 1e-6


def change_a_gradient(engine: Engine, rank: int) -> None:
    """A gradient that is changed after the ranks have summed it."""
    finish = engine.cut.gradients.finish

    def finish_and_change(unused: bool) -> None:
        finish(unused)
        for name, parameter in engine.stored:
            if name == "blocks.0.attention.out.bias" and engine.rank == rank and parameter.grad is not None:
                local_part(parameter.grad).mul_(1.5)

    engine.cut.gradients.finish = finish_and_change  # type: ignore[method-assign, assignment]


def exchange_nothing(engine: Engine, rank: int) -> None:  # noqa: ARG001
    """Gradients that stay on the rank they were computed on."""
    _Bucket.start_sum = lambda *_: None  # type: ignore[method-assign]
    _Bucket.wait = lambda *_: None  # type: ignore[method-assign]


def replace_a_parameter(engine: Engine, rank: int) -> None:  # noqa: ARG001
    """What reinitialising a layer after setup does."""
    engine.model.get_submodule("blocks.0.mlp.0").weight = nn.Parameter(torch.zeros(32, 16))


def add_a_parameter(engine: Engine, rank: int) -> None:  # noqa: ARG001
    engine.model.register_parameter("extra", nn.Parameter(torch.zeros(3)))


def untie(engine: Engine, rank: int) -> None:  # noqa: ARG001
    head: Any = engine.model.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone())


def train_into(job: Job, layout: str, planted: list[tuple[str, int]]) -> list[tuple[str | None, int]]:
    """Plants each violation before the second step of a run of its own; what was raised then, at which step."""
    found: list[tuple[str | None, int]] = []
    kept = _Bucket.start_sum, _Bucket.wait
    for number, (what, rank) in enumerate(planted):
        run = join(job, layout, meeting=f"m{number}")
        with suppress(InvariantError, UserError), run:
            engine = run.setup(TinyGPT, text_loss, optimizer=adamw, recover={"check_every": 2})
            for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=4, workers=0):
                if engine.steps_done == 1:
                    globals()[what](engine, rank)
                error = error_of(partial(engine.step, batch))
                if error:
                    found.append((f"{type(error).__name__}: {error}", engine.steps_done))
                    raise error
            found.append((None, engine.steps_done))
        _Bucket.start_sum, _Bucket.wait = kept  # type: ignore[method-assign]
    return found


def test_each_violation_is_found_at_the_next_check_by_every_rank_and_names_rank_and_parameter(ranks: RankPool) -> None:
    another = "rank 1 holds another"
    planted = {
        "change_a_weight": f"{another} value of blocks.1.mlp.0.weight than rank 0 after step 2: something changed it",
        "change_a_gradient": f"{another} gradient of blocks.0.attention.out.bias than rank 0 after step 2: gradients",
        "exchange_nothing": f"{another} gradient of embedding.weight than rank 0 after step 2: gradients were not",
    }
    everybody = ranks.run(train_into, 2, "dp=2", [(what, 1) for what in planted])
    assert everybody[0] == everybody[1]
    for (told, steps_done), (what, expected) in zip(everybody[0], planted.items(), strict=True):
        assert told is not None, what
        assert told.startswith(f"InvariantError: {expected}"), told
        assert steps_done in (1, 2)


def test_a_model_that_is_no_more_what_run_setup_made_is_refused_before_the_next_step(ranks: RankPool) -> None:
    planted = {
        "replace_a_parameter": "blocks.0.mlp.0.weight was replaced, added or removed after run.setup",
        "add_a_parameter": "extra was replaced, added or removed after run.setup",
        "untie": "head.weight was replaced, added or removed after run.setup",
    }
    for rank in ranks.run(train_into, 2, "dp=2", [(what, 1) for what in planted]):
        for (told, steps_done), expected in zip(rank, planted.values(), strict=True):
            assert told is not None
            assert told.startswith(f"UserError: {expected}"), told
            assert steps_done == 1


def test_the_odd_one_of_several_replicas_of_a_shard_is_named(ranks: RankPool) -> None:
    # Ranks 0 and 2 hold one shard, 1 and 3 the other.
    for [(told, _)] in ranks.run(train_into, 4, "dp=2,fsdp=2", [("change_a_weight", 3)]):
        assert told is not None
        assert "rank 3 holds another value of blocks.1.mlp.0.weight than rank 1 after step 2" in told
    for [(told, _)] in ranks.run(train_into, 4, "dp=4", [("change_a_weight", 0)]):
        assert told is not None
        assert "rank 0 holds another value of blocks.1.mlp.0.weight than rank 1" in told, "three against one"


def test_a_replaced_parameter_is_found_on_one_process_too(tmp_path: Path) -> None:
    def train() -> None:
        with lockstep.init("single", run_dir=tmp_path / "run") as run:
            engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
            for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=8, steps=2, workers=0):
                untie(engine, 0)
                engine.step(batch)

    with pytest.raises(UserError, match=r"^head.weight was replaced, added or removed after run.setup, "):
        train()
    assert not (tmp_path / "run" / "checkpoints" / "step-00000001").exists(), "what is stored is not what was trained"


# ---- Nothing mixed is saved


def change_the_optimizer(engine: Engine, rank: int) -> None:
    if engine.rank == rank:
        _, parameter = engine.stored[0]
        engine.optimizer.state[parameter]["exp_avg"].add_(1.0)


def fail_together(engine: Engine, rank: int) -> None:
    change_a_weight(engine, rank)
    raise SpikeError("planted")


def save_mixed(job: Job) -> list[tuple[str, list[int]]]:
    """Each way to a checkpoint after ranks were made to differ: what was raised, and which checkpoints are on disk."""
    found = []
    for number, (plant, saves) in enumerate(
        [(change_a_weight, True), (change_the_optimizer, True), (fail_together, False), (change_a_weight, False)]
    ):
        folder = job.folder / f"mixed{number}"

        def train(number: int = number, plant: Any = plant, saves: bool = saves, folder: Path = folder) -> None:
            with join(job, "dp=2", meeting=f"m{number}", run_dir=folder) as run:
                engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
                for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=2, workers=0):
                    engine.step(batch)
                    if engine.steps_done == 2:
                        plant(engine, 1)
                    if saves:
                        run.save(wait=True)

        error = error_of(train)
        found.append((f"{type(error).__name__}: {error}", steps_on_disk(folder)))
    return found


def test_ranks_that_differ_are_never_mixed_into_a_checkpoint(ranks: RankPool) -> None:
    everybody = ranks.run(save_mixed, 2)
    assert everybody[0] == everybody[1]
    saved, optimizer, emergency, end = everybody[0]
    weight = "InvariantError: rank 1 holds another value of blocks.1.mlp.0.weight than rank 0 after step 2"
    assert saved[0].startswith(weight)
    assert saved[1] == [1]
    assert "another value of the optimizer's exp_avg of embedding.weight than rank 0" in optimizer[0]
    assert optimizer[1] == [1]
    assert emergency == ("SpikeError: planted", []), "no emergency checkpoint either"
    assert end[0].startswith(weight), "also where the run ends without a save"


# ---- The digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 7, 1024, 5000])
def test_a_digest_changes_with_every_number_and_with_their_order(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    numbers = torch.randint(0, 2 if dtype == torch.bool else 100, (size,)).to(dtype)
    [digest] = digests_of([numbers])
    assert digests_of([numbers.clone()]) == [digest]
    for at in {0, size // 2, size - 1} if size else set():
        changed = numbers.clone()
        changed[at] = ~changed[at] if dtype == torch.bool else changed[at] + 1
        assert digests_of([changed]) != [digest]
    if size > 1 and dtype != torch.bool:
        numbers[0], numbers[-1] = 1, 2
        swapped = numbers.clone()
        swapped[0], swapped[-1] = 2, 1
        assert digests_of([swapped]) != digests_of([numbers])


def test_a_digest_tells_minus_zero_and_the_bits_of_a_nan_apart() -> None:
    assert len(set(digests_of(torch.tensor([number]) for number in (0.0, -0.0, float("nan"), 1.0)))) == 4
    assert digests_of([None, torch.zeros(3)]) == [0, 0]
