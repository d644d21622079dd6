"""Python's garbage collector, kept to step boundaries.

Left alone it stops each rank at a moment of its own, for longer the more objects a program holds, and all others wait.
"""

from __future__ import annotations

import gc

STEPS_BETWEEN = 100


class GarbageCollection:
    """Collects every so many steps, at the same step on every rank, and leaves what the set-up built alone."""

    def __init__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, step: int) -> None:
        """Collect when it is time."""
        if step % STEPS_BETWEEN == 0:
            gc.collect()

    def restore(self) -> None:
        """Give the collector back as it was."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
