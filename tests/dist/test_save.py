"""Saving beside the training: nothing is half there, nobody else may write, and what goes wrong stops the run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import lockstep
from lockstep.checkpoint import save as saving
from lockstep.checkpoint.disk.attempts import begin_attempt
from lockstep.checkpoint.disk.files import verify_checkpoint, write_shard
from lockstep.checkpoint.disk.format import DamageError, Group, OptimizerState, steps_on_disk
from lockstep.checkpoint.exchange.foreign import import_weights
from lockstep.checkpoint.manage import kept_no_longer
from lockstep.checkpoint.state import merge_optimizers
from lockstep.errors import SaveError, UserError
from lockstep.run import Run
from tests.events import read_events
from tests.parity.problems import GLOBAL_BATCH, RaggedTexts, TinyGPT, adamw, error_of, join, text_loss, unfinished
from tests.patience import wait_for
from tests.ranks import Job, RankPool


def steps_of(run: Run, steps: int) -> Any:
    """One step after another, each saved."""
    engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
    for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=steps, workers=0):
        yield engine.step(batch).step


# ---- Beside the training


class Slow:
    """Lets writing wait until it is told to go on."""

    def __init__(self) -> None:
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.began.set()
        self.may_go_on.wait()
        return write_shard(*args)


def test_the_training_goes_on_while_a_copy_is_written(tmp_path: Path) -> None:
    slow = Slow()
    with mock.patch.object(saving, "write_shard", slow), lockstep.init("single", run_dir=tmp_path / "run") as run:
        for step in steps_of(run, 6):
            if step == 2:
                saved = {name: tensor.detach().clone() for name, tensor in run.engine.stored}  # type: ignore[union-attr]
                run.save()
                slow.began.wait()
            if step == 5:
                assert steps_on_disk(tmp_path / "run") == [], "three steps later it is still being written"
                slow.may_go_on.set()
    assert steps_on_disk(tmp_path / "run") == [2]
    weights = lockstep.load(tmp_path / "run", TinyGPT, step="last").named_parameters()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights)
    [event] = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "checkpoint"]
    assert event["step"] == 2
    assert 0 < event["stall"] < event["seconds"]


def test_only_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    slow = Slow()
    with mock.patch.object(saving, "write_shard", slow), lockstep.init("single", run_dir=tmp_path / "run") as run:
        for step in steps_of(run, 2):
            if step == 2:
                threading.Timer(0.3, slow.may_go_on.set).start()
            run.save()
            if step == 2:
                assert slow.may_go_on.is_set(), "the second waited for the first"
                assert steps_on_disk(tmp_path / "run")[0] == 1


def test_without_memory_for_a_copy_the_training_waits(tmp_path: Path) -> None:
    memory = mock.Mock(available=1 << 20)
    with (
        mock.patch("psutil.virtual_memory", return_value=memory),
        lockstep.init("single", run_dir=tmp_path / "run") as run,
    ):
        for step in steps_of(run, 2):
            run.save()
            assert step in steps_on_disk(tmp_path / "run")


def fail_beside(job: Job, run_dir: Path) -> tuple[int, str]:
    """Rank 1 cannot write while the training goes on; returns the last step, and what every rank is told."""
    failing = OSError(5, "Input/output error") if job.rank == 1 else None
    last = 0
    with unfinished(join(job, "dp=2", run_dir)) as run:
        try:
            for step in steps_of(run, 50):
                last = step
                if step == 3:
                    run.save(wait=True)
                if step == 4:
                    with mock.patch.object(saving, "write_shard", side_effect=failing, wraps=write_shard):
                        run.save()
                        wait_for(lambda: run._checkpoints.has_failed, "the failure")
        except SaveError as error:
            return last, str(error)
    return last, "nobody noticed"


def test_a_write_error_stops_every_rank_at_the_next_steps_and_leaves_the_checkpoint_before(
    ranks: RankPool, tmp_path: Path
) -> None:
    for last, text in ranks.run(fail_beside, 2, tmp_path / "run"):
        assert last in (5, 6)
        assert text == "the checkpoint of step 4 was not written: rank 1: Input/output error"
    assert steps_on_disk(tmp_path / "run") == [3]


LAST_SAVE_FAILS = """
import lockstep
from unittest import mock
from tests.dist.test_save import *
run = lockstep.init("single", run_dir="run")
for step in steps_of(run, 2):
    if step == 2:
        mock.patch.object(saving, "write_shard", side_effect=OSError(5, "Input/output error")).start()
    run.save()
