"""`lockstep verify`, as a user types it."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.cli import verify as command
from lockstep.launch.supervise import Outcome
from tests.cli.commands import MODEL_OF_BLOCKS, lockstep
from tests.unit.test_verify import Run, scale_all

SCRIPT = (
    MODEL_OF_BLOCKS
    + """
run = lockstep.init(device="cuda", backend="nccl", seed=int(sys.argv[1]), name="mine")
engine = run.setup(
    Model,
    lambda model, x: (model(x).square().sum(), len(x)),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    clip=1.0,
    precision="bf16",
    compile="blocks",
)
run.print("what the script prints")
for batch in run.loader(Samples(), global_batch=10, epochs=2):
    out = engine.step(batch)
    assert out.step < 3, "it goes no further"
    if "crash" in sys.argv:
        {}["no such key"]
run.save()
"""
)


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, and one for temporary files: what is in them is all that may be there afterwards."""
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))  # short: loader processes make sockets in it
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("torch")))  # torch makes it when imported
    monkeypatch.chdir(tmp_path)
    return tmp_path


def left_in(folder: Path) -> list[str]:
    places = (folder, Path(os.environ["TMPDIR"]))
    return sorted(str(path.relative_to(place)) for place in places for path in place.rglob("*"))


def test_a_recipe_is_proved_and_nothing_is_left_behind(folder: Path) -> None:
    done = lockstep(folder, "verify", "digits", "--layout", "fsdp=2", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"]
    assert (result["layout"], result["steps"], result["cause"], result["remarks"]) == ("fsdp=2", 2, None, [])
    assert result["verdict"].startswith("fsdp=2 gives the numbers of one process: 2 steps, 8 parameters")
    names = ["steps", "samples", "parameters", "tied weights", "losses", "gradient norm", "gradients", "values"]
    assert [check["name"] for check in result["checks"]] == [*names, "replicas", "micro-batch"]
    assert all(check["ok"] for check in result["checks"])
    assert "MISMATCH" not in done.stderr
    assert "gradients" in done.stderr
    assert left_in(folder) == ["script.py"]


@pytest.mark.slow
def test_a_script_for_gpus_is_proved_on_cpus_as_it_is(folder: Path) -> None:
    options = ("--layout", "dp=2", "--steps", "2", "--blocks", "3", "--", "7")
    done = lockstep(folder, "verify", "script.py", *options, COLUMNS="160")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "computed with precision = fp32, not bf16" in done.stdout
    assert "computed with compile = off, not blocks" in done.stdout
    assert "3 of 4 blocks" in done.stdout
    assert "dp=2 gives the numbers of one process: 2 steps, 8 parameters" in done.stdout
    assert "what the script prints" not in done.stdout
    assert left_in(folder) == ["script.py"]


def test_a_script_that_fails_is_shown_with_its_output_and_its_traceback(folder: Path) -> None:
    done = lockstep(folder, "verify", "script.py", "--", "7", "crash")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "lockstep: the run under dp=2 failed: rank" in done.stderr
    assert "KeyError: 'no such key'" in done.stderr
    assert "at script.py:" in done.stderr
    assert '{}["no such key"]' in done.stderr
    assert left_in(folder) == ["script.py"]


def typed(text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["lockstep", *shlex.split(text)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_a_mismatch_is_exit_code_1_with_the_table_and_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def record(at: Path, _config: Any, layout: Any, _worker: Any, settings: dict[str, Any]) -> Outcome:
        at.mkdir()
        run = Run(layout.world_size).train()
        told = {key: settings[key] for key in ("micro_batch", "shaken") if key in settings}
        if layout.world_size > 1:
            scale_all(run)
            for line in run.lines[1]:
                line["loss"] = math.inf
        run.write(at / "recording")
        asked.append((str(layout), told, settings["layout"]))
        return Outcome(0)

    monkeypatch.setattr(command, "launch_trial", record)
    assert typed("verify digits --json", monkeypatch) == 1
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert (result["ok"], result["cause"], result["step"], result["module"]) == (False, "scale", 1, "embedding")
    wrong = {check["name"]: check["largest"] for check in result["checks"] if not check["ok"]}
    assert wrong.keys() == {"losses", "gradients"}
    assert wrong["losses"] == "Infinity"
    assert said.err.count("MISMATCH") == 2
    assert said.err.rstrip().endswith(result["verdict"])
    assert asked == [("dp=2", {}, "dp=2"), ("single", {}, "dp=2"), ("single", {"micro_batch": {"train": 2}}, "dp=2")]


WRONG = [
    ("verify digts", "unknown recipe 'digts': did you mean 'digits'?"),
    ("verify missing.py", "there is no script missing.py"),
    ("verify missing.toml", "cannot read config missing.toml"),
    ("verify digits --layout", "--layout"),
    ("verify digits --layout dq=2", "unknown axis in layout 'dq=2'"),
    ("verify digits --layout dp=x", "dp=x in layout 'dp=x' is not a size"),
    ("verify digits --layout dp=auto", "layout dp=auto leaves the number of processes open: say --nproc"),
    ("verify digits --layout dp=auto,fsdp=2 --nproc 3", "needs a multiple of 2 processes but there are 3"),
    ("verify script.py --layout dp=2,fsdp=2 --nproc 3", "2 x 2 = 4 processes but there are 3"),
    ("verify digits --layout single", "layout single is one process, which others are compared with"),
    ("verify digits extra", "'extra' is one argument too many"),
    ("verify digits --steps 0", "steps"),
    ("verify digits --blocks 1", "blocks"),
    ("verify digits --set optimizer.lrr=3", "did you mean 'optimizer.lr'?"),
    ("verify script.py --set epochs=3", "unknown key 'epochs'"),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong_input_is_one_sentence_and_starts_nothing(
    text: str, sentence: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = left_in(folder)
    assert typed(text, monkeypatch) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.startswith("lockstep: ")
    assert said.err.count("\n") == 1, "one sentence"
    assert said.out == ""
    assert left_in(folder) == before
