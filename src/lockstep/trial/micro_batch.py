"""How many samples one forward sees where nobody says it, and what becomes of a run that goes on with others.

Where samples do not see each other the size follows what suits the layout: it changes nothing but rounding. Where they
do, it is a part of the training, and the rule does not know the layout: one forward sees the whole global batch, as it
does in a plain loop on one device.
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.config.schema import PipelineConfig
from lockstep.data.order import Order
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.parallel.pipeline.timetable import choose_micro_batch
from lockstep.trial.coupling import Coupling


def default_micro_batch(pipeline: PipelineConfig, layout: Layout, global_batch: int) -> int:
    """What suits a layout: with stages what keeps them busy, else all that a rank has of a step."""
    if layout.pp > 1:
        return choose_micro_batch(pipeline, layout.pp, global_batch, layout.data_size)
    return -(-global_batch // layout.data_size)


def coupled_micro_batch(
    coupling: Coupling, layout: Layout, order: Order, can_synchronise: bool
) -> tuple[int, str] | None:
    """The size for a training whose samples see each other, and why; None where they do not.

    A BatchNorm that can be synchronised normalises over the global batch although each data rank has its own part.
    """
    cause, global_batch = coupling.any_cause, order.global_batch
    if cause is None:
        return None
    share = -(-global_batch // layout.data_size)
    if coupling.cause is None and can_synchronise:
        return share, f"{cause}, on all ranks together: over the global batch of {global_batch}"
    if coupling.gathers and global_batch % layout.data_size == 0:
        if left := order.size % global_batch:
            raise UserError(
                f"the loss function gathers from the other ranks by itself, and the last step of an epoch has {left} "
                f"samples, which ranks would not have alike",
                f"use {order.size - left} of the {order.size} samples, a multiple of global_batch = {global_batch}",
            )
        return share, (
            f"the loss function gathers from the other ranks by itself, so that it sees the global batch of "
            f"{global_batch}: lockstep verify proves whether that gives the numbers of one process"
        )
    if layout.data_size == 1:
        stages = ", so that the stages of the pipeline work one after the other" if layout.pp > 1 else ""
        return global_batch, f"one forward sees the whole global batch of {global_batch}{stages}, because {cause}"
    raise UserError(
        f"{cause}, so that one forward has to see the whole global batch of {global_batch}, and layout {layout} would "
        f"leave {layout.data_size - 1} of {layout.data_size} data ranks without work",
        f"say over how many samples it goes, micro_batch = {share} or less in run.loader (config: micro_batch), which "
        "gives the same numbers on any layout; or use a layout without dp and fsdp",
    )


def refuse_gathering(coupling: Coupling, layout: Layout, given: int) -> None:
    """A loss that gathers from other ranks by itself sees more samples than the micro-batch that was given."""
    if coupling.gathers:
        raise UserError(
            f"micro_batch = {given}, but the loss function gathers from the other ranks by itself: it sees "
            f"{given * layout.data_size} samples under {layout}, and {given} on one process",
            "leave micro_batch out, and it sees the global batch on any layout; or do not gather",
        )


def micro_batch_warnings(
    chosen: int, before: int | None, global_batch: int, data_size: int, coupling: Coupling
) -> Iterator[str]:
    """What to say when a run goes on with other micro-batches, or with too few for the ranks it has now."""
    if before is None:
        return
    if chosen != before and (cause := coupling.any_cause):
        yield f"micro_batch is {chosen} now and was {before}: {cause}, so that numbers differ from here on"
    idle = data_size - -(-global_batch // chosen)
    if idle > 0:
        yield (
            f"{idle} of {data_size} data ranks have nothing to do, because the run keeps micro_batch = {chosen}: "
            f"micro_batch = {-(-global_batch // data_size)} would share the batch out"
        )
