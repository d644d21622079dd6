"""How many samples one forward sees where nobody says it, and what becomes of a run that goes on with others."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.config import PipelineConfig
from lockstep.layout import Layout
from lockstep.parallel.timetable import choose_micro_batch


def default_micro_batch(pipeline: PipelineConfig, layout: Layout, global_batch: int) -> int:
    """What suits a layout: with stages what keeps them busy, else all that a rank has of a step."""
    if layout.pp > 1:
        return choose_micro_batch(pipeline, layout.pp, global_batch, layout.data_size)
    return -(-global_batch // layout.data_size)


def micro_batch_warnings(chosen: int, before: int | None, global_batch: int, data_size: int) -> Iterator[str]:
    """What to say when a run goes on with other micro-batches, or with too few for the ranks it has now."""
    if before is None:
        return
    if chosen != before:
        yield (
            f"micro_batch is {chosen} now and was {before}: dropout masks and BatchNorm follow micro-batches, and "
            "differ from here on"
        )
    idle = data_size - -(-global_batch // chosen)
    if idle > 0:
        yield (
            f"{idle} of {data_size} data ranks have nothing to do, because the run keeps micro_batch = {chosen}: "
            f"micro_batch = {-(-global_batch // data_size)} would share the batch out"
        )
