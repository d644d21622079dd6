"""Whether two recorded runs, one under a layout and one on one process, have the same numbers.

Every difference is divided by what it is measured against, so that one number a check, its tolerance, says how much is
rounding. Where a training makes more of its rounding errors than that (Adam's first steps do), a run that began with
other last bits shows how much. `causes.py` reads from the same comparison what may be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.layout import Layout
from lockstep.prove.recording import Recording, Tensors

LOSS = 1e-6
"""Allowed difference of a loss, relative to the loss or to 1, whichever is more."""

NORM = 1e-5
"""Allowed difference of the global gradient norm, relative to it."""

GRADIENT = 1e-5
"""Allowed difference of a gradient in norm, relative to |g| + 0.1 |g_all|: its own norm and that of all together."""

NO_SIGNAL = 1e-6
"""A gradient below this share of |g_all| is rounding error. What an optimizer makes of it is not compared."""

VALUE = 3e-5
"""Allowed difference of a parameter in norm, relative to how far the training moved it.

What fp32 cannot hold, a last bit a step, comes on top. Elements whose gradient agrees to fewer digits than this in some
step are left out: Adam divides a gradient by its own size, and moves an element of next to none by its error's sign.
"""

OUTPUT = 1e-5
"""Allowed difference of the norm of what a module returns, relative to it; only to say where a loss goes wrong."""

LAST_BIT = 2.0**-23

TIMES = 10
"""So many times as far as other last bits in the weights take a training apart, rounding may."""

NOT_ROUNDING = 1e-2
"""A larger difference is no rounding error. Where the last bits alone make one, nothing is left to compare."""


@dataclass(frozen=True)
class Limits:
    """What is rounding in a step."""

    loss: float = LOSS
    norm: float = NORM
    gradient: float = GRADIENT
    value: float = VALUE

    def beside(self, spread: StepDifferences) -> Limits:
        """At least these, and more where other last bits make more of a difference."""

        def least(limit: float, amount: float) -> float:
            return max(limit, min(NOT_ROUNDING, TIMES * amount))

        return Limits(
            least(self.loss, spread.loss),
            least(self.norm, spread.norm),
            least(self.gradient, max(spread.gradients.values(), default=0.0)),
            least(self.value, max(spread.values.values(), default=0.0)),
        )


@dataclass(frozen=True)
class StepDifferences:
    """How one step differs: relative differences, by parameter where there are many, 0 where all is equal."""

    step: int
    same_samples: bool
    settings: str
    """What else should be equal and is not: the learning rate, whether the step was skipped."""
    loss: float
    norm: float
    gradients: dict[str, float]
    values: dict[str, float]
    drifted: list[str]
    """Parameters of which two ranks of the layout hold different values."""
    disagreement: str
    """What two ranks of the layout report differently, of what should be equal on all."""
    limits: Limits = field(default_factory=Limits)

    @property
    def wrong_gradients(self) -> list[str]:
        """The parameters whose gradients differ by more than rounding, in the model's order."""
        return [name for name, amount in self.gradients.items() if amount > self.limits.gradient]

    @property
    def wrong_values(self) -> list[str]:
        """The parameters whose values differ by more than rounding, in the model's order."""
        return [name for name, amount in self.values.items() if amount > self.limits.value]

    @property
    def exact(self) -> bool:
        """Whether all is equal that has no rounding errors."""
        return self.same_samples and not self.settings and not self.drifted and not self.disagreement

    @property
    def same(self) -> bool:
        """Whether the step has the numbers of one process."""
        numbers = self.loss <= self.limits.loss and self.norm <= self.limits.norm
        return self.exact and numbers and not self.wrong_gradients and not self.wrong_values

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        return max(self.loss, self.norm, *self.gradients.values(), *self.values.values())


@dataclass(frozen=True)
class LayoutComparison:
    """A run under a layout (`ours`) beside one on one process (`theirs`)."""

    ours: Recording
    theirs: Recording
    missing: list[str]
    """Parameters of one process that no rank of the layout holds, or in another shape."""
    extra: list[str]
    untied: list[str]
    """Names that are one parameter in one of the runs and two in the other."""
    start: StepDifferences
    """The state before the first step."""
    steps: list[StepDifferences]
    first_output: str | None = None
    """The first module, in the order of calls of one process, that returns something else in the first step."""
    spread: list[StepDifferences] = field(default_factory=list)
    """How a run on one process with other last bits differs; empty where that was not asked."""

    @property
    def layout(self) -> str:
        """The layout in question."""
        return str(self.ours.ranks[0]["layout"])

    @property
    def first_difference(self) -> StepDifferences | None:
        """The first step that differs, the start counting as step 0."""
        return next((step for step in (self.start, *self.steps) if not step.same), None)

    @property
    def same(self) -> bool:
        """Whether the layout gives the numbers of one process."""
        return self._same_work and self.first_difference is None

    @property
    def may_be_rounding(self) -> bool:
        """Whether the runs differ, and only by amounts that rounding can grow to."""
        steps = (self.start, *self.steps)
        return not self.same and self._same_work and all(s.exact and s.largest < NOT_ROUNDING for s in steps)

    @property
    def left_out(self) -> int:
        """How many of the last steps were not compared, because other last bits would make other numbers of them."""
        return min(len(self.ours.steps), len(self.theirs.steps)) - len(self.steps)

    @property
    def _same_work(self) -> bool:
        same_model = not self.missing and not self.extra and not self.untied
        return same_model and len(self.ours.steps) == len(self.theirs.steps)


