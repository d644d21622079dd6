"""Why a layout may not give the numbers of one process: a guess at the cause, by name, and where it shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lockstep.prove.recording import Recording, Tensors
from lockstep.prove.verify import NO_SIGNAL, LayoutComparison, StepDifferences, gradient_differences
from lockstep.text.units import how_many

Cause = Literal[
    "data",  # other samples
    "rank",  # the loss function computes something else on another rank, for the same samples
    "micro-batch",  # the numbers follow how many samples one forward sees
    "mean",  # the same, because means of micro-batches are averaged
    "start",  # other initial values
    "missing-parameter",  # a layer that is not there, or gets no gradient
    "tied",  # one weight that has become two, or one whose uses are not added up
    "replica",  # ranks that should hold equal values do not
    "scale",  # a division that is missing or done twice
    "stale-gradient",  # what the step before has left
    "loss",  # the forward, or how losses are added up
    "optimizer",  # its step, its state, clipping: all that comes after right gradients
    "local",  # none of these: one module computes something else, or its buffers do
]

ALIKE = 1e-4
"""How nearly alike the numbers of two ranks have to be for the same samples: they add up in the same order."""

FIT = 1e-3
"""How well a gradient has to be a factor times another one, or a sum of two, to be called so."""


@dataclass(frozen=True)
class ProofVerdict:
    """One sentence, and for a difference its likely cause and the first step and parameter that show it."""

    text: str
    cause: Cause | None = None
    step: int | None = None
    parameter: str | None = None
    returns: str | None = None
    """The first module that returns something else, where the forward is wrong."""

    @property
    def module(self) -> str | None:
        """The module that is to blame, as far as it is known: else the one that owns the parameter."""
        return self.returns or (self.parameter and (self.parameter.rpartition(".")[0] or self.parameter))


def judge(found: LayoutComparison, other: LayoutComparison | None = None) -> ProofVerdict:
    """The verdict on a comparison. Of several differences it is about the first.

    `other` is a run on one process with another micro-batch, beside the first.
    """
    if found.same:
        if other is not None and not other.same:
            return _other_micro_batch(found, other)
        return ProofVerdict(_praise(found))
    if found.missing or found.extra or found.untied:
        return _other_model(found)
    first = found.first_difference
    if first is None:
        ours, theirs = len(found.ours.steps), len(found.theirs.steps)
        what = f"{found.layout} does {how_many(ours, 'step')} in all and one process {theirs}"
        return _verdict("data", min(ours, theirs) + 1, None, what, "the loader ends at another place")
    if not first.same_samples:
        why = "look at what the script or its dataset makes depend on the rank or the number of ranks"
        return _verdict("data", first.step, None, "other samples are read, or in another order", why)
    if first.drifted or first.disagreement:
        return _drift(found, first)
    # What a step has left makes ranks differ for the same samples too.
    if first.wrong_gradients and (verdict := _wrong_gradients(found, first)).cause == "stale-gradient":
        return verdict
    if (unlike := _unlike_ranks(found, first)) is not None:
        return unlike
    if other is not None and not other.same:
        return _other_micro_batch(found, other)
    if first.settings:
        return _verdict("optimizer", first.step, None, f"the {first.settings}", "it must not depend on the layout")
    if first.wrong_gradients:
        return _wrong_gradients(found, first)
    if first.norm > first.limits.norm:
        return _wrong_norm(found, first.step)
    if first.loss > first.limits.loss:
        what = f"the loss differs by {first.loss:.1e} and the gradients agree"
        return _verdict("loss", first.step, None, what, "losses or weights are added up wrongly")
    return _wrong_values(found, first)


def _praise(found: LayoutComparison) -> str:
    """The sentence about a layout that gives the numbers of one process."""
    gradients = [amount for step in found.steps for amount in step.gradients.values()]
    done = f"{how_many(len(found.steps), 'step')}, {how_many(len(found.theirs.parameters), 'parameter')}"
    text = f"{found.layout} gives the numbers of one process: {done}, largest gradient difference"
    text += f" {max(gradients, default=0.0):.1e}"
    if found.spread:
        spread = max((amount for step in found.spread for amount in step.gradients.values()), default=0.0)
        text += f" (rounding: one process with other last bits in its weights differs by {spread:.1e})"
    return text


def _other_micro_batch(found: LayoutComparison, other: LayoutComparison) -> ProofVerdict:
    """One process has other numbers with another micro-batch, and so has every layout that chooses one."""
    first = other.first_difference
    assert first is not None
    sizes = [" and ".join(map(str, one.micro_batch.values())) for one in (other.ours, other.theirs)]
    agrees = f"{found.layout} gives the numbers of one process, but " if found.same else ""
    where = f"{agrees}one process has other numbers with micro_batch = {sizes[0]} than with {sizes[1]}"
    weights = [run.steps[first.step - 1][0]["weight"] for run in (other.ours, other.theirs)] if first.step else [1, 1]
    if not _close(*weights):
        what = f"{where}: the weight of the step is {weights[0]:g} instead of {weights[1]:g}"
        why = "a mean of means follows how the batch is shared out: return the sum and how much counted, not a mean"
        return _verdict("mean", first.step, None, what, why)
    if first.step == 1:
        why = (
            "the loss of a sample depends on the others in its forward (a mean of its own, in-batch negatives, batch "
            "statistics) or on how often the loss is called: sum over samples, or give run.loader a micro_batch"
        )
    else:
        why = "what the model or the loss keeps from call to call follows their number: give run.loader a micro_batch"
    return _verdict("micro-batch", first.step, None, where, why)


def _unlike_ranks(found: LayoutComparison, first: StepDifferences) -> ProofVerdict | None:
    """Data ranks compute something else for the same samples."""
    reference, *others = found.ours.steps[-1][0]["by_rank"] or [None]
    if reference is None:
        return None
    look = "look for what depends on the rank: a seed, an `if rank == 0`, a generator of its own"
    for rank, one in enumerate(others, start=1):
        who = f"for the same samples data rank {rank} computes"
        if not math.isclose(one["loss"], reference["loss"], rel_tol=ALIKE, abs_tol=ALIKE):
            what = f"{who} the loss {one['loss']:.6g} and data rank 0 {reference['loss']:.6g}"
            return _verdict("rank", first.step, None, what, look)
        if one["gradient"] > ALIKE:
            what = f"{who} the loss of data rank 0 and another gradient of {_of(one['parameter'])}"
            return _verdict("rank", first.step, one["parameter"], what, f"{look}, a detach or no_grad on one of them")
    return None


def _other_model(found: LayoutComparison) -> ProofVerdict:
    """The two runs do not train the same parameters."""
    names = found.missing or found.extra or found.untied
    tied = _tied_names(found.ours) | _tied_names(found.theirs)
    if set(found.missing + found.extra) <= tied:
        separate = "on one process" if found.missing else f"under {found.layout}"
        what = f"{' and '.join(found.untied or names)} {'are' if len(found.untied) > 1 else 'is'} not one tied weight "
        return _verdict("tied", 0, names[0], f"{what}in both runs", f"find out what unties them {separate}")
    without, there = (found.layout, "one process") if found.missing else ("one process", found.layout)
    what = f"{without} does not have {_short(names, found.theirs.blocks + found.ours.blocks)} of {there}"
    return _verdict("missing-parameter", 0, names[0], what, "a layer was left out or added")


def _drift(found: LayoutComparison, first: StepDifferences) -> ProofVerdict:
    """Ranks of the layout disagree with each other."""
    if not first.drifted:
        cause: Cause = "loss" if first.disagreement in ("loss", "weight") else "optimizer"
        what = f"ranks have different results ({first.disagreement})"
        return _verdict(cause, first.step, None, what, "a sum over the ranks is missing")
    order = [*found.theirs.parameters, *found.theirs.buffers]
    name, *others = [name for name in order if name in first.drifted]
    if set(first.drifted) <= _tied_names(found.theirs):
        why = "the gradients of its uses are not added up everywhere"
        return _verdict("tied", first.step, name, f"ranks hold different values of the tied weight {name}", why)
    why = "its gradient is not summed over the replicas, or one of them was changed alone"
    return _verdict("replica", first.step, name, f"ranks hold different values of {_of(name)}{_and(others)}", why)


def _wrong_gradients(found: LayoutComparison, first: StepDifferences) -> ProofVerdict:
    step, wrong = first.step, first.wrong_gradients
    ours, theirs = found.ours.gradients(step), found.theirs.gradients(step)
    least = NO_SIGNAL * _norm_of_all(theirs)
    signal = [name for name in found.theirs.parameters if name in theirs and float(theirs[name].norm()) >= least]
    if dropped := [name for name in wrong if name in signal and not (name in ours and ours[name].any())]:
        what = f"{_short(dropped, found.theirs.blocks)} gets no gradient and does on one process"
        return _verdict("missing-parameter", step, dropped[0], what, "the layer is left out of the forward or backward")
    if set(signal) <= set(wrong) and (factor := _common_factor(ours, theirs, wrong)):
        return _all_scaled(found, step, wrong[0], factor, len(signal))

    # With clipping one wrong gradient changes the norm, and with it all the others.
    unclipped = _unclipped(found.ours, step), _unclipped(found.theirs, step)
    amounts = gradient_differences(*unclipped, found.theirs.parameters)
    fewer = [name for name, amount in amounts.items() if amount > first.limits.gradient]
    if 0 < len(fewer) < len(wrong):
        (ours, theirs), wrong = unclipped, fewer
    if step > 1 and (stale := _stale(ours, theirs, found.ours.gradients(step - 1), wrong)):
        what = f"the gradient of {_of(stale[0])} contains that of step {step - 1}{_and(stale[1:])}"
        return _verdict("stale-gradient", step, stale[0], what, "what a step has accumulated was not cleared after it")
    name, *others = wrong
    what = f"the gradient of {_of(name)}"
    if not others and len(signal) > 1:
        what += " differs and no other does"
        if name in _tied_names(found.theirs):
            why = "the weight is tied, and one of its uses is missing or counts twice"
            return _verdict("tied", step, name, what, why)
        return _verdict("replica", step, name, what, "what ranks have of it is not added up as for the others")
    if factor := _common_factor(ours, theirs, wrong):
        what += f" is {factor:.3f} x that of one process; {len(wrong)} of {len(signal)} gradients are"
        return _verdict("scale", step, name, what, "they are summed or divided once too often or too rarely")
    if first.loss > first.limits.loss:
        what = f"the loss differs by {first.loss:.1e}, and {what}{_and(others)}"
        if step == 1 and found.first_output is not None:
            where = f"{found.first_output} is the first module that returns something else than on one process"
            return replace(_verdict("loss", step, name, what, where), returns=found.first_output)
        return _verdict("loss", step, name, what, "the forward computes something else")
    if step > 1:
        why = "what a step leaves to the next is wrong: optimizer state, clipping, a buffer"
        return _verdict("optimizer", step, name, f"{what} differs{_and(others)}, and all before was right", why)
    why = "look at what this module computes under the layout"
    return _verdict("local", step, name, f"{what} differs{_and(others)}, in no known pattern", why)


def _all_scaled(found: LayoutComparison, step: int, name: str, factor: float, count: int) -> ProofVerdict:
    """All gradients are one factor off."""
    what = f"the gradient of {_of(name)} is {factor:.3f} x that of one process; all {how_many(count, 'gradient')} are"
    clipped = _is_clipped(found.ours, step) or _is_clipped(found.theirs, step)
    if clipped and (step > 1 or _close(_norm_ratio(found, step), 1 / factor)):
        return _verdict("optimizer", step, name, what, "clipping uses another norm than that of all gradients")
    times = max(factor, 1 / factor)
    by_ranks = _close(times, round(times)) and len(found.ours.ranks) % round(times) == 0
    divisor = "the number of ranks" if by_ranks else "the weight of the step or the number of micro-batches"
    return _verdict("scale", step, name, what, f"a division by {divisor} is missing or done twice")


def _wrong_norm(found: LayoutComparison, step: int) -> ProofVerdict:
    """The gradients are right as the optimizer sees them, and their norm is not."""
    what = f"the gradient norm is {_norm_ratio(found, step):.3f} x that of one process"
    if _is_clipped(found.theirs, step):
        why = "a division of the gradients is missing or done twice, which clipping hides"
        return _verdict("scale", step, None, what, why)
    return _verdict("optimizer", step, None, f"{what} and the gradients are right", "clipping uses a wrong norm")


def _wrong_values(found: LayoutComparison, first: StepDifferences) -> ProofVerdict:
    """The gradients are right, and what became of the parameters is not."""
    name, *others = first.wrong_values
    if first.step == 0:
        what = f"{_of(name)} has other initial values than on one process{_and(others)}"
        why = "build_model has to draw from torch's, numpy's or random's global stream"
        return _verdict("start", 0, name, what, why)
    if name in found.theirs.buffers:
        what = f"the buffer {_of(name)} differs{_and(others)} and all parameters are right"
        return _verdict("local", first.step, name, what, "what ranks count in it is not put together as on one process")
    if not others and name in _tied_names(found.theirs):
        what = f"the tied weight {name} differs and its gradient is right"
        return _verdict("tied", first.step, name, what, "one of its copies is updated alone")
    what = f"the value of {_of(name)} differs{_and(others)} and all gradients are right"
    return _verdict("optimizer", first.step, name, what, "the optimizer's step, its state or its groups are wrong")


def _common_factor(ours: Tensors, theirs: Tensors, names: list[str]) -> float | None:
    """The one number that turns these gradients of one process into ours, if there is one."""
    if any(name not in ours or name not in theirs for name in names):
        return None
    square = sum(float(theirs[name].double().square().sum()) for name in names)
    product = sum(float((ours[name].double() * theirs[name].double()).sum()) for name in names)
    if square == 0 or product == 0:
        return None
    factor, least = product / square, 1e-5 * _norm_of_all(ours)
    for name in names:
        mine, other = ours[name].double(), theirs[name].double()
        if float((mine - factor * other).norm()) > FIT * float(mine.norm()) + least:
            return None
    return factor


def _stale(ours: Tensors, theirs: Tensors, before: Tensors, names: list[str]) -> list[str]:
    """The gradients that are this step's plus some multiple of the one before, or such a multiple alone."""
    found = []
    for name in names:
        if not all(name in gradients and gradients[name].numel() >= 4 for gradients in (ours, theirs, before)):
            continue
        mine, *both = (gradients[name].double().flatten() for gradients in (ours, theirs, before))
        parts = torch.stack(both, dim=1)
        shares = torch.linalg.lstsq(parts, mine[:, None]).solution.flatten()
        now, then = shares.tolist()
        explains = float((mine - parts @ shares).norm()) <= FIT * float(mine.norm())
        matters = abs(then) * float(both[1].norm()) > 10 * FIT * float(mine.norm())
        if explains and matters and min(abs(now), abs(now - 1)) < 10 * FIT:
            found.append(name)
    return found


