"""`lockstep fetch`, and training on what it fetched or on a folder of one's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.data import sets
from tests.cli.commands import events, in_this_process, lockstep
from tests.sets import Server, plain_set, serve, write_mnist, write_wikitext2

Command = Callable[..., int]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """A server with the only data set there is, and an empty cache."""
    with serve() as running:
        monkeypatch.setattr(sets, "SETS", {"letters": plain_set(running)})
        monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
        yield running


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    def run(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["lockstep", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return run


def test_fetching_says_where_the_set_lies_and_a_second_time_that_it_did(server, command, tmp_path, capsys):
    folder = tmp_path / "cache" / "data" / "letters"
    assert command("fetch", "letters") == 0
    assert capsys.readouterr().out == f"letters is now in {folder}, every digest right (0.0 MB)\n"
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "b.txt"]
    asked = len(server.requests)
    assert command("fetch", "letters") == 0
    assert capsys.readouterr().out.startswith(f"letters was already in {folder}")
    assert len(server.requests) == asked


@pytest.mark.usefixtures("server")
def test_json_is_the_result_alone(command, tmp_path, capsys):
    assert command("fetch", "letters", "--json") == 0
    folder = str(tmp_path / "cache" / "data" / "letters")
    result = {"name": "letters", "folder": folder, "bytes": 9000, "downloaded": True}
    assert json.loads(capsys.readouterr().out) == result


@pytest.mark.usefixtures("server")
def test_the_list_says_what_there_is_what_is_here_and_under_which_licence(command, tmp_path, capsys):
    assert command("fetch", "--list") == 0
    before = capsys.readouterr().out
    assert "letters: two small files" in before
    assert "licence: CC0" in before
    assert "not here: lockstep fetch letters" in before
    assert str(tmp_path / "cache") in before
    assert not (tmp_path / "cache").exists(), "looking writes nothing"
    command("fetch", "letters")
    capsys.readouterr()
    command("fetch", "--list")
    assert f"here: {tmp_path / 'cache' / 'data' / 'letters'}" in capsys.readouterr().out
    command("fetch", "--list", "--json")
    [row] = json.loads(capsys.readouterr().out)
    assert row["cached"]
    assert row["bytes"] == 9000


def test_a_wrong_digest_is_one_sentence_and_nothing_is_kept(server, command, tmp_path, capsys):
    server.files["b.txt"] = b"other" * 800
    assert command("fetch", "letters") == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "b.txt" in said.err
    assert "expected sha256:" in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_real_list_names_every_set():
    assert set(sets.SETS) == {"wikitext2", "mnist", "cifar10"}


@pytest.mark.slow
def test_training_on_a_folder_of_ones_own_ends_with_a_line_about_the_test_data(tmp_path):
    write_wikitext2(tmp_path / "texts")
    small = ("model.width=16", "model.hidden=16", "model.context=16", "global_batch=8", "micro_batch=2", "epochs=1")
    options = [part for value in ("data.path=texts", *small) for part in ("--set", value)]
    done = lockstep(tmp_path, "train", "wikitext2", *options, "--nproc", "1", "--json")
    assert done.returncode == 0, done.stderr
    [test] = events(tmp_path / "runs" / "wikitext2", "test")
    result = json.loads(done.stdout)["test"]
    assert result == {key: test[key] for key in ("step", "loss", "metrics", "samples")}
    assert result["metrics"]["perplexity"]["count"] == 129
    [line] = [line for line in done.stderr.splitlines() if line.startswith("test loss ")]
    assert line.startswith(f"test loss {test['loss']:#.4g} | perplexity ")
    assert line.endswith(f"by the weights of step {test['step']}")


def test_a_run_without_its_data_starts_nothing_and_with_them_suggests_commands_that_work(tmp_path):
    cache = str(tmp_path / "cache")
    refused = in_this_process(tmp_path, "train", "mnist", LOCKSTEP_CACHE=cache)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert f"the data set mnist is not in the cache folder {cache}: run `lockstep fetch mnist`" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    write_mnist(tmp_path / "my digits", compressed=True)
    done = lockstep(tmp_path, "train", "mnist", "--set", "data.path=my digits", "--steps", "3", "--nproc", "1")
    assert done.returncode == 0, done.stderr
    assert "train mnist --set 'data.path=my digits' --steps 3 --layout fsdp=2" in done.stdout
