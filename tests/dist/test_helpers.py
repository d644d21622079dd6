"""What a script's own loop can call, and what it cannot: `run.print`, `run.reduce`, `run.once`, logs, timeouts."""

from __future__ import annotations

import datetime
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.init_run import SECONDS_FOR_THE_WATCHDOG
from lockstep.layout import Layout
from tests.parity.problems import (
    GLOBAL_BATCH,
    RaggedTexts,
    TinyGPT,
    adamw,
    error_of,
    join,
    text_loss,
    unfinished,
)
from tests.ranks import Job, RankFailed, RankPool

LAYOUTS = ["single", "dp=3", "dp=2,fsdp=2"]


def world_size(layout: str) -> int:
    return Layout.parse(layout).world_size


# ---- Output


def say_things(job: Job, layout: str, run_dir: Path) -> tuple[str, bool]:
    """What this rank wrote to the console it was born with, and whether it is the main one."""
    console = job.folder / f"console-{job.rank}"
    with console_in(console), join(job, layout, run_dir) as run:
        run.print("said", "once")
        print(f"said by rank {run.rank}", flush=True)
        print(f"complained by rank {run.rank}", file=sys.stderr, flush=True)
        os.write(1, f"called out by rank {run.rank}\n".encode())  # as libraries do that are not written in Python
        is_main = run.is_main
        run.reduce(0, "sum")  # who leaves early would take the others' connections down
    return console.read_text(), is_main


