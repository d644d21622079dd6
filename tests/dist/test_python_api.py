"""What the Python API says to people who give it something else than it wants: one sentence with the fix."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.checkpoint.disk.code import check_same_script
from lockstep.config.arguments import check_exports, check_setup
from lockstep.errors import UserError
from lockstep.faults import emergency
from lockstep.faults.uncaught import answer_user_errors
from lockstep.record.folder import RunFolder
from tests.events import read_events
from tests.parity.problems import join
from tests.ranks import Job, RankPool

DATA = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
Loss = Callable[[nn.Module, Any], Any]


def build() -> nn.Module:
    return nn.Linear(4, 1)


def squared(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


MODEL = nn.Linear(4, 1)
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"build_model": MODEL}, r"was given a model \(Linear\).*: give a function that makes it, such as lambda: Lin"),
        ({"build_model": 3}, "was given a int as build_model: give a function that makes the model"),
        ({"build_model": nn.Linear}, "build_model of run.setup cannot be called with 0 arguments"),
        ({"loss": nn.CrossEntropyLoss()}, "was given CrossEntropyLoss as its loss: give a function"),
        ({"loss": lambda model: model}, "the loss of run.setup cannot be called with 2 arguments"),
        ({"optimizer": OPTIMIZER}, r"an optimizer \(AdamW\).*: optimizer=lambda params: torch.optim.AdamW"),
        ({"optimizer": "adamw"}, "was given a str as optimizer: give a function such as lambda params"),
        (
            {"schedule": torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)},
            r"was given a scheduler \(StepLR\).*: make it after run.setup, StepLR\(engine.opt",
        ),
        ({"schedule": 0.5}, "was given a float as schedule: give a function of the step"),
        ({"clip": 0}, "clip is 0: give the largest global gradient norm"),
        ({"clip": "1.0"}, "clip is '1.0': give the largest global gradient norm"),
    ],
)
def test_setup_says_what_it_wants_instead(given: dict[str, Any], sentence: str) -> None:
    right: dict[str, Any] = {"build_model": build, "loss": squared, "optimizer": sgd, "schedule": None, "clip": None}
    with pytest.raises(UserError, match=sentence):
        check_setup(**(right | given))
    check_setup(**right)
    check_setup(nn.Identity, squared, torch.optim.AdamW, float, 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    begun = lockstep.init("single", device="cpu", run_dir=tmp_path_factory.mktemp("api") / "run")
    yield begun
    begun.leave()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda _: lockstep.init(lay_out="dp=2"), "lockstep.init has no argument lay_out: did you mean layout"),  # type: ignore[call-arg]
        (lambda run: run.setup(build, squared), "run.setup was called with wrong arguments: missing a required.*optim"),
        (lambda run: run.setup(build, squared, sgd), "too many positional arguments"),
        (lambda run: run.setup(build, squared, optimizer=sgd, clip_norm=1.0), "no argument clip_norm: .*mean clip"),
        (lambda run: run.setup(build, squared, optimizer=sgd, max_grad_norm=1), "argument max_grad_norm: .*mean clip"),
        (lambda run: run.loader(DATA, 8, microbatch=4), "run.loader has no argument microbatch: .*mean micro_batch"),
        (lambda run: run.loader(DATA, batch_size=8), "argument batch_size: did you mean global_batch or micro_batch"),
        (lambda run: run.loader(DATA, 8, num_workers=4), "no argument num_workers: did you mean workers"),
        (lambda run: run.loader(DATA, 8, xyzzy=4), "no argument xyzzy: it knows dataset, global_batch"),
        (lambda run: run.evaluate(DATA, batch_size=8), "run.evaluate has no argument batch_size: .*mean micro_batch"),
        (
            lambda run: run.log(1.0),
            r"run.log was called with .*: give each number by a name .* run.log\(loss=out.loss\)",
        ),
        (lambda run: run.keep(ema=[0.0]), r"run.keep was called with .*: give a name .* ema = run.keep\("),
        (
            lambda _: lockstep.Trainer(recipe="digits"),  # type: ignore[call-arg]
            "lockstep.Trainer has no argument recipe: it knows config, run",
        ),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(
    run: lockstep.Run, call: Callable[[Any], Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        call(run)


def test_a_loader_before_setup_is_refused(run: lockstep.Run) -> None:
    with pytest.raises(UserError, match=r"run.loader needs a model: call run.setup\(...\) before it"):
        run.loader(DATA, 8)


def nothing(*_: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"build_model": nothing}, "build_model returned nothing: let it return the model"),
        ({"optimizer": nothing}, r"optimizer function returned nothing: let it return a torch.optim.Optimizer"),
    ],
)
def test_what_is_built_and_made_is_looked_at(tmp_path: Path, wrong: dict[str, Any], sentence: str) -> None:
    begun = lockstep.init("single", device="cpu", run_dir=tmp_path / "run")
    with pytest.raises(UserError, match=sentence):
        begun.setup(**({"build_model": build, "loss": squared, "optimizer": sgd} | wrong))
    begun.leave()


def test_what_a_loader_reads_is_looked_at(tmp_path: Path) -> None:
    begun = lockstep.init("single", device="cpu", run_dir=tmp_path / "run")
    begun.setup(build, squared, optimizer=sgd)
    with pytest.raises(UserError, match="given a DataLoader: give its dataset"):
        begun.loader(DataLoader(DATA), 8)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="global_batch is '8': give a whole number from 1"):
        begun.loader(DATA, "8")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"run.evaluate has no argument batch_size: did you mean micro_batch"):
        begun.validate(DATA, batch_size=8)
    begun.leave()


def as_a_number(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().sum().item(), len(batch[0])


def detached(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().sum().detach(), len(batch[0])


def three_values(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().sum(), len(batch[0]), 0


def derives(model: nn.Module, batch: Any) -> Any:
    loss = model(batch[0]).square().sum()
    loss.backward(retain_graph=True)
    return loss, len(batch[0])


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (as_a_number, "a plain number without a gradient: return the loss itself, a tensor, without .item"),
        (detached, "a loss without a gradient, of weight 5: compute it with the model and without detach"),
        (three_values, r"the loss function returned 3 values: return \(sum of the losses, how many of them count\)"),
        (derives, "the loss function calls backward, which engine.step does itself: leave it out"),
    ],
)
def test_losses_without_a_gradient_or_with_two_are_refused(tmp_path: Path, loss: Loss, sentence: str) -> None:
    begun = lockstep.init("single", device="cpu", run_dir=tmp_path / "run")
    engine = begun.setup(build, loss, optimizer=sgd)
    with pytest.raises(UserError, match=sentence):
        engine.step(next(iter(begun.loader(DATA, 8, micro_batch=8, workers=0, steps=1))))
    begun.leave()


def with_input_gradients(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x = batch[0].clone().requires_grad_()
    model(x).sum().backward(inputs=[x])
    assert x.grad is not None
    return model(batch[0] + 0.1 * x.grad.sign()).square().sum(), len(batch[0])


def test_a_loss_may_derive_by_its_inputs_and_be_constant_where_nothing_counts(tmp_path: Path) -> None:
    def sometimes(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return with_input_gradients(model, batch) if batch[0].sum() > 0 else (torch.zeros(()), 0)

    with lockstep.init("single", device="cpu", run_dir=tmp_path / "run") as begun:
        engine = begun.setup(build, sometimes, optimizer=sgd)
        for batch in begun.loader(DATA, 8, micro_batch=1, workers=0, steps=1):
            assert engine.step(batch).weight == sum(bool(part.data[0].sum() > 0) for part in batch.micro_batches)


# ---- Whole scripts: what their run folder has afterwards


def test_a_run_of_plain_python_is_continued_by_lockstep_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "slow.py")])
    lockstep.init("single", device="cpu", run_dir=tmp_path / "run").leave()
    check_same_script(RunFolder(tmp_path / "run", 2), Path("slow.py"))
    with pytest.raises(UserError, match=r"is an unfinished run of .*slow.py, not of other.py"):
        check_same_script(RunFolder(tmp_path / "run", 2), Path("other.py"))


def test_a_checkpoint_that_is_none_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a checkpoint"):
        lockstep.init("single", device="cpu", run_dir=tmp_path / "run", resume="nowhere")
    assert list(tmp_path.iterdir()) == []


def refused_on(job: Job, folder: Path, ranks: tuple[int, ...]) -> str:
    patience = 5.0 if len(ranks) == job.world_size else 0.1
    try:
        with mock.patch.object(emergency, "SECONDS_FOR_THE_OTHERS", patience), join(job, "dp=2", folder) as begun:
            if job.rank in ranks:
                begun.setup(None, None, optimizer=None)  # type: ignore[arg-type]
            begun.leave()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_run_that_all_ranks_refuse_leaves_nothing(ranks: RankPool, tmp_path: Path, everywhere: bool) -> None:
    said = ranks.run(refused_on, 2, tmp_path / "runs" / "run", (0, 1) if everywhere else (0,))
    assert said[0].startswith("run.setup was given a NoneType as build_model")
    assert (tmp_path / "runs").exists() is not everywhere


ALWAYS = "the loss function returned weight 0 each time, so all were skipped and nothing is learnt"


@pytest.mark.parametrize(
    ("counts_from", "expected"), [(99, ["in 5 steps", "in any of the 8 steps"]), (7, ["in 5 steps"]), (2, [])]
)
def test_a_loss_that_never_counts_is_told_of(tmp_path: Path, counts_from: int, expected: list[str]) -> None:
    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        total, count = squared(model, batch)
        return (total, count) if engine.steps_done + 1 >= counts_from else (0 * total, 0)

    with lockstep.init("single", device="cpu", run_dir=tmp_path / "run") as begun:
        engine = begun.setup(build, loss, optimizer=sgd)
        for batch in begun.loader(DATA, 17, micro_batch=17, workers=0, steps=8):
            engine.step(batch)
    warnings = [one["text"] for one in read_events(begun.folder.events) if one.get("level") == "warning"]
    assert [text for text in warnings if ALWAYS in text] == [
        f"nothing has counted {which}: {ALWAYS}; let it return (sum of the losses, how many of them count)"
        for which in expected
    ]
    assert sum("global_batch is 17, and the dataset has 16 samples" in text for text in warnings) == 1


# ---- Exports


def test_a_refused_export_keeps_what_was_trained(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    begun = lockstep.init("single", device="cpu", run_dir=tmp_path / "run")
    engine = begun.setup(build, squared, optimizer=sgd)
    for batch in begun.loader(DATA, 8, workers=0, steps=2):
        engine.step(batch)
    with pytest.raises(UserError, match=r"exists already: .*step 2 is saved, and `lockstep ckpt export .* --step 2 -o"):
        begun.export(tmp_path / "model.pt")
    assert begun.saved_step == 2
    begun.leave()


@pytest.mark.parametrize(
    ("line", "is_sure"),
    [
        ("run.export({path!r})", True),
        ("if __name__ == '__main__':\n    run.export({path!r}, optimizer=True)", True),
        ("def main():\n    with run:\n        run.export({path!r})", True),
        ("if not exists:\n    run.export({path!r})", False),
        ("run.export(path)", False),
        ("this is no Python", False),
    ],
)
def test_an_export_onto_a_file_is_refused_before_the_training(tmp_path: Path, line: str, is_sure: bool) -> None:
    script, taken = tmp_path / "train.py", tmp_path / "model.pt"
    script.write_text(line.format(path=str(taken)))
    check_exports(script)
    taken.touch()
    if is_sure:
        with pytest.raises(UserError, match=r"train.py exports to .*model.pt, which exists already: give another name"):
            check_exports(script)
    else:
        check_exports(script)


# ---- Under plain python

SCRIPT = """
import sys, threading, lockstep
if sys.argv[1] == "recipe":
    lockstep.Trainer({"recipe": "digit"})
