"""The TensorBoard sink: TensorBoard itself reads back what was written."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from lockstep.record.log import EventLog
from lockstep.sinks.tensorboard import TensorBoard
from tests.events import read_events
from tests.runs import Made, run_events

START: dict[str, Any] = {
    "run": "lm",
    "layout": "single",
    "world_size": 1,
    "nodes": 1,
    "device": "cpu",
    "precision": "fp32",
    "formats": {"weights": "fp32"},
    "total_steps": 8,
    "steps_per_epoch": 4,
    "global_batch": 32,
    "micro_batch": 8,
    "item": "tokens",
    "versions": {"lockstep": "0.1.0", "torch": "2.11.0", "python": "3.11.7"},
    "parameters": 812345,
    "host": "node1",
}


def open_log(run: Path, attempt: int, said: list[str]) -> EventLog:
    return EventLog(run / "events.jsonl", attempt, [TensorBoard(run / "tb", said.append)])


def emit_step(log: EventLog, step: int, loss: float, seconds: float = 0.5) -> None:
    log.emit(
        "step",
        step=step,
        epoch=step / 4,
        loss=loss,
        grad_norm=1.5,
        lr=0.25,
        weight=2048.0,
        items=2048,
        padding=0,
        seconds=seconds,
        skipped=False,
        loss_scale=1.0,
    )


def emit_validation(log: EventLog, step: int, loss: float) -> None:
    metrics = {"accuracy": {"sum": 3, "count": 4, "value": 0.75}}
    log.emit("validation", step=step, epoch=step / 4, loss=loss, metrics=metrics, samples=4, seconds=0.1, best=True)


def read_back(run: Path) -> Any:
    accumulator = EventAccumulator(str(run / "tb"), purge_orphaned_data=True)
    accumulator.Reload()
    return accumulator


def points(accumulator: Any, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in accumulator.Scalars(tag)]


def test_tensorboard_reads_every_tag_with_its_steps_and_values(tmp_path: Path):
    said: list[str] = []
    log = open_log(tmp_path, 1, said)
    log.emit("start", **START, resumed_from_step=None)
    log.emit("status", text="building the model")
    for step in (1, 2):
        emit_step(log, step, loss=4.0 / step)
    log.emit("metric", step=2, values={"temperature": 0.5})
    emit_validation(log, 2, loss=2.5)
    perplexity = {"perplexity": {"sum": 9.0, "count": 4, "value": 9.5}}
    log.emit("test", step=1, loss=2.25, metrics=perplexity, samples=4, seconds=0.1)
    log.emit("sample", step=2, prompt="To be", text=" or\nnot *to* be")
    log.close()

    accumulator = read_back(tmp_path)
    assert set(accumulator.Tags()["scalars"]) == {
        "Loss/Train",
        "Loss/Val",
        "Accuracy/Val",
        "Loss/Test",
        "Perplexity/Test",
        "LearningRate",
        "GradNorm",
        "Throughput",
        "temperature",
    }
    assert points(accumulator, "Loss/Train") == [(1, 4.0), (2, 2.0)]
    assert points(accumulator, "LearningRate") == [(1, 0.25), (2, 0.25)]
    assert points(accumulator, "GradNorm") == [(1, 1.5), (2, 1.5)]
    assert points(accumulator, "Throughput") == [(1, 4096.0), (2, 4096.0)]
    assert points(accumulator, "Loss/Val") == [(2, 2.5)]
    assert points(accumulator, "Accuracy/Val") == [(2, 0.75)]
    assert points(accumulator, "Loss/Test") == [(1, 2.25)]
    assert points(accumulator, "Perplexity/Test") == [(1, 9.5)]
    assert points(accumulator, "temperature") == [(2, 0.5)]
    [sample] = accumulator.Tensors("Sample")
    assert sample.step == 2
    assert list(sample.tensor_proto.string_val) == [b"    To be or\n    not *to* be"]
    assert "Sample" in accumulator.PluginTagToContent("text")
    times = [event["time"] for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "step"]
    assert [point.wall_time for point in accumulator.Scalars("Loss/Train")] == times
    assert said == []


def test_tensorboard_has_the_times_the_machine_and_the_config(tmp_path: Path):
    sink = TensorBoard(tmp_path / "tb", lambda text: pytest.fail(text))
    for event in run_events(Made(steps=5, ranks=2, gpus=1)):
        sink.handle(event)
    sink.close()
    accumulator = read_back(tmp_path)
    assert points(accumulator, "Time/Input")[0] == pytest.approx((5, 0.05))
    assert points(accumulator, "MFU")[0] == pytest.approx((5, 0.16))
    assert points(accumulator, "GPU/node1/0/Memory")[0] == pytest.approx((5, 6e10))
    [config] = accumulator.Tensors("Config")
    assert list(config.tensor_proto.string_val) == [b'    recipe = "lm"\n    steps = 5\n']


def test_tensorboard_sees_a_step_at_once(tmp_path: Path):
    log = open_log(tmp_path, 1, [])
    emit_step(log, 1, loss=4.0)
    assert points(read_back(tmp_path), "Loss/Train") == [(1, 4.0)]
    log.close()


def test_steps_done_again_after_a_resume_are_not_doubled(tmp_path: Path):
    """The first attempt dies after step 5, in the middle of a record; the second resumes from step 3."""
    first = open_log(tmp_path, 1, [])
    first.emit("start", **START, resumed_from_step=None)
    for step in range(1, 6):
        emit_step(first, step, loss=10.0 + step)
    emit_validation(first, 5, loss=9.0)
    [file] = (tmp_path / "tb").iterdir()
    with file.open("ab") as torn:
        torn.write(b"\x18\0\0")

    second = open_log(tmp_path, 2, [])
    second.emit("start", **START, resumed_from_step=3)
    for step in range(4, 9):
        emit_step(second, step, loss=20.0 + step)
    emit_validation(second, 8, loss=8.0)
    second.close()

    accumulator = read_back(tmp_path)
    assert points(accumulator, "Loss/Train") == [
        (1, 11.0),
        (2, 12.0),
        (3, 13.0),
        (4, 24.0),
        (5, 25.0),
        (6, 26.0),
        (7, 27.0),
        (8, 28.0),
    ]
    assert points(accumulator, "Loss/Val") == [(8, 8.0)]


def test_an_attempt_from_scratch_forgets_the_one_before(tmp_path: Path):
    for attempt in (1, 2):
        log = open_log(tmp_path, attempt, [])
        log.emit("start", **START, resumed_from_step=None)
        emit_step(log, 1, loss=float(attempt))
        log.close()
    assert points(read_back(tmp_path), "Loss/Train") == [(1, 2.0)]


def test_numbers_that_are_not_finite_are_written(tmp_path: Path):
    log = open_log(tmp_path, 1, [])
    emit_step(log, 1, loss=math.nan, seconds=0.0)
    log.close()
    accumulator = read_back(tmp_path)
    assert math.isnan(accumulator.Scalars("Loss/Train")[0].value)
    assert "Throughput" not in accumulator.Tags()["scalars"]


def test_a_missing_tensorboard_is_said_once_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "site-packages" not in place])
    said: list[str] = []
    log = open_log(tmp_path, 1, said)
    emit_step(log, 1, loss=4.0)
    emit_step(log, 2, loss=3.0)
    log.close()
    assert said == [
        "nothing is written for TensorBoard, which is not installed: pip install lockstep-train[tensorboard]"
    ]
    assert not (tmp_path / "tb").exists()


def test_what_it_says_may_be_an_event_of_the_same_log(tmp_path: Path):
    (tmp_path / "tb").write_text("a file where the folder should be")
    log = EventLog(
        tmp_path / "events.jsonl",
        1,
        [TensorBoard(tmp_path / "tb", lambda text: log.emit("message", text=text, level="warning"))],
    )
    emit_step(log, 1, loss=4.0)
    emit_step(log, 2, loss=3.0)
    log.close()
    step, message, next_step = read_events(tmp_path / "events.jsonl")
    assert (step["step"], next_step["step"]) == (1, 2)
    assert message["text"].startswith("nothing more is written for TensorBoard (FileExistsError")


def test_writing_needs_neither_torch_nor_tensorflow(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from lockstep.sinks.tensorboard import TensorBoard\n"
        "assert 'tensorboard' not in sys.modules\n"
        "sink = TensorBoard(Path(sys.argv[1]), sys.exit)\n"
        "sink.handle({'kind': 'metric', 'time': 0.0, 'attempt': 1, 'step': 1, 'values': {'a': 1.0}})\n"
        "sink.close(); sys.exit(not {'torch', 'tensorflow'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0
