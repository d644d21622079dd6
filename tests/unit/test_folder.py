"""Which folder a run takes: an unfinished run goes on, a finished one stays, and nothing else is ever touched."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from lockstep.checkpoint.disk.code import check_same_script
from lockstep.checkpoint.disk.format import step_folder
from lockstep.config.layers import Layer, parse_assignments, resolve, to_toml
from lockstep.config.schema import Config, LaunchConfig
from lockstep.config.toml import read_toml
from lockstep.errors import UserError
from lockstep.record.folder import (
    RunFolder,
    check_same_training,
    choose_folder,
    create_folder,
    name_after,
    with_script,
    write_config,
)

CONFIG = resolve([]).config


def config_with(*assignments: str) -> Config:
    return resolve([Layer("--set", parse_assignments(assignments))]).config


def run_at(path: Path, *kinds: str, attempt: int = 1, config: Config = CONFIG) -> Path:
    """A run folder whose log holds these events."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(to_toml(config))
    lines = [json.dumps({"time": 0.0, "kind": kind, "attempt": attempt}) + "\n" for kind in kinds]
    (path / "events.jsonl").write_text("".join(lines))
    return path


def unfinished(path: Path, attempt: int = 1) -> Path:
    return run_at(path, "start", "step", attempt=attempt)


def finished(path: Path) -> Path:
    return run_at(path, "start", "step", "end")


def tree(path: Path) -> dict[str, bytes | None]:
    """Everything below a path: name -> content, None for a folder."""
    return {str(found.relative_to(path)): None if found.is_dir() else found.read_bytes() for found in path.rglob("*")}


# A name --------------------------------------------------------------------------------------------------------------


def test_the_first_run_of_a_name_is_new(tmp_path: Path) -> None:
    folder = choose_folder("lm", runs=tmp_path / "runs")
    assert folder == RunFolder(tmp_path / "runs" / "lm", attempt=1)
    assert not folder.continues
    assert folder.announce() == f"new run {folder.path}"


def test_an_unfinished_run_goes_on_as_the_next_attempt(tmp_path: Path) -> None:
    unfinished(tmp_path / "lm", attempt=3)
    folder = choose_folder("lm", runs=tmp_path)
    assert folder == RunFolder(tmp_path / "lm", attempt=4)
    assert folder.continues
    assert folder.announce() == f"continuing the unfinished run {folder.path}"


def test_a_run_that_never_wrote_an_event_goes_on_too(tmp_path: Path) -> None:
    (unfinished(tmp_path / "lm") / "events.jsonl").unlink()
    assert choose_folder("lm", runs=tmp_path) == RunFolder(tmp_path / "lm", attempt=2)


@pytest.mark.parametrize("last", ["status", "step", "checkpoint", "stop"])
def test_a_run_is_unfinished_until_its_last_event_is_its_end(tmp_path: Path, last: str) -> None:
    run_at(tmp_path / "lm", "start", last)
    assert choose_folder("lm", runs=tmp_path).continues


def test_a_torn_last_line_does_not_count_as_the_end(tmp_path: Path) -> None:
    with (unfinished(tmp_path / "lm") / "events.jsonl").open("a") as events:
        events.write('{"time": 1.0, "kind": "end", "atte')
    assert choose_folder("lm", runs=tmp_path) == RunFolder(tmp_path / "lm", attempt=2)


def test_a_finished_run_stays_and_the_new_one_takes_the_next_number(tmp_path: Path) -> None:
    finished(tmp_path / "lm")
    assert choose_folder("lm", runs=tmp_path) == RunFolder(tmp_path / "lm-2", attempt=1)
    finished(tmp_path / "lm-2")
    assert choose_folder("lm", runs=tmp_path) == RunFolder(tmp_path / "lm-3", attempt=1)


def test_an_unfinished_numbered_run_goes_on(tmp_path: Path) -> None:
    finished(tmp_path / "lm")
    unfinished(tmp_path / "lm-2")
    assert choose_folder("lm", runs=tmp_path) == RunFolder(tmp_path / "lm-2", attempt=2)


@pytest.mark.parametrize("resume", ["auto", "runs/lm/checkpoints/step-00000010"])
def test_resuming_automatically_or_from_a_path_continues(tmp_path: Path, resume: str) -> None:
    unfinished(tmp_path / "lm")
    assert choose_folder("lm", resume=resume, runs=tmp_path).path == tmp_path / "lm"


