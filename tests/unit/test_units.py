"""The text of numbers: what people read, and that the page's script writes the same."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import lockstep
from lockstep.text.units import amount, bytes_text, count_text, duration_text, loss_text, percent, plain, seconds_text

FORMAT = Path(lockstep.__path__[0]) / "page" / "front" / "src" / "format.js"

NUMBERS = [
    *(0, 1, 2, 7, 9, 10, 12, 59, 60, 61, 99, 100, 119, 120, 121, 999, 1000, 1001, 1024, 3599, 3600, 3601, 12345, 65536),
    *(86399, 86400, 90000, 172800, 999_499, 999_500, 999_999, 1_000_000, 123_456_789, 2**31, 10**12, 10**15, 10**18),
    *(0.5, 1.5, 2.5, 0.125, 0.375, 1.125, 12.25, 12.35, 12.45, 99.95, 999.4, 999.5, 999.6, 1234.5, 1235.5, 9999.5),
    *(0.001, 0.0005, 0.00049, 0.0095, 0.00949, 0.05, 0.095, 0.1, 0.25, 0.333333, 0.9994, 0.9995, 0.99951, 0.9999),
    *(1e-3, 9.995e-4, 9.994e-4, 1e-4, 9.9999e-5, 1.25e-5, 1e-6, 3.14159e-7, 1e-9, 2.43147, 2.4315, 2.43155, 0.1 + 0.2),
    *(59.4, 59.5, 59.9, 9.994, 9.995, 9.996, 119.4, 119.96, 3570, 3629.9, 3630, 5400, 84599, 84600, 84601, 7.2e5, 1e7),
    *(1.005, 1.015, 1.0049999, 5.5e9, 9.9949e9, 9.995e11, 9.9951e14, 1e18, 9.99e14),
    *(-1, -0.5, -2.5, -12.25, -61, -3630, -1234.5, -0.004, -5e6, -1e-5),
]

LONGEST = 1e15
"""Seconds: beyond, JavaScript knows no whole numbers."""

PAIRS: dict[str, tuple[Callable[[float], str], str]] = {
    "bytes": (bytes_text, 'amount(value, "B")'),
    "bytes a second": (lambda value: amount(value, "B/s"), 'amount(value, "B/s")'),
    "seconds": (seconds_text, 'amount(value, "s")'),
    "durations": (duration_text, "duration(value)"),
    "counts": (count_text, 'amount(value, "count")'),
    "rates": (lambda value: amount(value, "/s"), 'amount(value, "/s")'),
    "watts": (lambda value: amount(value, "W"), 'amount(value, "W")'),
    "operations": (lambda value: amount(value, "flop/s"), 'amount(value, "flop/s")'),
    "shares": (lambda value: amount(value, "share"), 'amount(value, "share")'),
    "per cents": (percent, "percent(value)"),
    "losses": (loss_text, 'amount(value, "")'),
    "three digits": (lambda value: plain(value, 3), "plain(value, 3)"),
}


@pytest.fixture(scope="module")
def of_the_page() -> dict[str, list[str]]:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    texts = ", ".join(f"{json.dumps(name)}: numbers.map((value) => {call})" for name, (_, call) in PAIRS.items())
    script = (
        f"import {{ amount, duration, percent, plain }} from {json.dumps(FORMAT.as_uri())};"
        f"const numbers = {json.dumps(NUMBERS)}; console.log(JSON.stringify({{ {texts} }}));"
    )
    command = ["node", "--no-warnings", "--input-type=module", "-e", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    texts_of: dict[str, list[str]] = json.loads(done.stdout)
    return texts_of


@pytest.mark.parametrize("what", PAIRS)
def test_python_and_the_page_write_the_same(of_the_page: dict[str, list[str]], what: str) -> None:
    write, _ = PAIRS[what]
    differing = {
        number: (ours, theirs)
        for number, theirs in zip(NUMBERS, of_the_page[what], strict=True)
        if (ours := write(number)) != theirs and (number < LONGEST or what not in ("seconds", "durations"))
    }
    assert not differing


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        (bytes_text, 999_996, "1 MB"),
        (bytes_text, 392_847_360, "393 MB"),
        (bytes_text, 812, "812 B"),
        (seconds_text, 0.0342, "34.2 ms"),
        (seconds_text, 75.3, "75.3 s"),
        (seconds_text, 2000, "33 min 20 s"),
        (duration_text, 3 * 3600 + 20 * 60 + 4, "3 h 20 min"),
        (duration_text, 41.3, "41 s"),
        (duration_text, 59.7, "1 min"),
        (count_text, 48_600, "48.6 k"),
        (count_text, 7_240_000, "7.24 M"),
        (loss_text, 2.43147, "2.431"),
        (percent, 0.05, "5 %"),
        (percent, 0.004, "0.4 %"),
        (percent, 0.0001, "< 0.1 %"),
    ],
)
def test_what_people_read(text: Callable[[float], str], value: float, expected: str) -> None:
    assert text(value) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1.7976931348623157e308, 5e-324])
def test_no_number_of_a_damaged_log_is_too_much(value: float) -> None:
    for write, _ in PAIRS.values():
        assert write(value)
