"""A run tells what the planner expects of it, and at the end how far off that was."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import median

import pytest
import torch
from rich.console import Console as Terminal

import lockstep
from lockstep.config.schema import SetupConfig, TensorConfig
from lockstep.layout import Layout
from lockstep.observe import prediction as foretell
from lockstep.observe.prediction import Expected, Measured, error_of
from lockstep.planner.cost.estimate import Memory
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.memory import estimate_memory
from lockstep.planner.model.find_model import find_model
from lockstep.record.events import validate
from lockstep.runtime.rank_env import Place
from lockstep.sinks.console import Console
from tests.events import Event, read_events

CUTTING = SetupConfig(batch_norm="micro-batch")
ALONE = Place(0, 1, 0, 1, 0, 1, None, "python")
EXPECTED = Expected(
    lambda: find_model("lm"), CUTTING, Layout(), ALONE, torch.device("cpu"), "fp32", global_batch=16, micro_batch=4
)


@pytest.fixture(autouse=True)
def _no_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_a_run_predicts_before_its_first_step_and_says_at_the_end_how_far_off_it_was() -> None:
    settings = {"context": 16, "width": 16, "layers": 1, "heads": 2, "validation_samples": 4}
    config = {"recipe": "lm", "layout": "single", "device": "cpu", "steps": 6, "model": settings}
    lockstep.Trainer({**config, "schedule": {"name": "constant", "warmup_steps": 0}}).fit()
    events = list(read_events(Path("runs/lm/events.jsonl")))
    kinds = [event["kind"] for event in events]
    assert kinds.index("start") < kinds.index("prediction") < kinds.index("step")
    assert kinds.index("prediction_error") == kinds.index("end") - 1
    prediction = next(event for event in events if event["kind"] == "prediction")
    assert prediction["reason"] == ""
    assert prediction["machine"] == "laptop-cpu"
    # Weights and two moments in fp32 at least, of 256 + 16 rows of 16, a block of 12 x 16 x 16 + 13 x 16, and a norm.
    parameters = (256 + 16) * 16 + 12 * 16 * 16 + 13 * 16 + 2 * 16
    assert parameters * 12 < prediction["memory_bytes"] < 10e6
    error = next(event for event in events if event["kind"] == "prediction_error")
    counted = median(event["seconds"] for event in events if event["kind"] == "step" and event["step"] > 2)
    assert error["step_seconds"]["measured"] == counted
    assert error["step_seconds"]["predicted"] == prediction["step_seconds"]
    assert error["step_seconds"]["error"] == pytest.approx(prediction["step_seconds"] / counted - 1)
    assert error["memory_bytes"] == {"predicted": prediction["memory_bytes"], "measured": None, "error": None}


def test_a_model_that_is_not_known_has_a_reason_and_no_numbers() -> None:
    fields = foretell.foretell(replace(EXPECTED, model=None))
    assert (fields["memory_bytes"], fields["step_seconds"]) == (None, None)
    assert "lockstep plan" in fields["reason"]
    validate({"time": 0.0, "kind": "prediction", "attempt": 1, **fields})


def test_whatever_goes_wrong_in_the_planner_is_a_reason_and_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("no work")

    monkeypatch.setattr(foretell, "estimate_time", broken)
    assert foretell.foretell(EXPECTED)["reason"] == "ZeroDivisionError: no work"


def test_ranks_of_one_node_share_its_cpu() -> None:
    two = replace(EXPECTED.place, world_size=2, local_world_size=2, head="localhost:1")
    alone, shared = (foretell.machine_of(replace(EXPECTED, place=place)) for place in (ALONE, two))
    assert shared.gpu.tflops["fp32"] == alone.gpu.tflops["fp32"] / 2
    assert (shared.gpus_per_node, shared.nodes) == (2, 1)


def test_attention_that_writes_its_scores_down_is_foretold_to_take_more_memory() -> None:
    scores, usual = (foretell.foretell(replace(EXPECTED, attention=kernels)) for kernels in ("math", "flash"))
    assert scores["memory_bytes"] > usual["memory_bytes"]


def test_tokens_are_foretold_to_be_cut_only_where_the_engine_cuts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def estimate(job: Job) -> tuple[Memory, ...]:
        jobs.append(job)
        return estimate_memory(job)

    monkeypatch.setattr(foretell, "estimate_memory", estimate)
    cutting = CUTTING.model_copy(update={"tensor": TensorConfig(sequence="on")})
    for layout in (Layout(tp=2), Layout(pp=2, tp=2)):
        foretell.foretell(replace(EXPECTED, layout=layout, cutting=cutting))
    assert [job.sequence_parallel for job in jobs] == [True, False]


def test_the_first_two_steps_do_not_count() -> None:
    measured = Measured(memory=2_000_000_000)
    for seconds in (9.0, 5.0, 0.1, 0.2, 0.3):
        measured.step(seconds)
    told = error_of({"machine": "H200", "memory_bytes": 1_900_000_000, "step_seconds": 0.15}, measured)
    assert told["step_seconds"]["measured"] == 0.2
    assert told["step_seconds"]["error"] == pytest.approx(-0.25)
    assert told["memory_bytes"]["error"] == pytest.approx(-0.05)


@pytest.mark.parametrize(
    ("machine", "memory", "told"),
    [
        ("H200", 2_000_000_000, "; the fullest rank held tensors of 2 GB, 5 % more than the predicted 1.9 GB"),
        ("here", None, ""),
        ("laptop-cpu", None, " (as if this were some laptop: lockstep bench measures it)"),
    ],
)
def test_the_console_says_it_in_a_line(machine: str, memory: int | None, told: str) -> None:
    measured = Measured(memory=memory)
    for seconds in (9.0, 5.0, 0.2):
        measured.step(seconds)
    fields = error_of({"machine": machine, "memory_bytes": 1_900_000_000, "step_seconds": 0.15}, measured)
    event: Event = {"time": 0.0, "kind": "prediction_error", "attempt": 1, "step": 5, **fields}
    validate(event)
    shown = StringIO()
    Console(Terminal(file=shown, width=200)).handle(event)
    assert shown.getvalue().strip() == f"a step took 200 ms, 33 % more than the predicted 150 ms{told}"
