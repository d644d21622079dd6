"""Bytes, seconds and shares as people read them."""

from __future__ import annotations

ROUNDED_UP = 0.9995
"""From here on three digits say that it is the next unit: 999,996 bytes are 1 MB, and not 1e+03 kB."""


def bytes_text(count: float) -> str:
    """A number of bytes for people."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= ROUNDED_UP * unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """A time for people."""
    if seconds >= 120:
        return f"{seconds / 60:.3g} min"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= ROUNDED_UP * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def percent(share: float) -> str:
    """Whole per cents, but for small ones."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0095 or share == 0 else f"{100 * share:.1f} %"
