"""What the planner expected of a run, from its `prediction` and `prediction_error` events."""

from __future__ import annotations

from lockstep.page.reading.damage import Fields, cut, finite, finite_or_none, inner, number, text
from lockstep.page.reading.summary import Compared


class Predictions:
    """Those of the last attempt that has any."""

    def __init__(self) -> None:
        self.note = ""
        self._step: Compared | None = None
        self._memory: Compared | None = None
        self._is_compared = False

    def take(self, event: Fields) -> None:
        """Beforehand."""
        step, memory = finite_or_none(event, "step_seconds"), finite_or_none(event, "memory_bytes")
        band, source, reason = finite_or_none(event, "band"), text(event, "source"), text(event, "reason")
        within = f", its memory to within {100 * band:.0f} %" if band is not None else ""
        machine = cut(str(event.get("machine") or "an unknown machine"))
        self.note = reason or f"Predicted for {'this machine' if machine == 'here' else machine} ({source}){within}."
        self._step = None if step is None else Compared(step, None, None)
        self._memory = None if memory is None else Compared(memory, None, None)
        self._is_compared = False

    def take_error(self, event: Fields) -> None:
        """Afterwards, as the run has compared it itself."""
        self._step, self._memory = _compared(inner(event, "step_seconds")), _compared(inner(event, "memory_bytes"))
        self._is_compared = True

    def step(self, measured: float | None) -> Compared | None:
        """Seconds of a step, beside the median that is told everywhere, so that there is no second one."""
        if self._step is None or not measured:
            return self._step
        return Compared(self._step.predicted, measured, self._step.predicted / measured - 1)

    def memory(self, measured: float | None) -> Compared | None:
        """Bytes on the fullest rank; as long as the run has not compared them itself, with the most of a GPU so far."""
        if self._memory is None or self._is_compared or not measured:
            return self._memory
        return Compared(self._memory.predicted, measured, self._memory.predicted / measured - 1)


def _compared(told: Fields) -> Compared:
    error = None if told.get("error") is None else number(told, "error")
    return Compared(finite(told, "predicted"), finite_or_none(told, "measured"), error)
