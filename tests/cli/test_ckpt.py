"""`lockstep ckpt`, `lockstep generate`, `lockstep.load`: what a run has saved, looked at and used without it."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lockstep as library
from lockstep.checkpoint.disk.files import reading
from lockstep.checkpoint.disk.format import read_index
from lockstep.checkpoint.disk.load import read_whole
from lockstep.checkpoint.disk.pick import pick
from lockstep.checkpoint.exchange.export import export
from lockstep.checkpoint.exchange.foreign import import_weights
from lockstep.config.layers import from_toml
from lockstep.recipes.task import task_of
from tests.cli import commands
from tests.cli.commands import SMALL_LM
from tests.cli.commands import in_this_process as lockstep

TRAIN = ("train", "lm", *SMALL_LM, "--steps", "6", "--set", "validate_every=3 steps", "--set", "save_every=2 steps")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of the language model, trained on two ranks that share its matrices."""
    folder = tmp_path_factory.mktemp("ckpt")
    done = commands.lockstep(folder, *TRAIN, "--layout", "tp=2", "--set", "keep_every=2")
    assert done.returncode == 0, done.stderr
    return folder


def answer(place: Path, *args: str) -> Any:
    done = lockstep(place, *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ls_shows_steps_sizes_layouts_and_the_best(place: Path) -> None:
    rows = answer(place, "ckpt", "ls", "runs/lm")["checkpoints"]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert [row["best"] for row in rows] == [False, False, True]
    assert all(row["layout"] == "tp=2" and row["problem"] is None and row["bytes"] > 100_000 for row in rows)
    text = lockstep(place, "ckpt", "ls", "runs/lm").stdout
    assert "whole, the best" in text


def test_verify_reads_everything_and_names_the_bad_file(place: Path, tmp_path: Path) -> None:
    assert lockstep(place, "ckpt", "verify", "runs/lm").returncode == 0
    shutil.copytree(place / "runs" / "lm", tmp_path / "run")
    bad = tmp_path / "run" / "checkpoints" / "step-00000004" / "shard-00001.safetensors"
    chunks = read_index(bad.parent).tensors["model/blocks.0.up.weight"].chunks
    content = bytearray(bad.read_bytes())
    content[next(chunk.offset for chunk in chunks if chunk.file == bad.name)] ^= 16
    bad.write_bytes(content)
    done = lockstep(tmp_path, "ckpt", "verify", "run")
    assert done.returncode == 1
    assert "step-00000006: whole" in done.stdout
    assert "step-00000004: damaged, shard-00001.safetensors has changed since it was written" in done.stdout
    assert done.stderr.count("\n") == 1
    assert lockstep(tmp_path, "ckpt", "export", "run", "--step", "4", "-o", "m.pt").returncode == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "nothing is left of a failed export"


def test_diff_compares_tensor_by_tensor(place: Path) -> None:
    steps = [f"runs/lm/checkpoints/step-0000000{step}" for step in (2, 4)]
    same = lockstep(place, "ckpt", "diff", steps[0], steps[0])
    assert same.returncode == 0
    other = lockstep(place, "ckpt", "diff", *steps, "--json")
    assert other.returncode == 1
    rows = {row["name"]: row for row in json.loads(other.stdout)["tensors"]}
    assert rows["model/tokens.weight"]["what"] == "differs"
    assert rows["model/tokens.weight"]["largest"] > 0


# ---- Out


def single_device_model(place: Path) -> torch.nn.Module:
    return task_of(from_toml(place / "runs" / "lm" / "config.toml")).build_model()


def test_every_kind_of_export_has_the_keys_and_bytes_of_the_plain_models_state_dict(
    place: Path, tmp_path: Path
) -> None:
    for target in ("m.safetensors", "m.pt", "folder"):
        done = lockstep(place, "ckpt", "export", "runs/lm", "-o", str(tmp_path / target), "--shard-size", "50KB")
        assert done.returncode == 0, done.stderr
    alone = library.load(place / "runs" / "lm")
    expected = alone.state_dict()
    assert "head.weight" in expected
    one_file = load_file(tmp_path / "m.safetensors")
    torch_file = torch.load(tmp_path / "m.pt", weights_only=True)
    shards = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(shards.values())) > 2
    assert list(torch_file) == list(expected)
    assert torch_file["head.weight"].data_ptr() == torch_file["tokens.weight"].data_ptr(), "tied in the file too"
    for key, tensor in expected.items():
        with safe_open(tmp_path / "folder" / shards[key], framework="pt") as file:
            assert torch.equal(file.get_tensor(key), tensor)
        assert torch.equal(one_file[key], tensor)
        assert torch.equal(torch_file[key], tensor)
    assert one_file.keys() == shards.keys() == expected.keys()
    single_device_model(place).load_state_dict(torch_file)


