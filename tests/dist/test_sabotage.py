"""`lockstep verify` on real runs: sound layouts pass, and one that is broken on purpose is caught with its cause.

A sabotage is a patch inside the ranks of the layout; the reference, on one process, is sound.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import Dataset

import lockstep.run
import lockstep.runtime.seeds
from lockstep.config.schema import LaunchConfig
from lockstep.data.order import Order
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.parallel.replicate import buckets as replicate
from lockstep.parallel.replicate import gradients
from lockstep.parallel.replicate.statistics import RunningStatistics
from lockstep.parallel.tensor import modules as tensor
from lockstep.parallel.tensor import team_grads as team
from lockstep.parallel.tensor.cut import Along, Parts, along_of, mark, plain, take
from lockstep.parallel.tensor.modules import Role
from lockstep.parallel.tensor.rules import products
from lockstep.prove.causes import ProofVerdict, judge
from lockstep.prove.recording import Recording, keep_blocks, read_recording
from lockstep.prove.verify import LayoutComparison, prove
from lockstep.record.folder import RunFolder, create_folder
from lockstep.runtime.axis import Axis
from lockstep.runtime.comm import Comm
from lockstep.step.grads import global_norm, gradient_scale
from lockstep.training import do_step as update
from lockstep.training import forwards
from lockstep.training.engine_parts import EngineParts
from tests.marks import others_slow
from tests.parity.problems import (
    GLOBAL_BATCH,
    IGNORED,
    SEED,
    ConvNet,
    Images,
    RaggedTexts,
    TinyGPT,
    adamw,
    image_loss,
    join,
    text_loss,
)
from tests.parity.test_tensor import GPT, Texts
from tests.parity.zoo import ZOO
from tests.ranks import Job, RankFailed, RankPool

CLIP: dict[str, Any] = {"clip": 0.1}
IMAGES: dict[str, Any] = {"build_model": ConvNet, "loss": image_loss, "dataset": Images}
FUSED: dict[str, Any] = {"build_model": partial(GPT, fused=True), "dataset": Texts}
STEPS = 3
MICRO_BATCH = 2
Patch = pytest.MonkeyPatch
Sabotage = Callable[[Job, Patch], dict[str, Any] | None]
"""Patches what it breaks in a rank, or gives other arguments of `run.setup`."""


# ---- A run that is recorded


def record(
    job: Job, layout: str, folder: Path, told: dict[str, Any], sabotage: Sabotage | None, options: dict[str, Any]
) -> None:
    """One rank of a run that `lockstep verify` would have launched."""
    launch = {"run_dir": str(folder / "run"), "attempt": 1, "resume": "never", "options": {}, "verify": told}
    with Patch.context() as patch, contextlib.suppress(SystemExit):
        patch.setitem(os.environ, "LOCKSTEP_LAUNCH", json.dumps(launch))
        instead = (sabotage(job, patch) if sabotage else None) or {}
        with join(job, layout) as run:
            setup: dict[str, Any] = {
                "build_model": partial(TinyGPT, dropout=0.1),
                "loss": text_loss,
                "optimizer": adamw,
            }
            setup |= {**options, **instead}
            dataset, reading = setup.pop("dataset", RaggedTexts), setup.pop("reading", {"micro_batch": MICRO_BATCH})
            engine = run.setup(**setup)
            for batch in run.loader(dataset(), GLOBAL_BATCH, workers=0, **reading):
                engine.step(batch)


class Verifier:
    """Records sound runs once, whatever is compared with them."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self._ranks = ranks
        self._folder = folder
        self._references: dict[str, Recording] = {}

    def verify(
        self, layout: str, sabotage: Sabotage | None = None, **options: Any
    ) -> tuple[LayoutComparison, ProofVerdict]:
        """What the command would find; a sabotage is done under the layout only, unless a reading says otherwise."""

        def recorded(_where: str, run_layout: Layout, more: dict[str, Any]) -> Recording:
            if run_layout.world_size > 1:
                return self._record(layout, layout, sabotage, more, options)
            key = repr((sorted(options.items()), sorted(more.items())))
            if key not in self._references:
                self._references[key] = self._record("single", layout, None, more, options)
            return self._references[key]

        found, other = prove(Layout.parse(layout), recorded)
        return found, judge(found, other)

    def _record(
        self, layout: str, asked: str, sabotage: Sabotage | None, more: dict[str, Any], options: dict[str, Any]
    ) -> Recording:
        folder = self._folder / str(len(list(self._folder.iterdir())))
        create_folder(RunFolder(folder / "run", 1), LaunchConfig(seed=SEED, layout=layout))
        told = {"folder": str(folder), "layout": asked, "steps": STEPS, **more}
        self._ranks.run(record, Layout.parse(layout).world_size, layout, folder, told, sabotage, options)
        return read_recording(folder)