"""


def test_a_script_whose_last_save_fails_does_not_exit_as_if_all_were_well(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LAST_SAVE_FAILS)
    done = script_in(tmp_path)
    assert done.returncode == 1, done.stderr
    assert "lockstep: the checkpoint of step 2 was not written: Input/output error" in done.stderr
    assert steps_on_disk(tmp_path / "run") == [1]


SAVES_AND_ENDS = """
import lockstep
from tests.dist.test_save import *
slow = Slow()
mock.patch.object(saving, "write_shard", slow).start()
run = lockstep.init("single", run_dir="run")
for step in steps_of(run, 2):
    pass
run.save()
threading.Timer(1.0, slow.may_go_on.set).start()
"""


def test_a_script_that_ends_while_a_checkpoint_is_written_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAVES_AND_ENDS)
    done = script_in(tmp_path)
    assert done.returncode == 0, done.stderr
    assert verify_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002") > 0
    assert list(read_events(tmp_path / "run" / "events.jsonl"))[-1]["kind"] == "end"


def script_in(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a folder's script.py, or a command, to its end."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        command or [sys.executable, "script.py"],
        cwd=folder,
        env={"PYTHONPATH": f"{root / 'src'}:{root}", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        capture_output=True,
        text=True,
        check=False,
    )


# ---- Who may write


def overtaken(job: Job, run_dir: Path) -> list[str]:
    """Another attempt begins while this one trains, as when a cut-off node comes back: its save must not count."""
    errors = []
    with unfinished(join(job, "dp=2", run_dir)) as run:
        for step in steps_of(run, 4):
            if step == 2:
                run.save(wait=True)
                run._checkpoints.wait()
            if step == 3:
                run.once("the next attempt", lambda: str(begin_attempt(run_dir, 2)))
                errors.append(str(error_of(lambda: run.save(wait=True))))
                break
    return errors


def test_an_attempt_that_was_overtaken_cannot_write_any_more(ranks: RankPool, tmp_path: Path) -> None:
    for [error] in ranks.run(overtaken, 2, tmp_path / "run"):
        assert "another attempt of this run has begun" in error
    assert steps_on_disk(tmp_path / "run") == [2]


def test_an_attempt_that_is_overtaken_between_writing_and_renaming_cannot_rename(tmp_path: Path) -> None:
    rename = saving._commit

    def commit_late(*args: Any) -> None:
        begin_attempt(tmp_path / "run", 2)
        rename(*args)

    with unfinished(lockstep.init("single", run_dir=tmp_path / "run")) as run:
        for step in steps_of(run, 2):
            if step == 1:
                run.save(wait=True)
                run._checkpoints.wait()
            else:
                with (
                    mock.patch.object(saving, "_commit", commit_late),
                    pytest.raises(SaveError, match="another attempt"),
                ):
                    run.save(wait=True)
                break  # between steps an attempt that was overtaken ends its process
    assert steps_on_disk(tmp_path / "run") == [1]


# ---- What stays


def test_older_checkpoints_stay_until_the_new_one_was_read_back(tmp_path: Path) -> None:
    with unfinished(lockstep.init("single", run_dir=tmp_path / "run")) as run:
        run.keep_checkpoints(1)
        for step in steps_of(run, 3):
            if step == 3:
                with mock.patch.object(saving, "_read_back", side_effect=DamageError("it has changed")):
                    run.save()
                    with pytest.raises(SaveError, match="it has changed"):
                        run._checkpoints.wait()
            else:
                run.save(wait=True)
                run._checkpoints.wait()
                assert steps_on_disk(tmp_path / "run") == [step]
    assert steps_on_disk(tmp_path / "run") == [2, 3]


@pytest.mark.parametrize(
    ("keep", "every", "best", "gone"),
    [
        (2, None, None, [1, 2, 3, 4]),
        (2, None, 3, [1, 2, 4]),
        (1, 2, 3, [1, 5]),
        (9, None, None, []),
    ],
)
def test_the_last_the_best_and_every_so_many_stay(
    keep: int, every: int | None, best: int | None, gone: list[int]
) -> None:
    assert kept_no_longer([1, 2, 3, 4, 5, 6], 6, keep, every, best) == gone


# ---- Space


def test_a_run_that_the_disk_cannot_hold_is_refused_before_it_begins(tmp_path: Path) -> None:
    with (
        mock.patch("shutil.disk_usage", return_value=mock.Mock(free=10**6)),
        unfinished(lockstep.init("single", run_dir=tmp_path / "run")) as run,
        pytest.raises(
            UserError,
            match=r"no room for a checkpoint \(it needs .* 67.1 MB for logs, and .* too little\): free some space",
        ),
    ):
        run.setup(TinyGPT, text_loss, optimizer=adamw)


FILLS_ITS_DISK = """
import lockstep, sys
from torch import nn
from unittest import mock
from tests.dist.test_save import *
if sys.argv[1] == "unchecked":
    mock.patch.object(saving, "check_space").start()

