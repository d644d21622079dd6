"""Numbers as people read them: bytes, seconds, counts, rates, shares and losses, for consoles, pages and charts.

The page's script writes the same text for the same number (page/front/src/format.js); a test runs both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal

ROUNDED_UP = 0.9995
"""From here on three digits say that it is the next unit: 999,996 bytes are 1 MB, and not 1,000 kB."""
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
SCALES: Mapping[str, Sequence[tuple[float, str]]] = {
    "B": ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "share": ((0.01, "%"),),
    "count": PREFIXES,
}
"""The units of an amount, the largest first; others take the prefixes."""
ZEROS = {"share": "%", "count": ""}
DURATIONS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
LONGEST_IN_SECONDS = 120.0
HALF_UP = Context(prec=400, rounding=ROUND_HALF_UP)
"""As people, and JavaScript, round; with room for every float."""


def amount(value: float, unit: str) -> str:
    """A value with its unit, in three digits: "34.2 ms", "93.1 %", "12.3 k/s"."""
    if unit == "":
        return plain(value)
    if unit == "s" and abs(value) >= LONGEST_IN_SECONDS:
        return duration_text(value)
    if value == 0:
        return f"0 {ZEROS.get(unit, unit)}".rstrip()
    of = unit.removesuffix("/s") if unit == "B/s" else unit
    scales = SCALES.get(of) or [(size, prefix + unit) for size, prefix in PREFIXES]
    size, name = next((scale for scale in scales if abs(value) >= ROUNDED_UP * scale[0]), scales[-1])
    return f"{plain(value / size, 3)} {name}{'/s' if of != unit else ''}".rstrip()


def plain(value: float, digits: int = 4) -> str:
    """Few digits, and no exponent where it can be helped."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    exact, size = Decimal(value), abs(value)
    if size >= 1e9 or size < 1e-4:
        mantissa, exponent = f"{_to_digits(exact, digits - 1):e}".split("e")
        return f"{_without_zeros(mantissa)}e{int(exponent)}"
    if size >= 10 ** (digits - 1):
        return f"{int(exact.quantize(Decimal(1), context=HALF_UP)):,}"
    return _without_zeros(f"{_to_digits(exact, digits):f}")


def _to_digits(exact: Decimal, digits: int) -> Decimal:
    return exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), context=HALF_UP)


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def bytes_text(count: float) -> str:
    """A number of bytes for people."""
    return amount(count, "B")


def seconds_text(seconds: float) -> str:
    """A time for people."""
    return amount(seconds, "s")


def count_text(count: float) -> str:
    """A large number for people: 812, 48.6 k, 7.24 M, 1.2 P."""
    return amount(count, "count")


def loss_text(loss: float) -> str:
    """A loss, with four digits that count."""
    return plain(loss)


def share_text(share: float) -> str:
    """A share that matters, to three digits of a per cent."""
    return amount(share, "share")


def percent(share: float) -> str:
    """Whole per cents, but for small ones."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    step = Decimal("0.1") if 0 < abs(share) < 0.0095 else Decimal(1)
    return f"{Decimal(100 * share).quantize(step, context=HALF_UP):f} %" if math.isfinite(100 * share) else f"{share} %"


def duration_text(seconds: float) -> str:
    """A time that may be long, in its two largest units: "41 s", "3 h 20 min", "2 d 4 h"."""
    if not math.isfinite(seconds):
        return str(seconds)
    sign, size = "\N{MINUS SIGN}" if seconds < 0 else "", abs(seconds)
    if size < 59.5:
        return sign + (amount(size, "s") if size < 10 else f"{math.floor(size + 0.5)} s")
    for unit, large, step, small in DURATIONS:
        whole, rest = divmod(math.floor(size / step + 0.5) * step, unit)
        if whole:
            return f"{sign}{whole} {large}" + (f" {rest // step} {small}" if rest else "")
    raise AssertionError(seconds)


def steady(value: float) -> str:
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


def rounded(number: float) -> float:
    """A measured number with as many digits as it is worth: of a thousand ranks there are thousands in a log."""
    return float(f"{number:.4g}")


def how_many(count: int, what: str, more: str = "s") -> str:
    """A number of things: 1 rank, 2 ranks."""
    return f"{count} {what}{more if count != 1 else ''}"


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
            return f"{plain(hours / size, 3)} {what}-{unit}"
    return f"{hours * 3600:.0f} {what}-seconds"


def energy_text(kwh: float) -> str:
    """Energy; little of it in watt-hours."""
    return f"{plain(kwh, 3)} kWh" if kwh >= 0.1 else f"{plain(1000 * kwh, 3)} Wh"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def printable(text: str) -> str:
    """Text without what moves the cursor or changes colours; its lines stay."""
    return "\n".join("".join(char if char.isprintable() else " " for char in line) for line in text.splitlines())