def test_the_optimizer_can_be_exported_and_goes_on_on_one_device(place: Path, tmp_path: Path) -> None:
    answer(place, "ckpt", "export", "runs/lm", "-o", str(tmp_path / "both.pt"), "--optimizer")
    both = torch.load(tmp_path / "both.pt", weights_only=True)
    model = single_device_model(place)
    model.load_state_dict(both["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    optimizer.load_state_dict(both["optimizer"])
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}
    assert optimizer.param_groups[0]["lr"] < 1
    with library.init("single", run_dir=tmp_path / "run", resume=str(place / "runs" / "lm"), seed=0) as run:
        task = task_of(from_toml(place / "runs" / "lm" / "config.toml"))
        engine = run.setup(task.build_model, task.loss, optimizer=lambda params: torch.optim.AdamW(params, lr=1.0))
        states = [engine.optimizer.state[parameter] for _, parameter in engine.cut.trained]
        for ours, theirs in zip(states, optimizer.state.values(), strict=True):
            assert torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"])
        assert engine.optimizer.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]


def test_an_export_never_overwrites(place: Path, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_text("mine")
    done = lockstep(place, "ckpt", "export", "runs/lm", "-o", str(tmp_path / "m.pt"))
    assert done.returncode == 2
    assert (tmp_path / "m.pt").read_text() == "mine"


def test_a_model_is_loaded_for_use_and_a_language_model_goes_on(place: Path) -> None:
    model = library.load(place / "runs" / "lm")
    assert not model.training
    assert model.head.weight is model.tokens.weight  # type: ignore[union-attr]
    texts = [answer(place, "generate", "runs/lm", "The state", "--length", "20")["text"] for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0] == library.generate(place / "runs" / "lm", "The state", length=20)
    assert texts[0] != library.generate(place / "runs" / "lm", "The state", length=20, seed=1)
    assert lockstep(place, "generate", "runs/lm", "The state", "--length", "5").stdout.startswith("The state")


# ---- In


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    whole = pick(run)
    with reading(whole) as reader:
        tensors = whole.index.tensors
        return {key: read_whole(reader, tensors[f"model/{name}"]) for key, name in whole.index.state_dict.items()}


def foreign_files(folder: Path) -> dict[str, Path]:
    """The same weights in every way that courses and libraries write them."""
    weights = {"embed.weight": torch.randn(5, 3), "norm.count": torch.tensor(7), "empty": torch.zeros(0, 2)}
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in weights.items()}
    files = {
        "plain.pt": weights,
        "snapshot.pt": {"MODEL_STATE": wrapped, "EPOCHS_RUN": 3},
        "checkpoint.pth": {"epoch": 1, "model_state_dict": weights, "optimizer_state_dict": {"state": {}}, "loss": 0.5},
        "lightning.ckpt": {"state_dict": weights, "pytorch-lightning_version": "2"},
    }
    for name, content in files.items():
        torch.save(content, folder / name)
    torch.save(weights, folder / "old.pt", _use_new_zipfile_serialization=False)
    save_file(wrapped, folder / "one.safetensors")
    (folder / "shards").mkdir()
    for number, name in enumerate(weights):
        save_file({name: weights[name]}, folder / "shards" / f"{number}.safetensors")
    places = {name: f"{number}.safetensors" for number, name in enumerate(weights)}
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    content = {"model": weights, "optimizer": {"lr": 0.1, "state": torch.ones(3)}}
    torch.distributed.checkpoint.save(content, checkpoint_id=folder / "dcp", no_dist=True)
    return {path.name: path for path in folder.iterdir()}


