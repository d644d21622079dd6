"""`lockstep lab` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from lockstep.launch.probe import Answer
from tests.cli.commands import in_this_process, interrupt, lockstep, start
from tests.hosts import why_no_hosts

TOPICS = ("broadcast", "reduce", "allreduce", "allgather", "reducescatter", "alltoall", "ddp", "fsdp", "tp", "pipeline")


def test_alone_it_lists_the_topics_with_a_line_each(tmp_path: Path) -> None:
    done = in_this_process(tmp_path, "lab")
    assert done.returncode == 0
    for topic in TOPICS:
        (line,) = (line.split() for line in done.stdout.splitlines() if line.split()[:1] == [topic])
        assert len(line) > 3


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("allreduce", "--algo", "rong"), "unknown algorithm 'rong': did you mean 'ring'?"),
        (("broadcast", "--algo", "ring"), "no ring algorithm for broadcast: use tree or naive"),
        (("all-reduce", "--algo", "halving-doubling", "--ranks", "6"), "6 is not a power of two: use 4 or 8 ranks"),
        (("allreduce", "--ranks", "17"), "--ranks 17 is not possible here: use 1 to 16"),
        (("allreduce", "--ranks", "0"), "--ranks 0 is not possible here: use 1 to 16"),
        (("allreduce", "--size", "much"), "'much' is not a size: write 500MB or 5GB"),
        (("allreduce", "--rate", "10MB"), "'10MB' is not a rate: write 1MB/s"),
        (("allreduce", "--draw", "ring.png"), "--draw ring.png is not a .svg file: call it ring.svg"),
        (("ddp", "--draw", "no/such/folder.svg"), "a folder that is not there: make no/such first"),
        (("fsdp", "--draw", "."), "--draw . is a folder: name a file in it, as in name.svg"),
        (("tp", "--ranks", "3"), "--ranks 3 is not possible here"),
        (("fsdp", "--ranks", "5"), "--ranks 5 is not possible here: use 1, 2, 3 or 4"),
        (("pipeline", "--schedule", "1f1c"), "unknown schedule '1f1c': did you mean '1f1b'?"),
        (("pipeline", "--micro-batches", "3"), "needs at least 4 micro-batches in a step, not 3"),
        (("pipeline", "--schedule", "gpipe", "--per-rank", "2"), "needs exactly 1 stage per rank, not 2"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    done = in_this_process(tmp_path, "lab", *args)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_rank_that_dies_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(*_: object, **__: object) -> list[Answer]:
        return [
            Answer(0, trouble="RuntimeError: connection closed by peer"),
            Answer(1, trouble="was killed by SIGKILL"),
        ]

    monkeypatch.setattr("lockstep.lab.ranks.run_ranks", run_ranks)
    for topic in ("allreduce", "fsdp"):
        done = in_this_process(tmp_path, "lab", topic, "--ranks", "2")
        assert (done.returncode, done.stderr) == (1, "lockstep: rank 1 of 2 failed: was killed by SIGKILL\n")


def test_a_pipeline_is_drawn_and_said_as_json(tmp_path: Path) -> None:
    done = in_this_process(
        tmp_path, "lab", "pipeline", "--stages", "2", "--micro-batches", "4", "--draw", "p.svg", "--json"
    )
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert answer["bubble"] == pytest.approx(1 / 5)
    assert [rank["in_flight"] for rank in answer["ranks"]] == [2, 1]
    assert "F3" in done.stderr
    assert len(list(ET.parse(tmp_path / "p.svg").getroot())) > 10


def test_a_collective_runs_is_compared_drawn_and_counted(tmp_path: Path) -> None:
    args = ("--ranks", "3", "--no-measure", "--size", "3MB", "--rate", "1MB/s", "--draw", "ring.svg", "--json")
    done = lockstep(tmp_path, "lab", "allreduce", *args)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    found = {row["algorithm"]: row for row in answer["algorithms"]}
    assert list(found) == ["ring", "tree", "naive"]
    assert all(row["agrees"] for row in found.values())
    assert found["ring"] | {"predicted": 0} == {
        "algorithm": "ring",
        "agrees": True,
        "rounds": 4,
        "messages": 12,
        "busiest_sends": 4_000_000,
        "predicted": 0,
        "measured": None,
    }
    assert found["ring"]["predicted"] == pytest.approx(4)
    assert answer["drawn"]["after"][-1] == [[[33.0], [36.0], [39.0]]] * 3
    assert "what gloo's own all-reduce gives, to the bit" in done.stderr
    assert "without halving-doubling: " in done.stderr
    assert ET.parse(tmp_path / "ring.svg").getroot().attrib["role"] == "img"


@pytest.mark.slow
def test_a_layout_is_shown_from_real_ranks(tmp_path: Path) -> None:
    done = lockstep(tmp_path, "lab", "fsdp", "--draw", "fsdp.svg")
    assert done.returncode == 0, done.stderr
    assert "its gradient after reduce-scatter" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["fsdp.svg"]


@pytest.mark.slow
@pytest.mark.skipif(why_no_hosts() is not None, reason=f"needs network namespaces: {why_no_hosts()}")
def test_a_slow_network_takes_at_least_as_long_as_the_model_says(tmp_path: Path) -> None:
    args = ("--algo", "ring", "--ranks", "4", "--size", "2MB", "--rate", "2MB/s", "--json")
    done = lockstep(tmp_path, "lab", "allreduce", *args)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["algorithms"]
    # Three quarters of 2 MB, twice, at 2 MB/s, and what messages cost. That it is slow is the point: loopback does it
    # in milliseconds. How much slower it gets where ranks share cores says nothing.
    assert row["predicted"] >= 1.5
    assert row["measured"] > 0.9 * 1.5


@pytest.mark.slow
@pytest.mark.skipif(why_no_hosts() is not None, reason=f"needs network namespaces: {why_no_hosts()}")
def test_ctrl_c_while_it_is_timed_ends_it_with_130(tmp_path: Path) -> None:
    process = start(tmp_path, "lab", "broadcast", "--ranks", "2", "--rate", "100kB/s")
    assert process.stdout is not None
    seen = ""
    while "to the bit" not in seen:
        line = process.stdout.readline()
        assert line, f"it ended too early: {seen}"
        seen += line
    code, rest = interrupt(process, signal.SIGINT)
    assert code == 130, rest
    assert "Traceback" not in rest


def test_where_no_network_can_be_made_the_times_are_predicted_only_and_it_says_why(tmp_path: Path) -> None:
    """A folder with Python alone in it stands for a machine without iproute2."""
    (tmp_path / "bin").mkdir()
    done = lockstep(tmp_path, "lab", "broadcast", "--ranks", "2", PATH=str(tmp_path / "bin"))
    assert done.returncode == 0, done.stderr
    assert "nothing is measured, because a slow network cannot be made here: ip and tc not found" in done.stdout
    assert "predicted" in done.stdout
    assert "measured  " not in done.stdout
    assert os.listdir(tmp_path) == ["bin"]
