"""The doctor as a user calls it: on one machine and on several, sound ones and ones with planted faults."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import LOCKSTEP, clean_environment, run
from tests.hosts import Host, hosts

BUSY = {"CPUs", "memory", "run folder"}
"""What a small or busy machine may really lack, and no test has planted."""


def bad(stdout: str) -> dict[str, list[str]]:
    """What was found to be wrong, by check."""
    report = json.loads(stdout)
    found: dict[str, list[str]] = {}
    for finding in report["findings"]:
        if finding["level"] in ("slow", "broken"):
            found.setdefault(finding["check"], []).append(finding["evidence"])
    assert report["ok"] == (not found)
    return found


def with_fault(prelude: str) -> list[str]:
    """The command, after something in its process was broken."""
    return [sys.executable, "-c", f"{prelude}\nfrom lockstep.cli import main\nmain()", "doctor"]


def test_eight_ranks_on_three_axes_get_the_right_values_from_every_collective(tmp_path: Path) -> None:
    done = run(tmp_path, *LOCKSTEP, "doctor", "--nproc", "8", "--layout", "dp=2,fsdp=2,tp=2", "--json")
    assert set(bad(done.stdout)) <= BUSY, done.stdout + done.stderr
    (collectives,) = [one for one in json.loads(done.stdout)["findings"] if one["check"] == "collectives"]
    assert "the right values" in collectives["evidence"]
    # Of every rank: seven groups (three axes, three pairs, all), ten formats and sizes, at least twelve calls for each.
    assert int(collectives["evidence"].split()[0].replace(",", "")) > 8 * 7 * 10 * 12
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


BROKEN_SUM = """
import torch, torch.distributed as dist
right = dist.all_reduce
def all_reduce(tensor, *args, **kwargs):
    work = right(tensor, *args, **kwargs)
    if tensor.dtype == torch.bfloat16 and dist.get_rank() == 1:
        tensor[3] += 1
    return work
