"""W&B and MLflow: what they are told of a run, with a service that only writes down what it is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.record.log import EventLog
from lockstep.sinks import tracking
from lockstep.sinks.scalars import Numbers
from lockstep.sinks.trackers import Tracker, check_installed
from lockstep.sinks.tracking import Ending, Sent, follow
from tests.events import read_events
from tests.runs import Made, run_events, write_run


class Notebook:
    """What a service was told."""

    def __init__(self, sent: Sent) -> None:
        sent.run = sent.run or "run-1"
        self.run = sent.run
        self.config: dict[str, Any] = {}
        self.points: list[tuple[str, int, float]] = []
        self.ending: Ending | None = None

    def describe(self, config: Mapping[str, Any]) -> None:
        self.config |= config

    def log(self, numbers: Mapping[str, float], step: int, time: float) -> None:
        assert time > 0
        self.points += [(name, step, value) for name, value in numbers.items()]

    def flush(self) -> None:
        pass

    def finish(self, how: Ending) -> None:
        self.ending = how

    def steps(self, name: str) -> list[int]:
        return [step for one, step, _ in self.points if one == name]


def told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """What one process tells of the run as it is now."""
    notebooks: list[Notebook] = []

    def connect(_name: str, _folder: Path, sent: Sent) -> Notebook:
        notebooks.append(Notebook(sent))
        return notebooks[0]

    monkeypatch.setattr(tracking, "_connect", connect)
    (folder / "wandb").mkdir(exist_ok=True)
    follow("wandb", folder, lambda: True)
    return notebooks[0]


def test_a_run_is_told_once_with_its_config_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path, Made(steps=100, metrics=True))
    notebook = told(tmp_path, monkeypatch)
    assert notebook.steps("Loss/Train") == list(range(1, 101))
    assert notebook.steps("temperature") == list(range(1, 101))
    assert notebook.steps("Loss/Val") == notebook.steps("Accuracy/Val") == [50, 100]
    assert notebook.config["recipe"] == "lm"
    assert notebook.config["start.layout"] == "dp=4"
    assert notebook.ending == "finished"
    assert told(tmp_path, monkeypatch).points == []


def test_a_run_that_goes_on_is_told_from_where_it_was_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first attempt dies after step 75; the second goes on from the checkpoint of step 50."""
    write_run(tmp_path, Made(steps=200, fails_after=[75], validate_every=25))
    lines = (tmp_path / "events.jsonl").read_text().splitlines(keepends=True)
    first = [line for line in lines if json.loads(line)["attempt"] == 1]
    (tmp_path / "events.jsonl").write_text("".join(first))
    before = told(tmp_path, monkeypatch)
    assert before.ending == "failed"
    assert before.steps("Loss/Train") == list(range(1, 76))
    (tmp_path / "events.jsonl").write_text("".join(lines))
    after = told(tmp_path, monkeypatch)
    assert after.run == before.run
    assert after.steps("Loss/Train") == list(range(76, 201))
    assert after.steps("Loss/Val") == [100, 125, 150, 175, 200]  # that of step 75 was told
    assert after.ending == "finished"


@pytest.mark.parametrize("in_one_go", [True, False])
def test_a_validation_that_a_crash_kept_from_being_told_is_told_when_it_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_one_go: bool
):
    """The first attempt dies after step 75, while it validates; the second does it again from step 50."""
    write_run(tmp_path, Made(steps=200, fails_after=[75], validate_every=25))
    log = tmp_path / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    lost = [event for event in events if (event["attempt"], event["kind"], event.get("step")) == (1, "validation", 75)]
    assert len(lost) == 1
    events.remove(lost[0])
    first = [event for event in events if event["attempt"] == 1]
    points = []
    for part in [events] if in_one_go else [first, events]:
        log.write_text("".join(json.dumps(event) + "\n" for event in part))
        points += told(tmp_path, monkeypatch).points
    for name, steps in {"Loss/Train": range(1, 201), "Loss/Val": range(25, 201, 25)}.items():
        assert [step for one, step, _ in points if one == name] == list(steps)


