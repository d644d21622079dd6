"""benchmarks/baselines.py: the loops train as one device does; what needs two devices is tested on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from benchmarks.baselines import Busy, check, config_of, figures_of, main, place_in_halves, train_in_halves
from lockstep.config.layers import Layer, resolve
from lockstep.errors import UserError
from lockstep.recipes.task import task_of
from lockstep.record.log import EventLog
from lockstep.runtime.seeds import seed_host, seed_of
from tests.cli.commands import events
from tests.parity.problems import TinyGPT

CPU, META = torch.device("cpu"), torch.device("meta")
SMALL = {"steps": 5, "layout": "single", "validate_every": "never", "data": {"workers": 0}}


@pytest.mark.parametrize("recipe", ["lm", "digits"])
def test_a_baseline_has_the_losses_norms_and_rates_of_one_process(recipe: str, tmp_path: Path) -> None:
    model = {"width": 16, "layers": 2, "context": 16} if recipe == "lm" else {}
    config = resolve([Layer("test", {**SMALL, "recipe": recipe, "model": model})]).config
    lockstep.Trainer(config, lockstep.init("single", run_dir=tmp_path / "run", device="cpu")).fit()
    task = task_of(config)
    seed_host(seed_of(config.seed, "init"))
    log = EventLog(tmp_path / "plain" / "events.jsonl", 1)
    train_in_halves(config, task, task.build_model().train(), (CPU, CPU), log)
    log.close()
    for ours, theirs in zip(events(tmp_path / "plain", "step"), events(tmp_path / "run", "step"), strict=True):
        for field in ("step", "loss", "grad_norm", "lr", "weight", "items", "epoch"):
            assert ours[field] == pytest.approx(theirs[field], rel=1e-5), field
    figures = figures_of("naive-mp", [tmp_path / "plain"], [tmp_path / "run"], "fp32")
    assert (figures["same_loss"], figures["idle"].keys()) == (True, {"cpu"})
    assert figures["speed_up"] > 0


def test_the_layers_from_the_middle_block_on_go_to_the_second_device_and_tied_weights_stay() -> None:
    model = TinyGPT(tied=True, depth=4)
    place_in_halves(model, (CPU, META), Busy((CPU, META)))
    beyond = {name for name, parameter in model.named_parameters() if parameter.device == META}
    expected = {name for name, _ in model.named_parameters() if name.startswith(("blocks.2", "blocks.3", "norm."))}
    assert beyond == expected
    assert model.head.weight.device == CPU
    assert model.get_buffer("blocks.3.attention.causal").device == META
    assert model.waves.device == CPU


def test_a_model_of_one_layer_cannot_be_cut() -> None:
    with pytest.raises(UserError, match="single one"):
        place_in_halves(nn.Linear(2, 2), (CPU, META), Busy((CPU, META)))


@pytest.mark.parametrize(
    ("name", "gpus", "settings", "said"),
    [
        ("naive-mp", 0, "seed=1", "there is only the CPU: leave it out"),
        ("data-parallel", 1, "seed=1", "shares a batch out over GPUs, and there is 1"),
        ("naive", 1, "seed=1", "there is no baseline naive: there are data-parallel and naive-mp"),
        ("naive-mp", 1, "compile=blocks", "naive-mp is a plain loop that knows nothing of compile"),
        ("naive-mp", 1, "recompute=true", "knows nothing of recompute, which is set: leave recompute out"),
        ("naive-mp", 1, "numerics.tf32=true", "knows nothing of numerics"),
        ("naive-mp", 1, "precision=fp16", "naive-mp knows no loss scale, which fp16 needs: compare in bf16 or fp32"),
        ("naive-mp", 1, "model.dropout=0.1", "draws other masks for dropout"),
    ],
)
def test_what_it_cannot_measure_is_refused(name: str, gpus: int, settings: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check([name], config_of("lm", 5, [settings]), gpus)
    check(["naive-mp"], config_of("lm", 5, ["precision=bf16"]), 1)


def test_a_wrong_name_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert capsys.readouterr().err == "baselines: there is no baseline nothing: there are data-parallel and naive-mp\n"