dist.all_reduce = all_reduce
"""


def test_a_machine_with_four_faults_is_told_of_all_of_them(tmp_path: Path) -> None:
    """A tiny /dev/shm, few open files, a variable left behind, and an all-reduce that is wrong in one format."""
    setup = 'mount -t tmpfs -o size=8m none /dev/shm && ulimit -n 512 && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", setup, "sh", *with_fault(BROKEN_SUM), "--nproc", "2", "--json"]
    done = run(tmp_path, *command, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode == 1, done.stderr
    found = bad(done.stdout)
    assert found["shared memory"] == ["/dev/shm has 8 of 8 MB free, and 2 ranks hand their batches through it"]
    assert found["limits"] == ["512 open files for a process at most, and loaders and sockets need more"]
    assert found["environment"] == ["TORCH_DISTRIBUTED_DEBUG=DETAIL: every collective is checked by two more"]
    # The sum, the smallest, the largest and the mean, and nothing else.
    assert len(found["collectives"]) == 4
    assert found["collectives"][0].startswith(
        "all-reduce (sum), bfloat16 of 1023 elements over dp gives wrong values on rank 1: 1 of 1023 values are wrong: "
        "element 3 is "
    )


def test_people_read_the_finding_and_its_fix(tmp_path: Path) -> None:
    prelude = BROKEN_SUM.replace("tensor[3] += 1", "import time; time.sleep(60)").replace("bfloat16", "float16")
    shorter = "import lockstep.checkup.doctor as d; d.SECONDS_OF_A_COLLECTIVE = 8.0"
    done = run(tmp_path, *with_fault(f"{prelude}\n{shorter}"), "--nproc", "2", CUDA_LAUNCH_BLOCKING="1")
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    assert "SLOW environment CUDA_LAUNCH_BLOCKING=1: every kernel waits for the one before fix: unset" in text
    assert "BROKEN collectives rank 1, all-reduce (sum) over dp: did not come back" in text, "not the one that waits"
    assert text.endswith("a training: see the fixes above")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layout", "dp=3", "--nproc", "2"], "layout dp=3 needs 3 processes but there are 2"),
        (["--nodes", "2"], "--nodes 2 without --node-rank"),
        (["--device", "tpu"], "--device tpu is not a device: use cpu or cuda"),
        (["--layout", "xp=2"], "unknown axis in layout 'xp=2'"),
    ],
)
def test_a_wrong_call_is_one_sentence(tmp_path: Path, options: list[str], says: str) -> None:
    from tests.cli.commands import in_this_process

    done = in_this_process(tmp_path, "doctor", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


# Several nodes ----------------------------------------------------------------------------------------------------


def examine(on: Sequence[Host], folder: Path, commands: dict[int, Sequence[str]] | None = None) -> list[Any]:
    """The doctor on every host, one rank each; the codes of all, and what the head says."""
    head = f"{on[0].address}:29444"
    processes = []
    for number, host in enumerate(on):
        options = ["--nodes", str(len(on)), "--node-rank", str(number), "--head", head, "--nproc", "1", "--json"]
        command = (commands or {}).get(number, [*LOCKSTEP, "doctor"])
        processes.append(host.popen([*command, *options], folder, clean_environment(), stderr=subprocess.PIPE))
    outputs = [process.communicate() for process in processes]
    codes = [process.returncode for process in processes]
    assert all(code in (0, 1) for code in codes), outputs
    return [codes, outputs[0][0], [out for out, _ in outputs]]


@pytest.mark.slow
def test_three_sound_nodes_are_fit_and_say_how_they_reach_each_other(tmp_path: Path) -> None:
    with hosts(3) as three:
        codes, said, _ = examine(three, tmp_path)
    assert (set(bad(said)) - BUSY, len(set(codes))) == (set(), 1), said
    ways = [one["evidence"] for one in json.loads(said)["findings"] if one["check"] == "network"]
    assert len(ways) == 3
    assert "host2 by eth0" in ways[0]
    assert [node["host"] for node in json.loads(said)["nodes"]] == ["host1", "host2", "host3"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_another_torch_and_another_disk_on_one_node_are_named(tmp_path: Path) -> None:
    other = with_fault("import torch; torch.__version__ = '2.12.0'")
    own_disk = ["sh", "-c", f'mount -t tmpfs none {tmp_path} && cd {tmp_path} && exec "$@"', "sh"]
    with hosts(2) as two:
        codes, said, _ = examine(two, tmp_path, {1: [*own_disk, *other]})
    found = bad(said)
    assert codes == [1, 1]
    assert found["versions"][0].endswith("2.12.0 on host2")
    assert found["run folder"] == [f"host2 does not see in {tmp_path} what host1 wrote there"]


@pytest.mark.slow
def test_a_peer_that_cannot_be_reached_is_named_and_no_rank_is_started(tmp_path: Path) -> None:
    with hosts(3) as three:
        three[1].ip("route", "add", "unreachable", three[2].address)
        codes, said, _ = examine(three, tmp_path)
    found = bad(said)
    assert codes == [1, 1, 1]
    assert any(text.startswith(f"host2 does not reach host3 at {three[2].address}") for text in found["network"])
    assert "not all nodes reach each other" in said


@pytest.mark.slow
def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    sooner = with_fault("import lockstep.checkup.doctor as d; d.SECONDS_TO_COME = 20.0")
    with hosts(3) as three:
        three[2].cut()
        lonely = with_fault("import lockstep.checkup.doctor as d; d.SECONDS_TO_MEET = 5.0")
        codes, said, others = examine(three, tmp_path, {0: sooner, 1: sooner, 2: lonely})
    assert codes == [1, 1, 1]
    assert bad(said)["network"] == ["node 2 has not said anything for 20 s"]
    assert f"host3 cannot reach the head {three[0].address}:29444" in bad(others[2])["network"][0]
