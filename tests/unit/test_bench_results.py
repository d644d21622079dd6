"""What bench measured: sizes, bandwidths as nccl-tests defines them, and files that are read again or refused."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.cli.bench import parse_sizes
from lockstep.errors import UserError
from lockstep.links.bench_show import show_pairs
from lockstep.links.collective_cost import Collective
from lockstep.links.expected import ExpectedSpeed
from lockstep.links.findings import Finding
from lockstep.links.measured import (
    Bench,
    Pair,
    Row,
    Speed,
    file_name,
    fits_of,
    is_better,
    read_bench,
    timed_row,
    write_bench,
)
from lockstep.text.units import bytes_text, seconds_text

ROWS = [timed_row("dp", 2, "all-reduce", size, [1e-4 + size * 1e-9], 10) for size in (1000, 4000, 16000, 64000)]


def bench(rows: list[Row] = ROWS, complete: bool = True) -> Bench:
    return Bench(
        lockstep="0.1.0",
        torch="2.13.0",
        when="2026-01-01T00:00:00+00:00",
        complete=complete,
        layout="dp=2",
        device="cpu",
        backend="gloo",
        hosts=["a", "b"],
        nodes=[0, 1],
        rows=rows,
        pairs=[Pair(a=0, b=1, gb_s=1.5, latency=2e-5)],
        speeds=[Speed(rank=0, device="CPU, 1 thread", matmul_tflops={"fp32": 0.1}, copy_gb_s=9.0)],
        fits=fits_of(rows),
        findings=[Finding("slow link", "slow", "a", "is slow", "mend it")],
    )


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1kB:64kB", (1000, 4000, 16000, 64000)),
        ("1kB:64MB", (1000, 4000, 16000, 64000, 256000, 1024000, 4096000, 16384000, 64000000)),
        ("1kB:40kB", (1000, 4000, 16000, 40000)),
        ("1kB:5kB", (1000, 5000)),
        ("1kB:1.5kB", (1000,)),
        ("2MB", (2000000,)),
    ],
)
def test_sizes_go_by_factors_of_four_and_end_where_they_should(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "1kB:", "big", "1kB:2kB:3kB", "-1kB:2kB", "4:8", "1kb-2kb"])
def test_sizes_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"cannot be read: write from:to, as in 1kB:64MB"):
        parse_sizes(text)


def test_sizes_the_wrong_way_round_are_refused_with_the_right_one() -> None:
    with pytest.raises(UserError, match=r"ends below where it begins: write 1kB:1MB"):
        parse_sizes("1MB:1kB")


@pytest.mark.parametrize(
    ("collective", "ranks", "busbw"),
    [
        ("all-reduce", 2, 1.0),
        ("all-reduce", 8, 1.75),
        ("all-gather", 8, 0.875),
        ("reduce-scatter", 4, 0.75),
        ("all-to-all", 4, 0.75),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("reduce", 4, 1.0),
        ("send-recv", 4, 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(collective: Collective, ranks: int, busbw: float) -> None:
    row = timed_row("dp", ranks, collective, 10_000_000, [9e-3, 10e-3, 14e-3], 30)
    assert (row.seconds, row.fastest, row.slowest) == (10e-3, 9e-3, 14e-3)
    assert row.algbw_gb_s == pytest.approx(1.0)
    assert row.busbw_gb_s == pytest.approx(busbw)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_bench(bench(), tmp_path / "new folder" / "bench.json")
    again = read_bench(tmp_path / "new folder" / "bench.json")
    assert again == bench()
    assert again.fits[0].alpha == pytest.approx(1e-4)
    curve = again.curve("dp", "all-reduce")
    assert curve is not None
    assert curve.seconds(8000) == pytest.approx(1e-4 + 8e-6, rel=0.02)
    assert again.curve("tp", "all-reduce") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version: input should be 1"),
        ({"rows": [{"axis": "dp"}]}, "rows.0.ranks: field required"),
        ({"nodes": [0]}, "names ranks that it does not have"),
        ({"pairs": [{"a": 0, "b": 7, "gb_s": 1.0, "latency": 1.0}]}, "names ranks that it does not have"),
        ({"unheard": 1}, "unheard: extra inputs are not permitted"),
    ],
)
def test_a_damaged_file_is_refused_by_what_is_wrong(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(json.loads(bench().model_dump_json()) | change))
    with pytest.raises(UserError, match=said):
        read_bench(path)


@pytest.mark.parametrize("content", ["", '{"version": 1', "[]", "\0\1"])
def test_what_is_no_result_at_all_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(UserError, match="is not a result of lockstep bench"):
        read_bench(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_bench(tmp_path / "missing.json")


def test_nothing_whole_is_given_up_for_a_part(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    broadcast = timed_row("dp", 2, "broadcast", 1000, [1e-4], 1)
    assert is_better(bench(complete=False), path), "better than nothing"
    write_bench(bench([*ROWS, broadcast]), path)
    assert is_better(bench([*ROWS, broadcast]), path)
    assert not is_better(bench([*ROWS, broadcast], complete=False), path)
    assert not is_better(bench(ROWS), path), "the broadcast would be lost"
    assert not is_better(bench([*ROWS[:-1], broadcast]), path), "the largest size would be lost"
    assert not is_better(bench([*ROWS[1:], broadcast]), path), "the smallest size would be lost"
    larger = timed_row("dp", 2, "all-reduce", 256000, [1e-3], 1)
    assert is_better(bench([ROWS[0], larger, broadcast]), path), "all sizes are between these"
    path.write_text("damaged")
    assert is_better(bench(ROWS), path)


def test_results_of_another_backend_or_of_more_nodes_are_kept_apart() -> None:
    one = bench()
    others = [
        one.model_copy(update={"backend": "nccl"}),
        one.model_copy(update={"device": "cuda"}),
        one.model_copy(update={"nodes": [0, 0]}),
        one.model_copy(update={"layout": "tp=2"}),
    ]
    assert file_name(one) == "a-2-nodes-cpu-gloo-dp=2.json"
    assert len({file_name(found) for found in (one, *others)}) == 5


def test_bytes_and_seconds_for_people_never_round_up_to_a_thousand() -> None:
    assert [bytes_text(count) for count in (12, 996, 1000, 64e3, 999_996, 65.5e6, 1e9, 2e12)] == [
        *("12 B", "996 B", "1 kB", "64 kB", "1 MB", "65.5 MB", "1 GB", "2 TB")
    ]
    assert [seconds_text(seconds) for seconds in (0.0, 34.4e-6, 0.99997e-3, 0.0123, 2.5, 119, 1090)] == [
        *("0 s", "34.4 µs", "1 ms", "12.3 ms", "2.5 s", "119 s", "18 min 10 s")
    ]


def test_the_matrix_marks_what_is_slow_even_where_most_links_are() -> None:
    found = [Pair(a=a, b=b, gb_s=0.1 if b == 2 else 2.0, latency=1e-5) for a, b in ((0, 1), (0, 2), (1, 2))]
    terminal = Console(file=io.StringIO(), width=100)
    show_pairs(found, [0, 1, 2], ["a", "b", "c"], {False: ExpectedSpeed(1.5, "cluster big")}, terminal)
    assert isinstance(terminal.file, io.StringIO)
    text = terminal.file.getvalue()
    assert re.search(r"^2 c +0\.1! +0\.1! +\.", text, re.M)
    assert re.search(r"^0 a +\. +2 +0\.1!", text, re.M)
    assert "between nodes: median 0.1 GB/s, 10 µs (3 pairs); expected: 1.5 GB/s (cluster big)" in text
