"""Several nodes without a scheduler: started by hand, cut off, slowed down, lost and joined, on hosts of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.disk.files import reading
from lockstep.checkpoint.disk.format import open_or_refuse, step_folder
from lockstep.checkpoint.disk.load import read_whole
from tests.cli.commands import LOCKSTEP, clean_environment, events
from tests.hosts import Host, hosts
from tests.patience import wait_for
from tests.small_training import small_training

STEPS = 40

pytestmark = pytest.mark.limit(300)

SCRIPT = small_training(STEPS, saves_every=5)


class Nodes:
    """Launchers on hosts of their own, of one run."""

    def __init__(self, folder: Path, on: Sequence[Host], nodes: str, pause: float) -> None:
        self.folder, self.hosts, self.nodes = folder, on, nodes
        self.pause = pause
        self.launchers: list[subprocess.Popen[str]] = []
        (folder / "train.py").write_text(SCRIPT)

    def start(self, nproc: int = 1) -> None:
        """Start the launcher of one more host."""
        number = len(self.launchers)
        head = f"{self.hosts[0].address}:29555"
        options = ["--nodes", self.nodes, "--node-rank", str(number), "--head", head, "--nproc", str(nproc)]
        command = [*LOCKSTEP, "run", *options, "train.py", str(self.pause)]
        with self.output_file(number).open("w") as output:
            self.launchers.append(self.hosts[number].popen(command, self.folder, clean_environment(), output))

    def output_file(self, number: int) -> Path:
        return self.folder / f"node{number}.txt"

    def output(self, number: int) -> str:
        return self.output_file(number).read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.folder / "runs" / "train", kind)

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: any(one["step"] >= step for one in self.events("step")), f"step {step}", 120)

    def end(self, numbers: Sequence[int]) -> list[int]:
        """The exit codes of some launchers."""
        return [self.launchers[number].wait() for number in numbers]

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights after the last step."""
        return weights_of(self.folder / "runs" / "train", STEPS)


def weights_of(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    whole = open_or_refuse(step_folder(run_folder, step))
    with reading(whole) as reader:
        return {name: read_whole(reader, stored) for name, stored in whole.index.tensors.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that one process, undisturbed, ends with."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "train.py", "0"], cwd=folder, env=clean_environment(), check=True)
    made = Nodes(folder, [], "1", 0)
    return made.weights()


def assert_same_numbers(found: dict[str, torch.Tensor], alone: dict[str, torch.Tensor]) -> None:
    for name, tensor in alone.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_unequal_nodes_find_each_other_and_give_the_numbers_of_one_process(tmp_path, alone) -> None:
    with hosts(2, names="loopback") as two:
        nodes = Nodes(tmp_path, two, "2", pause=0)
        nodes.start(nproc=2)
        nodes.start(nproc=1)
        assert nodes.end([0, 1]) == [0, 0], nodes.output(0) + nodes.output(1)
    start = nodes.events("start")[0]
    assert (start["nodes"], start["world_size"], start["layout"]) == (2, 3, "dp=3")
    assert_same_numbers(nodes.weights(), alone)


@pytest.mark.slow
def test_a_run_on_four_nodes_that_loses_one_goes_on_with_three(tmp_path, alone) -> None:
    with hosts(4) as four:
        nodes = Nodes(tmp_path, four, "3:4", pause=0.2)
        for _ in four:
            nodes.start()
        nodes.wait_for_step(12)
        four[3].vanish()
        assert nodes.end([0, 1, 2]) == [0, 0, 0], nodes.output(0)
    sizes = [start["world_size"] for start in nodes.events("start")]
    assert sizes == [4, 3]
    assert nodes.events("start")[1]["global_batch"] == 24
    assert "on host4 does not answer" in nodes.events("failure")[0]["text"]
    assert_same_numbers(nodes.weights(), alone)


@pytest.mark.slow
def test_a_node_that_joins_takes_part_and_no_step_is_lost(tmp_path, alone) -> None:
    with hosts(2) as two:
        nodes = Nodes(tmp_path, two, "1:2", pause=0.7)
        nodes.start()
        nodes.wait_for_step(3)
        nodes.start()
        assert nodes.end([0, 1]) == [0, 0], nodes.output(0)
    starts = nodes.events("start")
    assert [start["world_size"] for start in starts] == [1, 2]
    assert starts[1]["resumed_from_step"] == nodes.events("stop")[0]["step"]
    assert_same_numbers(nodes.weights(), alone)


@pytest.mark.slow
def test_a_node_that_is_cut_off_ends_and_the_head_goes_on_without_it(tmp_path, alone) -> None:
    with hosts(2) as two:
        nodes = Nodes(tmp_path, two, "1:2", pause=0.2)
        nodes.start()
        nodes.start()
        nodes.wait_for_step(12)
        two[1].cut()
        assert nodes.end([0, 1]) == [0, 1], nodes.output(0)
        wait_for(lambda: two[1].pids() == [], "the end of all processes of the node")
    assert "on host2 does not answer" in nodes.events("failure")[0]["text"]
    assert "has not reached the head" in nodes.output(1)
    assert [start["world_size"] for start in nodes.events("start")] == [2, 1]
    assert_same_numbers(nodes.weights(), alone)


@pytest.mark.slow
def test_a_slow_link_is_no_failure(tmp_path, alone) -> None:
    with hosts(2) as two:
        two[1].slow("1mbit")
        nodes = Nodes(tmp_path, two, "2", pause=0)
        nodes.start()
        nodes.start()
        assert nodes.end([0, 1]) == [0, 0], nodes.output(0)
    assert nodes.events("failure") == []
    assert_same_numbers(nodes.weights(), alone)


REFUSED = {
    "an unknown host": (["--nodes", "2", "--node-rank", "1", "--head", "no.such.host.invalid:29500"], "is unknown"),
    "no head": (["--nodes", "2", "--node-rank", "0"], "--nodes 2 without --head"),
    "no rank": (["--nodes", "2", "--head", "127.0.0.1:29500"], "--nodes 2 without --node-rank"),
    "a rank too high": (
        ["--nodes", "2", "--node-rank", "2", "--head", "127.0.0.1:29500"],
        "count the nodes from 0 to 1",
    ),
    "no port": (["--nodes", "2", "--node-rank", "0", "--head", "127.0.0.1"], "is not host:port"),
    "no number": (["--nodes", "3:2", "--node-rank", "0", "--head", "127.0.0.1:29500"], "is not a number of nodes"),
    "a head elsewhere": (["--nodes", "2", "--node-rank", "0", "--head", "192.0.2.1:29500"], "cannot listen on --head"),
    "a new run": (
        ["--nodes", "2", "--node-rank", "0", "--head", "127.0.0.1:29500", "--resume", "never"],
        "give a new --run-dir instead",
    ),
    "one node": (["--node-rank", "0", "--head", "127.0.0.1:29500"], "are for several nodes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nodes_that_cannot_meet_are_refused_before_anything_starts(name, tmp_path, monkeypatch, capsys) -> None:
    from lockstep.cli import main
    from lockstep.runtime.host import network

    monkeypatch.setattr(network, "SECONDS_FOR_NAMES", 0.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    options, sentence = REFUSED[name]
    monkeypatch.setattr(sys, "argv", ["lockstep", "run", *options, "train.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["train.py"]


def test_a_port_in_use_is_refused(tmp_path, monkeypatch, capsys) -> None:
    import socket

    from lockstep.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        head = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(
            sys, "argv", ["lockstep", "run", "--nodes", "2", "--node-rank", "0", "--head", head, "train.py"]
        )
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 2
    assert "choose another port" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["train.py"]