class Wide(TinyGPT):
    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(700_000))

    def forward(self, tokens):
        return super().forward(tokens) + self.wide.sum()

run = lockstep.init("single", run_dir="disk/run")
run.keep_checkpoints(100)
engine = run.setup(Wide, text_loss, optimizer=adamw)
for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=8, steps=40, workers=0):
    engine.step(batch)
    run.save()
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, to mount a small disk")
@pytest.mark.parametrize("check", ["checked", "unchecked"])
def test_a_disk_that_fills_up_stops_the_run_and_all_older_checkpoints_are_whole(tmp_path: Path, check: str) -> None:
    """On a real small disk, of which a checkpoint takes a tenth; `unchecked` finds out when it writes."""
    (tmp_path / "script.py").write_text(FILLS_ITS_DISK)
    (tmp_path / "disk").mkdir()
    commands = [
        "mount -t tmpfs -o size=112m tmpfs disk",
        f"{sys.executable} script.py {check}; code=$?",
        "cp -r disk kept; exit $code",
    ]
    in_a_mount = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    done = script_in(tmp_path, *in_a_mount, " && ".join(commands[:2]) + "\n" + commands[2])
    assert done.returncode == 1, done.stderr
    assert "was not written: the disk is full" in done.stdout + done.stderr
    steps = steps_on_disk(tmp_path / "kept" / "run")
    assert len(steps) >= 4
    for step in steps:
        folder = tmp_path / "kept" / "run" / "checkpoints" / f"step-{step:08d}"
        assert verify_checkpoint(folder) > 0
    assert not list((tmp_path / "kept" / "run" / "checkpoints").glob(".attempt-*/*")), "the failed one is removed"


# ---- Odd models, and runs with a past


