"""Planted problems in event logs: what is read from them ends as the right sentence in "what to change"."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.page.advice.choose import advise
from lockstep.page.panels import Advice
from lockstep.page.reading.reader import RunReader
from tests.runs import BEGIN, Made, run_events, write_run


def advice_on(folder: Path, made: Made) -> list[Advice]:
    reader = RunReader(write_run(folder, made))
    assert reader.read()
    return advise(reader.summary(BEGIN + 1e6))


USUAL = Made(steps=1000)
"""Steps of 0.1 s on CPUs, with 10 ms of exposed communication and 5 ms each of input and of the script's own code."""


@pytest.mark.parametrize(
    ("made", "text", "evidence"),
    [
        pytest.param(
            Made(steps=1000, gpus=4, ranks=3, peak=1e11, per_sample=1e8),
            "GPU 3 of node1 (NVIDIA H200) is used by nobody: start a rank on it (--nproc 4), or ask for fewer GPUs.",
            "1 of the 4 GPUs has no rank: 25 % of what the node of this run costs.",
            id="a GPU nobody uses",
        ),
        pytest.param(
            Made(steps=1000, slow_input={2: 0.1}),
            "Rank 2 (node1) waits for its data, and all others wait for it: give it more data.workers (it has none)",
            "Its data take 105 ms of a mean step of 200 ms, those of the others 5 ms: "
            "the difference is 50 % of the time in steps.",
            id="slow input on rank 2",
        ),
        pytest.param(
            Made(steps=1000, hosts=2, slow_compute={1: 0.1}),
            "Rank 1 (node1) computes longer than the others, which wait for it: look at its device (lockstep doctor)",
            "It computes 185 ms of a mean step of 200 ms, the others 85 ms: "
            "the difference is 50 % of the time in steps.",
            id="slow compute on rank 1",
        ),
        pytest.param(
            Made(steps=1000, save_every=10, stall=0.5),
            'The training stands still while it saves: save in the background (run.save() without wait=True), or less '
            'often, as with save_every = "500 steps".',
            "100 checkpoints stalled it for 500 ms each, 50 s in all: ",
            id="checkpoint stalls",
        ),
        pytest.param(
            Made(steps=120, fails_after=(120, 120), save_every=50, ending="failed"),
            "Attempts 1 to 3 failed alike and none got further than the first of them",
            "3 attempts of 3: none got beyond step 120, and all after the first, ",
            id="restart loop",
        ),
        pytest.param(
            Made(steps=1000, cores=4, threads=4),
            "The CPUs of node1 are oversubscribed, and its threads wait for a core: start with OMP_NUM_THREADS=1.",
            "4 ranks with 4 threads each want 16 cores; node1 has 4, 100 % busy.",
            id="oversubscribed CPUs",
        ),
        pytest.param(
            Made(steps=1000, input=0.1),
            "The training waits for its data: use more data.workers (it has none), or a faster disk.",
            "Every rank waited 100 ms of a mean step of 195 ms, 51 %.",
            id="all wait for data",
        ),
        pytest.param(
            Made(steps=1000, communication=0.1, layout="fsdp=4", hosts=2),
            "The ranks wait for each other: fsdp gathers weights between nodes in every block, so shard inside "
            "the nodes alone, as in dp=2,fsdp=2;",
            "Rank 0, which waits least (all ranks on average: 100 ms), waited 100 ms of a mean step of 190 ms, 53 %.",
            id="exposed communication",
        ),
        pytest.param(
            Made(steps=1000, between=0.1),
            "The script's own code between two steps takes long",
            "Between two steps went 100 ms of a mean step of 195 ms, 51 %.",
            id="between steps",
        ),
        pytest.param(
            Made(steps=1000, padding=1024),
            "Much of what is computed only fills rows up",
            "1.02 M of 2.05 M tokens are padding, 50 %.",
            id="padding",
        ),
        pytest.param(
            Made(steps=1000, fails_after=(490, 980), save_every=500, stall=0.1),
            "Work is repeated after failures: save more often, as with save_every = ",
            "were steps done again, or to be done again, after 2 failures, with 2 checkpoints. A save stalls for",
            id="repeated work",
        ),
        pytest.param(
            Made(steps=1000, not_finite=range(100, 200)),
            "Many steps are skipped because their numbers are not finite",
            "100 of 1000 steps (10 %) left the weights as they were, with 100 alarms.",
            id="skipped steps",
        ),
    ],
)  # fmt: skip
def test_a_planted_problem_is_told_first(made: Made, text: str, evidence: str, tmp_path: Path) -> None:
    told = advice_on(tmp_path, made)
    assert told[0].text.startswith(text)
    assert evidence in told[0].evidence


def test_a_failure_that_cost_nothing_is_not_blamed_for_skipped_steps(tmp_path: Path) -> None:
    """10 s of skipped steps, and a failure exactly at a checkpoint."""
    told = advice_on(tmp_path, Made(steps=1000, not_finite=range(100, 200), fails_after=(500,), save_every=500))
    assert [advice.text.split(":")[0] for advice in told] == [
        "Many steps are skipped because their numbers are not finite"
    ]
    assert len(told) <= 3


def test_without_a_problem_nothing_is_told(tmp_path: Path) -> None:
    assert advice_on(tmp_path, USUAL) == []


def test_a_run_is_advised_while_it_goes_on(tmp_path: Path) -> None:
    """Long before the 60th step it was found twice that rank 2 is slow."""
    lines = []
    for event in run_events(Made(steps=1000, slow_input={2: 0.1})):
        lines.append(json.dumps(event) + "\n")
        if event["kind"] == "step" and event["step"] == 60:
            break
    (tmp_path / "events.jsonl").write_text("".join(lines))
    reader = RunReader(tmp_path)
    reader.read()
    summary = reader.summary(event["time"] + 1)
    assert summary.state == "running"
    assert advise(summary)[0].text.startswith("Rank 2 (node1) waits for its data")