def test_resume_never_leaves_an_unfinished_run_alone(tmp_path: Path) -> None:
    unfinished(tmp_path / "lm")
    assert choose_folder("lm", resume="never", runs=tmp_path) == RunFolder(tmp_path / "lm-2", attempt=1)


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "lm").mkdir()
    assert choose_folder("lm", runs=tmp_path) == RunFolder(tmp_path / "lm", attempt=1)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "/tmp/a", "a/", "../lm", "<b>x", "a b", "$(x)", "lm\n"]
)
def test_a_name_that_is_a_path_or_means_more_to_a_shell_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as refusal:
        choose_folder(name, runs=tmp_path)
    fix = "use letters, digits, dots, dashes and underscores; --run-dir takes a path"
    assert str(refusal.value) == f"{name!r} is not a run name: {fix}"


@pytest.mark.parametrize("name", ["lm", "lm-2", "lm_2.1", "größe", "-c"])
def test_a_name_of_letters_and_a_few_signs_is_taken(tmp_path: Path, name: str) -> None:
    assert choose_folder(name, runs=tmp_path).path == tmp_path / name


def test_a_run_is_called_after_its_file_whatever_that_is_called() -> None:
    assert name_after(Path("some/train.py")) == "train"
    assert name_after(Path("my train (1).py")) == "my-train-1-"


# --run-dir -----------------------------------------------------------------------------------------------------------


def test_a_run_dir_is_taken_as_it_is(tmp_path: Path) -> None:
    assert choose_folder("lm", run_dir=tmp_path / "here") == RunFolder(tmp_path / "here", attempt=1)


def test_a_run_dir_with_an_unfinished_run_goes_on(tmp_path: Path) -> None:
    unfinished(tmp_path / "here", attempt=2)
    assert choose_folder("lm", run_dir=tmp_path / "here") == RunFolder(tmp_path / "here", attempt=3)


def test_a_run_dir_with_a_finished_run_is_refused(tmp_path: Path) -> None:
    finished(tmp_path / "here")
    with pytest.raises(UserError) as refusal:
        choose_folder("lm", run_dir=tmp_path / "here")
    assert str(refusal.value) == f"{tmp_path / 'here'} holds a finished run: give another --run-dir"


def test_a_run_dir_with_an_unfinished_run_and_resume_never_is_refused(tmp_path: Path) -> None:
    unfinished(tmp_path / "here")
    with pytest.raises(UserError) as refusal:
        choose_folder("lm", run_dir=tmp_path / "here", resume="never")
    assert str(refusal.value) == (
        f"{tmp_path / 'here'} holds an unfinished run: give another --run-dir, or drop --resume never"
    )


# What is no run folder -----------------------------------------------------------------------------------------------


def make_foreign(path: Path) -> None:
    path.mkdir()
    (path / "holiday.jpg").write_bytes(b"\xff\xd8")


def make_file(path: Path) -> None:
    path.write_text("notes")


def make_unreadable_config(path: Path) -> None:
    path.mkdir()
    # Permissions do not stop root, but reading at address 0 of a process fails for everyone.
    (path / "config.toml").symlink_to("/proc/self/mem")


def make_unreadable_events(path: Path) -> None:
    (unfinished(path) / "events.jsonl").unlink()
    (path / "events.jsonl").mkdir()


REFUSED = {
    "a foreign folder": (make_foreign, "{path} is not a run folder (it has no config.toml): give another name"),
    "a file in the way": (make_file, "{path} is a file: a run needs a folder: give another name"),
    "an unreadable config": (make_unreadable_config, "cannot read the run folder {path}: input/output error"),
    "an unreadable log": (make_unreadable_events, "cannot read the run folder {path}: is a directory"),
}


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by --run-dir"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_readable_run_folder_is_refused_and_left_as_it_was(tmp_path: Path, what: str, by_name: bool) -> None:
    make, sentence = REFUSED[what]
    make(tmp_path / "lm")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as refusal:
        choose_folder("lm", None if by_name else tmp_path / "lm", runs=tmp_path)
    assert str(refusal.value).startswith(sentence.format(path=tmp_path / "lm"))
    assert "\n" not in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_lines_of_a_log_are_passed_over_and_said(tmp_path: Path) -> None:
    path = unfinished(tmp_path / "lm", attempt=3)
    with (path / "events.jsonl").open("ab") as file:
        file.write(b'nonsense\n\x00\xff\n{"time": 0, "kind": "step", "attempt": 3, "step": "many"}\n')
    folder = choose_folder("lm", runs=tmp_path)
    assert folder == RunFolder(path, attempt=4, lost=2)
    assert folder.announce() == (
        f"continuing the unfinished run {path}; 2 lines are damaged in its events.jsonl, and passed over"
    )