def compare(
    ours: Recording, theirs: Recording, shaken: Recording | None = None, other: Recording | None = None
) -> LayoutComparison:
    """Compare a run under a layout with one on one process, step by step.

    `shaken` is a run on one process that began with other last bits: rounding may do what they do. `other` is one with
    another micro-batch, which shows whose outputs can be told apart by samples.
    """
    spread = compare(shaken, theirs).steps if shaken is not None else []
    shared = [name for name, shape in theirs.parameters.items() if ours.parameters.get(name) == shape]
    buffers = [name for name in theirs.buffers if name in ours.buffers]
    start = theirs.values(0)
    began = ours.values(0) if ours.shaken else {}  # what it began with is no difference that a training has made
    alike: dict[str, torch.Tensor] = {}
    without_signal: set[str] = set()

    def values(step: int) -> dict[str, float]:
        mine, other = ours.values(step), theirs.values(step)
        found = {}
        for name in (*shared, *buffers):
            # A bias before a BatchNorm has no signal, and the running mean behind it follows its rounding errors.
            follows = bool(without_signal) and name.endswith("running_mean")
            if name not in without_signal and not follows:
                kept = alike.get(name, torch.ones_like(start[name], dtype=torch.bool))
                before, their, our = start[name][kept], other[name][kept], mine[name][kept]
                if name in began:
                    our = our.double() - began[name][kept].double() + before.double()
                most = VALUE * _distance(their, before) + max(1, step) * LAST_BIT * _norm(their)
                found[name] = VALUE * _ratio(_distance(our, their), most)
        return found

    def step_differences(step: int) -> StepDifferences:
        line, reference = ours.steps[step - 1][0], theirs.steps[step - 1][0]
        mine, other = ours.gradients(step), theirs.gradients(step)
        gradients = gradient_differences(mine, other, shared)
        without_signal.update(name for name in shared if name not in gradients)
        for name in gradients:
            zeros = torch.zeros_like(start[name])
            our, their = mine.get(name, zeros).double(), other.get(name, zeros).double()
            agree = (our - their).abs() <= VALUE * their.abs()
            alike[name] = agree & alike[name] if name in alike else agree
        return StepDifferences(
            step,
            same_samples(ours, theirs, step),
            _unequal_settings(line, reference),
            _ratio(_difference(line["loss"], reference["loss"]), max(1.0, abs(reference["loss"]))),
            _ratio(_difference(line["grad_norm"], reference["grad_norm"]), reference["grad_norm"]),
            gradients,
            values(step),
            _drifted(ours, step),
            _disagreement(ours.steps[step - 1]),
            limits[step - 1],
        )

    limits = _limits(spread, min(len(ours.steps), len(theirs.steps)))
    return LayoutComparison(
        ours,
        theirs,
        missing=[name for name in theirs.parameters if name not in shared],
        extra=[name for name in ours.parameters if name not in theirs.parameters],
        untied=_untied(ours, theirs),
        start=StepDifferences(0, True, "", 0.0, 0.0, {}, values(0), _drifted(ours, 0), ""),
        steps=[step_differences(step + 1) for step in range(len(limits))],
        first_output=_first_output(ours, theirs, other),
        spread=spread[: len(limits)],
    )


Record = Callable[[str, Layout, dict[str, Any]], Recording]
"""Trains under a layout (said in words, too) with more settings of `VerifySettings`, and returns what was recorded."""


def prove(layout: Layout, record: Record) -> tuple[LayoutComparison, LayoutComparison | None]:
    """The layout beside one process; and one process with another micro-batch beside it, where that is free.

    Both sides run as the user's own command would. Where they differ by little, one process begins once more, with
    other last bits in its weights, and shows how much of a difference rounding makes in this training.
    """
    ours = record(f"under {layout}", layout, {})
    theirs = record("on one process", Layout(), {})
    tried = other_micro_batches(ours, theirs)
    again = record("on one process, with another micro-batch", Layout(), {"micro_batch": tried}) if tried else None
    found, other = compare(ours, theirs, other=again), compare(again, theirs) if again else None
    if found.may_be_rounding or (other is not None and other.may_be_rounding):
        shaken = record("on one process, with other last bits", Layout(), {"shaken": True})
        found = compare(ours, theirs, shaken, again)
        other = compare(again, theirs, shaken) if again else None
    return found, other


