"""Is a loss far above those of the steps before? Decided by the losses alone, so every rank decides alike.

Losses are compared as logarithms: a factor means the same at 5 and at 0.05. What is judged is how far a loss is above
the level, the median of the last few, so that a falling loss hides nothing. One loss that is far above is a spike;
where losses are noisy, two or three in a row say more than one does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, pstdev

LEVEL = 8
WINDOW = 64
HISTORY = 24
"""So many steps have to be seen, after those that make the first level, before anything is called a spike."""
FACTORS = (3.0, 3.0, 2.5)
"""What one loss, or the mean of two or three in a row, is at least above the level, however quiet the losses are."""
NOISE = 4.0
"""And so many standard deviations."""
BEYOND = 0.25
"""And so much above the highest that was ever accepted of the window, on the scale of logarithms."""
LASTING = 8
"""So many high losses in a row are no spike any more: the level is a new one."""


@dataclass(frozen=True)
class Spike:
    """A loss that is `factor` times the `level` of the steps before; `first` of those in a row."""

    loss: float
    level: float
    factor: float
    first: bool


class SpikeDetector:
    """Sees the loss of every step, one after another. Losses that are not positive numbers pass unseen."""

    def __init__(self) -> None:
        self._accepted: deque[float] = deque(maxlen=LEVEL)
        self._above: deque[float] = deque(maxlen=WINDOW)  # how far each accepted one was above the level before it
        self._high: list[float] = []

    def see(self, loss: float) -> Spike | None:
        """The next step's loss; returns what it is when it is a spike, which does not raise the level then."""
        if not math.isfinite(loss) or loss <= 0:
            return None
        log = math.log(loss)
        if len(self._accepted) < LEVEL:
            self._accepted.append(log)
            return None
        level = median(self._accepted)
        if not self._is_high(log - level):
            self._high.clear()
            self._accepted.append(log)
            self._above.append(log - level)
            return None
        self._high.append(log)
        if len(self._high) == LASTING:
            self._accepted.extend(self._high)
            self._above.clear()
            self._high.clear()
            return None
        return Spike(loss, math.exp(level), math.exp(log - level), first=len(self._high) == 1)

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps of it: a run that goes on decides as if it had not been interrupted."""
        return {"accepted": list(self._accepted), "above": list(self._above), "high": list(self._high)}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on with what `state` gave."""
        self._accepted = deque(state["accepted"], maxlen=LEVEL)
        self._above = deque(state["above"], maxlen=WINDOW)
        self._high = list(state["high"])

    def _is_high(self, above: float) -> bool:
        if len(self._above) < HISTORY:
            return False
        seen = list(self._above)
        means = [(sum(seen[len(seen) - count + 1 :]) + above) / count for count in (1, 2, 3)]
        if all(mean <= math.log(factor) for mean, factor in zip(means, FACTORS, strict=True)):
            return False  # as nearly always: the rest takes a while
        middle = median(seen)
        usual = 1.4826 * median(abs(one - middle) for one in seen)
        # Noise grows while a loss falls: what single losses did lately counts too.
        lately = max(usual, pstdev(seen[-HISTORY:]))
        for count, mean, factor, noise in zip((1, 2, 3), means, FACTORS, (lately, lately, usual), strict=True):
            before = [sum(seen[at : at + count]) / count for at in range(len(seen) - 2 * (count - 1))]
            if mean > max(math.log(factor), NOISE * noise / math.sqrt(count), max(before) + BEYOND):
                return True
        return False
