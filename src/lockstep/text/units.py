"""Bytes, seconds and shares as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

ROUNDED_UP = 0.9995
"""From here on three digits say that it is the next unit: 999,996 bytes are 1 MB, and not 1e+03 kB."""


def rounded(number: float) -> float:
    """A measured number with as many digits as it is worth: of a thousand ranks there are thousands in a log."""
    return float(f"{number:.4g}")


def how_many(count: int, what: str, more: str = "s") -> str:
    """A number of things: 1 rank, 2 ranks."""
    return f"{count} {what}{more if count != 1 else ''}"


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
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def percent(share: float) -> str:
    """Whole per cents, but for small ones."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0095 or share == 0 else f"{100 * share:.1f} %"


def duration_text(seconds: float) -> str:
    """A time that may be long, in its two largest units: "41 s", "3 h 20 min", "2 d 4 h"."""
    if seconds < 59.5:
        return seconds_text(seconds) if 0 < seconds < 10 else f"{seconds:.0f} s"
    small, large, size, step = "s", "min", 60, 1
    for unit, name, inner, inner_size in ((3600, "h", "min", 60), (86400, "d", "h", 3600)):
        if round(seconds / inner_size) * inner_size >= unit:
            small, large, size, step = inner, name, unit, inner_size
    whole, rest = divmod(round(seconds / step) * step, size)
    return f"{whole} {large}" + (f" {rest // step} {small}" if rest else "")


def count_text(count: float) -> str:
    """A large number for people: 812, 48.6 k, 7.24 M, 1.2 P."""
    for unit, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= ROUNDED_UP * unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.3g}"


def loss_text(loss: float) -> str:
    """A loss, with four digits that count."""
    return f"{loss:#.4g}".rstrip(".") if abs(loss) < 1e4 else f"{loss:,.0f}"


def share_text(share: float) -> str:
    """A share that matters, to a tenth of a per cent."""
    return f"{100 * share:.1f} %"


def beside_prediction(measured: float, predicted: float, text: Callable[[float], str]) -> str:
    """How a measurement stands to what was predicted, in words that cannot be read the wrong way round."""
    ratio = measured / predicted if predicted > 0 else math.inf
    if not 0.5 < ratio < 2:
        how = f"{ratio:.2g} times"
    elif abs(ratio - 1) < 0.005:
        how = "equal to"
    else:
        how = f"{100 * abs(ratio - 1):.0f} % {'more' if ratio > 1 else 'less'} than"
    return f"{how} the predicted {text(predicted)}"


def error_text(error: float) -> str:
    """How far off a prediction was, as a share of what was measured."""
    return f"{100 * error:+.0f} %"


def device_time_text(hours: float, device: str) -> str:
    """What a run cost, in hours of GPUs or of CPU processes; a short one in minutes or seconds of them."""
    what = "process" if device == "cpu" else "GPU"
    for size, unit in ((1.0, "hours"), (1 / 60, "minutes")):
        if hours >= 2 * size or (unit == "hours" and hours >= 0.1):
            return f"{_three_digits(hours / size)} {what}-{unit}"
    return f"{hours * 3600:.0f} {what}-seconds"


def energy_text(kwh: float) -> str:
    """Energy; little of it in watt-hours."""
    return f"{_three_digits(kwh)} kWh" if kwh >= 0.1 else f"{_three_digits(1000 * kwh)} Wh"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