@pytest.fixture(scope="module")
def verifier(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    return Verifier(ranks, tmp_path_factory.mktemp("recordings"))


# ---- Sound runs


SOUND = [
    ("dp=2", "zero3"),
    ("dp=2,fsdp=2", "zero1"),
    ("pp=2", "zero3"),
    ("fsdp=2", "zero2"),
    ("fsdp=3", "zero3"),
    ("tp=2", "zero3"),
]


@pytest.mark.parametrize(("layout", "level"), others_slow(SOUND, SOUND[:3]))
def test_a_sound_layout_passes(verifier: Verifier, layout: str, level: str) -> None:
    found, verdict = verifier.verify(layout, clip=0.5, shard={"level": level}, precision="bf16")
    assert found.same, verdict.text
    assert verdict.cause is None
    assert verdict.text.startswith(f"{layout} gives the numbers of one process: 3 steps, 35 parameters")
    assert found.ours.ranks[0]["changed"] == {"precision": ["bf16", "fp32"]}
    assert found.ours.ranks[0]["tied"] == [["embedding.weight", "head.weight"]]
    assert found.ours.micro_batch == {"train": MICRO_BATCH}


@pytest.mark.parametrize("layout", ["tp=2", "cp=2"])
def test_ranks_that_compute_together_pass(verifier: Verifier, layout: str) -> None:
    found, verdict = verifier.verify(layout, **FUSED)
    assert found.same, verdict.text


def test_running_statistics_are_compared_too(verifier: Verifier) -> None:
    found, verdict = verifier.verify("dp=2", **IMAGES)
    assert found.same, verdict.text
    assert {"norm1.running_mean", "norm2.running_var"} <= found.steps[-1].values.keys()


ZOO_PROVED = ["hf-gpt2 tp=2", "hf-gpt2 pp=2", "hf-t5 pp=2", "resnet pp=2", "torch-seq2seq pp=2", "hf-bert pp=2"]


@pytest.mark.parametrize("case", others_slow(ZOO_PROVED, ZOO_PROVED[:4]))
def test_what_trains_is_proved_too(verifier: Verifier, case: str) -> None:
    """Recording computes nothing in the forward, which a pipeline follows; and Adam's first steps grow rounding."""
    name, layout = case.split()
    entry = ZOO[name]
    if entry.needs is not None:
        pytest.importorskip(entry.needs)
    options: dict[str, Any] = {"build_model": entry.build, "loss": entry.loss, "clip": 1.0}
    found, verdict = verifier.verify(layout, **options, dataset=partial(dataset_of, name))
    assert verdict.cause is None, verdict.text
    assert found.left_out == 0


def dataset_of(name: str) -> Any:
    return ZOO[name].dataset


# ---- Broken ones


def forget_a_division(job: Job, patch: Patch) -> None:
    def scale(norm: torch.Tensor, factor: float, clip: float | None) -> torch.Tensor | None:
        return gradient_scale(norm, factor * job.world_size, clip)

    patch.setattr(update, "gradient_scale", scale)


def forget_a_division_before_the_norm(job: Job, patch: Patch) -> None:
    def norm_of_sums(*arguments: Any) -> torch.Tensor:
        return global_norm(*arguments) * job.world_size

    patch.setattr(update, "global_norm", norm_of_sums)
    forget_a_division(job, patch)


def forget_the_other_shards_in_the_norm(_job: Job, patch: Patch) -> None:
    patch.setattr(update, "global_norm", lambda grads, _groups, device: global_norm(grads, [], device))


def make_small_buckets(patch: Patch) -> None:
    patch.setattr(replicate, "FIRST_BUCKET_BYTES", 4000)
    patch.setattr(replicate, "BUCKET_BYTES", 4000)


def keep_what_a_bucket_holds(_job: Job, patch: Patch) -> None:
    begin, finish = replicate.GradientBuckets.begin, update._count_step
    done: list[int] = []

    def begin_with_a_full_bucket(self: replicate.GradientBuckets) -> None:
        before = self._buckets[1].flat.clone()
        begin(self)
        if done:  # what was tried out before the first step is not part of it
            self._buckets[1].flat.copy_(before)

    def finish_and_count(parts: EngineParts, skipped: bool) -> None:
        finish(parts, skipped)
        done.append(parts.state.steps_done)

    patch.setattr(update, "_count_step", finish_and_count)

    make_small_buckets(patch)
    patch.setattr(replicate.GradientBuckets, "begin", begin_with_a_full_bucket)


def sum_all_buckets_but_one(_job: Job, patch: Patch) -> None:
    start = replicate.GradientBuckets._start_sum

    def start_and_forget_the_second(self: replicate.GradientBuckets) -> None:
        number = self._next
        if number == 1:
            local = self._buckets[1].flat.clone()
            start(self)
            self._buckets[1].wait()
            self._buckets[1].flat.copy_(local)
            self._buckets[1]._work = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
        else:
            start(self)

    make_small_buckets(patch)
    patch.setattr(replicate.GradientBuckets, "_start_sum", start_and_forget_the_second)


def skip_a_block(_job: Job, _patch: Patch) -> dict[str, Any]:
    def build() -> nn.Module:
        model = TinyGPT(dropout=0.1)
        model.blocks[1].forward = lambda x: x
        return model

    return {"build_model": build}


def leave_a_block_out(_job: Job, _patch: Patch) -> dict[str, Any]:
    def build() -> nn.Module:
        model = TinyGPT(dropout=0.1)
        keep_blocks(model, 1)
        return model

    return {"build_model": build}


def untie_the_embedding(_job: Job, _patch: Patch) -> dict[str, Any]:
    def build() -> nn.Module:
        model = TinyGPT(dropout=0.1)
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
        return model

    return {"build_model": build}


def forget_one_use_of_the_embedding(_job: Job, _patch: Patch) -> dict[str, Any]:
    def build() -> nn.Module:
        model = TinyGPT(dropout=0.1)
        vars(model.head)["forward"] = lambda x: F.linear(x, model.head.weight.detach())
        return model

    return {"build_model": build}


def keep_the_uses_of_the_embedding_apart(_job: Job, patch: Patch) -> None:
    """A pipeline's first and last stage have a copy each: the gradient of each stays its own."""
    patch.setattr(gradients, "add_up", lambda _ties: None)


def use_another_optimizer(_job: Job, _patch: Patch) -> dict[str, Any]:
    return {"optimizer": partial(adamw, weight_decay=0.2)}


def read_in_another_order(_job: Job, patch: Patch) -> None:
    patch.setattr(lockstep.run, "Order", lambda seed, **options: Order(seed=seed + 1, **options))


def change_one_replica(job: Job, _patch: Patch) -> dict[str, Any]:
    class Nudged(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            with torch.no_grad():
                self.param_groups[0]["params"][3].add_(1e-3 * job.rank)

    return {"optimizer": partial(Nudged, lr=3e-3, weight_decay=0.1)}


def count_each_rank_for_itself(_job: Job, patch: Patch) -> None:
    patch.setattr(RunningStatistics, "combine", lambda _self: None)


def draw_other_masks(_job: Job, patch: Patch) -> None:
    draw_seed = lockstep.runtime.seeds.draw_seed
    patch.setattr(forwards, "draw_seed", lambda *coordinate: draw_seed(*coordinate) + 1)


def keep_what_a_row_returns(_job: Job, patch: Patch) -> None:
    patch.setattr(tensor, "reduce_products", lambda part, _axis: part)


def add_the_bias_of_a_row_on_every_rank(_job: Job, patch: Patch) -> None:
    def row(module: nn.Linear, axis: Axis, _parts: Parts, value: torch.Tensor) -> torch.Tensor:
        rest = tuple(one for one in along_of(value) if one.axis.name != axis.name)
        return tensor.reduce_products(F.linear(mark(plain(value), rest), module.weight, module.bias), axis)

    patch.setattr(tensor, "row", row)


def cut_a_fused_matrix_in_one_piece(_job: Job, patch: Patch) -> None:
    cuts = tensor.parameter_cuts

    def contiguous(module: nn.Module, role: Role, axis: Axis) -> dict[str, Along]:
        return {name: one.at(one.dim, (one.size,)) for name, one in cuts(module, role, axis).items()}

    patch.setattr(tensor, "parameter_cuts", contiguous)


def keep_the_gradients_of_a_team_apart(_job: Job, patch: Patch) -> None:
    patch.setattr(team, "sum_together", lambda _gradients, _group: None)


def sum_over_data_alone(_job: Job, patch: Patch) -> None:
    """Ranks that have other tokens of the same samples keep their gradients to themselves."""
    group_over = Comm.group_over

    def without_sequences(self: Comm, *axes: str) -> dist.ProcessGroup:
        return group_over(self, *(axis for axis in axes if axis != "cp"))

    patch.setattr(Comm, "group_over", without_sequences)


def look_up_only_what_is_here(_job: Job, patch: Patch) -> None:
    def vocabulary(module: nn.Embedding, axis: Axis, parts: Parts, numbers: torch.Tensor) -> torch.Tensor:
        first, count = Along(axis, 0, parts).rows_of(axis.rank).start, len(module.weight)
        elsewhere = (numbers < first) | (numbers >= first + count)
        found = F.embedding((numbers - first).masked_fill(elsewhere, 0), module.weight)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    patch.setattr(tensor, "vocabulary", vocabulary)


def attend_to_own_tokens_only(_job: Job, patch: Patch) -> None:
    def own_rows(
        func: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, along: Along, options: dict[str, Any]
    ) -> torch.Tensor:
        key, value = (take(one, along.at(one.dim() - 2)) for one in (key, value))
        return func(query, key, value, is_causal=True, **options)  # type: ignore[no-any-return]

    patch.setattr(products, "_causal_rows", own_rows)


# ---- Scripts with a mistake of their own, the same on one process


def place() -> tuple[int, int]:
    """As scripts ask for it: this rank and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def token_losses(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of every token, 0 where it does not count, and which do."""
    labels = batch["y"]
    losses = F.cross_entropy(model(batch["x"]).transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return losses, labels != IGNORED


def noise_with_the_seed_of_a_rank(model: nn.Module, batch: Any) -> Any:
    losses, counted = token_losses(model, batch)
    noise = torch.rand(losses.shape, generator=torch.Generator().manual_seed(place()[0]))
    return (losses * (0.5 + noise)).sum(), counted.sum()


def detached_on_one_rank(model: nn.Module, batch: Any) -> Any:
    losses, counted = token_losses(model, batch)
    if place()[0] == 1:
        losses = 0.5 * losses + 0.5 * losses.detach()
    return losses.sum(), counted.sum()


def divided_by_the_number_of_ranks(model: nn.Module, batch: Any) -> Any:
    losses, counted = token_losses(model, batch)
    return losses.sum() / place()[1], counted.sum()


def mean_of_means(model: nn.Module, batch: Any) -> Any:
    losses, counted = token_losses(model, batch)
    return losses.sum() / counted.sum().clamp(min=1), 1


def mean_of_means_by_samples(model: nn.Module, batch: Any) -> Any:
    losses, counted = token_losses(model, batch)
    return losses.sum() / counted.sum().clamp(min=1) * len(losses), len(losses)


class TwoTowers(nn.Module):
    """Pairs of vectors: a sample's two are to be nearer to each other than to those of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.one(one), dim=1), F.normalize(self.two(two), dim=1)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        return {"one": torch.randn(6, generator=draw), "two": torch.randn(6, generator=draw)}


def in_batch(model: nn.Module, batch: Any) -> Any:
    """Only against the others of its own forward."""
    one, two = model(batch["one"], batch["two"])
    return F.cross_entropy(5 * one @ two.T, torch.arange(len(one)), reduction="sum"), len(one)


def gathered(model: nn.Module, batch: Any) -> Any:
    """Against those of all ranks, which it gathers itself, as CLIP does."""
    one, two = model(batch["one"], batch["two"])
    rank, ranks = place()
    everybodys = torch.cat(all_gather(two)) if ranks > 1 else two  # type: ignore[no-untyped-call]
    labels = torch.arange(len(one)) + rank * len(one)
    return F.cross_entropy(5 * one @ everybodys.T, labels, reduction="sum"), len(one)


TOWERS: dict[str, Any] = {"build_model": TwoTowers, "dataset": Pairs}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (noise_with_the_seed_of_a_rank, {}, "on data rank 1 for the same samples: let no seed, generator or `if`"),
    (mean_of_means, {}, "returns the weight 1 for 5 samples, 1 and 1 for 2 and 3 of them"),
    (mean_of_means_by_samples, {}, "makes the loss of a sample depend on those who share its forward"),
    (in_batch, TOWERS, "makes the loss of a sample depend on those who share its forward"),
    (gathered, {**TOWERS, "reading": {"micro_batch": 4}}, "it sees 8 samples under dp=2, and 4 on one process"),
]
PLANTED = [
    (detached_on_one_rank, "rank", "a detach or no_grad on one of them"),
    (
        divided_by_the_number_of_ranks,
        "scale",
        "is 0.500 x that of one process; all 33 gradients are: a division by the",
    ),
]


@pytest.mark.parametrize(("loss", "options", "said"), REFUSED, ids=[row[0].__name__ for row in REFUSED])
def test_a_mistake_that_the_first_samples_show_is_refused(
    verifier: Verifier, loss: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RankFailed) as failed:
        verifier.verify("dp=2", **{"build_model": TinyGPT, "reading": {}, **options, "loss": loss})
    assert isinstance(failed.value.exception, UserError)
    assert said in str(failed.value.exception)


@pytest.mark.parametrize(("loss", "cause", "said"), PLANTED, ids=[row[0].__name__ for row in PLANTED])
def test_a_mistake_in_a_script_is_named(verifier: Verifier, loss: Any, cause: str, said: str) -> None:
    _, verdict = verifier.verify("dp=2", build_model=TinyGPT, reading={}, loss=loss)
    assert verdict.cause == cause, verdict.text
    assert said in verdict.text


def test_a_loss_that_gathers_over_the_ranks_itself_agrees(verifier: Verifier) -> None:
    _, verdict = verifier.verify("dp=2", **TOWERS, loss=gathered, reading={})
    assert verdict.cause is None, verdict.text


# fmt: off
BROKEN: list[tuple[str, Sabotage, dict[str, Any], str, int, str | None]] = [
    # layout   sabotage                               options  cause               step  module
    ("dp=2",   forget_a_division,                     {},      "scale",              1, "embedding"),
    ("dp=2",   forget_a_division,                     CLIP,    "scale",              1, "embedding"),
    ("dp=2",   forget_a_division_before_the_norm,     CLIP,    "scale",              1, None),
    ("fsdp=2", forget_the_other_shards_in_the_norm,   CLIP,    "optimizer",          1, None),
    ("dp=2",   keep_what_a_bucket_holds,              {},      "stale-gradient",     2, "blocks.1.attention.query"),
    ("dp=2",   keep_what_a_bucket_holds,              CLIP,    "stale-gradient",     2, "blocks.1.attention.query"),
    ("dp=2",   sum_all_buckets_but_one,               {},      "replica",            1, "blocks.1.attention.query"),
    ("dp=2",   skip_a_block,                          {},      "missing-parameter",  1, "blocks.1.norm1"),
    ("fsdp=2", leave_a_block_out,                     {},      "missing-parameter",  0, "blocks.1.norm1"),
    ("dp=2",   untie_the_embedding,                   {},      "tied",               0, "head"),
    ("fsdp=2", forget_one_use_of_the_embedding,       CLIP,    "tied",               1, "embedding"),
    ("pp=2",   keep_the_uses_of_the_embedding_apart,  {},      "tied",               1, "embedding"),
    ("dp=2",   use_another_optimizer,                 {},      "optimizer",          1, "embedding"),
    ("dp=2",   read_in_another_order,                 {},      "data",               1, None),
    ("dp=2",   change_one_replica,                    {},      "replica",            1, "blocks.0.attention.query"),
    ("dp=2",   count_each_rank_for_itself,            IMAGES,  "replica",            1, "norm1"),
    ("fsdp=2", draw_other_masks,                      {},      "loss",               1, "dropout"),
    ("tp=2",   keep_what_a_row_returns,               {},      "loss",               1, "blocks.0.attention.out"),
    ("tp=2",   keep_what_a_row_returns,               FUSED,   "loss",               1, "blocks.0.attention.out"),
    ("tp=2",   add_the_bias_of_a_row_on_every_rank,   {},      "loss",               1, "blocks.0.attention.out"),
    ("tp=2",   cut_a_fused_matrix_in_one_piece,       FUSED,   "loss",               1, "blocks.0.attention.qkv"),
    ("tp=2",   keep_the_gradients_of_a_team_apart,    {},      "replica",            1, "blocks.0.norm1"),
    ("tp=2",   look_up_only_what_is_here,             {},      "loss",               1, "embedding"),
    ("cp=2",   attend_to_own_tokens_only,             FUSED,   "loss",               1, "blocks.0.attention.out"),
    ("cp=2",   sum_over_data_alone,                   FUSED,   "replica",            1, "embedding"),
]
# fmt: on


def name_of(layout: str, sabotage: Sabotage, options: dict[str, Any]) -> str:
    variant = next((name for name, known in (("clipped", CLIP), ("fused", FUSED)) if options is known), "plain")
    return f"{layout}-{sabotage.__name__}-{variant}"


@pytest.mark.parametrize(
    ("layout", "sabotage", "options", "cause", "step", "module"),
    [
        pytest.param(*row, id=name_of(*row[:3]), marks=[pytest.mark.slow] if number % 3 else [])
        for number, row in enumerate(BROKEN)
    ],
)
def test_a_broken_layout_is_caught_with_its_cause(
    verifier: Verifier,
    layout: str,
    sabotage: Sabotage,
    options: dict[str, Any],
    cause: str,
    step: int,
    module: str | None,
) -> None:
    found, verdict = verifier.verify(layout, sabotage, **options)
    assert not found.same
    assert (verdict.cause, verdict.step, verdict.module) == (cause, step, module), verdict.text