def test_a_foreign_folder_among_the_numbered_ones_is_refused(tmp_path: Path) -> None:
    finished(tmp_path / "lm")
    make_foreign(tmp_path / "lm-2")
    with pytest.raises(UserError, match=r"lm-2 is not a run folder \(it has no config.toml\)"):
        choose_folder("lm", runs=tmp_path)


def test_a_name_too_long_for_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r": file name too long$"):
        choose_folder("x" * 300, runs=tmp_path)


def test_choosing_writes_nothing(tmp_path: Path) -> None:
    finished(tmp_path / "lm")
    unfinished(tmp_path / "digits")
    before = tree(tmp_path)
    for name in ("lm", "digits", "linear"):
        choose_folder(name, runs=tmp_path)
        choose_folder(name, resume="never", runs=tmp_path)
    choose_folder("lm", run_dir=tmp_path / "deep" / "down")
    assert tree(tmp_path) == before


# Making the folder ---------------------------------------------------------------------------------------------------


def test_a_made_folder_holds_the_whole_config_and_room_for_logs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "lm", attempt=1)
    create_folder(folder, CONFIG)
    assert tree(folder.path) == {"config.toml": to_toml(CONFIG).encode(), "logs": None}
    assert folder.log("node1", 3) == folder.path / "logs" / "node1.3.log"
    assert folder.events == folder.path / "events.jsonl"


def test_going_on_replaces_the_config_and_keeps_everything_else(tmp_path: Path) -> None:
    unfinished(tmp_path / "lm")
    before = tree(tmp_path / "lm")
    create_folder(choose_folder("lm", runs=tmp_path), config_with("steps=700"))
    assert tree(tmp_path / "lm") == {**before, "config.toml": to_toml(config_with("steps=700")).encode(), "logs": None}


def test_a_made_folder_is_an_unfinished_run(tmp_path: Path) -> None:
    create_folder(choose_folder("lm", runs=tmp_path), CONFIG)
    assert choose_folder("lm", runs=tmp_path) == RunFolder(tmp_path / "lm", attempt=2)


@pytest.mark.parametrize("below", ["file/run", "file/deep/down/run"])
def test_a_folder_below_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("notes")
    with pytest.raises(UserError) as refusal:
        create_folder(choose_folder("lm", run_dir=tmp_path / below), CONFIG)
    assert str(refusal.value) == f"cannot write to {tmp_path / below}: not a directory; give another --run-dir"
    assert tree(tmp_path) == {"file": b"notes"}


def test_a_file_system_that_takes_no_folders_is_refused() -> None:
    with pytest.raises(UserError) as refusal:
        create_folder(choose_folder("lm", run_dir=Path("/proc/runs/lm")), CONFIG)
    assert str(refusal.value) == "cannot write to /proc/runs/lm: no such file or directory; give another --run-dir"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], AbstractContextManager[None]]:
    """A disk on which a file can still be made, but writing or renaming it fails."""

    @contextmanager
    def full(method: str) -> Iterator[None]:
        def fail(path: Path, *_: object, **__: object) -> None:
            path.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(Path, method, fail)
            yield

    return full


@pytest.mark.parametrize("there_before", ["", "runs", "runs/lm"])
@pytest.mark.parametrize("failing", ["write_text", "replace"])
def test_a_disk_that_fills_up_meanwhile_is_refused_and_left_as_it_was(
    tmp_path: Path, full_disk: Callable[[str], AbstractContextManager[None]], there_before: str, failing: str
) -> None:
    (tmp_path / there_before).mkdir(parents=True, exist_ok=True)
    before = tree(tmp_path)
    with full_disk(failing), pytest.raises(UserError) as refusal:
        create_folder(RunFolder(tmp_path / "runs" / "lm", attempt=1), CONFIG)
    assert str(refusal.value) == (
        f"cannot write to {tmp_path / 'runs' / 'lm'}: no space left on device; give another --run-dir"
    )
    assert tree(tmp_path) == before


@pytest.mark.parametrize("failing", ["write_text", "replace"])
def test_a_disk_that_fills_up_while_going_on_keeps_the_run(
    tmp_path: Path, full_disk: Callable[[str], AbstractContextManager[None]], failing: str
) -> None:
    create_folder(RunFolder(tmp_path / "lm", attempt=1), CONFIG)
    before = tree(tmp_path)
    folder = choose_folder("lm", runs=tmp_path)
    with full_disk(failing), pytest.raises(UserError, match="no space left on device"):
        create_folder(folder, config_with("steps=700"))
    assert tree(tmp_path) == before


def test_a_config_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    write_config(tmp_path, config_with("steps=700"))
    assert tree(tmp_path) == {"config.toml": to_toml(config_with("steps=700")).encode()}