@contextmanager
def console_in(path: Path) -> Iterator[None]:
    """Stand in for a terminal: stdout and stderr of the process, descriptors and all, are a file."""
    born_with = os.dup(1), os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, saved in enumerate(born_with, start=1):
            os.dup2(saved, descriptor)
            os.close(saved)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_main_rank_speaks_on_the_console_and_every_rank_in_a_log_of_its_own(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    n = world_size(layout)
    everybody = ranks.run(say_things, n, layout, tmp_path / "run")
    assert [is_main for _, is_main in everybody] == [True] + [False] * (n - 1)
    consoles = [console for console, _ in everybody]
    assert consoles[1:] == [""] * (n - 1)
    assert consoles[0].count("said once\n") == 1
    assert "said by rank 0\n" in consoles[0]
    assert "complained by rank 0\n" in consoles[0]

    host = socket.gethostname().split(".")[0]
    logs = sorted((tmp_path / "run" / "logs").iterdir())
    assert [log.name for log in logs] == [f"{host}.{rank}.log" for rank in range(n)]
    for rank, log in enumerate(logs):
        text = log.read_text()
        assert f"said by rank {rank}\n" in text
        assert f"complained by rank {rank}\n" in text
        assert text.count("said once") == (rank == 0), "run.print speaks once, not once per rank"
        assert not any(f"by rank {other}" in text for other in range(n) if other != rank)
        if rank > 0:
            assert f"called out by rank {rank}\n" in text


# ---- Numbers over all ranks


def reduce_everything(job: Job, layout: str) -> dict[str, Any]:
    hows: list[Any] = ["sum", "mean", "min", "max"]
    with join(job, layout) as run:
        found: dict[str, Any] = {}
        for how in hows:
            matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (run.rank + 1)
            found[f"int {how}"] = run.reduce(run.rank + 1, how)
            found[f"float {how}"] = run.reduce(0.1 * (run.rank + 1), how)
            found[f"large int {how}"] = run.reduce(2**60 + run.rank, how)
            found[f"tensor {how}"] = run.reduce(matrix, how).tolist()
            # A view with gaps, of which the collectives of gloo would touch other elements.
            found[f"strided {how}"] = run.reduce(matrix[:, 1], how).tolist()
            found[f"integers {how}"] = run.reduce(torch.tensor([run.rank, 5]), how).tolist()
            assert matrix.equal(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (run.rank + 1)), "the argument stays"
            assert run.reduce(matrix.bfloat16(), how).dtype == torch.bfloat16
        found["refused"] = str(error_of(lambda: run.reduce(1, "median")))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reduce_gives_every_rank_the_sum_mean_minimum_and_maximum(ranks: RankPool, layout: str) -> None:
    n = world_size(layout)
    total, mean = n * (n + 1) / 2, (n + 1) / 2
    factors = {"sum": total, "mean": mean, "min": 1, "max": n}
    for found in ranks.run(reduce_everything, n, layout):
        for how, factor in factors.items():
            assert found[f"int {how}"] == factor
            assert isinstance(found[f"int {how}"], float if how == "mean" else int)
            assert found[f"float {how}"] == pytest.approx(0.1 * factor, rel=1e-15)
            assert found[f"tensor {how}"] == [[factor, 2 * factor], [3 * factor, 4 * factor]]
            assert found[f"strided {how}"] == [2 * factor, 4 * factor]
        assert found["large int max"] == 2**60 + n - 1, "whole numbers do not pass through a float"
        assert found["large int sum"] == n * 2**60 + n * (n - 1) // 2
        assert found["integers sum"] == [n * (n - 1) // 2, 5 * n]
        assert found["integers mean"] == [(n - 1) / 2, 5.0]
        assert found["refused"] == "cannot reduce by 'median': use one of sum, mean, min, max"


# ---- once

TIMEOUT = 4.0


def prepare_slowly(job: Job, layout: str) -> tuple[Any, float, int]:
    """Rank 0 prepares for longer than any collective would wait; a collective works afterwards."""
    calls, timeout = 0, job.patient(TIMEOUT)

    def prepare() -> dict[str, Any]:
        nonlocal calls
        calls += 1
        time.sleep(timeout + 1.0)
        return {"path": "/data/tokens", "sizes": [1, 2.5, None], "ready": True}

    with unfinished(join(job, layout, timeout_minutes=timeout / 60)) as run:  # a report would take its time, too
        result = run.once("download", prepare)
        return result, run.reduce(1.0, "sum"), calls


def test_the_others_wait_for_a_slow_preparation_longer_than_for_a_collective(ranks: RankPool) -> None:
    everybody = ranks.run(prepare_slowly, 2, "dp=2")
    assert [calls for _, _, calls in everybody] == [1, 0], "only one process prepares"
    for result, total, _ in everybody:
        assert result == {"path": "/data/tokens", "sizes": [1, 2.5, None], "ready": True}
        assert total == 2.0


def wait_for_a_late_rank(job: Job) -> None:
    """The control for the test above: a delay in front of a collective is too long for it."""
    with join(job, "dp=2", timeout_minutes=job.patient(TIMEOUT) / 60) as run:
        if run.rank == 0:
            time.sleep(100_000)
        run.reduce(1.0, "sum")


def test_a_collective_does_run_into_the_timeout(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="rank 1 died: exit code 1"):  # by its watchdog
        ranks.run(wait_for_a_late_rank, 2)


def fail_to_prepare(job: Job, layout: str) -> tuple[str, str, Any]:
    def prepare() -> None:
        raise FileNotFoundError("no such corpus")

    with join(job, layout) as run:
        error = error_of(lambda: run.once("corpus", prepare))
        # The run is in order after that, and the name can be used again.
        again = run.once("corpus", lambda: "found")
        run.reduce(0, "sum")
        return type(error).__name__, str(error), again


def test_a_failed_preparation_fails_on_every_rank(ranks: RankPool) -> None:
    first, *others = ranks.run(fail_to_prepare, 3, "dp=3")
    assert first == ("FileNotFoundError", "no such corpus", "found")
    for kind, text, again in others:
        assert kind == "RuntimeError"
        assert "rank 0 failed in once('corpus'): FileNotFoundError: no such corpus" in text
        assert again == "found"


def prepare_twice(job: Job, layout: str) -> list[Any]:
    with join(job, layout) as run:
        results = [run.once("data", partial(int, number)) for number in range(3)]
        results.append(run.once("other", lambda: "x"))
        run.reduce(0, "sum")
        return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_name_may_be_used_again(ranks: RankPool, layout: str) -> None:
    assert ranks.run(prepare_twice, world_size(layout), layout) == [[0, 1, 2, "x"]] * world_size(layout)


def prepare_what_is_not_json(job: Job, layout: str) -> str:
    with join(job, layout) as run:
        error = error_of(lambda: run.once("set", lambda: {1, 2}))
        run.reduce(0, "sum")
        return str(error)


@pytest.mark.parametrize("layout", ["dp=2"])
def test_a_result_that_cannot_be_shared_fails_on_every_rank(ranks: RankPool, layout: str) -> None:
    for text in ranks.run(prepare_what_is_not_json, world_size(layout), layout):
        assert "set is not JSON serializable" in text


# ---- Process groups


def timeouts(job: Job, layout: str) -> list[datetime.timedelta]:
    """Of every process group there is after a step: the default one, the one for decisions, those of the mesh."""
    with join(job, layout, timeout_minutes=7) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw, clip=1.0)
        engine.step(next(iter(run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, workers=0))))
        groups = list(dist.distributed_c10d._world.pg_map)
        return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


