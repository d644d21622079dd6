"""Whatever happens to the files of a checkpoint: a run has the right weights, or says in one sentence why it has none.

The damage itself is in tests/faults/damage.py.
"""

from __future__ import annotations

import io
import shutil
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import pytest
import torch

from lockstep.checkpoint.disk.format import step_folder, steps_on_disk
from lockstep.cli.ckpt import ls_command, verify_command
from lockstep.engine import Engine
from lockstep.errors import UserError
from lockstep.layout import Layout
from tests.events import read_events
from tests.faults.damage import GOOD_STEPS, KINDS, NEWEST, Case, make_case
from tests.parity.problems import (
    GLOBAL_BATCH,
    RaggedTexts,
    TinyGPT,
    adamw,
    fingerprint,
    full,
    join,
    text_loss,
    unfinished,
    weights,
)
from tests.patience import patient
from tests.ranks import Job, RankPool

LAST_STEP = 8
SECONDS_PER_CASE = 6
LONGEST_SENTENCE = 1000


# ---- Loading


@dataclass
class Outcome:
    """What became of a run on one rank."""

    step: int = -1
    weights: str = ""
    optimizer: str = ""
    weights_at_the_end: str = ""
    refused: str | None = None
    raised: str | None = None
    looked: list[str] = field(default_factory=list)
    """What went wrong in the commands that only look at the checkpoints."""
    called_whole: bool = False
    """Whether the one that reads all of them found nothing."""
    warnings: list[str] = field(default_factory=list)


def optimizer_state(engine: Engine) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": full(torch.as_tensor(value))
        for name, parameter in engine.stored
        for key, value in engine.optimizer.state.get(parameter, {}).items()
    }


class Hung(Exception):  # noqa: N818 - not an OSError, which would pass for a file that cannot be read
    """A case took too long."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def out_of_time(_number: int, _frame: FrameType | None) -> None:
        raise Hung(f"not done after {seconds:g} s")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def resume(job: Job, layout: str, run_dir: Path, trains_on: bool) -> Outcome:
    """Continue a run; with `trains_on` do its last steps as well, and save from where it was newest."""
    outcome = Outcome()
    try:
        with (
            limited(job.patient(SECONDS_PER_CASE)),
            unfinished(join(job, layout, run_dir, meeting=run_dir.name)) as run,
        ):
            engine = run.setup(lambda: TinyGPT(dropout=0.2), text_loss, optimizer=adamw)
            outcome.step = engine.steps_done
            outcome.weights = fingerprint(weights(engine))
            outcome.optimizer = fingerprint(optimizer_state(engine))
            if trains_on:
                for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=LAST_STEP, workers=0):
                    if engine.step(batch).step >= NEWEST:
                        run.save(wait=True)
                run._checkpoints.wait()
                outcome.weights_at_the_end = fingerprint(weights(engine))
    except UserError as error:
        outcome.refused = str(error)
    except Exception as error:
        outcome.raised = told_shortly(error)
    events = read_events(run_dir / "events.jsonl")
    outcome.warnings = [event["text"] for event in events if event.get("level") == "warning"]
    return outcome


def told_shortly(error: BaseException) -> str:
    """An exception, and the last lines of Lockstep that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "/lockstep/" in frame.filename]
    return f"{type(error).__name__}: {error} ({' '.join(ours[-2:])})"


def look(run_dir: Path, outcome: Outcome) -> None:
    """`lockstep ckpt ls` and `verify`."""
    for command, as_json in ((ls_command, False), (ls_command, True), (verify_command, False), (verify_command, True)):
        try:
            with limited(patient(SECONDS_PER_CASE)), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                outcome.called_whole = command(run_dir, as_json) == 0
        except UserError:
            outcome.called_whole = False
        except Exception as error:
            outcome.looked.append(f"{command.__name__}: {told_shortly(error)}")
            if isinstance(error, Hung):
                break


def resume_all(job: Job, layout: str, cases: Sequence[tuple[Path, bool]]) -> list[Outcome]:
    outcomes = []
    for run_dir, trains_on in cases:
        (run_dir.parent / "at").write_text(run_dir.name)  # for the case that takes the process with it
        before = Outcome()
        if layout == "single":
            look(run_dir, before)
        after = resume(job, layout, run_dir, trains_on)
        outcomes.append(replace(after, looked=before.looked, called_whole=before.called_whole))
    return outcomes


# ---- What is damaged


def write_checkpoints(job: Job, run_dir: Path) -> None:
    with unfinished(join(job, "fsdp=2", run_dir)) as run:
        run.keep_checkpoints(len(GOOD_STEPS))
        engine = run.setup(lambda: TinyGPT(dropout=0.2), text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=NEWEST, workers=0):
            if engine.step(batch).step in GOOD_STEPS:
                run.save(wait=True)


@dataclass(frozen=True)
class Good:
    """A run with whole checkpoints, and by layout and step what it is to have when it goes on from each of them."""

    run_dir: Path
    expected: dict[str, dict[int, Outcome]]


