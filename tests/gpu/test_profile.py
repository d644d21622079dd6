"""Profiles on a GPU: kernels are the GPU's, memory is what its allocator counts."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.kernel_names import short_kernel_name
from tests.cli.commands import events
from tests.cli.commands import lockstep as command

pytestmark = pytest.mark.gpu

FEW_STEPS = ("--steps", "12", "--set", "schedule.warmup_steps=2", "--set", "validate_every=never")


def profiled(folder: Path, *options: str) -> tuple[Path, list[dict[str, Any]]]:
    done = command(folder, "train", "lm", *FEW_STEPS, "--profile", "6-8", *options)
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / "lm"
    return run, events(run, "profile")


def trace_of(run: Path, profile: dict[str, Any]) -> list[dict[str, Any]]:
    with gzip.open(run / profile["path"], "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def test_kernels_are_those_of_the_gpu_and_memory_is_its_allocators(tmp_path):
    run, (profile,) = profiled(tmp_path, "--nproc", "1")
    trace = trace_of(run, profile)
    on_gpu = {event["name"] for event in trace if event.get("cat") in ("gpu_memcpy", "gpu_memset")}
    on_gpu |= {short_kernel_name(event["name"]) for event in trace if event.get("cat") == "kernel"}
    assert {re.sub(r" \(\d+ kernels\)$", "", name) for name, *_ in profile["kernels"]} <= on_gpu
    assert not any(name.startswith("aten::") for name in on_gpu)
    steps = {event["name"] for event in trace if event["name"].startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"}, "the step before only warms up"

    seconds = profile["seconds"]
    assert 0 < seconds["compute"] <= seconds["whole"]
    assert seconds["communication"] == 0
    assert seconds["compute"] + seconds["idle"] == pytest.approx(seconds["whole"], rel=1e-6)

    counted = {event["args"]["Total Allocated"] for event in trace if event.get("args", {}).get("Device Type") == 1}
    assert {size for _, size in profile["memory"][1:]} <= counted
    (start,) = events(run, "start")
    lowest, peak = (choose(size for _, size in profile["memory"]) for choose in (min, max))
    assert lowest >= 12 * start["parameters"], "weights and Adam's two moments in fp32 are always there"
    assert peak <= max(event["memory"][0] for event in events(run, "ranks"))
    assert len(profile["tensors"]) == 10
    assert sum(size for size, *_ in profile["tensors"]) <= peak
    assert any("lm.py" in where for *_, where in profile["tensors"]), profile["tensors"]
    assert any(shape.endswith(("float32", "bfloat16")) for _, shape, _ in profile["tensors"])


def test_profiled_steps_are_not_counted_and_the_losses_stay(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "profiled").mkdir()
    done = command(tmp_path / "plain", "train", "lm", *FEW_STEPS, "--nproc", "1")
    assert done.returncode == 0, done.stderr
    run, _ = profiled(tmp_path / "profiled", "--nproc", "1")
    plain = [event["loss"] for event in events(tmp_path / "plain" / "runs" / "lm", "step")]
    # Sums of a GPU may be added up in another order from run to run.
    assert [event["loss"] for event in events(run, "step")] == pytest.approx(plain, rel=1e-3)
    assert sum(event["steps"] for event in events(run, "ranks")) == 12 - 1 - 4, "without the first, 5 and 6-8"


def test_ranks_that_share_a_gpu_communicate_over_gloo(tmp_path):
    _, profiles = profiled(tmp_path, "--nproc", "2", "--share-gpu", "--layout", "dp=2", "--profile-ranks", "all")
    assert [profile["rank"] for profile in profiles] == [0, 1]
    for profile in profiles:
        assert not any(name.startswith("aten::") for name, *_ in profile["kernels"])
        assert profile["seconds"]["communication"] > 0
        assert profile["seconds"]["compute"] > 0


def test_a_pipeline_and_compiled_blocks_are_profiled_too(tmp_path):
    (tmp_path / "pp").mkdir()
    (tmp_path / "compiled").mkdir()
    _, profiles = profiled(tmp_path / "pp", "--nproc", "2", "--share-gpu", "--layout", "pp=2", "--profile-ranks", "all")
    assert len(profiles) == 2
    _, (profile,) = profiled(tmp_path / "compiled", "--nproc", "1", "--set", "compile=blocks")
    assert any("triton" in name for name, *_ in profile["kernels"])