def other_micro_batches(ours: Recording, theirs: Recording) -> dict[str, int]:
    """Sizes to try on one process for the loaders whose micro-batch is free: neither run's, where there is a third."""
    found = {}
    for name, size in theirs.micro_batch.items():
        smaller = [max(1, size // 2), *range(size // 3, 0, -1)]
        if name not in theirs.fixed and size > 1:
            found[name] = next((one for one in smaller if one != ours.micro_batch.get(name)), smaller[0])
    return found


def _limits(spread: list[StepDifferences], steps: int) -> list[Limits]:
    """What is rounding in every step that can be compared: errors stay in a training, so that it is never less."""
    if not spread:
        return [Limits()] * steps
    found: list[Limits] = []
    for one in spread[:steps]:
        if found and TIMES * one.largest > NOT_ROUNDING:
            break
        found.append((found[-1] if found else Limits()).beside(one))
    return found


@dataclass(frozen=True)
class Check:
    """One row of the table: the largest difference, what is allowed, and where or how many."""

    name: str
    ok: bool
    note: str
    largest: float | None = None
    allowed: float | None = None


def checks(found: LayoutComparison, other: LayoutComparison | None = None) -> list[Check]:
    """Everything that was compared; `other` is a run on one process with another micro-batch, beside the first."""
    ours, steps = found.ours, (found.start, *found.steps)
    drifted = next((f"{step.drifted[0]} from step {step.step} on" for step in steps if step.drifted), "")
    disagree = next((f"{s.disagreement} differs between ranks in step {s.step}" for s in steps if s.disagreement), "")
    unequal = next((f"step {step.step}: {step.settings}" for step in steps if step.settings), "")
    other_samples = next((f"other ones in step {step.step}" for step in steps if not step.same_samples), "")
    samples = sum(len(line["ids"]) for (line,) in found.theirs.steps)
    numbers = sum(math.prod(shape) for shape in found.theirs.parameters.values())
    missing = ", ".join([*(f"no {name}" for name in found.missing[:2]), *(f"also {name}" for name in found.extra[:2])])
    ties = [" = ".join(group) for rank in found.theirs.ranks for group in rank["tied"]]
    done = " and ".join(map(str, dict.fromkeys((len(ours.steps), len(found.theirs.steps)))))
    if found.left_out:
        done += f", compared up to step {len(found.steps)}: the last bit of the weights decides about later ones"
    equal_steps = len(ours.steps) == len(found.theirs.steps)
    return [
        Check("steps", equal_steps and not unequal, unequal or done),
        Check("samples", not other_samples, other_samples or f"{samples}, in the same order"),
        Check("parameters", not missing, missing or f"{len(found.theirs.parameters)}, {numbers:,} numbers"),
        Check("tied weights", not found.untied, " and ".join(found.untied) or ", ".join(ties) or "none"),
        _largest("losses", [(step, {"": step.loss}, step.limits.loss) for step in found.steps]),
        _largest("gradient norm", [(step, {"": step.norm}, step.limits.norm) for step in found.steps]),
        _largest("gradients", [(step, step.gradients, step.limits.gradient) for step in found.steps]),
        _largest("values", [(step, step.values, step.limits.value) for step in steps]),
        Check(
            "replicas",
            not drifted and not disagree,
            drifted or disagree or f"the same bits on all of {len(ours.ranks)} ranks",
        ),
        _micro_batch(found, other),
    ]


def _micro_batch(found: LayoutComparison, other: LayoutComparison | None) -> Check:
    """Whether the numbers depend on how many samples one forward sees, where nothing says that they may."""
    ours, theirs = found.ours.micro_batch, found.theirs.micro_batch
    sizes = "; ".join(
        f"{size} under {found.layout}, {theirs[name]} on one process" if theirs.get(name, size) != size else str(size)
        for name, size in ours.items()
    )
    if other is None:
        why = {"given": "as the script says", "coupled": "because the loss of a sample depends on the others in it"}
        reasons = dict.fromkeys(why[reason] for reason in found.theirs.fixed.values())
        return Check("micro-batch", True, ", ".join([sizes, *reasons]))
    tried = " and ".join(map(str, other.ours.micro_batch.values()))
    first = other.first_difference
    note = f"{sizes}; on one process with {tried} "
    note += "the same numbers" if first is None else f"other numbers from step {first.step} on"
    worst = max(other.steps, key=lambda step: max(step.gradients.values(), default=0.0) / step.limits.gradient)
    largest = max(worst.gradients.values(), default=0.0)
    return Check("micro-batch", other.same, note, largest, worst.limits.gradient)


def _largest(name: str, steps: list[tuple[StepDifferences, dict[str, float], float]]) -> Check:
    """The row of the difference that comes nearest to what is allowed in its step, or goes furthest beyond it."""
    found = [
        (amount / allowed, amount, allowed, parameter, step.step)
        for step, amounts, allowed in steps
        for parameter, amount in amounts.items()
    ]
    nearest = max(found, key=lambda one: one[0], default=(0.0, 0.0, 0.0, "", 0))
    share, largest, allowed, parameter, step = nearest
    where = f"{parameter}, step {step}" if parameter else f"step {step}"
    return Check(name, share <= 1, where if largest else "", largest, allowed)


def gradient_differences(ours: Tensors, theirs: Tensors, names: Iterable[str]) -> dict[str, float]:
    """The relative difference of every gradient that carries a signal in one of the runs."""
    whole = math.hypot(*(_norm(gradient) for gradient in theirs.values()))
    found = {}
    for name in names:
        mine, other = ours.get(name), theirs.get(name)
        if mine is None and other is None:
            found[name] = 0.0
            continue
        # A parameter that was not used has no gradient, and one that was multiplied by 0 one of zeros.
        mine = torch.zeros_like(other) if mine is None else mine  # type: ignore[arg-type]
        other = torch.zeros_like(mine) if other is None else other
        if _norm(other) >= NO_SIGNAL * whole or _norm(mine) >= 2 * NO_SIGNAL * whole:
            found[name] = _ratio(_distance(mine, other), _norm(other) + 0.1 * whole)
    return found


def same_samples(ours: Recording, theirs: Recording, step: int) -> bool:
    """Whether all data ranks together read in a step what one process reads, in order."""
    (expected,) = theirs.steps[step - 1]
    together: dict[int, list[int]] = {}
    for rank, line in zip(ours.ranks, ours.steps[step - 1], strict=True):
        if together.setdefault(rank["data_rank"], line["ids"]) != line["ids"]:
            return False  # ranks that work on one micro-batch together read different ones
    expected_ids: list[int] = expected["ids"]
    return [sample for _, ids in sorted(together.items()) for sample in ids] == expected_ids


def _unequal_settings(line: dict[str, Any], reference: dict[str, Any]) -> str:
    for key in ("lr", "skipped"):
        if _difference(line[key], reference[key]) > 1e-12 * abs(reference[key]):
            return f"{key} is {line[key]:g}, on one process {reference[key]:g}"
    return ""


def _disagreement(lines: list[dict[str, Any]]) -> str:
    for key in ("loss", "weight", "lr", "skipped", "grad_norm"):
        if any(_difference(line[key], lines[0][key]) > 0 for line in lines):
            return key
    return ""


def _drifted(run: Recording, step: int) -> list[str]:
    seen: dict[str, int] = {}
    drifted = {name: None for name, _, checksum in run.checksums(step) if seen.setdefault(name, checksum) != checksum}
    return list(drifted)


def _untied(ours: Recording, theirs: Recording) -> list[str]:
    """Names that share a parameter in one of the runs only, as far as a rank has them."""
    (single,) = theirs.ranks
    found: dict[str, None] = {}
    for rank in ours.ranks:
        known = set(rank["names"]) & set(single["names"])
        for ties, others in ((single["tied"], rank["tied"]), (rank["tied"], single["tied"])):
            for group in ties:
                here = [name for name in group if name in known]
                if len(here) > 1 and not any(set(here) <= set(other) for other in others):
                    found |= dict.fromkeys(here)
    return list(found)


def _first_output(ours: Recording, theirs: Recording, other: Recording | None) -> str | None:
    """The module whose output differs first. One that calls others returns after them, so the innermost is found."""
    found, alone = ours.outputs, {} if other is None else other.outputs
    for call, norms in theirs.outputs.items():
        for place, expected in norms.items():
            norm, again = found.get(call, {}).get(place), alone.get(call, {}).get(place)
            if norm is None or (again is not None and not _same_output(again, expected)):
                continue  # not there, or another sample's: the module has no row for each sample
            if not _same_output(norm, expected):
                return str(call.rpartition("/")[0]) or "the model"
    return None


def _same_output(one: float, expected: float) -> bool:
    return _difference(one, expected) <= OUTPUT * max(expected, 1e-6)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of a difference; numbers that are not finite are infinitely far from any but themselves."""
    distance = _norm(one.double() - other.double())
    if math.isnan(distance):
        return 0.0 if torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) else math.inf
    return distance


def _difference(one: float, other: float) -> float:
    if math.isnan(one) or math.isnan(other) or one == other:
        return 0.0 if one == other or (math.isnan(one) and math.isnan(other)) else math.inf
    return abs(one - other)


def _ratio(difference: float, reference: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / reference if reference > 0 else math.inf
