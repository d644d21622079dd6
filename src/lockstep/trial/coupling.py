"""Whether the loss of a sample depends on more than the sample: on others of its forward, or on a call before.

Before the first step a few samples go through the loss together and then in two parts, with the same draws. Where sums
and weights add up, and gradients too, the micro-batch is free and may follow what is fast. Where they do not (batch
statistics, contrastive losses, balance losses, gradients that are scaled over the batch), it is a part of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.data.digest import digest_of_value
from lockstep.data.first_samples import Read
from lockstep.data.loader import MicroBatch
from lockstep.engine import Engine
from lockstep.errors import UserError
from lockstep.faults.invariants import parameters_of
from lockstep.follow.carried import (
    CarriedPlace,
    differs,
    holds_objects,
    note_values,
    places_of,
    put_back,
    watch_numbers,
)
from lockstep.follow.trees import tensors_of
from lockstep.parallel.held import hold_value
from lockstep.parallel.replicate.statistics import changed_by_each
from lockstep.runtime.comm import Comm
from lockstep.runtime.dtensors import local_part
from lockstep.runtime.seeds import seed_of
from lockstep.runtime.torch_private import AnyBatchNorm
from lockstep.step.scoring import MetricFunction
from lockstep.text.units import listed
from lockstep.training.tries import Tried
from lockstep.trial.fits import free_bytes

SAMPLES = 5
"""How many are tried: a part of two and one of three, so that neither is a single one and a mean of means shows."""

MANY = 32
"""How many are tried for what few do not show: pairs of one class, the hardest of a batch."""

FEW = 8
"""How many are tried in the smallest micro-batches, of which none may count: a weight of at least 1, say."""

GRADIENT_ROUNDING = 1e-2
"""By how much a parameter's gradient may differ, relative to it: far more than rounding, and less than any coupling."""

SMALL = 1e-4
"""A difference that is smaller, relative to the gradient of the whole model, may be all rounding."""

LATER = 30
"""How many times more rounding is allowed once weights and losses may have any size."""

BEGINNINGS = 3
"""How many small numbers are tried in matrices of zeros: with some, a router sends all samples to the same expert."""

COINS = 10
"""In how many steps a forward is tried that draws a number for all samples: mixup in every third step, say."""

MORE = 10_000
"""What is added to a counter, to see whether anything depends on it."""


@dataclass(frozen=True)
class Coupling:
    """What makes the numbers of a sample depend on those who share its forward, in words; None: nothing does.

    `batch_norm` is told apart, because it can normalise over the samples of several ranks. `draws` says whether a
    forward draws random numbers, and `gathers` whether the loss sees the samples of other ranks by itself.
    """

    cause: str | None = None
    batch_norm: str | None = None
    draws: bool = True
    gathers: bool = False

    @property
    def any_cause(self) -> str | None:
        """The first of them, BatchNorm last."""
        return self.cause or self.batch_norm


