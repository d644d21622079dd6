"""How often something happens in a run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Cadence:
    """How often something happens: every so many steps, epochs or minutes, or never."""

    amount: float
    unit: Literal["steps", "epochs", "minutes", "never"]

    @staticmethod
    def parse(text: str) -> Cadence:
        """Read "100 steps", "1 epoch", "0.5 epochs", "10 minutes" or "never"."""
        if text.strip() == "never":
            return Cadence(math.inf, "never")
        amount, _, unit = text.strip().partition(" ")
        units: dict[str, Literal["steps", "epochs", "minutes"]] = {
            "step": "steps",
            "epoch": "epochs",
            "minute": "minutes",
        }
        try:
            value, unit_name = float(amount), units[unit.strip().removesuffix("s")]
        except (ValueError, KeyError):
            raise ValueError(f'write "100 steps", "1 epoch", "10 minutes" or "never", not {text!r}') from None
        if not (value > 0 and math.isfinite(value)) or (unit_name == "steps" and value != int(value)):
            raise ValueError(f"{text!r} is not a positive number of {unit_name}")
        return Cadence(value, unit_name)

    def due(self, step: int, steps_per_epoch: int | None, minutes_since_last: float) -> bool:
        """Whether it is time after `step` optimizer steps."""
        if self.unit == "steps":
            return step % int(self.amount) == 0
        if self.unit == "epochs":
            if steps_per_epoch is None:
                return False
            # Whole parts done now and a step ago: so the parts never drift away from the epochs' ends.
            now, before = (round(at / (self.amount * steps_per_epoch), 9) // 1 for at in (step, step - 1))
            return now > before
        return self.unit == "minutes" and minutes_since_last >= self.amount


def parse_duration(text: str) -> float:
    """Seconds of a time such as "2h", "90m", "1h30m", "45s", or as Slurm writes it: "HH:MM:SS", "D-HH:MM:SS"."""
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text.strip())
    parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    match = clock or parts
    numbers = [int(part or 0) for part in match.groups()] if match else []
    seconds = float(sum(number * unit for number, unit in zip(numbers, units.values(), strict=False)))
    if seconds <= 0:
        raise ValueError(f'max_time is {text!r}: write a time such as "2h", "90m" or "1-12:00:00"')
    return seconds
