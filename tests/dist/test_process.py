"""A process after a run is what it was before: docs/process.md lists what a run changes in it."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import config as dynamo
from torch.utils.data import TensorDataset

import lockstep
from lockstep.layout import Layout
from lockstep.parallel.build.compile import allow_variants, keep_on_disk
from lockstep.runtime import process, stop_signals
from tests.parity.problems import join
from tests.ranks import Job, RankPool


def settings() -> dict[str, Any]:
    """What a process has once, and a run may change."""
    return {
        **{f"signal {number.name}": signal.getsignal(number) for number in (*stop_signals.STOPS, signal.SIGCHLD)},
        "excepthook": (_without_torch(sys.excepthook), threading.excepthook),
        "streams": (sys.stdout, sys.stderr, os.fstat(1).st_ino, os.fstat(2).st_ino),
        "collector": (gc.isenabled(), gc.get_freeze_count()),
        "threads of torch": torch.get_num_threads(),
        "tf32": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "distributions": torch.distributions.Distribution._validate_args,
        "compiler": (dynamo.recompile_limit, dynamo.accumulated_recompile_limit, dynamo.fail_on_recompile_limit_hit),
        "tag": torch.compiler.config.cache_key_tag,
        "cudnn": torch.backends.cudnn.enabled,
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "patches": (dist.Work.wait, torch.cuda.Stream.wait_event, torch.autograd.backward, torch.autograd.grad),
        "group": dist.is_initialized(),
    }


def _without_torch(hook: Any) -> Any:
    """torch's own hook, which says the rank, stays where a process group was made: see the hook before it."""
    while hook.__module__ == "torch.distributed.distributed_c10d":
        hook = inspect.getclosurevars(hook).nonlocals["old_hook"]
    return hook


def train(job: Job, layout: str, folder: str) -> list[str]:
    """What is different after a run, and what was not different inside of it although it should have been."""
    lockstep.init  # noqa: B018 - from here on UserErrors are one sentence
    gc.unfreeze()
    before, threads = settings(), set(threading.enumerate())
    with join(job, layout, Path(folder)) as run:
        allow_variants(40)
        keep_on_disk(Path(folder) / "compile")
        model = lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))  # noqa: E731

        def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
            return model(batch[0]).square().sum(), len(batch[0])

        engine = run.setup(model, loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
        for batch in run.loader(TensorDataset(torch.randn(8, 4)), global_batch=4, steps=2):
            engine.step(batch)
        inside = settings()
    after = settings()
    wanted = {"environment", "compiler", "collector", "excepthook", "patches", "group"}
    if Layout.parse(layout).team > 1:
        wanted |= {"fast path", "distributions"}
    end = time.monotonic() + 10
    while set(threading.enumerate()) - threads and time.monotonic() < end:
        time.sleep(0.05)
    left = [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("lockstep")]
    return (
        [f"{name}: {before[name]} became {after[name]}" for name in before if before[name] != after[name]]
        + [f"{name} was not changed" for name in wanted if before[name] == inside[name]]
        + [f"the thread {name} is left" for name in left]
    )


@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2"])
def test_a_process_is_after_a_run_what_it_was_before(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    for different in ranks.run(train, 2, layout, str(tmp_path / "run")):
        assert different == []


def test_a_setting_that_is_changed_twice_is_put_back_to_what_it_was_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "mine")
    monkeypatch.delenv("B", raising=False)
    before, filters = torch.get_num_threads(), list(warnings.filters)
    for text in ("one", "two"):
        process.set_environment("A", text)
        process.set_environment("B", text)
        process.ignore_warning("no such warning")
        process.set_threads(1)
        process.set_tf32(text == "one")
    process.set_default_environment("A", "three")
    assert (os.environ["A"], os.environ["B"], len(warnings.filters)) == ("two", "two", len(filters) + 1)
    process.put_back()
    assert (os.environ["A"], os.environ.get("B"), warnings.filters) == ("mine", None, filters)
    assert torch.get_num_threads() == before
    process.put_back()  # nothing more
