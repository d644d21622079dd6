"""W&B and MLflow themselves, without a network: what they have of a training whose rank 0 was killed on the way."""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.commands import SMALL_LM, events, ranks_of, start
from tests.patience import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.limit(300)]

STEPS, SAVE = 150, 25


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in two attempts: the first was killed after step 40 or some more, maybe while it validated."""
    folder = tmp_path_factory.mktemp("trackers")
    training = start(
        folder,
        *("train", "--steps", str(STEPS), "--nproc", "1", "--device", "cpu", *SMALL_LM),
        *("--set", f"save_every={SAVE} steps", "--set", "validate_every=50 steps"),
        *("--set", 'log_to=["wandb", "mlflow"]'),
    )
    run = folder / "runs" / "lm"
    try:
        wait_for(lambda: any(event["step"] >= SAVE + 15 for event in events(run, "step")), "some steps", 100)
        [rank] = ranks_of(run)
        rank.kill()
        output, _ = training.communicate()
    finally:
        training.terminate()
    assert training.returncode == 0, output
    assert len(events(run, "start")) == 2
    assert len(events(run, "step")) > STEPS  # some were done again
    return run


def losses(run: Path) -> dict[int, float]:
    """Of every step, as it was told first; both attempts have the same."""
    found: dict[int, float] = {}
    for event in events(run, "step"):
        found.setdefault(event["step"], event["loss"])
    return found


def records_in(file: Path) -> Iterator[bytes]:
    """What is in a file of W&B, whose package has no reader in Python: seven bytes of head, then LevelDB's log format.

    Blocks of 32 kB hold pieces of records, each after a checksum (4 bytes), its length (2) and its type (1): 1 is a
    whole record, 2 the first piece of one, 3 a further one, 4 the last.
    """
    data, at, pieces = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


def test_wandb_has_every_step_once_as_one_run(run: Path):
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")  # its types are made when it is imported

    rows: dict[int, dict[str, Any]] = {}
    ids: set[str] = set()
    config: dict[str, str] = {}
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    for file in files:
        for data in records_in(file):
            record = messages.Record.FromString(data)
            ids |= {record.run.run_id} - {""}
            config |= {item.key: item.value_json for item in record.config.update}
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if items:
                row = rows.setdefault(int(items["_step"]), {})
                assert not [name for name in items if name in row and not name.startswith("_")]
                row |= items
    assert len(ids) == 1
    assert sorted(rows) == list(range(1, STEPS + 1))
    assert {step: float(row["Loss/Train"]) for step, row in rows.items()} == losses(run)
    assert [step for step, row in sorted(rows.items()) if "Loss/Val" in row] == [50, 100, 150]
    assert config["start.layout"] == '"single"'


def test_mlflow_has_every_step_once_as_one_run(run: Path):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lockstep")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "lm")
    assert found.data.params["start.layout"] == "single"
    history = client.get_metric_history(found.info.run_id, "Loss/Train")
    assert [point.step for point in history] == list(range(1, STEPS + 1))
    told = losses(run)
    assert all(math.isclose(point.value, told[point.step]) for point in history)
    assert [point.step for point in client.get_metric_history(found.info.run_id, "Loss/Val")] == [50, 100, 150]


def is_tracker(process: psutil.Process) -> bool:
    return "lockstep.sinks.tracking" in (process.info["cmdline"] or [])


def test_nobody_is_left_behind(run: Path):
    alive = [process for process in psutil.process_iter(["cmdline"]) if is_tracker(process)]
    assert not [process for process in alive if Path(process.cwd()) == run.parent.parent]
    assert "Traceback" not in (run / "logs" / "wandb.log").read_text() + (run / "logs" / "mlflow.log").read_text()
