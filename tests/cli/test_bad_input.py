"""Wrong input is one sentence on stderr and exit code 2; nothing is started, nothing is written."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from lockstep.cli import main

WRONG = [
    ("train digts", "unknown recipe 'digts': did you mean 'digits'?"),
    ("train digits --set globl_batch=3", "did you mean 'global_batch'?"),
    ("train digits --set optimizer.lrr=3", "did you mean 'optimizer.lr'?"),
    ("train digits --set lr=3", "did you mean 'optimizer.lr'?"),
    ("train digits --set model.widht=3", "did you mean 'model.width'?"),
    (
        "train digits --layout dp=3 --nproc 2",
        "needs 3 processes but there are 2: use --nproc 3, or layout dp=2 or fsdp=2",
    ),
    ("train digits --layout dp=2,fsdp=3 --nproc 8", "2 x 3 = 6 processes but there are 8"),
    ("train digits --layout pp=2,cp=2 --nproc 4", "has both cp and pp"),
    ("train digits --layout dp=x", "dp=x in layout 'dp=x' is not a size"),
    ("train digits --set global_batch=-4", "global_batch = -4 (from --set) is not valid"),
    ("train digits --set global_batch=many", "it has to be a whole number"),
    ("train digits --steps -3", "steps = -3"),
    (f"train digits --set seed={'9' * 23}", "it has to be less than 18446744073709551616"),
    ("submit --dry-run --name 'a\ntouch b' train digits", r"--name has control characters in it ('a\ntouch b')"),
    ("submit --dry-run --partition 'a\nb' train digits", "--partition has control characters in it"),
    ("submit --dry-run --sbatch 'a\rb' train digits", "--sbatch has control characters in it"),
    ("submit --dry-run train digits --set name='a\nb'", "the command has control characters in it"),
    ("train digits --nproc 0", "nproc = 0"),
    ("train digits --profile soon", "write the steps as FIRST-LAST, such as 10-12"),
    ("train digits --profile 12-10", "ends before it begins: write 10-12"),
    ("train digits --profile 0-3", "the first step of a run is 1"),
    ("train digits --profile 1-1000", "1000 steps: profile at most 50"),
    ("train digits --steps 20 --profile 19-21", "the run has 20 steps: profile earlier ones, or do more"),
    ("train digits --set epochs=1 --profile 9999", "profile is '9999' and the run has"),
    ("train digits --profile 3 --profile-ranks some", "write ranks such as 0 or 0,3, or all"),
    ("train digits --nproc 2 --profile 3 --profile-ranks 0,2", "names rank 2: the ranks of this run are 0 to 1"),
    ("train digits --set profile=true", "profile = True (from --set) is not valid: it has to be text"),
    ("run --profile x script.py", "profile is 'x'"),
    ("run --set seed script.py", "cannot read --set 'seed': write --set key=value, as in --set seed=1"),
    ("run --steps 5 --profile 6 script.py", "the run has 5 steps"),
    ("run --nproc 2 --profile 3 --profile-ranks 2 script.py", "names rank 2"),
    ("submit --dry-run train digits --steps 5 --profile 6", "the run has 5 steps"),
    ("submit --dry-run --nproc 2 run --profile 3 --profile-ranks 7 script.py", "the ranks of this run are 0 to 1"),
    ("train digits --set steps=2 --set epochs=3", "steps and epochs contradict each other"),
    ("train digits --set global_batch=8 --set micro_batch=16", "micro_batch 16 is larger than global_batch 8"),
    ("train digits --set optimizer.name=adamx", "did you mean 'adam'?"),
    ("train digits --set optimizer.args.foo=1", "unknown argument of optimizer adamw: 'foo'"),
    ("train digits --set optimizer.name=no.such:Thing", "cannot import the optimizer"),
    ("train digits --set precision=fp64", "it has to be 'fp32', 'bf16' or 'fp16'"),
    ("train digits --set precision=bf16 --set numerics.storage_dtype=bf16", 'numerics.accept = ["bf16-weights"]'),
    ("train digits --set numerics.tf32=true", "a CPU has no tf32"),
    ("train digits --set numerics.param_dtype=bf16", 'set precision = "bf16" as well'),
    ("train digits --set numerics.reduce_dtype=fp16", "loses small gradients without a loss scale"),
    ("train digits --set numerics.accept=slow-fp16", "it has to be a list, as in --set"),
    ("train digits --set shard.level=FULL_SHARD", "torch's name: write zero3"),
    ("train digits --set shard.level=NO_SHARD", "use the axis dp"),
    ("train digits --set shard.min_params=0", "shard.min_params = 0"),
    ("train digits --set compile=true", "it has to be 'off', 'blocks' or 'model'"),
    ("train linear --set compile=blocks", "no repeated blocks: use compile = model"),
    ("train digits --layout fsdp=2 --set compile=model", "does not go with the sharded weights of layout fsdp=2"),
    ("train digits --set batch_norm=sync --set compile=blocks", "does not go with batch_norm = sync"),
    ("train digits --set attention=flash2", "attention = 'flash2'"),
    ("train digits --set validate_every=often", 'write "100 steps"'),
    ("train digits --set novalue", "write --set key=value"),
    ("train digits --set backend=nccl --device cpu", "backend nccl needs device cuda"),
    ("train lm --set model.width=100 --set model.heads=3", "not divisible"),
    ("train lm --set data.path=missing.txt", "missing.txt"),
    ("train lm --set data.path=empty.txt", "empty.txt"),
    ("train linear --set data.path=empty.txt", "leave data.path out"),
    ("train mnist", "the data set mnist is not in the cache folder"),
    ("train cifar10", "run `lockstep fetch cifar10` on a machine with internet"),
    ("train wikitext2 --set data.path=missing", "there is no folder missing: check data.path"),
    ("train wikitext2 --set data.path=foreign", "foreign has neither train.txt nor wiki.train.tokens"),
    ("train mnist --set data.path=foreign", "foreign/train-images-idx3-ubyte.gz is missing"),
    ("train mnist --set data.path=", "data.path is empty"),
    ("train cifar10 --set data.path=empty.txt", "empty.txt is a file: give the folder it is in"),
    ("train mnist --set data.path=missing.npz", "missing.npz is missing"),
    ("train cifar10 --set data.path=foreign", "foreign has no data_batch_*.bin"),
    ("train cifar10 --set data.path=cut", "cut/data_batch_1.bin has 4000 bytes, which is no whole number of records"),
    ("train wikitext2 --set model.heads=3", "width 200 is not divisible by heads 3"),
    ("fetch", "name one of wikitext2, mnist, cifar10"),
    ("fetch mnits", "unknown data set 'mnits': did you mean 'mnist'?"),
    ("fetch mnist --from ftp://somewhere", "give a folder, or a URL that begins with https://HOST/"),
    ("fetch mnist --from http://[::1", "is no address"),
    ("fetch mnist --from missing", "missing is not there"),
    ("fetch mnist --from foreign", "foreign/train-images-idx3-ubyte.gz: download all files of the set"),
    ("fetch mnist --from http://127.0.0.1:1", "this machine has no internet, 127.0.0.1 cannot be reached"),
    ("fetch cifar10 --from http://127.0.0.1:1", "run `lockstep fetch cifar10` on a login node"),
    ("train missing.toml", "cannot read config missing.toml"),
    ("train broken.toml", "config broken.toml is not TOML"),
    ("train digits --run-dir foreign", "foreign is not a run folder"),
    ("train digits --run-dir empty.txt", "empty.txt is a file"),
    ("train digits --run-dir empty.txt/below", "cannot write to empty.txt/below: not a directory"),
    ("train digits --run-dir /proc/nothing/here", "cannot write to /proc/nothing/here"),
    ("train digits --name a/b", "'a/b' is not a run name"),
    ("train digits --resume foreign", "foreign is not a checkpoint"),
    ("run missing.py", "there is no script missing.py"),
    ("run --layout dp=3 --nproc 2 script.py", "needs 3 processes but there are 2"),
    ("run --set epochs=3 script.py", "unknown key 'epochs'"),
    ("trian", "train"),
    ("train --foo", "--foo"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # else a CPU may be refused for another reason
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("not a run")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken.toml").write_text("steps = = 3")
    (tmp_path / "script.py").write_text("print('never started')")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "data_batch_1.bin").write_bytes(bytes(4000))
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "sentence"), WRONG, ids=[command for command, _ in WRONG])
def test_wrong_input_is_one_sentence_and_changes_nothing(command, sentence, folder, monkeypatch, capsys):
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["lockstep", *shlex.split(command)])

    with pytest.raises(SystemExit) as stopped:
        main()

    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert sentence in said.err
    assert said.err.startswith("lockstep: ")
    assert said.err.count("\n") == 1, "one sentence"
    assert said.out == ""
    assert sorted(folder.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize(
    ("text", "behind", "names"),
    [
        ("", "--layout fsdp=2 7", "--layout stands behind script.py and is given to it; write it"),
        ("", "--set=a --nproc 3", "--set and --nproc stand behind script.py and are given to it; write them"),
        ("add_argument('--steps')", "--steps 3 --lr 1 layout", ""),
    ],
)
def test_options_behind_a_script_are_said_to_be_the_scripts(text, behind, names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(text)
    monkeypatch.setattr(sys, "argv", ["lockstep", *shlex.split(f"run --dry-run --nproc 2 script.py {behind}")])
    with pytest.raises(SystemExit, match="0"):
        main()
    expected = f"lockstep: {names} before the script to mean Lockstep's\n" if names else ""
    assert capsys.readouterr().err == expected


FLAT = "nests its values more than 50 deep: write them flatter"


@pytest.mark.parametrize(
    ("option", "config", "sentence"),
    [
        pytest.param("", "a = " + "[" * 5000 + "]" * 5000, FLAT, id="arrays"),
        pytest.param("", "a = " + "{b = " * 5000, FLAT, id="tables"),
        pytest.param("", ".".join("a" * 5000) + " = 1", FLAT, id="keys"),
        pytest.param("", f"seed = {'9' * 5000}", "is not TOML", id="digits"),
        pytest.param(f"model.width={'[' * 5000}{']' * 5000}", "", FLAT, id="arrays of --set"),
        pytest.param("model=" + '{"a":' * 5000 + "}" * 5000, "", "model = ", id="tables of --set"),
        pytest.param(f"{'a.' * 5000}b=1", "", "write --set key=value", id="keys of --set"),
        pytest.param(f"seed={'9' * 5000}", "", "it has to be a whole number", id="digits of --set"),
    ],
)
def test_values_without_end_are_refused_in_one_sentence(
    option: str,
    config: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "deep.toml").write_text(config)
    monkeypatch.setattr(
        sys, "argv", ["lockstep", "train", str(tmp_path / "deep.toml"), *(["--set", option] if option else [])]
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert len(said) < 500
