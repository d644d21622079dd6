"""The benchmarks run, and the tools they compare train the same model. How fast they are is not a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import clean_environment

CONTENDERS = ["raw", "fabric", "trainer", "accelerate", "lockstep"]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.limit(400)]


def benchmark(folder: Path, *command: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark to its end: what it wrote, and what it printed."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / command[0], *command[1:], "--json", "figures.json"],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "figures.json").read_text()), done.stdout


def rows(text: str) -> list[str]:
    """The contenders in the first column of the tables in a text."""
    cells = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return [cell for cell in cells if cell in CONTENDERS]


def test_two_cpu_ranks_train_the_same_with_every_tool(tmp_path):
    figures, printed = benchmark(tmp_path, "overhead.py", "--quick")
    assert rows(printed) == CONTENDERS * 4  # two sizes, wall clock and processor
    assert list(figures["sizes"]) == ["small", "medium"]
    for size in figures["sizes"].values():
        assert list(size["contenders"]) == CONTENDERS
        for name in CONTENDERS:
            assert size["losses"][name] == pytest.approx(size["losses"]["raw"], rel=1e-5)


def test_the_gpu_benchmark_trains_the_same_with_every_tool(tmp_path):
    figures, printed = benchmark(tmp_path, "gpu.py", "--size=tiny", "--device=cpu", "--eager", "--rounds=1")
    assert rows(printed) == CONTENDERS
    raw = figures["contenders"]["raw"]
    for name in CONTENDERS:
        assert figures["contenders"][name]["losses"] == pytest.approx(raw["losses"], rel=1e-2)
    assert any("flash" in kernel for kernel in raw["attention"])


def test_a_pipeline_trains_the_same_as_one_written_with_torch(tmp_path):
    figures, printed = benchmark(tmp_path, "pipeline.py", "--quick")
    assert "| lockstep |" in printed
    assert figures["losses"]["lockstep"] == pytest.approx(figures["losses"]["torch"], rel=1e-5)


def test_cut_matrices_train_the_same_as_those_cut_with_torch(tmp_path):
    figures, printed = benchmark(tmp_path, "tensor.py", "--quick")
    assert "| lockstep |" in printed
    assert figures["losses"]["lockstep"] == pytest.approx(figures["losses"]["torch"], rel=1e-5)
