"""The comparison behind `lockstep verify`, on made-up recordings: what is rounding, and which cause it names."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.errors import UserError
from lockstep.prove.causes import ProofVerdict, judge
from lockstep.prove.recording import Recording, keep_blocks, read_recording
from lockstep.prove.verify import (
    GRADIENT,
    LOSS,
    NORM,
    NOT_ROUNDING,
    TIMES,
    VALUE,
    Check,
    LayoutComparison,
    checks,
    compare,
    other_micro_batches,
)

SHAPES = {
    "embedding.weight": (7, 4),
    "blocks.0.linear.weight": (4, 4),
    "blocks.0.linear.bias": (4,),
    "blocks.1.linear.weight": (4, 4),
    "blocks.1.linear.bias": (4,),
    "norm.weight": (4,),
}
BUFFER = "norm.running_mean"
BLOCK = [name for name in SHAPES if name.startswith("blocks.1.")]
TIED = ["embedding.weight", "head.weight"]
STEPS = 3
LR = 0.1


@dataclass
class Run:
    """A recording before it is written. Every rank holds everything; `values` and `gradients` are those of rank 0."""

    ranks: int = 1
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: dict(SHAPES))
    tied: list[list[str]] = field(default_factory=lambda: [TIED])
    untied_names: list[str] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    values: list[dict[str, torch.Tensor]] = field(default_factory=list)
    lines: list[list[dict[str, Any]]] = field(default_factory=list)
    shaken: bool = False
    drifts: dict[tuple[int, str], int] = field(default_factory=dict)
    """(step, parameter) -> the rank that holds another value of it."""

    def train(self, clip: float = math.inf) -> Run:
        """Fill in a training by plain gradient descent."""
        draw = torch.Generator().manual_seed(3)
        self.values = [{name: torch.randn(shape, generator=draw) for name, shape in self.shapes.items()}]
        self.values[0][BUFFER] = torch.zeros(4)
        self.gradients = [{}]
        for step in range(1, STEPS + 1):
            gradients = {name: torch.randn(shape, generator=draw) for name, shape in self.shapes.items()}
            norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
            scale = min(1.0, clip / norm)
            self.gradients.append({name: gradient * scale for name, gradient in gradients.items()})
            self.update(step)
            ids = [[8 * step + 4 * rank + sample for sample in range(4)] for rank in range(2)]
            shared: dict[str, Any] = {"step": step, "loss": 2.0 / step, "weight": 8.0, "grad_norm": norm}
            shared |= {"lr": LR, "skipped": False, "micro_batch": {"train": 4}, "fixed": {}, "by_rank": []}
            together = [[*ids[0], *ids[1]]] if self.ranks == 1 else [ids[rank % 2] for rank in range(self.ranks)]
            self.lines.append([{**shared, "ids": own} for own in together])
        return self

    def update(self, step: int) -> None:
        """Do the optimizer's part of a step."""
        before, gradients = self.values[step - 1], self.gradients[step]
        after = {name: value - LR * gradients[name] if name in gradients else value for name, value in before.items()}
        self.values[step:] = [{**after, BUFFER: torch.full((4,), float(step))}]

    def retrain(self) -> None:
        for step in range(1, STEPS + 1):
            self.update(step)

    def write(self, folder: Path) -> Recording:
        folder.mkdir()
        of_ties = [name for group in self.tied for name in group]
        names = list(dict.fromkeys([*self.shapes, *of_ties, *self.untied_names]))
        for rank in range(self.ranks):
            head = {
                "rank": rank,
                "layout": "single" if self.ranks == 1 else f"dp={self.ranks}",
                "data_rank": rank % 2,
                "writes_tensors": rank == 0,
                "parameters": self.shapes,
                "buffers": [BUFFER],
                "names": names,
                "tied": self.tied,
                "blocks": ["blocks.0", "blocks.1"],
                "blocks_built": 2,
                "changed": {},
                "shaken": self.shaken,
            }
            lines = [head, *(step[rank] for step in self.lines)]
            for step, line in enumerate(lines):
                line["checksums"] = {
                    name: zlib.crc32(value.numpy().tobytes()) + (self.drifts.get((step, name), -1) == rank)
                    for name, value in self.values[step].items()
                }
            (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step in range(len(self.lines) + 1):
            tensors = {f"value/{name}": value for name, value in self.values[step].items()}
            tensors |= {f"grad/{name}": gradient for name, gradient in self.gradients[step].items()}
            save_file(tensors, folder / f"rank-0-step-{step}.safetensors")
        return read_recording(folder)


Change = Callable[[Run], None]


def compared(folder: Path, change: Change, *, ranks: int = 2, clip: float = math.inf) -> LayoutComparison:
    """One process beside two ranks that did the same but for a change."""
    ours = Run(ranks).train(clip)
    change(ours)
    return compare(ours.write(folder / "ours"), Run().train(clip).write(folder / "theirs"))


def row(found: LayoutComparison, name: str) -> Check:
    return next(check for check in checks(found) if check.name == name)


# ---- What is equal


def test_equal_runs_pass_with_a_table_in_which_all_is_well(tmp_path: Path) -> None:
    found = compared(tmp_path, lambda _: None)
    assert found.same
    assert all(check.ok for check in checks(found))
    assert judge(found) == ProofVerdict(
        "dp=2 gives the numbers of one process: 3 steps, 6 parameters, largest gradient difference 0.0e+00"
    )
    assert row(found, "samples").note == "24, in the same order"
    assert row(found, "parameters").note == "6, 72 numbers"
    assert row(found, "tied weights").note == "embedding.weight = head.weight"
    assert row(found, "replicas").note == "the same bits on all of 2 ranks"


def test_ranks_that_work_on_one_micro_batch_together_count_its_samples_once(tmp_path: Path) -> None:
    assert compared(tmp_path, lambda _: None, ranks=4).same


def test_a_skipped_step_is_equal_to_a_skipped_step(tmp_path: Path) -> None:
    def skip(run: Run) -> None:
        run.gradients[2] = {}
        run.retrain()
        for line in run.lines[1]:
            line |= {"loss": math.nan, "weight": 0.0, "grad_norm": 0.0, "skipped": True}

    theirs = Run().train()
    skip(theirs)
    ours = Run(2).train()
    skip(ours)
    found = compare(ours.write(tmp_path / "ours"), theirs.write(tmp_path / "theirs"))
    assert found.same, judge(found).text


# ---- What is rounding


def nudge(tensor: torch.Tensor, by: float) -> torch.Tensor:
    """The tensor moved by a vector of this norm that touches all elements alike."""
    moved: torch.Tensor = tensor.double() + by / tensor.numel() ** 0.5
    return moved.float()


@pytest.mark.parametrize(("times", "same"), [(0.9, True), (1.1, False)])
def test_a_gradient_may_differ_by_a_part_of_its_norm_and_of_all_norms(tmp_path: Path, times: float, same: bool) -> None:
    def change(run: Run) -> None:
        gradients = run.gradients[1]
        whole = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        allowed = 1e-5 * float(gradients["norm.weight"].norm()) + 1e-6 * whole
        gradients["norm.weight"] = nudge(gradients["norm.weight"], times * allowed)

    found = compared(tmp_path, change)
    assert found.same == same
    assert row(found, "gradients").largest == pytest.approx(times * GRADIENT, rel=0.02)
    assert row(found, "gradients").note == "norm.weight, step 1"


@pytest.mark.parametrize(
    ("key", "allowed", "check"), [("loss", 2.0 * LOSS, "losses"), ("grad_norm", 8.0 * NORM, "gradient norm")]
)
@pytest.mark.parametrize(("times", "same"), [(0.5, True), (1.5, False)])
def test_a_loss_and_a_norm_may_differ_by_a_little(
    tmp_path: Path, key: str, allowed: float, check: str, times: float, same: bool
) -> None:
    def change(run: Run) -> None:
        for line in run.lines[0]:
            line[key] += times * allowed

    found = compared(tmp_path, change)
    assert row(found, check).ok == same
    assert found.same == same


@pytest.mark.parametrize(("times", "same"), [(0.9, True), (1.1, False)])
def test_a_value_may_differ_by_a_part_of_how_far_it_was_moved(tmp_path: Path, times: float, same: bool) -> None:
    def change(run: Run) -> None:
        start, value = run.values[0]["embedding.weight"], run.values[3]["embedding.weight"]
        allowed = VALUE * float((value - start).norm()) + 3 * 2.0**-23 * float(value.norm())
        run.values[3]["embedding.weight"] = nudge(value, times * allowed)

    found = compared(tmp_path, change)
    assert found.same == same
    assert row(found, "values").largest == pytest.approx(times * VALUE, rel=0.1)


def test_a_gradient_without_signal_is_compared_neither_by_itself_nor_by_value(tmp_path: Path) -> None:
    def silence(run: Run, sign: float) -> None:
        for step in range(1, STEPS + 1):
            run.gradients[step]["blocks.0.linear.bias"] = torch.full((4,), sign * 1e-7)
            run.values[step]["blocks.0.linear.bias"] += sign * LR

    theirs = Run().train()
    silence(theirs, 1.0)
    found = compare(
        _changed(Run(2).train(), lambda run: silence(run, -1.0)).write(tmp_path / "ours"),
        theirs.write(tmp_path / "theirs"),
    )
    assert found.same, judge(found).text


def test_an_element_moved_by_the_sign_of_a_rounding_error_is_not_held_against_the_optimizer(tmp_path: Path) -> None:
    def change(run: Run, sign: float) -> None:
        run.gradients[1]["embedding.weight"][0, 0] = sign * 1e-8
        for step in range(1, STEPS + 1):
            run.values[step]["embedding.weight"][0, 0] += sign * LR

    found = compare(
        _changed(Run(2).train(), lambda run: change(run, 1.0)).write(tmp_path / "ours"),
        _changed(Run().train(), lambda run: change(run, -1.0)).write(tmp_path / "theirs"),
    )
    assert found.same, judge(found).text


def nudge_gradient(by: float) -> Change:
    """In step 2 a gradient differs by a part of the norm that it is measured against, as rounding may have grown."""

    def change(run: Run) -> None:
        gradients = run.gradients[2]
        whole = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        reference = float(gradients["norm.weight"].norm()) + 0.1 * whole
        gradients["norm.weight"] = nudge(gradients["norm.weight"], by * reference)

    return change


@pytest.mark.parametrize(
    ("differs", "spread", "same"), [(1.7e-5, 0.3e-5, True), (1.7e-5, 0.1e-5, False), (1.5e-2, 0.3e-2, False)]
)
def test_rounding_that_a_training_grows_is_what_other_last_bits_make_of_it(
    tmp_path: Path, differs: float, spread: float, same: bool
) -> None:
    ours = _changed(Run(2).train(), nudge_gradient(differs)).write(tmp_path / "ours")
    theirs = Run().train().write(tmp_path / "theirs")
    shaken = _changed(Run(shaken=True).train(), nudge_gradient(spread)).write(tmp_path / "shaken")
    assert not compare(ours, theirs).same
    assert compare(ours, theirs).may_be_rounding == (differs < NOT_ROUNDING)
    found = compare(ours, theirs, shaken)
    assert found.same == (same or found.left_out > 0)
    if same:
        assert row(found, "gradients").allowed == pytest.approx(TIMES * spread, rel=0.02)
        assert f"with other last bits in its weights differs by {spread:.1e}" in judge(found).text


def test_steps_about_which_the_last_bit_decides_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    ours = _changed(Run(2).train(), nudge_gradient(5e-3)).write(tmp_path / "ours")
    theirs = Run().train().write(tmp_path / "theirs")
    shaken = _changed(Run(shaken=True).train(), nudge_gradient(5e-3)).write(tmp_path / "shaken")
    found = compare(ours, theirs, shaken)
    assert (found.same, found.left_out, len(found.steps)) == (True, 2, 1)
    assert row(found, "steps").note == "3, compared up to step 1: the last bit of the weights decides about later ones"


def test_a_mistake_in_the_first_step_is_no_rounding_whatever_other_last_bits_do(tmp_path: Path) -> None:
    ours = _changed(Run(2).train(), scale_all).write(tmp_path / "ours")
    theirs = Run().train().write(tmp_path / "theirs")
    shaken = _changed(Run(shaken=True).train(), scale_all).write(tmp_path / "shaken")
    found = compare(ours, theirs, shaken)
    assert not found.may_be_rounding
    assert judge(found).cause == "scale"


# ---- Another micro-batch


def with_another_micro_batch(
    folder: Path, change: Change, layout: Change = lambda _: None
) -> tuple[ProofVerdict, Check]:
    ours = _changed(Run(2).train(), layout).write(folder / "ours")
    theirs = Run().train().write(folder / "theirs")
    assert other_micro_batches(ours, theirs) == {"train": 2}

    def of_two(run: Run) -> None:
        change(run)
        for line in run.lines:
            line[0]["micro_batch"] = {"train": 2}

    again = _changed(Run().train(), of_two).write(folder / "again")
    found, other = compare(ours, theirs, other=again), compare(again, theirs)
    return judge(found, other), next(check for check in checks(found, other) if check.name == "micro-batch")


def test_numbers_that_do_not_depend_on_the_micro_batch_are_said_to_be_so(tmp_path: Path) -> None:
    verdict, check = with_another_micro_batch(tmp_path, lambda _: None)
    assert verdict.cause is None
    assert check == Check("micro-batch", True, "4; on one process with 2 the same numbers", 0.0, GRADIENT)


def test_numbers_that_follow_the_micro_batch_are_no_proof_even_where_the_layout_agrees(tmp_path: Path) -> None:
    verdict, check = with_another_micro_batch(tmp_path, compute_something_else(1))
    assert (verdict.cause, verdict.step, check.ok) == ("micro-batch", 1, False)
    assert (
        "dp=2 gives the numbers of one process, but one process has other numbers with micro_batch = 2" in verdict.text
    )
    assert check.note == "4; on one process with 2 other numbers from step 1 on"


def test_a_layout_that_differs_as_another_micro_batch_does_is_not_to_blame(tmp_path: Path) -> None:
    verdict, _ = with_another_micro_batch(tmp_path, compute_something_else(1), compute_something_else(1))
    assert verdict.cause == "micro-batch"
    assert "first difference: step 1, one process has other numbers with micro_batch = 2 than with 4" in verdict.text


def test_a_mean_of_means_is_known_by_its_weight(tmp_path: Path) -> None:
    def average(run: Run) -> None:
        compute_something_else(1)(run)
        for line in run.lines:
            line[0]["weight"] = 2.0

    verdict, _ = with_another_micro_batch(tmp_path, average)
    assert verdict.cause == "mean"
    assert "the weight of the step is 2 instead of 8: a mean of means" in verdict.text


def test_another_weight_with_the_same_numbers_is_no_difference(tmp_path: Path) -> None:
    def count_micro_batches(run: Run) -> None:
        for lines in run.lines:
            for line in lines:
                line["weight"] = 2.0

    assert compared(tmp_path, count_micro_batches).same


@pytest.mark.parametrize("why", ["given", "coupled"])
def test_a_micro_batch_that_is_part_of_the_training_is_not_changed(tmp_path: Path, why: str) -> None:
    def fix(run: Run) -> None:
        for lines in run.lines:
            for line in lines:
                line["fixed"] = {"train": why}

    ours, theirs = (_changed(Run(ranks).train(), fix).write(tmp_path / f"of-{ranks}") for ranks in (2, 1))
    assert other_micro_batches(ours, theirs) == {}
    reasons = {"given": "as the script says", "coupled": "because the loss of a sample depends on the others in it"}
    assert row(compare(ours, theirs), "micro-batch").note == f"4, {reasons[why]}"


# ---- The same samples on every rank


@pytest.mark.parametrize(
    ("of_rank_1", "said"),
    [
        ({"loss": 2.5}, "data rank 1 computes the loss 2.5 and data rank 0 2: look for what depends on the rank"),
        ({"gradient": 0.5}, "data rank 1 computes the loss of data rank 0 and another gradient of norm.weight"),
    ],
)
def test_ranks_that_compute_something_else_for_the_same_samples_are_named(
    tmp_path: Path, of_rank_1: dict[str, float], said: str
) -> None:
    def differ(run: Run) -> None:
        compute_something_else(1)(run)
        alike = {"loss": 2.0, "gradient": 0.0, "parameter": "norm.weight"}
        run.lines[-1][0]["by_rank"] = [alike, {**alike, **of_rank_1}]

    verdict = judge(compared(tmp_path, differ))
    assert verdict.cause == "rank"
    assert said in verdict.text


def _changed(run: Run, change: Change) -> Run:
    change(run)
    return run


# ---- Causes


def scale_all(run: Run) -> None:
    run.gradients = [{name: 2 * gradient for name, gradient in step.items()} for step in run.gradients]
    run.retrain()


def scale_some(run: Run) -> None:
    for name in BLOCK:
        run.gradients[1][name] *= 0.5


def scale_the_norm(run: Run) -> None:
    for step in run.lines:
        for line in step:
            line["grad_norm"] *= 2


def clip_wrongly_in_step_2(run: Run) -> None:
    run.gradients[2] = {name: 1.5 * gradient for name, gradient in run.gradients[2].items()}
    run.retrain()


def change_one(name: str, clip: float | None = None) -> Change:
    """One gradient differs, and with clipping all the others follow the norm."""

    def change(run: Run) -> None:
        gradients = run.gradients[1]
        gradients[name][0] += 1.0
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        for line in run.lines[0]:
            line["grad_norm"] = norm if clip is None else line["grad_norm"] * norm / clip
        for gradient in gradients.values():
            gradient *= 1.0 if clip is None else clip / norm

    return change


def update_one(name: str) -> Change:
    def change(run: Run) -> None:
        run.values[2][name] = run.values[2][name] + 0.01

    return change


def untie(run: Run) -> None:
    run.tied = []
    run.shapes["head.weight"] = SHAPES["embedding.weight"]
    for step in range(STEPS + 1):
        run.values[step]["head.weight"] = run.values[step]["embedding.weight"].clone()


def drop_a_block(run: Run) -> None:
    for name in BLOCK:
        del run.shapes[name]
        for step in range(STEPS + 1):
            run.values[step].pop(name)
            run.gradients[step].pop(name, None)


def skip_a_block(run: Run) -> None:
    for step in range(1, STEPS + 1):
        run.gradients[step]["norm.weight"] *= 1.3
        for line in run.lines[step - 1]:
            line["loss"] += 0.1
        run.gradients[step].pop(BLOCK[0])
        run.gradients[step][BLOCK[1]].zero_()
    run.retrain()


def keep_the_last_gradient(run: Run) -> None:
    for name in BLOCK:
        run.gradients[2][name] = run.gradients[2][name] + 2 * run.gradients[1][name]
    run.retrain()


def repeat_the_last_gradient(run: Run) -> None:
    run.gradients[3]["blocks.0.linear.weight"] = run.gradients[2]["blocks.0.linear.weight"].clone()
    run.gradients[3]["embedding.weight"] = run.gradients[2]["embedding.weight"].clone()


def read_other_samples(run: Run) -> None:
    run.lines[1][1]["ids"][0] += 1


def decay(run: Run) -> None:
    for step in range(1, STEPS + 1):
        run.values[step] = {name: 0.99 * value for name, value in run.values[step].items()}


def start_elsewhere(run: Run) -> None:
    run.values[0]["norm.weight"] += 0.1
    run.retrain()


def drift(name: str) -> Change:
    return lambda run: run.drifts.update({(2, name): 1})


def compute_something_else(step: int) -> Change:
    def change(run: Run) -> None:
        draw = torch.Generator().manual_seed(9)
        for name in run.shapes:
            run.gradients[step][name] += 0.1 * torch.randn(SHAPES[name], generator=draw)
        run.retrain()

    return change


def compute_another_loss(run: Run) -> None:
    compute_something_else(1)(run)
    add_up_another_loss(run)


def add_up_another_loss(run: Run) -> None:
    for line in run.lines[0]:
        line["loss"] += 0.1


def report_another_loss_on_one_rank(run: Run) -> None:
    run.lines[2][1]["loss"] += 1e-9


def use_another_learning_rate(run: Run) -> None:
    for line in run.lines[1]:
        line["lr"] = 0.2


def end_earlier(run: Run) -> None:
    run.lines.pop()


# fmt: off
CAUSES: list[tuple[Change, str, int, str | None, str]] = [
    (scale_all, "scale", 1, "embedding.weight", "2.000 x that of one process; all 6 gradients are: a division by the"),
    (scale_some, "scale", 1, BLOCK[0], "2 of 6 gradients"),
    (change_one("embedding.weight"), "tied", 1, "embedding.weight", "one of its uses"),
    (change_one("norm.weight"), "replica", 1, "norm.weight", "no other does"),
    (untie, "tied", 0, "head.weight", "under dp=2"),
    (drop_a_block, "missing-parameter", 0, BLOCK[0], "dp=2 does not have blocks.1 (2 parameters)"),
    (skip_a_block, "missing-parameter", 1, BLOCK[0], "blocks.1 (2 parameters) gets no gradient"),
    (keep_the_last_gradient, "stale-gradient", 2, BLOCK[0], "contains that of step 1"),
    (repeat_the_last_gradient, "stale-gradient", 3, "embedding.weight", "contains that of step 2"),
    (read_other_samples, "data", 2, None, "other samples"),
    (end_earlier, "data", 3, None, "does 2 steps in all and one process 3"),
    (start_elsewhere, "start", 0, "norm.weight", "other initial values"),
    (decay, "optimizer", 1, "embedding.weight", "all gradients are right"),
    (compute_something_else(2), "optimizer", 2, "embedding.weight", "all before was right"),
    (use_another_learning_rate, "optimizer", 2, None, "the lr is 0.2, on one process 0.1"),
    (update_one("embedding.weight"), "tied", 2, "embedding.weight", "one of its copies is updated alone"),
    (update_one("norm.weight"), "optimizer", 2, "norm.weight", "all gradients are right"),
    (update_one(BUFFER), "local", 2, BUFFER, "the buffer norm.running_mean (module norm) differs"),
    (drift("blocks.0.linear.bias"), "replica", 2, "blocks.0.linear.bias", "(module blocks.0.linear)"),
    (drift("embedding.weight"), "tied", 2, "embedding.weight", "different values of the tied weight"),
    (compute_something_else(1), "local", 1, "embedding.weight", "in no known pattern"),
    (compute_another_loss, "loss", 1, "embedding.weight", "the forward"),
    (add_up_another_loss, "loss", 1, None, "the gradients agree"),
    (report_another_loss_on_one_rank, "loss", 3, None, "ranks have different results (loss)"),
]
# fmt: on


@pytest.mark.parametrize(
    ("change", "cause", "step", "parameter", "said"), CAUSES, ids=[f"{row[1]}-{row[4][:20]}" for row in CAUSES]
)
def test_a_difference_is_named_with_its_cause_and_where_it_begins(
    tmp_path: Path, change: Change, cause: str, step: int, parameter: str | None, said: str
) -> None:
    found = compared(tmp_path, change)
    verdict = judge(found)
    assert not found.same
    assert (verdict.cause, verdict.step, verdict.parameter) == (cause, step, parameter), verdict.text
    assert said in verdict.text
    assert verdict.text.startswith("first difference: ")
    assert any(not check.ok for check in checks(found))


CLIPPED: list[tuple[Change, str, int, str]] = [
    (scale_the_norm, "scale", 1, "which clipping hides"),
    (clip_wrongly_in_step_2, "optimizer", 2, "clipping uses another norm"),
    (change_one("norm.weight", clip=1.0), "replica", 1, "gradient of norm.weight (module norm) differs and no other"),
]


@pytest.mark.parametrize(("change", "cause", "step", "said"), CLIPPED, ids=[row[1] for row in CLIPPED])
def test_clipping_is_seen_through(tmp_path: Path, change: Change, cause: str, step: int, said: str) -> None:
    verdict = judge(compared(tmp_path, change, clip=1.0))
    assert (verdict.cause, verdict.step) == (cause, step), verdict.text
    assert said in verdict.text


def test_a_wrong_norm_without_clipping_is_told_from_wrong_gradients(tmp_path: Path) -> None:
    verdict = judge(compared(tmp_path, scale_the_norm))
    assert verdict.cause == "optimizer"
    assert "2.000 x that of one process and the gradients are right" in verdict.text


def test_ranks_that_should_read_the_same_samples_are_held_to_it(tmp_path: Path) -> None:
    def change(run: Run) -> None:
        run.lines[0][2]["ids"] = [1, 2, 3, 4]

    assert judge(compared(tmp_path, change, ranks=4)).cause == "data"


def test_a_tie_is_compared_also_where_no_parameter_is_one_too_many(tmp_path: Path) -> None:
    ours, theirs = Run(2).train(), Run().train()
    theirs.tied = [[*TIED, "tail.weight"]]
    found = compare(ours.write(tmp_path / "ours"), theirs.write(tmp_path / "theirs"))
    assert found.same, "a rank that has not got the third name cannot have untied it"
    ours.tied, ours.untied_names = [TIED], ["tail.weight"]
    found = compare(ours.write(tmp_path / "untied"), read_recording(tmp_path / "theirs"))
    assert judge(found).cause == "tied"
    assert row(found, "tied weights").note == "embedding.weight and head.weight and tail.weight"


def test_a_run_that_did_no_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the run did no step: verify needs a script"):
        read_recording(tmp_path)


# ---- Fewer blocks


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.second = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        self.named = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
        self.rest = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])


def test_the_first_blocks_of_every_list_stay() -> None:
    model = Halves()
    kept = model.first[0], model.first[1], model.second[1]
    keep_blocks(model, 2)
    assert [name for name, _ in model.named_children()] == ["first", "second", "named", "rest"]
    assert (model.first[0], model.first[1], model.second[1]) == kept
    assert (len(model.first), len(model.second), list(model.named), len(model.rest)) == (2, 2, ["a", "b"], 2)


def test_a_model_that_is_one_list_loses_blocks_and_one_with_fewer_stays() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    keep_blocks(model, 3)
    assert len(model) == 3
    keep_blocks(model, 4)
    assert len(model) == 3