class Odd(TinyGPT):
    """Has a buffer of size 0, a single number, a complex one, and one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("one", torch.tensor(3.5))
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)


def train_on(run_dir: Path, steps: int, build: Any = TinyGPT, resume: str = "auto", save: bool = True) -> Run:
    """Train up to a step, save there, and leave the run as a crash would."""
    run = lockstep.init("single", run_dir=run_dir, resume=resume, seed=0)
    with unfinished(run):
        engine = run.setup(build, text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=8, steps=50, workers=0):
            if engine.steps_done == steps:
                break
            engine.step(batch)
        if save:
            run.save(wait=True)
            run._checkpoints.wait()
    return run


def flip(run_dir: Path, step: int) -> None:
    [shard] = (run_dir / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name.partition(".set-aside")[0] for path in (run_dir / "checkpoints").iterdir())


def test_empty_single_and_complex_tensors_come_back(tmp_path: Path) -> None:
    train_on(tmp_path / "run", 2, Odd)
    run = train_on(tmp_path / "run", 3, Odd)
    assert run.engine is not None
    assert run.engine.steps_done == 3
    assert verify_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003") > 0


def test_a_number_format_that_no_checkpoint_holds_is_refused_before_the_training(tmp_path: Path) -> None:
    class Exact(TinyGPT):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("exact", torch.zeros(2, dtype=torch.complex128))

    with pytest.raises(UserError, match="exact is complex128, which checkpoints cannot hold"):
        train_on(tmp_path / "run", 1, Exact)


@pytest.mark.parametrize("values", [(0, None), (-1, None), (2, 0)])
def test_keeping_less_than_one_checkpoint_is_refused(tmp_path: Path, values: tuple[int, int | None]) -> None:
    with (
        unfinished(lockstep.init("single", run_dir=tmp_path / "run")) as run,
        pytest.raises(UserError, match="give a whole number from 1"),
    ):
        run.keep_checkpoints(*values)


def test_the_best_weights_are_exported_when_they_are_in_the_model(tmp_path: Path) -> None:
    with lockstep.init("single", run_dir=tmp_path / "run") as run:
        for step in steps_of(run, 3):
            run.save(best_loss=1.0 if step == 2 else None)
        run.export(tmp_path / "last.pt")
        assert run.load_best() == 2
        run.export(tmp_path / "best.pt")
        assert run.engine is not None
        model = {name: tensor.clone() for name, tensor in run.engine.model.state_dict().items()}
    best, last = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("best", "last"))
    assert all(torch.equal(best[name], tensor) for name, tensor in model.items())
    assert not all(torch.equal(last[name], tensor) for name, tensor in model.items())


def test_going_back_to_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    for step in (2, 4):
        train_on(tmp_path / "run", step)
    flip(tmp_path / "run", 2)
    with pytest.raises(UserError, match="is damaged"):
        train_on(tmp_path / "run", 5, resume=str(tmp_path / "run" / "checkpoints" / "step-00000002"))
    assert names_in(tmp_path / "run") == ["step-00000002", "step-00000004"]


def test_the_same_command_that_went_back_goes_on_when_it_is_typed_again(tmp_path: Path) -> None:
    back = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    for step in (2, 4):
        train_on(tmp_path / "run", step)
    train_on(tmp_path / "run", 3, resume=back)
    assert steps_on_disk(tmp_path / "run") == [2, 3]
    train_on(tmp_path / "run", 5, resume=back)
    assert 3 in steps_on_disk(tmp_path / "run"), "it went on from step 3"
    assert ".step-00000004" in names_in(tmp_path / "run"), "renamed, not deleted"


def imported(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    torch.save(TinyGPT().state_dict(), tmp_path / "weights.pt")
    import_weights(tmp_path / "weights.pt", tmp_path / "run")
    return tmp_path / "run"


def test_a_run_that_goes_back_to_its_imported_weights_begins_at_step_0(tmp_path: Path) -> None:
    run_dir = imported(tmp_path)
    train_on(run_dir, 3)
    flip(run_dir, 3)
    run = train_on(run_dir, 3)
    assert run.saved_step == 3
    assert verify_checkpoint(run_dir / "checkpoints" / "step-00000003") > 0
    assert run.best is None


def test_an_imported_run_may_be_saved_before_its_first_step(tmp_path: Path) -> None:
    run_dir = imported(tmp_path)
    train_on(run_dir, 0)
    assert steps_on_disk(run_dir) == [0]
    expected = torch.load(tmp_path / "weights.pt", weights_only=True)
    state = lockstep.load(run_dir, TinyGPT, step="last").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_tied_weights_may_stand_in_a_file_once_but_not_twice_and_different(tmp_path: Path) -> None:
    state = TinyGPT().state_dict()
    for name, weights in {"once": {k: v for k, v in state.items() if k != "head.weight"}, "twice": dict(state)}.items():
        if name == "twice":
            weights["head.weight"] = weights["head.weight"] + 1
        torch.save(weights, tmp_path / f"{name}.pt")
        import_weights(tmp_path / f"{name}.pt", tmp_path / name)
    assert torch.equal(lockstep.load(tmp_path / "once", TinyGPT).state_dict()["head.weight"], state["head.weight"])
    for use in (lambda: lockstep.load(tmp_path / "twice", TinyGPT), lambda: train_on(tmp_path / "twice", 1)):
        with pytest.raises(UserError, match="are one parameter in the model and two in the checkpoint"):
            use()


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path: Path) -> None:
    with (
        mock.patch("lockstep.checkpoint.manage.remove", side_effect=OSError(39, "Directory not empty")),
        lockstep.init("single", run_dir=tmp_path / "run") as run,
    ):
        run.keep_checkpoints(1)
        for _ in steps_of(run, 2):
            run.save()
    events = read_events(tmp_path / "run" / "events.jsonl")
    texts = [event["text"] for event in events if event.get("level") == "warning"]
    assert texts == ["the checkpoint of step 1 cannot be deleted (Directory not empty), though it need not stay"]


def test_the_optimizer_of_a_pipeline_is_numbered_as_on_one_device() -> None:
    parts = [
        OptimizerState(name="AdamW", groups=[Group(parameters=names, options={})], values={})
        for names in (["a", "c"], ["b", "d", "a"])
    ]
    [group] = merge_optimizers(parts, ["a", "b", "c", "d"]).groups
    assert group.parameters == ["a", "b", "c", "d"]