thread = threading.Thread(target=lockstep.init, kwargs={"lay_out": "dp=2"})
thread.start()
thread.join()
with lockstep.init("single", run_dir="run") as run:
    run.setup(None, None, optimizer=None)
"""


@pytest.mark.parametrize(
    ("what", "sentences"),
    [
        ("recipe", ["lockstep: unknown recipe 'digit': did you mean 'digits'? (at train.py:4 in <module>)"]),
        (
            "run",
            [
                "lockstep: lockstep.init has no argument lay_out: did you mean layout?",
                "lockstep: run.setup was given a NoneType as build_model: give a function that makes the model, "
                "such as lambda: Net(...) (at train.py:9 in <module>)",
            ],
        ),
    ],
)
def test_a_user_error_is_one_sentence_and_exit_2(tmp_path: Path, what: str, sentences: list[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "train.py", what], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == sentences
    assert "UserError" not in done.stdout, "it was said"
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_the_sentence_comes_through_where_torch_collects_what_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    answer_user_errors.__wrapped__()
    with redirect_stderr(io.StringIO()), pytest.raises(SystemExit, match="2"):
        sys.excepthook(UserError, UserError("it is wrong", "mend it"), None)
    assert capfd.readouterr().err == "lockstep: it is wrong: mend it\n"