def test_weights_of_any_kind_of_file_begin_a_run(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    files = foreign_files(tmp_path / "files")
    expected = torch.load(files["plain.pt"], weights_only=True)
    assert len(files) == 8
    for name, path in files.items():
        import_weights(path, tmp_path / "runs" / name)
        found = weights_of(tmp_path / "runs" / name)
        assert found.keys() == expected.keys(), name
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype
            assert torch.equal(found[key], tensor), (name, key)


@pytest.mark.slow
def test_a_run_begins_with_imported_weights_under_any_layout(place: Path, tmp_path: Path) -> None:
    answer(place, "ckpt", "export", "runs/lm", "-o", str(tmp_path / "m.safetensors"))
    assert lockstep(tmp_path, "ckpt", "import", "m.safetensors", "runs/lm").returncode == 0
    options = ("--steps", "1", "--set", "optimizer.lr=1e-30", "--set", "optimizer.args={weight_decay = 0.0}")
    done = commands.lockstep(tmp_path, "train", "lm", *SMALL_LM, *options, "--layout", "fsdp=2")
    assert done.returncode == 0, done.stderr
    began, ended = weights_of(place / "runs" / "lm"), weights_of(tmp_path / "runs" / "lm")
    assert all(torch.equal(ended[name], tensor) for name, tensor in began.items())
    again = lockstep(tmp_path, "ckpt", "import", "m.safetensors", "runs/lm")
    assert again.returncode == 2
    assert "runs/lm is a run already" in again.stderr


def test_weights_of_another_model_are_refused_with_all_names(place: Path, tmp_path: Path) -> None:
    answer(place, "ckpt", "export", "runs/lm", "-o", str(tmp_path / "m.safetensors"))
    weights = load_file(tmp_path / "m.safetensors")
    del weights["norm.bias"], weights["blocks.1.up.weight"]
    save_file({**weights, "extra": torch.ones(1), "more": torch.ones(1)}, tmp_path / "other.safetensors")
    lockstep(tmp_path, "ckpt", "import", "other.safetensors", "run")
    task = task_of(from_toml(place / "runs" / "lm" / "config.toml"))
    sentence = r"has no blocks\.1\.up\.weight, norm\.bias, and has extra, more, which the model does not have"
    with library.init("single", run_dir=tmp_path / "run") as run, pytest.raises(library.UserError, match=sentence):
        run.setup(task.build_model, task.loss, optimizer=torch.optim.AdamW)
    with pytest.raises(library.UserError, match=sentence):
        library.load(tmp_path / "run", task.build_model)


def test_half_precision_is_converted_when_it_is_asked_for(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.5, 2.5]).bfloat16(), "n": torch.tensor([3])}, tmp_path / "half.safetensors")
    lockstep(tmp_path, "ckpt", "import", "half.safetensors", "as-it-is")
    lockstep(tmp_path, "ckpt", "import", "half.safetensors", "converted", "--dtype", "fp32")
    assert weights_of(tmp_path / "as-it-is")["w"].dtype == torch.bfloat16
    converted = weights_of(tmp_path / "converted")
    assert converted["w"].dtype == torch.float32
    assert converted["n"].dtype == torch.int64
    np.testing.assert_array_equal(converted["w"].numpy(), [1.5, 2.5])


# ---- Wrong input


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("ckpt ls nowhere", "nowhere is not a run folder or a checkpoint"),
        ("ckpt verify runs/lm/checkpoints/step-00000099", "does not exist"),
        ("ckpt export runs/lm -o m.onnx", "cannot export to m.onnx: use NAME.safetensors, NAME.pt, or a folder"),
        ("ckpt export runs/lm -o m.safetensors --optimizer", "can only be exported to a .pt file: use m.pt"),
        ("ckpt export runs/lm -o nowhere/m.pt", "the folder nowhere does not exist"),
        ("ckpt export runs/lm -o m.pt --step 5", "has no checkpoint of step 5: it has 2, 4, 6"),
        ("ckpt export runs/lm -o m.pt --step newest", "'newest' is not a step: give a number, best or last"),
        ("ckpt export runs/lm -o m --shard-size 5", "'5' is not a size: write 500MB or 5GB"),
        ("ckpt import nowhere.pt new", "nowhere.pt does not exist"),
        ("ckpt import runs/lm/config.toml new", "nothing of it was executed"),
        ("ckpt import runs new", "runs is not a folder of weights"),
        ("generate runs/lm ''", "the text is empty"),
        ("generate nowhere text", "nowhere is not a run folder"),
        ("train lm --resume nowhere", "nowhere is not a checkpoint"),
    ],
)
def test_wrong_input_is_one_sentence_and_leaves_nothing(place: Path, args: str, sentence: str) -> None:
    before = sorted(place.rglob("*"))
    done = lockstep(place, *[arg.replace("''", "") for arg in args.split()])
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert sorted(place.rglob("*")) == before


# ---- Memory


def peak_growth(work: Any) -> int:
    """How many bytes this process grew at most while it did something."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@pytest.mark.parametrize("target", ["m.pt", "m.safetensors", "folder"])
def test_an_export_holds_one_tensor_at_a_time(tmp_path: Path, target: str) -> None:
    """Of 32 tensors of 8 MB."""
    for name, rows in (("small", 1), ("big", 2048)):  # the small one lets torch import what it needs
        torch.save({f"w{number}": torch.full((rows, 1024), float(number)) for number in range(32)}, tmp_path / name)
        import_weights(tmp_path / name, tmp_path / f"{name}-run")
        checkpoint = pick(tmp_path / f"{name}-run")
        grown = peak_growth(partial(export, checkpoint, tmp_path / f"{name}-{target}"))
    whole = checkpoint.index.bytes
    assert grown < whole / 2, f"{grown / 1e6:.0f} MB for {whole / 1e6:.0f} MB"
