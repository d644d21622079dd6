"""`lockstep compare`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import compare as command
from lockstep.config.schema import Config
from lockstep.errors import UserError
from lockstep.launch.supervise import Outcome
from lockstep.record.log import EventLog
from tests.cli.commands import in_this_process, lockstep
from tests.unit.test_events import EXAMPLES


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--layouts", "single; dp=2; dp=2"], "--layouts names dp=2 twice"),
        (["--layouts", "single; dp=2,fsdp=1; dp=2"], "--layouts names dp=2 twice"),
        (["--layouts", "single; pd=2"], "unknown axis in layout 'pd=2'"),
        (["--layouts", "single; singel"], "unknown layout 'singel': did you mean 'single'?"),
        (["--layouts", "single, dp=2"], "with ; between them"),
        (["--layouts", "single; dp=auto"], "leaves the number of processes open"),
        (["--layouts", "single; pp=2,cp=2"], "has both cp and pp"),
        (["--layouts", "single; dp=8"], "some ranks would have nothing to do: --set micro_batch=2"),
        (
            ["--layouts", "single; naive-mp"],
            "naive-mp is no layout, but a baseline that nobody should train with: benchmarks/baselines.py",
        ),
        (["--layouts", "single; data-parallel"], "data-parallel is no layout, but a baseline"),
        (["--layouts", "single; dp=2", "--device", "cuda"], "no GPU is visible"),
        (["--layouts", "single; dp=2", "--chart", "no/such/folder.svg"], "make no/such first"),
        (["--layouts", "single; dp=2", "--chart", "speed.png"], "call it speed.svg"),
        (["--layouts", "single; dp=2", "--page", "speed.htm"], "call it speed.html"),
        (["--layouts", "single; pp=8"], "layout pp=8 (16 samples in micro-batches of 4): schedule 1f1b on 8 ranks"),
        (["--layouts", "single; dp=2", "--steps", "2"], "--steps"),
        (["nonsense", "--layouts", "single; dp=2"], "unknown recipe 'nonsense'"),
        (["--layouts", "single; dp=2", "--set", "layers=2"], "did you mean 'model.layers'?"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "launch_in", lambda *_: pytest.fail("something was started"))
    done = in_this_process(tmp_path, "compare", *args, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


class Launches:
    """Stands in for real runs: each leaves an event log with a loss, or fails as it is told."""

    def __init__(self, outcomes: dict[str, list[float | Outcome]]) -> None:
        self.outcomes = {name: iter(told) for name, told in outcomes.items()}
        self.started: list[tuple[str, int | None]] = []

    def __call__(self, folder: Path, config: Config, *_: object) -> Outcome:
        self.started.append((config.layout, config.global_batch))
        told = next(self.outcomes[config.layout])
        if isinstance(told, Outcome):
            return told
        log = EventLog(folder / "events.jsonl", 1)
        for kind in ("start", *["step"] * 8, "ranks"):
            fields = {key: value for key, value in EXAMPLES[kind].items() if key not in ("kind", "time", "attempt")}
            log.emit(kind, **{**fields, **({"loss": told} if kind == "step" else {})})
        log.close()
        return Outcome(0)


def compare(
    folder: Path, monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, list[Any]], *args: str
) -> tuple[int, dict[str, Any], list[tuple[str, int | None]]]:
    launches = Launches(outcomes)
    monkeypatch.setattr(command, "launch_in", launches)
    command_line = ("compare", "linear", "--layouts", "; ".join(outcomes), "--repeats", "2", "--json", *args)
    done = in_this_process(folder, *command_line, CUDA_VISIBLE_DEVICES="")
    return done.returncode, json.loads(done.stdout), launches.started


def test_nobody_is_profiled_whatever_the_config_says(tmp_path: Path) -> None:
    config = tmp_path / "profiled.toml"
    config.write_text('recipe = "linear"\nsteps = 100\nprofile = "50-52"\n')
    entrants, _ = command._entrants(str(config), "single; dp=2", {"steps": 6, "device": "cpu"}, [])
    assert [(one.config.steps, one.config.profile) for one in entrants.values()] == [(6, None)] * 2


def test_layouts_run_in_turns_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, told, started = compare(tmp_path, monkeypatch, {"single": [2.0, 2.0], "dp=2": [2.0, 2.0]})
    assert started == [("single", 32), ("dp=2", 32)] * 2
    assert (code, told["ok"], told["experiment"]) == (0, True, "fixed global batch")
    assert [row["repeats"] for row in told["rows"]] == [2, 2]
    assert any(remark.startswith("the losses agree") for remark in told["remarks"])


def test_other_losses_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, told, _ = compare(tmp_path, monkeypatch, {"single": [2.0, 2.0], "dp=2": [2.1, 2.1]})
    assert (code, told["ok"]) == (1, False)


def test_a_batch_per_replica_is_another_experiment_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {"single": [2.0, 2.0], "dp=2": [2.1, 2.1]}
    code, told, started = compare(tmp_path, monkeypatch, outcomes, "--batch-per-device", "6")
    assert started[:2] == [("single", 6), ("dp=2", 12)]
    assert (code, told["experiment"]) == (0, "fixed batch per replica")
    assert told["title"] == "linear, 6 samples a replica a step: another training on every layout (weak scaling)"


def test_the_results_are_out_before_a_chart_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise UserError("the disk is full", "make room")

    monkeypatch.setattr("lockstep.cli.compare.write_output", full)
    code, told, _ = compare(tmp_path, monkeypatch, {"single": [2.0] * 2, "dp=2": [2.0] * 2}, "--chart", "speed.svg")
    assert (code, told["ok"]) == (2, True)


def test_the_page_has_the_table_and_the_speed_ups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {"single": [2.0, 2.0], "dp=2": [2.0, 2.0]}
    assert compare(tmp_path, monkeypatch, outcomes, "--page", "speed.html")[0] == 0
    page = (tmp_path / "speed.html").read_text()
    assert "linear, 32 samples a step: the same training on every layout" in page
    assert '"ideal"' in page
    assert "the losses agree" in page


def test_a_layout_that_fails_says_why_is_not_tried_again_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: dict[str, list[Any]] = {
        "single": [2.0, 2.0],
        "dp=2": [Outcome(1, "rank 1 was killed")],
        "fsdp=2": [2.0, 2.0],
    }
    code, told, started = compare(tmp_path, monkeypatch, outcomes)
    assert code == 1
    assert [row["failure"] for row in told["rows"]] == [None, "rank 1 was killed", None]
    assert [name for name, _ in started] == ["single", "dp=2", "fsdp=2", "single", "fsdp=2"]


def test_ctrl_c_leaves_the_table_of_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, told, started = compare(tmp_path, monkeypatch, {"single": [2.0, Outcome(130)], "dp=2": [2.0]})
    assert code == 130
    assert [row["repeats"] for row in told["rows"]] == [1, 1]
    assert len(started) == 3


@pytest.mark.slow
def test_real_runs_make_a_table_and_one_that_cannot_be_cut_says_why(tmp_path: Path) -> None:
    """A linear map has one layer, which no pipeline can cut."""
    options = ("--steps", "8", "--repeats", "1", "--json", "--device", "cpu")
    done = lockstep(tmp_path, "compare", "linear", "--layouts", "single; dp=2; pp=2", *options)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    single, dp2, pp2 = told["rows"]
    assert (single["processes"], dp2["processes"]) == (1, 2)
    assert dp2["same_loss"] is True
    assert dp2["speed_up"][0] == pytest.approx(single["step_seconds"][0] / dp2["step_seconds"][0])
    assert dp2["efficiency"][0] == pytest.approx(dp2["speed_up"][0] / 2)
    assert 0 < dp2["exposed_communication"][0] < 1
    assert dp2["peak_memory_bytes"] > 1 << 20
    assert pp2["failure"]
    assert pp2["step_seconds"] is None
    assert list(tmp_path.iterdir()) == [], "nothing is kept"
