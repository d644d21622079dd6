"""`lockstep bench`, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.links.measured import read_bench
from tests.cli.commands import LOCKSTEP, clean_environment, free_port, in_this_process, interrupt, lockstep
from tests.hosts import hosts

SMALL = ("--sizes", "4kB:64kB", "--collectives", "all_reduce,broadcast")


def test_two_ranks_are_measured_shown_drawn_and_written(tmp_path: Path) -> None:
    done = lockstep(
        tmp_path, "bench", *SMALL, "--json", "-o", "out.json", "--chart", "out.svg", LOCKSTEP_CACHE=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    bench = read_bench(tmp_path / "out.json")
    assert bench == read_bench(next((tmp_path / "bench").glob("*-1-node-cpu-gloo-dp=2.json")))
    assert json.loads(done.stdout) == json.loads((tmp_path / "out.json").read_text())
    assert bench.complete
    assert (bench.layout, bench.backend, bench.nodes) == ("dp=2", "gloo", [0, 0])
    assert [(row.collective, row.bytes) for row in bench.rows] == [
        (name, size) for name in ("all-reduce", "broadcast") for size in (4000, 16000, 64000)
    ]
    assert [(pair.a, pair.b) for pair in bench.pairs] == [(0, 1)]
    assert [speed.rank for speed in bench.speeds] == [0, 1]
    assert all(speed.matmul_tflops["fp32"] > 0 for speed in bench.speeds)
    assert [fit.collective for fit in bench.fits] == ["all-reduce", "broadcast"]
    values = ElementTree.parse(tmp_path / "out.svg").getroot().find("{http://www.w3.org/2000/svg}desc")
    assert values is not None
    assert "at 64 kB" in (values.text or "")
    for words in ("all-reduce over axis dp, 2 ranks", "pairs of ranks", "inside a node: median", "kept in "):
        assert words in done.stderr


def test_one_rank_has_nobody_to_talk_to_and_is_still_measured(tmp_path: Path) -> None:
    done = lockstep(tmp_path, "bench", "--nproc", "1", LOCKSTEP_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "one rank has nobody to talk to" in done.stdout
    assert "copy GB/s" in done.stdout


def test_ctrl_c_shows_and_writes_what_was_measured_so_far(tmp_path: Path) -> None:
    command = [*LOCKSTEP, "bench", "-o", "out.json"]
    environment = clean_environment() | {"LOCKSTEP_CACHE": str(tmp_path)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seen = ""
    while "4 kB" not in seen:
        line = process.stdout.readline()
        assert line, f"it ended before the second row: {seen}"
        seen += line
    code, rest = interrupt(process, signal.SIGINT)
    assert code == 130
    assert "interrupted" in rest
    assert "time = alpha + beta x bytes" in rest
    assert "Traceback" not in rest
    bench = read_bench(tmp_path / "out.json")
    assert not bench.complete
    assert bench.rows[0].collective == "all-reduce"
    assert bench.pairs == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--collectives all-reduc", "unknown collective 'all-reduc': did you mean 'all-reduce'?"),
        ("--sizes 1kB-4kB", "--sizes 1kB-4kB cannot be read: write from:to, as in 1kB:64MB"),
        ("--sizes 4MB:1kB", "write 1kB:4MB"),
        ("--layout dp=3 --nproc 2", "needs 3 processes but there are 2"),
        ("--nproc 0", "Invalid value for '--nproc': Input should be greater than or equal to 1"),
        ("--layout tpp=2", "did you mean 'tp'?"),
        ("--device gpu", "--device gpu is not a device: use cpu or cuda"),
        ("--nodes 2:3 --node-rank 0 --head localhost:29999", "leaves open how many: say one number"),
        ("--nodes 2", "--nodes 2 without --node-rank"),
        ("--cluster no-such", "unknown cluster 'no-such'"),
        ("-o missing/out.json", "--output missing/out.json would be in a folder that is not there: make missing first"),
        ("-o out.txt", "--output out.txt is not a .json file: call it out.json"),
        ("--chart .", "--chart . is a folder"),
        ("--chart out.png", "call it out.svg"),
    ],
)
def test_wrong_input_is_one_sentence_and_starts_nothing(tmp_path: Path, options: str, said: str) -> None:
    done = in_this_process(tmp_path, "bench", *options.split(), LOCKSTEP_CACHE=str(tmp_path))
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the system's answer is made up."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    done = in_this_process(tmp_path, "bench", "-o", "out.json", LOCKSTEP_CACHE=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--output out.json cannot be written" in done.stderr


@pytest.mark.slow
def test_ctrl_c_on_the_head_ends_every_node_with_130(tmp_path: Path) -> None:
    head = f"127.0.0.1:{free_port()}"
    environment = clean_environment() | {"LOCKSTEP_CACHE": str(tmp_path)}
    first, second = (
        subprocess.Popen(
            [*LOCKSTEP, "bench", "--nodes", "2", "--node-rank", str(node), "--head", head, "--nproc", "1"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    )
    assert first.stdout is not None
    seen = ""
    while "4 kB" not in seen:
        line = first.stdout.readline()
        assert line, f"it ended before the second row: {seen}"
        seen += line
    code, output = interrupt(first, signal.SIGINT)
    rest = second.communicate()[0]
    assert (code, second.returncode) == (130, 130), output + rest
    assert "has lost a rank of another node" in rest
    assert "Traceback" not in output + rest


@pytest.mark.slow
def test_a_host_behind_a_slow_cable_is_named_and_the_exit_code_is_1_on_every_node(tmp_path: Path) -> None:
    with hosts(3) as made:
        made[2].slow("20mbit")
        processes = []
        for number, host in enumerate(made):
            where = ["--nodes", "3", "--node-rank", str(number), "--head", f"{made[0].address}:29555", "--nproc", "1"]
            options = ["--collectives", "all-reduce", "--sizes", "1kB:16kB", "-o", f"{number}.json"]
            environment = clean_environment() | {"LOCKSTEP_CACHE": str(tmp_path)}
            processes.append(host.popen([*LOCKSTEP, "bench", *where, *options], tmp_path, environment))
        outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1], "\n".join(outputs)
    assert "every link of node host3 is slow" in outputs[0]
    assert "between nodes: median" in outputs[0]
    assert os.listdir(tmp_path / "bench") == ["host1-3-nodes-cpu-gloo-dp=3.json"]
    bench = read_bench(tmp_path / "0.json")
    assert [finding.where for finding in bench.findings] == ["host3"]
    assert bench.hosts == ["host1", "host2", "host3"]
    assert not (tmp_path / "1.json").exists(), "the head writes"
