"""What a run on a GPU tells of its machine, and of the parts of its steps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import lockstep
from tests.events import read_events
from tests.parity.problems import RaggedTexts, TinyGPT, adamw, text_loss

pytestmark = pytest.mark.gpu

NAP = 0.05


def test_the_gpu_of_a_rank_is_found_and_naps_around_steps_are_seen(tmp_path: Path) -> None:
    with lockstep.init("single", run_dir=tmp_path / "run", device="cuda", rank=0, world_size=1) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw, clip=1.0)
        for batch in run.loader(RaggedTexts(), 8, micro_batch=4, steps=40, epochs=None, workers=0):
            time.sleep(NAP / 2)
            engine.step(batch)
            time.sleep(NAP / 2)
    events = list(read_events(run.folder.events))
    machine = [event for event in events if event["kind"] == "machine"][-1]
    (host,) = machine["hosts"]
    (mine,) = [gpu for gpu in host["gpus"] if gpu["ranks"] == [0]]
    assert mine["name"] == torch.cuda.get_device_name()
    assert 0 < mine["memory"] <= mine["memory_total"]
    assert 0 <= mine["busy"] <= 1
    assert mine["watts"] > 0
    assert host["joules"] > 0
    parts = [event for event in events if event["kind"] == "ranks"][-1]
    # Nothing else keeps this GPU busy: nearly all of the naps it has run dry.
    assert 0.8 * NAP < parts["between"][0] < 1.2 * NAP + 0.01
    assert 0 < parts["optimizer"][0] < parts["compute"][0]
