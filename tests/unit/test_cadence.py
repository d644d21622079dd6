"""Times as people and Slurm write them."""

from __future__ import annotations

import pytest

from lockstep.config.cadence import parse_duration

MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45s", 45),
        ("90m", 90 * MINUTE),
        ("2h", 2 * HOUR),
        ("1h30m", HOUR + 30 * MINUTE),
        ("1d", DAY),
        ("2d3h4m5s", 2 * DAY + 3 * HOUR + 4 * MINUTE + 5),
        ("00:10:30", 10 * MINUTE + 30),
        ("24:00:00", DAY),
        ("1-12:00:00", DAY + 12 * HOUR),
        (" 1-00:00:01 ", DAY + 1),
    ],
)
def test_a_time_is_so_many_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "00:00:00", "2 hours", "1.5h", "10:00", "-1h", "3h2h", "h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a time such as"):
        parse_duration(text)