# Going on with the same training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        [],
        ["steps=9000"],
        ["epochs=3"],
        ["layout=fsdp=2", "nproc=2"],
        ["device=cpu", "backend=gloo"],
        ["timeout_minutes=1.0"],
        ["validate_every=never", "save_every=5 minutes", "keep=9"],
        ["data.workers=3", "data.prefetch=9", "data.persistent=false"],
        ["name=other"],
    ],
    ids=lambda changed: "; ".join(changed) or "nothing",
)
def test_going_on_may_change_how_far_and_where_but_not_what(tmp_path: Path, changed: list[str]) -> None:
    unfinished(tmp_path / "lm")
    check_same_training(RunFolder(tmp_path / "lm", attempt=2), config_with(*changed))


@pytest.mark.parametrize(
    ("changed", "key", "old", "new"),
    [
        ("seed=1", "seed", 0, 1),
        ("global_batch=64", "global_batch", 16, 64),
        ("precision=bf16", "precision", "fp32", "bf16"),
        ("clip=0.5", "clip", 1.0, 0.5),
        ("optimizer.lr=0.5", "optimizer.lr", 0.006, 0.5),
        ("schedule.name=linear", "schedule.name", "cosine", "linear"),
        ("data.shuffle=false", "data.shuffle", True, False),
        ("data.path=mine.txt", "data.path", None, "mine.txt"),
        ("model.layers=2", "model.layers", 4, 2),
        (
            "optimizer.args.weight_decay=0.0",
            "optimizer.args",
            {"weight_decay": 0.1, "betas": [0.9, 0.99]},
            {"weight_decay": 0.0, "betas": [0.9, 0.99]},
        ),
    ],
)
def test_going_on_with_other_numbers_is_refused_by_the_key_that_changed(
    tmp_path: Path, changed: str, key: str, old: object, new: object
) -> None:
    unfinished(tmp_path / "lm")
    with pytest.raises(UserError) as refusal:
        check_same_training(RunFolder(tmp_path / "lm", attempt=2), config_with(changed))
    assert str(refusal.value) == (
        f"{tmp_path / 'lm'} is an unfinished run with {key} = {old!r}, now it is {new!r}: "
        "use the old value, or --name for a new run, or --resume never"
    )


def test_going_on_with_another_recipe_is_refused(tmp_path: Path) -> None:
    unfinished(tmp_path / "lm")
    with pytest.raises(UserError, match="is an unfinished run with recipe = 'lm', now it is 'digits'"):
        check_same_training(RunFolder(tmp_path / "lm", attempt=2), config_with("recipe=digits"))


def test_a_script_does_not_go_on_with_a_run_of_something_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, 2)
    (tmp_path / "config.toml").write_text('recipe = "digits"\n')
    check_same_script(folder, Path("digits.py"))  # there is nothing to go on from
    step_folder(tmp_path, 5).mkdir(parents=True)
    with pytest.raises(UserError, match=r"is an unfinished run of lockstep train digits, not of digits\.py"):
        check_same_script(folder, Path("digits.py"))
    (tmp_path / "config.toml").write_text("seed = 0\n")
    with pytest.raises(UserError, match=r"is an unfinished run of another script, not of digits\.py"):
        check_same_script(folder, Path("digits.py"))
    (tmp_path / "config.toml").write_text('script = "examples/digits.py"\n')
    check_same_script(folder, Path("./digits.py"))


@pytest.mark.parametrize("config", ['recipe = "digits"\n', "seed = 0\n"], ids=["a Trainer", "a version before"])
def test_a_run_whose_config_does_not_name_its_script_is_known_by_the_code_that_saved_it(
    tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_folder(tmp_path, 5).mkdir(parents=True)
    (tmp_path / "config.toml").write_text(config)
    monkeypatch.setattr("lockstep.checkpoint.disk.code.saved_code", lambda _: (5, {"digits.py": "0123"}))
    check_same_script(RunFolder(tmp_path, 2), Path("there/digits.py"))
    with pytest.raises(UserError, match="is an unfinished run of"):
        check_same_script(RunFolder(tmp_path, 2), Path("other.py"))


def test_a_plain_start_keeps_its_script_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "slow.py"
    monkeypatch.setattr("sys.argv", [str(script), "--lr", "\udcff"])
    assert with_script(LaunchConfig()) == LaunchConfig(), "there is no such script"
    script.touch()
    create_folder(RunFolder(tmp_path / "run", 1), with_script(LaunchConfig(seed=3)))
    stored = read_toml(tmp_path / "run" / "config.toml")
    assert (stored["script"], stored["args"], stored["seed"]) == (str(script), ["--lr", "?"], 3)
