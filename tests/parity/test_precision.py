"""fp16 and bf16 give one process's numbers within their rounding, and an overflow is everybody's overflow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.config.schema import NumericsConfig
from lockstep.data.order import sample_ids
from lockstep.errors import NonFiniteError, UserError
from lockstep.layout import Layout
from lockstep.step.precision import LossScale, check_can_compute, number_formats
from tests.events import read_events
from tests.marks import others_slow
from tests.parity.problems import (
    GLOBAL_BATCH,
    SEED,
    Batch,
    RaggedTexts,
    Tensors,
    TinyGPT,
    adamw,
    anew,
    error_of,
    fingerprint,
    gradients,
    join,
    text_loss,
    weights,
)
from tests.ranks import Job, RankPool

LAYOUTS = ["single", "dp=2", "fsdp=2", "dp=2,fsdp=2"]
ANY_CPU = {"accept": ["slow-fp16"]}
STEPS = 8


@dataclass
class Record:
    losses: list[float]
    scales: list[float]
    skipped: list[bool]
    norms: list[float]
    fingerprints: list[str]
    first_gradients: Tensors


def train(job: Job, layout: str, settings: dict[str, dict[str, Any]], steps: int = STEPS) -> dict[str, Record]:
    """One training for each of the settings, one after another in the same processes."""
    records = {}
    with join(job, layout) as run:
        for name, options in settings.items():
            engine = anew(run).setup(partial(TinyGPT, True, 0.2), text_loss, optimizer=adamw, clip=0.5, **options)
            seen = records[name] = Record([], [], [], [], [], {})
            for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=steps, workers=0):
                out = engine.step(batch)
                seen.losses.append(out.loss)
                seen.scales.append(out.loss_scale)
                seen.skipped.append(out.skipped)
                seen.norms.append(out.grad_norm.item())
                seen.fingerprints.append(fingerprint(weights(engine)))
                seen.first_gradients = seen.first_gradients or gradients(engine)
    return records


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"precision": "fp16", "numerics": {**ANY_CPU, "loss_scale": 1024.0}},
    "fp16, fp16 sums": {"precision": "fp16", "numerics": {**ANY_CPU, "reduce_dtype": "fp16", "loss_scale": 1024.0}},
    "bf16": {"precision": "bf16"},
    "bf16, bf16 sums": {"precision": "bf16", "numerics": {"reduce_dtype": "bf16"}},
    "bf16 weights in a forward": {"precision": "bf16", "numerics": {"param_dtype": "bf16", "buffer_dtype": "bf16"}},
    "bf16 weights": {
        "precision": "bf16",
        "numerics": {"storage_dtype": "bf16", "buffer_dtype": "bf16", "accept": ["bf16-weights"]},
    },
}
ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


QUICK = {
    "single": list(SETTINGS),
    "dp=2": ["fp16", "bf16, bf16 sums", "bf16 weights"],
    "fsdp=2": list(SETTINGS),
    "dp=2,fsdp=2": ["fp16, fp16 sums"],
}
each_cell = pytest.mark.parametrize(
    ("layout", "name"),
    others_slow(
        [(layout, name) for layout in LAYOUTS for name in SETTINGS],
        [(layout, name) for layout, names in QUICK.items() for name in names],
    ),
)


class Table:
    """Trains the settings of a layout when the first of them is asked for; those that are not quick apart."""

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._found: dict[tuple[str, str], list[Record]] = {}

    def records(self, layout: str, name: str) -> list[Record]:
        """What every rank recorded."""
        if (layout, name) not in self._found:
            quick = QUICK[layout]
            alike = {other: SETTINGS[other] for other in SETTINGS if (other in quick) == (name in quick)}
            by_rank = self._ranks.run(train, Layout.parse(layout).world_size, layout, alike)
            self._found |= {(layout, other): [rank[other] for rank in by_rank] for other in alike}
        return self._found[layout, name]


@pytest.fixture(scope="module")
def trained(ranks: RankPool) -> Table:
    return Table(ranks)


def precision_of(name: str) -> str:
    return str(SETTINGS[name].get("precision", "fp32"))


@each_cell
def test_losses_agree_with_one_process_within_the_rounding_of_the_format(
    trained: Table, layout: str, name: str
) -> None:
    ours, theirs = trained.records(layout, name)[0], trained.records("single", name)[0]
    rounding = max(ROUNDING[precision_of(name)], 1e-6)
    assert ours.losses == pytest.approx(theirs.losses, rel=rounding)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-6), "equal weights give equal losses"
    assert ours.losses[-1] < ours.losses[0]


@each_cell
def test_first_gradients_agree_with_one_process_within_the_rounding_of_the_sums(
    trained: Table, layout: str, name: str
) -> None:
    ours, theirs = (trained.records(where, name)[0].first_gradients for where in (layout, "single"))
    numerics = SETTINGS[name].get("numerics", {})
    coarsest = max(ROUNDING[numerics.get(key, "fp32")] for key in ("reduce_dtype", "param_dtype", "storage_dtype"))
    allowed = max(4 * coarsest, 1e-5)
    whole = whole_norm(theirs)
    for parameter, expected in theirs.items():
        difference = float((ours[parameter].float() - expected.float()).norm())
        assert difference <= allowed * (float(expected.float().norm()) + 1e-3 * whole), parameter


@each_cell
def test_every_rank_holds_the_same_weights_and_the_same_loss_scale(trained: Table, layout: str, name: str) -> None:
    first, *others = trained.records(layout, name)
    for other in others:
        assert other.fingerprints == first.fingerprints
        assert other.scales == first.scales
        assert other.norms == first.norms


def test_every_format_really_is_another_computation(trained: Table) -> None:
    losses = {name: tuple(trained.records("fsdp=2", name)[0].losses) for name in SETTINGS}
    assert len(set(losses.values())) == len(losses)


def whole_norm(gradients: Tensors) -> float:
    return math.hypot(*(float(gradient.float().norm()) for gradient in gradients.values()))


@pytest.mark.parametrize("layout", ["single", "fsdp=2"])
def test_the_loss_scale_is_in_no_gradient_and_no_norm(trained: Table, layout: str) -> None:
    """Adam would not notice: it divides by the size of what it is given."""
    scaled, plain = (trained.records(layout, name)[0] for name in ("fp16", "fp32"))
    assert scaled.scales[0] == 1024.0
    assert scaled.norms[0] == pytest.approx(plain.norms[0], rel=0.02)
    assert whole_norm(scaled.first_gradients) == pytest.approx(whole_norm(plain.first_gradients), rel=0.02)


# ---- Overflow


class Spiked(Dataset[Batch]):
    """Pairs for a linear map. In the third step one sample is so large that its gradient overflows in fp16."""

    def __init__(self, size: int = 32) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 8, generator=draw)
        third = torch.arange(2 * GLOBAL_BATCH, 3 * GLOBAL_BATCH).numpy()
        self.spike = int(sample_ids(third, size, SEED, 0)[-1])  # the last rank's
        self.x[self.spike] *= 3e4

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        return {"x": self.x[index], "y": self.x[index, :2]}


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def huber(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    return nn.functional.smooth_l1_loss(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def train_over_a_spike(job: Job, layout: str, window: int) -> tuple[Record, int, list[int]]:
    with join(job, layout) as run:
        numerics = {**ANY_CPU, "loss_scale": 64.0, "loss_scale_window": window}
        engine = run.setup(linear, huber, optimizer=adamw, precision="fp16", numerics=numerics)
        seen, reads_spike = Record([], [], [], [], [fingerprint(weights(engine))], {}), []
        data = Spiked()
        for batch in run.loader(data, GLOBAL_BATCH, micro_batch=2, steps=4, workers=0):
            out = engine.step(batch)
            seen.skipped.append(out.skipped)
            seen.scales.append(out.loss_scale)
            seen.norms.append(out.grad_norm.item())
            seen.losses.append(out.loss)
            seen.fingerprints.append(fingerprint(weights(engine)))
            if any(data.spike in part.ids for part in batch.micro_batches if not part.filler):
                reads_spike.append(out.step)
        return seen, engine.state.steps_skipped, reads_spike


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_is_skipped_by_all_in_the_same_step(ranks: RankPool, layout: str) -> None:
    found = ranks.run(train_over_a_spike, Layout.parse(layout).world_size, layout, 2)
    assert [reads for _, _, reads in found] == [*([[]] * (len(found) - 1)), [3]], "one rank alone reads the spike"
    for seen, skipped, _ in found:
        assert seen.skipped == [False, False, True, False]
        assert skipped == 1
        assert seen.scales == [64.0, 64.0, 128.0, 64.0], "doubled after two good steps, halved by the overflow"
        assert seen.fingerprints[2] == seen.fingerprints[3], "the weights stay as they were"
        assert len(set(seen.fingerprints)) == 4
        assert seen.fingerprints == found[0][0].fingerprints
        assert all(map(math.isfinite, seen.losses))
        assert not math.isfinite(seen.norms[2])


def nan_gradient(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    total = model(batch["x"]).square().sum()
    # finite forward, infinite slope: the root of zero
    return total + (total * 0).sqrt(), len(batch["y"])


def train_to_an_error(job: Job, layout: str) -> str:
    with join(job, layout) as run:
        numerics = {**ANY_CPU, "loss_scale": 2.0}
        engine = run.setup(linear, nan_gradient, optimizer=adamw, precision="fp16", numerics=numerics)
        batches = run.loader(Spiked(), GLOBAL_BATCH, micro_batch=2, steps=20, workers=0)

        def until_the_end() -> None:
            for batch in batches:
                engine.step(batch)

        error = error_of(until_the_end)
        assert isinstance(error, NonFiniteError)
        return f"{error} | {engine.steps_done}"


@pytest.mark.parametrize("layout", ["single", "dp=2"])
def test_a_gradient_that_no_loss_scale_makes_finite_stops_the_run(ranks: RankPool, layout: str) -> None:
    for text in ranks.run(train_to_an_error, Layout.parse(layout).world_size, layout):
        assert "gradient" in text
        assert text.endswith("| 1"), "after a first step with the scale 2"


def test_the_loss_scale_doubles_after_its_window_and_halves_on_overflow() -> None:
    scale = LossScale(2.0**16, window=3)
    scales = []
    for overflow in (False, False, True, False, False, False, False, True, True):
        scale.update(overflow)
        scales.append(math.log2(scale.scale))
    assert scales == [16, 16, 15, 15, 15, 16, 16, 15, 14]


def resumed(job: Job) -> Iterator[Any]:
    options: dict[str, Any] = {"precision": "fp16", "numerics": {**ANY_CPU, "loss_scale": 64.0, "loss_scale_window": 3}}
    for meeting, stop in (("whole", 8), ("first", 4), ("second", 8)):
        folder = job.folder / ("whole" if meeting == "whole" else "parts")
        run = join(job, "dp=2", folder, meeting)
        engine = run.setup(linear, huber, optimizer=adamw, **options)
        for batch in run.loader(Spiked(), GLOBAL_BATCH, micro_batch=2, steps=8, workers=0):
            out = engine.step(batch)
            yield meeting, out.step, out.loss, out.loss_scale
            if out.step == stop:
                run.save()
                break
        run.leave()


def train_in_parts(job: Job) -> list[Any]:
    return list(resumed(job))


def test_a_resumed_run_goes_on_with_the_loss_scale_and_its_count_of_good_steps(ranks: RankPool) -> None:
    for steps in ranks.run(train_in_parts, 2):
        whole = [step[1:] for step in steps if step[0] == "whole"]
        parts = [step[1:] for step in steps if step[0] != "whole"]
        assert parts == whole
        assert len({scale for *_, scale in whole}) > 2, "the scale moved, in both parts"


# ---- What is refused


@pytest.mark.parametrize(
    ("precision", "numerics", "cause"),
    [
        ("fp16", {"tf32": True}, "a CPU has no tf32"),
        ("bf16", {"storage_dtype": "bf16"}, r"stored as bfloat16, and AdamW loses updates .*bf16-weights"),
        ("fp32", {"param_dtype": "bf16"}, 'set precision = "bf16" as well'),
        ("fp8", {}, "unknown precision 'fp8'"),
        ("fp32", {"reduce_dtyp": "bf16"}, "did you mean 'numerics.reduce_dtype'"),
    ],
)
def test_formats_that_cannot_work_are_refused(tmp_path: Any, precision: Any, numerics: Any, cause: str) -> None:
    run = lockstep.init("single", device="cpu", run_dir=tmp_path / "run")
    with run, pytest.raises(UserError, match=cause):
        run.setup(linear, huber, optimizer=adamw, precision=precision, numerics=numerics)


def test_weights_built_in_fp16_are_refused(tmp_path: Any) -> None:
    run = lockstep.init("single", device="cpu", run_dir=tmp_path / "run")
    with run, pytest.raises(UserError, match="stored as float16"):
        run.setup(lambda: linear().half(), huber, optimizer=adamw)


def test_fp16_on_a_cpu_that_only_emulates_it_is_refused_unless_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.step.precision.cpu_has_fp16", lambda: False)
    with pytest.raises(UserError, match="emulated, about a hundred times slower"):
        check_can_compute("fp16", NumericsConfig(), "cpu")
    check_can_compute("fp16", NumericsConfig(accept=["slow-fp16"]), "cpu")


def test_a_cpu_whose_matrix_units_kill_is_found_out_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.step.precision._claims_amx", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(
        "lockstep.step.precision.PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)  # {dtype}"
    )
    from lockstep.step.precision import _half_precision_kills

    _half_precision_kills.cache_clear()
    with pytest.raises(UserError, match=r"killed \(SIGILL\): set ONEDNN_MAX_CPU_ISA"):
        check_can_compute("bf16", NumericsConfig(), "cpu")
    _half_precision_kills.cache_clear()


def test_the_precision_table_says_what_is_stored_computed_and_summed_in_what() -> None:
    table = number_formats("fp16", NumericsConfig(reduce_dtype="fp16", loss_scale=8.0), "cuda")
    assert table["weights"] == table["optimizer state"] == "fp32"
    assert table["matrix products"] == table["gradient sums over ranks"] == "fp16"
    assert table["loss scale"].startswith("8, doubled every 2000 steps")
    assert number_formats("fp32", NumericsConfig(tf32=True), "cuda")["matrix products"] == "tf32"
    halves = number_formats("bf16", NumericsConfig(storage_dtype="bf16"), "cuda")
    assert halves["weights"] == halves["optimizer state"] == "bf16"


def record_formats(job: Job) -> Any:
    run = join(job, "dp=2")
    with run:
        engine = run.setup(linear, huber, optimizer=adamw, precision="bf16", numerics={"reduce_dtype": "bf16"})
        for batch in run.loader(Spiked(), GLOBAL_BATCH, micro_batch=2, steps=1, workers=0):
            engine.step(batch)
    return next(event["formats"] for event in read_events(run.folder.events) if event["kind"] == "start")


def test_a_run_records_its_precision_table(ranks: RankPool) -> None:
    table = ranks.run(record_formats, 2)[0]
    assert table["gradient sums over ranks"] == "bf16"
    assert table["weights"] == "fp32"