def _unclipped(run: Recording, step: int) -> Tensors:
    """The gradients of a step as they were before clipping."""
    gradients = run.gradients(step)
    factor = run.steps[step - 1][0]["grad_norm"] / _norm_of_all(gradients) if _is_clipped(run, step) else 1.0
    return {name: gradient.double() * factor for name, gradient in gradients.items()}


def _is_clipped(run: Recording, step: int) -> bool:
    """Whether the gradients that the optimizer saw are shorter than the norm that was reported."""
    norm = float(run.steps[step - 1][0]["grad_norm"])
    return 0 < _norm_of_all(run.gradients(step)) < (1 - FIT) * norm


def _norm_ratio(found: LayoutComparison, step: int) -> float:
    ours, theirs = (float(run.steps[step - 1][0]["grad_norm"]) for run in (found.ours, found.theirs))
    return ours / theirs if theirs else math.inf


def _norm_of_all(tensors: Tensors) -> float:
    return math.hypot(*(float(tensor.double().norm()) for tensor in tensors.values()))


def _tied_names(run: Recording) -> set[str]:
    return {name for rank in run.ranks for group in rank["tied"] for name in group}


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=FIT)


def _verdict(cause: Cause, step: int, parameter: str | None, what: str, why: str) -> ProofVerdict:
    return ProofVerdict(
        f"first difference: {f'step {step}' if step else 'the start'}, {what}: {why}", cause, step, parameter
    )


def _of(name: str) -> str:
    module = name.rpartition(".")[0]
    return f"{name} (module {module})" if module else name


def _and(others: list[str]) -> str:
    return f" (and of {how_many(len(others), 'other')})" if others else ""


def _short(names: list[str], blocks: list[str]) -> str:
    """Parameters in a few words: by their block where they are all in one."""
    for block in blocks:
        if all(name.startswith(f"{block}.") for name in names):
            return f"{block} ({how_many(len(names), 'parameter')})"
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
