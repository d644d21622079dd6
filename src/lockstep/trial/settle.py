"""Before a loader yields its first step: how many samples one forward sees, found out with the first samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from lockstep.data.first_samples import Read, first_samples, second_of, uneven_samples
from lockstep.data.loader import Loader, MicroBatch, Reading
from lockstep.data.order import Order
from lockstep.engine import Engine
from lockstep.errors import UserError
from lockstep.faults.out_of_memory import memory_explained
from lockstep.parallel.build.apply import synchronises
from lockstep.runtime.comm import Comm
from lockstep.step.scoring import MetricFunction
from lockstep.trial.coupling import MANY, SAMPLES, Coupling, coupled_metric, coupled_since, find_coupling, untold
from lockstep.trial.fits import largest_micro_batch
from lockstep.trial.micro_batch import coupled_micro_batch, micro_batch_warnings, refuse_gathering

LOOKS_EVERY = 250
"""After so many steps, beside 1, 2, 4, ..., and at the end samples are tried out again."""


@dataclass(frozen=True)
class LoaderPlan:
    """A loader that is about to be made: what it reads, and the micro-batch that it was given or had before.

    `most` is what fits, where memory ran out in an earlier start. `is_first` says that the run has no other loader.
    """

    dataset: Any
    order: Order
    reading: Reading
    given: int | None = None
    before: int | None = None
    most: int | None = None
    is_first: bool = True

    @property
    def is_stream(self) -> bool:
        """Whether the samples come one after another, and have no numbers."""
        return isinstance(self.dataset, IterableDataset)


@dataclass(frozen=True)
class Settled:
    """What was found out: the order with the micro-batch that the training needs or that suits the layout.

    `again` are samples to try out now and then, where the micro-batch is free.
    """

    order: Order
    coupling: Coupling
    again: tuple[Read, int] | None


def settle_micro_batch(
    engine: Engine,
    comm: Comm,
    wanted: LoaderPlan,
    say: Callable[..., None],
    status: Callable[[str], None],
    show: Callable[[MicroBatch], None] | None,
) -> Settled:
    """Try the first samples out, and choose how many one forward sees. What other loaders have found stays true.

    `show` is given samples before any gradient is computed; None: nobody wants to see them.
    """
    order, layout, given = wanted.order, engine.layout, wanted.given
    status("looking at how samples depend on each other")
    others_draw = engine.forwards.may_draw and not wanted.is_first
    coupling, again = _coupling(engine, comm, wanted, show)
    engine.forwards.may_draw = coupling.draws or others_draw
    rule = None
    if given is None:
        rule = coupled_micro_batch(coupling, layout, order, synchronises(layout, engine.setup.settings))
    else:
        refuse_gathering(coupling, layout, given)
    if rule is not None:
        size, why = rule
        say(why)
        if wanted.most is not None and wanted.most < size:
            raise UserError(
                f"memory is full with {size} samples in a forward, and {why}",
                f"give micro_batch = {wanted.most} or less",
            )
    else:
        size = _free_size(engine, comm, wanted, status)
    batch_norm = engine.setup.settings.batch_norm
    synchronise = batch_norm == "sync" or (rule is not None and size < order.global_batch)
    if not wanted.is_first and engine.would_synchronise(synchronise) != engine.is_synchronised:
        raise UserError(
            "BatchNorm would normalise over the global batch of one loader and over the micro-batches of another",
            "give all loaders a micro_batch, or none of them",
        )
    engine.synchronise_batch_norm(synchronise)
    for line in micro_batch_warnings(size, wanted.before, order.global_batch, layout.data_size, coupling):
        say(line, "warning")
    settled = replace(order, micro_batch=size, equal_counts=order.equal_counts or engine.is_synchronised)
    return Settled(settled, coupling, again)


def _free_size(engine: Engine, comm: Comm, wanted: LoaderPlan, status: Callable[[str], None]) -> int:
    """How many samples one forward sees where that changes nothing but rounding."""
    order, before = wanted.order, wanted.before
    size = wanted.given or order.micro_batch
    if wanted.given is None and before is not None and -(-order.global_batch // before) >= engine.layout.data_size:
        size = before  # bit for bit as it was
    elif wanted.given is None and engine.layout.pp == 1 and not wanted.is_stream:
        status("measuring how many samples one forward can hold")
        size = largest_micro_batch(engine, wanted.dataset, order, wanted.reading, comm).micro_batch
    return min(size, wanted.most or size)  # memory ran out with more


def _coupling(
    engine: Engine, comm: Comm, wanted: LoaderPlan, show: Callable[[MicroBatch], None] | None
) -> tuple[Coupling, tuple[Read, int] | None]:
    """What makes samples depend on each other, found out with the first ones, and these where nothing does."""
    order = wanted.order
    if wanted.is_stream and second_of(wanted.dataset) is None:
        return untold(engine, wanted.dataset), None
    fits = min(wanted.given or order.global_batch, wanted.most or order.global_batch)
    samples = min(max(2, fits), order.global_batch, order.size or order.global_batch)
    read = first_samples(wanted.dataset, order, wanted.reading)
    uneven = uneven_samples(wanted.dataset, order, wanted.reading, min(SAMPLES, samples))
    comm.beat.step = engine.steps_done + 1
    comm.beat.at("the trial")
    if show is not None:  # now: after the trial's gradients on a GPU no fork of this process could count
        show(read(0, min(MANY, samples)))
    with memory_explained(engine.state, engine.setup.settings.precision, comm.beat, fits):
        smallest = 1 if engine.pipeline is None else order.micro_batch
        coupling = find_coupling(engine, comm, read, samples, smallest, uneven)
    is_free = wanted.given is None and coupling.any_cause is None and show is not None
    return coupling, (read, samples) if is_free else None


def check_still_uncoupled(
    engine: Engine, loader: Loader, again: tuple[Read, int], steps: int, alone: AbstractContextManager[Any], last: bool
) -> None:
    """Now and then: a term of the loss may have woken, or other samples show what the first ones did not.

    `steps` were done since the start, and what is tried draws `alone`.
    """
    order = loader.order
    is_due = last or not steps & (steps - 1) or not steps % LOOKS_EVERY
    is_free = not loader.micro_batch_given and not loader.is_coupled and order.micro_batch < order.global_batch
    if not is_free or steps < 1 or not is_due:
        return
    read, samples = again
    if not last and not isinstance(loader.dataset, IterableDataset):
        read = first_samples(loader.dataset, order, loader.reading, loader.position)
    with alone:
        cause = coupled_since(engine, read, samples, order.micro_batch)
    if cause is not None:
        raise UserError(
            f"after step {engine.steps_done} {cause}, which nothing did before step 1",
            f"say over how many samples it goes, micro_batch = {order.micro_batch} or another number in run.loader "
            "(config: micro_batch), which gives the same numbers on any layout",
        )


def coupled_score(engine: Engine, wanted: LoaderPlan, metrics: Mapping[str, MetricFunction]) -> str | None:
    """The score of an evaluation that depends on who shares a forward, found out with its first samples."""
    if wanted.is_stream and second_of(wanted.dataset) is None:
        return None
    order = wanted.order
    count = min(order.size or MANY, MANY, max(SAMPLES, 2 * order.micro_batch))
    read = first_samples(wanted.dataset, replace(order, global_batch=count), wanted.reading)
    return coupled_metric(engine, read, count, metrics)
