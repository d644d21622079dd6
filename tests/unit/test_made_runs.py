"""The runs that tests make up are ones that Lockstep could have written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from lockstep.record.events import validate
from tests.events import read_events
from tests.runs import Made, run_events, write_run

RUNS = {
    "plain": Made(),
    "one step": Made(steps=1, ranks=1, validate_every=None, save_every=None),
    "restarts": Made(fails_after=(60, 130), gpus=4, hosts=2, ranks=8, metrics=True, samples=True),
    "unknown": Made(per_sample=None, peak=None, predicted_step=None, joules=False, ending="killed"),
    "not finite": Made(not_finite=range(1, 201), ending="stop"),
    "failed": Made(steps=0, ending="failed"),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_event_is_one_of_the_schema_and_time_goes_on(name: str) -> None:
    events = list(run_events(RUNS[name]))
    for event in events:
        validate(event)
    assert all(before["time"] <= after["time"] for before, after in itertools.pairwise(events))


def test_a_written_run_reads_back(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Made(not_finite=[3]))
    events = list(read_events(folder / "events.jsonl"))
    assert json.dumps(events) == json.dumps(list(run_events(Made(not_finite=[3]))))
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(1, 201))


def test_the_next_attempt_goes_on_from_the_last_checkpoint() -> None:
    events = list(run_events(Made(fails_after=(60, 130))))
    assert [event["resumed_from_step"] for event in events if event["kind"] == "start"] == [None, 50, 100]