@pytest.mark.parametrize(("layout", "at_least"), [("dp=2", 2), ("fsdp=3", 2), ("dp=2,fsdp=2", 4)])
def test_every_process_group_has_the_timeout_of_the_run(ranks: RankPool, layout: str, at_least: int) -> None:
    for found in ranks.run(timeouts, world_size(layout), layout):
        assert len(found) >= at_least
        assert set(found) == {datetime.timedelta(minutes=7, seconds=SECONDS_FOR_THE_WATCHDOG)}


# ---- Refusals


def join_twice(job: Job, layout: str) -> str:
    with join(job, layout, meeting="1") as run:
        error = error_of(lambda: join(job, layout, meeting="2"))
        run.reduce(0, "sum")
        return str(error)


def test_a_second_init_is_refused(ranks: RankPool) -> None:
    for text in ranks.run(join_twice, 2, "dp=2"):
        assert text == "torch.distributed is already initialised: let lockstep.init() do it, and drop the other call"


def join_after_leaving(job: Job, layout: str) -> list[float]:
    sums = []
    for meeting in ("1", "2"):
        with join(job, layout, meeting=meeting) as run:
            sums.append(run.reduce(1.0, "sum"))
        assert not dist.is_initialized()
    return sums


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_was_left_makes_room_for_the_next(ranks: RankPool, layout: str) -> None:
    n = world_size(layout)
    assert ranks.run(join_after_leaving, n, layout) == [[n, n]] * n


def join_in_vain(job: Job, layout: str) -> tuple[Exception | None, bool, list[Path]]:
    error = error_of(lambda: join(job, layout))
    return error, dist.is_initialized(), list(job.folder.iterdir())


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("dp=3", "layout dp=3 needs 3 processes but there are 2: use --nproc 3, or layout dp=2"),
        ("dp=2,fsdp=2", "layout dp=2,fsdp=2 needs 2 x 2 = 4 processes but there are 2"),
        ("single", "layout single needs 1 process but there are 2"),
        ("auto", "layout auto is chosen by lockstep train and lockstep run"),
        ("pd=2", "unknown axis"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_anything_starts(
    ranks: RankPool, layout: str, sentence: str
) -> None:
    for error, started, written in ranks.run(join_in_vain, 2, layout):
        assert isinstance(error, UserError)
        assert sentence in str(error)
        assert not started
        assert written == []


def half_told(job: Job) -> str:
    import lockstep

    calls: list[Callable[[], Any]] = [
        lambda: lockstep.init("single", rank=0, run_dir=job.folder / "run"),
        lambda: lockstep.init("single", world_size=1, run_dir=job.folder / "run"),
    ]
    return " | ".join(str(error_of(call)) for call in calls)


def test_a_rank_without_a_world_size_is_refused(ranks: RankPool) -> None:
    sentence = "lockstep.init got one of rank and world_size: give both, or neither"
    assert ranks.run(half_told, 1) == [f"{sentence} | {sentence}"]


def call_out_of_order(job: Job) -> list[str]:
    with join(job, "single") as run:
        return [str(error_of(run.save)), str(error_of(lambda: run.evaluate(RaggedTexts(3))))]


def test_saving_and_evaluating_need_a_model(ranks: RankPool) -> None:
    (texts,) = ranks.run(call_out_of_order, 1)
    assert texts == [
        "run.save needs a model: call run.setup(...) before it",
        "run.evaluate needs a model: call run.setup(...) before it",
    ]


# ---- Random numbers before a step


def draw_after_init(job: Job) -> list[list[float]]:
    """What each library draws after init: in a rank that has a state of its own, and where the script seeds numpy."""
    random.seed()
    np.random.seed(7)
    torch.manual_seed(job.rank)
    with join(job, "dp=2"):
        return [[random.random()], np.random.rand(2).tolist(), torch.rand(2).tolist()]


def test_after_init_every_rank_draws_the_same_and_what_the_script_seeded_stays(ranks: RankPool) -> None:
    first, second = ranks.run(draw_after_init, 2)
    assert first == second
    np.random.seed(7)
    assert first[1] == np.random.rand(2).tolist()