def find_coupling(
    engine: Engine, comm: Comm, read: Read, samples: int, smallest: int = 1, uneven: Read | None = None
) -> Coupling:
    """Try out the first samples of the training; refuses a mean that is called a sum, and state nobody keeps.

    `read(start, end)` gives these of the first step's samples, `smallest` is with how few of them a forward is tried,
    and `uneven` gives some of the most different sizes. Every rank calls it, with the same ones.
    """
    norms, batch_norm = _batch_norms(engine)
    # A pipeline looks at a forward without data first, in which such layers take the statistics of the batch.
    takes_several = any(layer.running_mean is None for layer in norms)
    places = places_of(engine.cut.models, engine.setup.loss)
    count = min(SAMPLES, samples)
    engine.forwards.may_draw = False
    with _evaluating(norms, engine.device), put_back(places):
        cause, gathers, parts = None, False, []
        with engine.forwards.draws.learning():
            for start in range(0, samples - count + 1, count):
                whole = read(start, start + count)
                is_alike = comm.is_same(digest_of_value(whole.data))
                if not is_alike:
                    _refuse_unsteady(engine)
                with put_back(places):
                    engine.forwards.may_draw = engine.try_forward(whole).drew
                    if engine.forwards.may_draw and count > 1:
                        _learn_draws(engine, read(start, start + count // 2))
                first = _checked_again(engine, comm, whole, places)
                if is_alike:
                    _refuse_unlike_ranks(engine, first)
                if math.isfinite(first.loss):  # others tell nothing; step 1 says which they are
                    break
            if count > 1 and math.isfinite(first.loss):
                middle = start + count // 2
                parts = [read(start, middle), read(middle, start + count)]
                cause = _follows(engine, comm, whole, parts, first) or _cause(engine, whole, parts, first)
                if first.flips and cause is None and engine.pipeline is None:
                    cause = _cause_in_other_steps(engine, whole, parts)
        if parts:
            cause = cause or _cause_among_many(engine, comm, read, min(MANY, samples), parts[0])
            few = min(FEW, samples)
            if engine.pipeline is not None and takes_several:
                smallest = max(2, smallest)
                few -= few % smallest
            cause = cause or _cause_among_few(engine, read, few, smallest)
            if uneven is not None:
                cause = cause or _cause_of_sizes(engine, norms, uneven, count)
            if cause is not None and engine.layout.data_size > 1:
                gathers = _gathers(engine, parts[0], read(middle, middle + count // 2))
            cause = cause or _cause_in_gradients(engine, comm, whole, parts)
    if engine.forwards.may_draw and not engine.forwards.draws_by_sample:
        cause = cause or "compiled code draws random numbers for all samples of a forward at once"
    return Coupling(cause, batch_norm, engine.forwards.may_draw, gathers)


def coupled_since(engine: Engine, read: Read, samples: int, micro_batch: int) -> str | None:
    """What makes samples depend on each other now, between two steps, that did not when the training began.

    On a GPU no more are looked at than have room: steps keep the activations of a micro-batch.
    """
    most = MANY if engine.device.type == "cpu" else min(MANY, max(SAMPLES, micro_batch))
    count = min(most, samples)
    if count < 2:
        return None
    with put_back(places_of(engine.cut.models, engine.setup.loss)):
        together = read(0, count)
        count = len(together.ids)  # the last step of an epoch may have fewer
        if count < 2:
            return None
        parts = [read(0, count // 2), read(count // 2, count)]
        whole = engine.try_forward(together)
        rounding = LATER * engine.trial_rounding
        cause = _cause(engine, together, parts, whole, rounding) if math.isfinite(whole.loss) else None
        smallest = 1 if engine.pipeline is None else micro_batch
        return cause or _cause_among_few(engine, read, min(FEW, count), smallest, rounding)


def coupled_metric(engine: Engine, read: Read, count: int, metrics: Mapping[str, MetricFunction]) -> str | None:
    """The score of an evaluation, the loss among them, that depends on which samples share a forward.

    Metrics that may collect something in an object of the script's own are not tried.
    """
    metrics = {name: metric for name, metric in metrics.items() if not holds_objects(metric)}
    together = read(0, count)
    count = len(together.ids)
    if count < 2:
        return None
    parts = [read(0, count // 2), read(count // 2, count)]
    with ExitStack() as everything:
        for function in (engine.setup.loss, *metrics.values()):
            everything.enter_context(put_back(places_of(engine.cut.models, function)))
        with _too_few(engine) as raised:
            whole, apart = engine.evaluate([together], metrics), engine.evaluate(parts, metrics)
    if raised:
        return "scores"
    rounding = max(1e-2 if engine.setup.settings.precision != "fp32" else 0.0, engine.trial_rounding)
    for name, one in whole.items():
        far = max(abs(one.sum - apart[name].sum), abs(one.count - apart[name].count))
        if not far <= rounding * max(abs(one.sum), abs(one.count)) and math.isfinite(one.sum):
            return name
    return None


def untold(engine: Engine, stream: Any) -> Coupling:
    """What has to be taken for true of a stream of which nothing can be tried out."""
    cause = f"the stream {type(stream).__name__} can be read only once, and nobody can try out whether its samples "
    return Coupling(f"{cause}depend on those who share their forward", _batch_norms(engine)[1])


@contextmanager
def _too_few(engine: Engine) -> Iterator[list[Exception]]:
    """Keeps what functions raise that need more samples than they get here. Full memory is something else."""
    raised: list[Exception] = []
    try:
        yield raised
    except torch.OutOfMemoryError:
        raise
    except (ValueError, RuntimeError, IndexError) as error:
        if engine.pipeline is not None:  # other ranks are in the middle of it
            raise
        raised.append(error)


def _batch_norms(engine: Engine) -> tuple[list[AnyBatchNorm], str | None]:
    """The layers that normalise over a batch in training, and that in words."""
    norms = [(name, layer) for name, layer in engine.model.named_modules() if isinstance(layer, AnyBatchNorm)]
    norms = [(name, layer) for name, layer in norms if layer.training]
    words = (
        f"the {type(norms[0][1]).__name__} {norms[0][0]} normalises over the samples of a forward" if norms else None
    )
    return [layer for _, layer in norms], words


def _refuse_unsteady(engine: Engine) -> None:
    """Samples are not the same on all ranks, although their data are: they are others whenever they are read."""
    if engine.layout.world_size > engine.layout.data_size:
        raise UserError(
            f"a sample is another one whenever it is read, and under {engine.layout} several ranks read the same one",
            "draw from torch's, numpy's or Python's own generator, which are seeded for each sample",
        )


def _refuse_unlike_ranks(engine: Engine, tried: Tried) -> None:
    """All data ranks have seen the same samples, with the same draws."""
    reference, *others = tried.by_rank
    for rank, loss in enumerate(others, start=1):
        if abs(loss - reference) > engine.trial_rounding * abs(reference):
            raise UserError(
                f"{loss_line(engine.setup.loss)} gives {reference:.6g} on data rank 0 and {loss:.6g} on data rank "
                f"{rank} for the same samples",
                "let no seed, generator or `if` in it depend on the rank",
            )


def _gathers(engine: Engine, same: MicroBatch, others: MicroBatch) -> bool:
    """Whether the loss of a rank follows what samples the other data ranks have: it gathers them by itself."""
    mine = same if engine.layout.data_rank(engine.rank) == 0 else others
    with _too_few(engine) as raised:
        before, after = (engine.try_forward(one).by_rank[0] for one in (same, mine))
    return not raised and abs(after - before) > engine.trial_rounding * abs(before)


def _learn_draws(engine: Engine, part: MicroBatch) -> None:
    """Another number of samples shows which dim of every draw follows it, before any numbers are compared."""
    with _too_few(engine):  # of which _cause tells
        engine.try_forward(part)


def _follows(engine: Engine, comm: Comm, whole: MicroBatch, parts: Sequence[MicroBatch], first: Tried) -> str | None:
    """A buffer that follows the samples of a forward, as a cause; of those that change alike the engine is told."""
    if not any(comm.gather(bool(first.changed))):
        return None
    with _too_few(engine) as raised:
        alike, following = _told_apart(engine, [first, *(engine.try_forward(part) for part in parts)])
        if engine.pipeline is None:
            with _counted_ahead(engine, alike):  # where what begins to change later does so
                later = _told_apart(engine, [engine.try_forward(one) for one in (whole, parts[0])])
            alike, following = alike | later[0], following | later[1]
    if raised:
        return None  # _cause tells of it
    everybodys = comm.gather([sorted(alike), sorted(following)])
    if names := {name for _, some in everybodys for name in some}:
        if engine.layout.data_size > 1:
            raise changed_by_each(min(names))
        return f"the buffer {min(names)} follows the samples of a forward"
    engine.change_once({name for some, _ in everybodys for name in some})
    return None


def _told_apart(engine: Engine, tried: Sequence[Tried]) -> tuple[set[str], set[str]]:
    """Buffers that forwards of other samples have changed in the same way, and in other ways."""
    buffers = dict(engine.buffers)
    found: tuple[set[str], set[str]] = set(), set()
    for name in {name for one in tried for name in one.changed}:
        values = [one.changed.get(name, buffers[name]) for one in tried]
        is_alike = all(_is_alike(buffers[name], values[0], other) for other in values[1:])
        found[0 if is_alike else 1].add(name)
    return found


def _is_alike(before: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    before, one, other = (value.to(torch.promote_types(value.dtype, torch.float64)) for value in (before, one, other))
    moved, far = float((one - before).norm()), float((one - other).norm())
    return far <= 1e-3 * moved + 1e-6 * float(one.norm())


@contextmanager
def _counted_ahead(engine: Engine, names: Collection[str]) -> Iterator[None]:
    """With these buffers, as far as they are single numbers, far ahead."""
    buffers = [buffer for name, buffer in engine.buffers if name in names and buffer.numel() == 1]
    before = [buffer.clone() for buffer in buffers]
    with torch.no_grad():
        for buffer in buffers:
            buffer += 0 if buffer.dtype == torch.bool else MORE
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def _cause_among_many(engine: Engine, comm: Comm, read: Read, count: int, part: MicroBatch) -> str | None:
    """What couples samples when there are more of them, and when what begins at zero has begun to train."""
    while count > SAMPLES:
        together = read(0, count)
        count = len(together.ids)  # a stream may have fewer
        if count > SAMPLES and _fits(engine, comm, count, part, engine.try_forward):
            parts = [read(0, count // 2), read(count // 2, count)]
            zeros = _zeros(engine)
            has_matrices = any(comm.gather(any(part.dim() > 1 for part in zeros.values())))
            for beginning in range(BEGINNINGS if has_matrices else 1):
                with _begun(zeros, beginning):
                    with _too_few(engine) as raised:
                        whole = engine.try_forward(together)
                    if raised and zeros:  # it may not take made-up numbers
                        break
                    if raised:
                        raise raised[0]
                    if whole.loss == 0:
                        none = f"{loss_line(engine.setup.loss)} gives 0 for the first {count} samples"
                        return f"{none}, which does not tell whether they depend on those who share their forward"
                    cause = _cause(engine, together, parts, whole) if math.isfinite(whole.loss) else None
                if cause is not None:
                    return cause
            return None
        count //= 2
    return None


def _cause_among_few(
    engine: Engine, read: Read, count: int, smallest: int, rounding: float | None = None
) -> str | None:
    """What shows in the smallest micro-batches alone. One that is too small for a function says so when it comes."""
    if smallest >= count:
        return None
    with _too_few(engine) as raised:
        together = read(0, count)
        parts = [read(at, min(at + smallest, count)) for at in range(0, count, smallest)]
        whole, *tried = [engine.try_forward(one) for one in (together, *parts)]
    if raised or not all(math.isfinite(one.loss) for one in (whole, *tried)):
        return None
    return _cause_in(engine, together, parts, whole, tried, rounding)


def _cause_of_sizes(engine: Engine, norms: Sequence[AnyBatchNorm], read: Read, count: int) -> str | None:
    """What couples samples of other sizes, of which the collate function fills up the shorter ones."""
    together, parts = read(0, count), [read(0, count // 2), read(count // 2, count)]
    with _counted(norms) as of_whole:
        whole = engine.try_forward(together)
    if not math.isfinite(whole.loss):
        return None
    with _counted(norms) as of_parts:
        cause = _cause(engine, together, parts, whole)
    if cause is None and of_whole != of_parts:
        return "BatchNorm normalises over what the collate function fills shorter samples up with, too"
    return cause


@contextmanager
def _counted(norms: Sequence[AnyBatchNorm]) -> Iterator[list[int]]:
    """How many numbers each of these layers is given, inside."""
    counts = [0] * len(norms)

    def count(number: int, x: torch.Tensor) -> None:
        counts[number] += x.numel()

    hooks = [
        layer.register_forward_pre_hook(lambda _, given, number=number: count(number, given[0]))
        for number, layer in enumerate(norms)
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _zeros(engine: Engine) -> dict[tuple[str, str], torch.Tensor]:
    """What this rank has of parameters and is all zeros, by name and by who else has it."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    names = set(engine.cut.tensor_names)  # each tensor under one of its names
    with engine.state.hidden():
        parameters = parameters_of(engine.cut)
    for name, parameter in parameters.items():
        part = local_part(parameter.detach())
        if name in names and part.numel() and not part.any():
            found[name, hold_value(engine.cut.held[name], parameter).replicas] = part
    return found


@contextmanager
def _begun(zeros: Mapping[tuple[str, str], torch.Tensor], beginning: int) -> Iterator[None]:
    """With small numbers in parameters that are all zeros, behind which a part of the model would not be seen."""
    for piece, part in zeros.items():
        size = part.shape[-1] ** -0.5 if part.dim() > 1 else 0.1
        seed = seed_of("begun", beginning, *piece)
        part.normal_(0, size, generator=torch.Generator(part.device).manual_seed(seed))
    try:
        yield
    finally:
        for part in zeros.values():
            part.zero_()


def _cause(
    engine: Engine, together: MicroBatch, parts: Sequence[MicroBatch], whole: Tried, rounding: float | None = None
) -> str | None:
    """What couples samples that gave `whole` together, as two parts of them tell."""
    with _too_few(engine) as raised:
        tried = [engine.try_forward(part) for part in parts]
    if raised:
        count, sizes = len(together.ids), _sizes(parts)
        return f"{loss_line(engine.setup.loss)} takes {count} samples in a forward, and not {sizes} ({raised[0]})"[:300]
    return _cause_in(engine, together, parts, whole, tried, rounding)


def _cause_in(
    engine: Engine,
    together: MicroBatch,
    parts: Sequence[MicroBatch],
    whole: Tried,
    tried: Sequence[Tried],
    rounding: float | None = None,
) -> str | None:
    """What couples samples, by what they gave together and in parts."""
    count, sizes = len(together.ids), _sizes(parts)
    weight = sum(one.weight for one in tried)
    loss = sum(one.loss for one in tried)
    scale = sum(abs(one.loss) for one in tried) + abs(whole.loss)
    rounding = rounding or engine.trial_rounding
    if abs(weight - whole.weight) > rounding * abs(whole.weight):
        got = listed([f"{one.weight:g}" for one in tried])
        always = all(one.weight == whole.weight for one in tried)
        advice = " (if its loss is a mean: return the sum, and how many count)" if always else ""
        line = loss_line(engine.setup.loss)
        return f"{line} returns the weight {whole.weight:g} for {count} samples, {got} for {sizes}{advice}"
    if abs(loss - whole.loss) <= rounding * scale:
        return None
    mean = sum(one.loss * one.weight for one in tried)
    if abs(mean - whole.loss * whole.weight) <= rounding * scale * abs(whole.weight):
        raise UserError(
            f"{loss_line(engine.setup.loss)} returns a mean as the sum of its losses: {whole.loss:.6g} for {count} "
            f"samples, {listed([f'{one.loss:.6g}' for one in tried])} for {sizes}",
            'use reduction="sum", or say loss_reduction="mean" in run.setup (config: loss_reduction)',
        )
    where = _first_coupled(engine, parts, together) or loss_line(engine.setup.loss)
    return f"{where} makes the loss of a sample depend on those who share its forward"


def _sizes(parts: Sequence[MicroBatch]) -> str:
    return f"{listed([str(len(part.ids)) for part in parts])} of them"


def _cause_in_other_steps(engine: Engine, together: MicroBatch, parts: Sequence[MicroBatch]) -> str | None:
    """What couples samples in some steps only, where a number that is drawn for all of them decides."""
    begun = engine.steps_done
    try:
        for step in range(1, COINS + 1):
            engine.state.steps_done = begun + step
            whole = engine.try_forward(together)
            if math.isfinite(whole.loss) and (cause := _cause(engine, together, parts, whole)) is not None:
                return f"in some steps {cause}"
    finally:
        engine.state.steps_done = begun
    return None


def _cause_in_gradients(engine: Engine, comm: Comm, together: MicroBatch, parts: Sequence[MicroBatch]) -> str | None:
    """What couples samples although no loss shows it, in the backward pass alone."""
    found = None
    gathered = engine.cut.parameter_count if engine.layout.fsdp > 1 else 0
    gradients = 4 * (gathered + 2 * sum(one.numel() for _, one in engine.cut.trained))
    count, trial = len(together.ids), lambda part: engine.try_gradients([part])
    if engine.needs_whole_steps is None and _fits(engine, comm, count, parts[0], trial, least=gradients):
        whole = engine.try_gradients([together])
        if engine.needs_whole_steps is None:
            apart = engine.try_gradients([replace(part, index=number) for number, part in enumerate(parts)])
            found = _differing(engine, comm, whole, apart)
    if engine.needs_whole_steps is not None:
        return engine.needs_whole_steps
    if found is None:
        return None
    return (
        f"the gradient of {found} is not the sum over the samples, although the loss is (a backward of your own, or "
        "something detached, looks at all samples of a forward)"
    )


def _differing(
    engine: Engine, comm: Comm, whole: list[tuple[str, torch.Tensor]], apart: list[tuple[str, torch.Tensor]]
) -> str | None:
    """The parameter whose gradient differs most, where any does by more than rounding; the same on every rank."""
    others, found = dict(apart), (0.0, "")
    total = comm.reduce(max((float(one.norm()) for _, one in whole), default=0.0), "max")
    rounding = max(GRADIENT_ROUNDING, 10 * engine.trial_rounding)
    for name, one in whole:
        other = others.get(name, torch.zeros_like(one))
        if other.shape == one.shape:
            far, size = float((one - other).norm()), float(one.norm())
            if math.isfinite(size) and not (far <= rounding * size or far <= SMALL * total):
                found = max(found, (far, name))
    return max(comm.gather(found))[1] or None


def _fits(
    engine: Engine, comm: Comm, count: int, part: MicroBatch, trial: Callable[[MicroBatch], Any], least: int = 0
) -> bool:
    """Whether a GPU has room to try so many samples, as `trial` shows with a part that takes `least` bytes or more."""
    if engine.device.type != "cuda":
        return True
    if comm.reduce(free_bytes(engine.device) - least, "min") <= 0:
        return False
    before = torch.cuda.memory_allocated(engine.device)
    torch.cuda.reset_peak_memory_stats(engine.device)
    trial(part)
    taken = torch.cuda.max_memory_allocated(engine.device) - before
    return bool(comm.reduce(free_bytes(engine.device) - 2 * taken * count // len(part.ids), "min") > 0)


def _checked_again(engine: Engine, comm: Comm, whole: MicroBatch, places: Sequence[CarriedPlace]) -> Tried:
    """The samples' loss, which has to be the same when it is asked for again: else something is kept between calls."""
    before = note_values(places)
    first = engine.try_forward(whole)
    changed = [place for place, old, now in zip(places, before, note_values(places), strict=True) if differs(old, now)]
    with watch_numbers([place for place in changed if type(place.get()) in (int, float)]) as decides:
        second = engine.try_forward(whole)
    line, lost = loss_line(engine.setup.loss), "which no checkpoint has and every rank would have its own of"
    fix = "make it a function of the batch or a buffer, or change it between steps (run.keep saves it)"
    if abs(second.loss - first.loss) > engine.trial_rounding * abs(first.loss) or second.weight != first.weight:
        kept = next((one for one in comm.gather(next((place.words for place in changed), None)) if one), None)
        kept = f"{kept} is kept between calls" if kept else "it keeps something between calls"
        raise UserError(
            f"{line} gives another loss when it sees the same samples again: {kept}, {lost}",
            f"{fix}; draw random numbers without a torch.Generator of your own",
        )
    if counter := next((one for one in comm.gather(next(iter(decides), None)) if one), None):
        raise UserError(f"{line} decides by {counter}, which it changes in every call, and {lost}", fix)
    return first


def _first_coupled(engine: Engine, parts: Sequence[MicroBatch], whole: MicroBatch) -> str | None:
    """The first module, in the order of calls, that returns something else for a sample among others, in words."""
    if engine.pipeline is not None or engine.layout.team > 1:  # whose values are in parts
        return None
    together, *apart = [_row_sums(engine, one) for one in (whole, *parts)]
    for number, (name, rows) in enumerate(together):
        others = [one[number] for one in apart if number < len(one) and one[number][0] == name]
        if len(others) < len(parts) or sum(len(one) for _, one in others) != len(rows):
            continue
        expected = torch.cat([one for _, one in others])
        if not torch.allclose(rows, expected, rtol=10 * engine.trial_rounding, atol=float(rows.abs().max()) * 1e-5):
            return name
    return None


def _row_sums(engine: Engine, micro_batch: MicroBatch) -> list[tuple[str, torch.Tensor]]:
    """A number for every sample in what every module is given and returns, in the order of calls."""
    found: list[tuple[str, torch.Tensor]] = []
    samples = len(micro_batch.ids)

    def keep(name: str, output: Any) -> None:
        tensor = next((one for one in tensors_of(output) if one.is_floating_point()), None)
        if tensor is not None and tensor.dim() and len(tensor) == samples:
            found.append((name, tensor.detach().double().flatten(1).sum(1) if tensor.dim() > 1 else tensor.double()))

    modules = [(name, module) for name, module in engine.model.named_modules() if name]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, name=name: keep(f"what comes before the module {name}, or the collate function", given)
        )
        for name, module in modules
    ]
    hooks += [
        module.register_forward_hook(lambda _, __, output, name=name: keep(f"the module {name}", output))
        for name, module in modules
    ]
    try:
        engine.try_forward(micro_batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def _evaluating(layers: Sequence[AnyBatchNorm], device: torch.device) -> Iterator[None]:
    """BatchNorm without statistics of the batch, so that what else couples samples shows."""
    without = [layer for layer in layers if layer.running_mean is None]
    for layer in layers:
        layer.training = False
    for layer in without:  # else they would take the batch's in any mode
        layer.running_mean = torch.zeros(layer.num_features, device=device)
        layer.running_var = torch.ones(layer.num_features, device=device)
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True
        for layer in without:
            layer.running_mean = layer.running_var = None


def loss_line(loss: Any) -> str:
    """The loss function with its place, for people."""
    code = getattr(loss, "__code__", None)
    if code is None:
        return "the loss function"
    return f"the loss function ({Path(code.co_filename).name}:{code.co_firstlineno})"