def test_steps_that_are_done_again_within_an_attempt_are_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A rollback goes back from step 10 to step 6."""
    events = run_events(Made(steps=10, ending="killed", metrics=True))
    again = [event for event in run_events(Made(steps=12, metrics=True)) if event.get("step", 0) > 6]
    text = "".join(json.dumps(event) + "\n" for event in [*events, *again])
    (tmp_path / "events.jsonl").write_text(text)
    notebook = told(tmp_path, monkeypatch)
    assert notebook.steps("Loss/Train") == notebook.steps("temperature") == list(range(1, 13))


def test_switched_on_late_the_whole_run_is_told_and_no_step_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path, Made(steps=200, fails_after=[75]))
    assert told(tmp_path, monkeypatch).steps("Loss/Train") == list(range(1, 201))


def test_a_damaged_line_and_an_unknown_event_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(
        tmp_path, Made(steps=10), more=["not an event\n", '{"time": 1, "kind": "weather", "attempt": 1}\n', '{"ti']
    )
    assert told(tmp_path, monkeypatch).steps("Loss/Train") == list(range(1, 11))


def test_an_event_that_lacks_a_number_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spoilt = [dict(event) for event in run_events(Made(steps=10))]
    del next(event for event in spoilt if event["kind"] == "step" and event["step"] == 4)["lr"]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in spoilt))
    notebook = told(tmp_path, monkeypatch)
    assert notebook.steps("Loss/Train") == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert notebook.ending == "finished"


@pytest.mark.parametrize(("ending", "how"), [("end", "finished"), ("failed", "failed"), ("stop", "stopped")])
def test_how_a_run_ended_is_told_also_where_that_takes_two_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, how: Ending
):
    def fail(_notebook: Notebook, _how: Ending) -> None:
        raise ConnectionError("the network is down")

    write_run(tmp_path, Made(steps=10, ending=ending))
    with monkeypatch.context() as patch:
        patch.setattr(Notebook, "finish", fail)
        with pytest.raises(ConnectionError):
            told(tmp_path, patch)
    again = told(tmp_path, monkeypatch)
    assert (again.points, again.ending) == ([], how)


def test_a_run_that_goes_on_after_it_ended_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path, Made(steps=10))
    assert told(tmp_path, monkeypatch).ending == "finished"
    again = [{**event, "attempt": 2} for event in run_events(Made(steps=10, ending="killed"))]
    events = [*run_events(Made(steps=10)), *again]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert told(tmp_path, monkeypatch).ending == "stopped"


def test_a_later_try_still_knows_what_mfu_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a sample costs is told once, before the first step; ranks tell their times at step 5, then every second."""
    write_run(tmp_path, Made(steps=30, per_sample=1e9, peak=1e12, tell_every=1.0))
    lines = (tmp_path / "events.jsonl").read_text().splitlines(keepends=True)
    cut = next(number for number, line in enumerate(lines) if json.loads(line).get("step") == 10)
    (tmp_path / "events.jsonl").write_text("".join(lines[:cut]))
    assert told(tmp_path, monkeypatch).steps("MFU") == [5]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    after = told(tmp_path, monkeypatch)
    assert after.steps("MFU") == after.steps("Time/Compute")
    assert after.steps("MFU")[-1] == 30


def test_a_package_that_is_not_there_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "wandb").mkdir()  # what W&B leaves behind is no package
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(UserError, match=rf"{name}, which is not installed: pip install lockstep-train\[{name}\]"):
            check_installed([name])
    check_installed([])


def test_a_tracker_that_cannot_work_is_said_once_and_the_run_goes_on(tmp_path: Path):
    """There is no service of this name: its process ends at once."""
    said: list[str] = []
    tracker: Any = Tracker("nobody", tmp_path, said.append)
    log = EventLog(tmp_path / "events.jsonl", 1, [tracker])
    log.emit("status", text="building the model")
    assert not tracker.log.exists()  # it begins with the run
    [start] = [event for event in run_events(Made(steps=1)) if event["kind"] == "start"]
    log.emit(**{name: value for name, value in start.items() if name not in ("time", "attempt")})
    assert tracker.log.exists()
    tracker._process.wait()
    for text in ("one", "two"):
        log.emit("status", text=text)
    log.close()
    assert said == [f"nothing more is sent to nobody (see {tmp_path / 'logs' / 'nobody.log'})"]
    assert [event["kind"] for event in read_events(tmp_path / "events.jsonl")] == [
        "status",
        "start",
        "status",
        "status",
    ]


def test_mfu_is_the_models_work_over_what_the_devices_can_do():
    """32 samples of 1e9 operations in a step of 0.1 s, on four devices of 1e12 a second: 8 %."""
    numbers = Numbers()
    named = [numbers.of(event) for event in run_events(Made(steps=5, per_sample=1e9, peak=1e12))]
    assert [round(one["MFU"], 4) for one in named if "MFU" in one] == [0.08]
    too_much = Numbers()
    assert not any("MFU" in too_much.of(event) for event in run_events(Made(steps=5, per_sample=1e12, peak=1e12)))


def test_the_shares_of_a_steps_time_are_those_of_all_ranks():
    """Of 0.14 s rank 1 computes 0.11 and the others 0.07; nobody else waits for input."""
    events = run_events(Made(steps=5, slow_compute={1: 0.04}))
    [named] = [Numbers().of(event) for event in events if event["kind"] == "ranks"]
    assert named["Time/Compute"] == pytest.approx((3 * 0.07 + 0.11) / 4 / 0.14)
    assert named["Time/Optimizer"] == pytest.approx(0.01 / 0.14)
    assert named["Time/Communication"] == pytest.approx((3 * 0.05 + 0.01) / 4 / 0.14)
    assert sum(value for name, value in named.items() if name.startswith("Time/")) == pytest.approx(1.0)


def test_every_gpu_has_its_curves_unless_there_are_many():
    [few] = [Numbers().of(event) for event in run_events(Made(steps=5, gpus=5)) if event["kind"] == "machine"]
    assert few["GPU/node1/0/Busy"] == 0.9
    assert few["GPU/node1/4/Busy"] == 0.0  # nobody uses it
    assert few["GPU/Busy"] == few["GPU/LeastBusy"] == 0.9
    assert few["CPU/node1/Busy"] == 0.25
    many = Made(steps=5, ranks=64, hosts=32, gpus=2)
    [all_together] = [Numbers().of(event) for event in run_events(many) if event["kind"] == "machine"]
    assert set(all_together) == {"GPU/Busy", "GPU/LeastBusy"}