@pytest.fixture(scope="module")
def good(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("fuzz")
    run_dir = folder / "run"
    ranks.run(write_checkpoints, 2, run_dir)
    assert steps_on_disk(run_dir) == list(GOOD_STEPS)
    expected: dict[str, dict[int, Outcome]] = {}
    for layout in ("single", "fsdp=2"):
        cases = []
        for step in GOOD_STEPS:
            copy = folder / f"{layout}-{step}"
            shutil.copytree(run_dir, copy)
            for newer in (s for s in GOOD_STEPS if s > step):
                shutil.rmtree(step_folder(copy, newer))
            cases.append((copy, True))
        outcomes = ranks.run(resume_all, Layout.parse(layout).world_size, layout, cases)[0]
        expected[layout] = dict(zip(GOOD_STEPS, outcomes, strict=True))
        for step, outcome in expected[layout].items():
            assert (outcome.step, outcome.warnings, outcome.raised, outcome.refused) == (step, [], None, None)
    assert expected["single"][NEWEST].weights == expected["fsdp=2"][NEWEST].weights
    return Good(run_dir, expected)


# ---- The promise


def problems_of(case: Case, outcomes: Sequence[Outcome], expected: dict[int, Outcome]) -> Iterator[str]:
    """How the ranks of a run broke the promise."""
    first = outcomes[0]
    if any(case.mark.glob("*/mark")):
        yield "something was unpickled"
    for rank, outcome in enumerate(outcomes):
        if outcome.raised is not None and (rank == 0 or first.refused is None):
            yield f"rank {rank} raised {outcome.raised}"
    yield from first.looked
    if first.called_whole and first.warnings:
        yield f"ckpt verify found nothing, and then {first.warnings[0]}"
    for sentence in (*first.warnings, first.refused or ""):
        if not sentence.isprintable() or len(sentence) > LONGEST_SENTENCE:
            yield f"not a sentence for people: {sentence[:300]!r} ({len(sentence)} characters)"
    untouched = [step for step in expected if step not in case.damage]
    if first.refused is not None:
        if untouched and not case.forged:
            yield f"refused though step {max(untouched)} is whole: {first.refused}"
        return
    if first.step == -1:
        return
    if first.step not in expected:
        yield f"went on from step {first.step}, which was never saved"
        return
    if first.step < max(untouched, default=0):
        yield f"went on from step {first.step} though step {max(untouched)} is whole"
    for rank, outcome in enumerate(outcomes):
        right = expected[first.step]
        if outcome.step != first.step or outcome.weights != right.weights:
            yield f"rank {rank} silently has other weights than those of step {first.step}"
        elif outcome.optimizer != right.optimizer and not case.forged:  # a forger may say anything of it
            yield f"rank {rank} silently has another state of the optimizer than that of step {first.step}"
        elif not case.forged and outcome.raised is None and outcome.weights_at_the_end != right.weights_at_the_end:
            yield f"rank {rank} trained on from step {first.step} to other weights"
    for step, names in case.damage.items():
        told = [text for text in first.warnings if f"step {step} " in text and any(name in text for name in names)]
        if step > first.step and names and not told:
            yield f"no warning of step {step} names any of {sorted(names)}: {first.warnings}"


def check_all(
    ranks: RankPool,
    good: Good,
    folder: Path,
    layout: str,
    seeds: Sequence[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = [make_case(seed, good.run_dir, folder) for seed in seeds]
    runs = [(case.run_dir, not case.forged) for case in cases]
    world_size = Layout.parse(layout).world_size
    try:
        by_rank = ranks.run(resume_all, world_size, layout, runs, timeout=30 + 2 * len(cases))
    except AssertionError as error:
        at = next(case for case in cases if case.run_dir.name == (folder / "at").read_text())
        raise AssertionError(f"seed {at.seed} ({at.text}) took a rank with it") from error
    broken = [
        f"seed {case.seed} ({case.text}), {layout}: {problem}"
        for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True)
        for problem in problems_of(case, outcomes, good.expected[layout])
    ]
    went_back = sum(0 <= outcome.step < NEWEST for outcome in by_rank[0])
    refused = sum(outcome.refused is not None for outcome in by_rank[0])
    with capsys.disabled():
        print(f"\n{len(cases)} damaged runs: {went_back} went back, {refused} were refused", end=" ")
    assert went_back >= len(cases) / 3, "too little damage to say anything"
    assert not broken, f"{len(broken)} broken promises\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("layout", "seeds"),
    [("single", range(0, KINDS, 2)), pytest.param("fsdp=2", range(1000, 1006), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_damaged_checkpoint_gives_the_right_weights_or_a_sentence(
    ranks: RankPool, good: Good, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, seeds: range
) -> None:
    check_all(ranks, good, tmp_path, layout, seeds, capsys)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.limit(600)
@pytest.mark.parametrize(
    ("layout", "seeds"),
    [("single", range(2000, 2000 + 2 * KINDS)), ("fsdp=2", range(3000, 3000 + KINDS))],
    ids=str,
)
def test_hundreds_more_give_the_right_weights_or_a_sentence(
    ranks: RankPool, good: Good, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, seeds: range
) -> None:
    check_all(ranks, good, tmp_path, layout, seeds, capsys)


# ---- The best checkpoint


def keep_the_best(job: Job, run_dir: Path) -> None:
    """The second step is the best until the last one is, and then it is deleted."""
    with unfinished(join(job, "single", run_dir, meeting="1")) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=NEWEST, workers=0):
            step = engine.step(batch).step
            run.save(best_loss={2: 3.5, NEWEST: 3.25}.get(step), wait=True)
        run._checkpoints.wait()


def load_the_best(job: Job, run_dir: Path) -> tuple[int, int]:
    with unfinished(join(job, "single", run_dir, meeting="2")) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        return engine.steps_done, run.load_best()


def test_a_run_that_went_back_does_not_take_a_deleted_checkpoint_for_its_best(ranks: RankPool, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ranks.run(keep_the_best, 1, run_dir)
    (step_folder(run_dir, NEWEST) / "index.json").unlink()
    ((began, best),) = ranks.run(load_the_best, 1, run_dir)
    assert began == NEWEST - 1
    assert best in steps_on_disk(run_dir)
