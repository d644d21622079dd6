"""Numbers, times and strange text as the console writes them."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Four significant digits with their trailing zeros: a running number should not change its width."""
    return f"{value:#.4g}".rstrip(".") if math.isfinite(value) else str(value)


def clock(seconds: float) -> str:
    """A time as a clock shows it: 1:02, 3:04:05, 2 d 3 h."""
    if not math.isfinite(seconds):
        return str(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str) -> str:
    """Text without what moves the cursor or changes colours; its lines stay."""
    return "\n".join("".join(char if char.isprintable() else " " for char in line) for line in text.splitlines())
