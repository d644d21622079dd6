"""Is the planner's step time what a step takes on one GPU? GPT-2s of several sizes, predicted and measured.

Every cell is a training of its own, through the engine: some steps to warm up, then steps by the clock, in several
batches of which the median counts.

    python benchmarks/planner_time.py [--machine H200] [--cells 124M,350M] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from lockstep.layout import Layout
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.step_time import estimate_time
from lockstep.planner.machine.find_machine import find_machine
from lockstep.planner.model.parts import Shape
from lockstep.planner.model.transformer import transformer

WANTED = 0.20
WARM_UP, BATCHES, STEPS = 5, 5, 4
VOCABULARY = 50304


@dataclass(frozen=True)
class Cell:
    """A GPT-2 and how it is trained."""

    name: str
    layers: int
    width: int
    heads: int
    context: int
    micro_batch: int
    micro_batches: int = 1
    precision: Literal["fp32", "bf16"] = "bf16"
    recompute: bool = False
    compiled: bool = False


CELLS = (
    Cell("124M", 12, 768, 12, 1024, 16),
    Cell("124M fp32", 12, 768, 12, 1024, 8, precision="fp32"),
    Cell("124M compiled", 12, 768, 12, 1024, 16, compiled=True),
    Cell("350M, 4 micro-batches", 24, 1024, 16, 1024, 8, micro_batches=4),
    Cell("350M recompute", 24, 1024, 16, 1024, 16, recompute=True),
    Cell("1.3B", 24, 2048, 16, 2048, 4),
    Cell("1.3B compiled", 24, 2048, 16, 2048, 4, compiled=True),
    Cell("2.7B recompute", 32, 2560, 20, 2048, 4, recompute=True),
    Cell("7M, waits for Python", 6, 256, 8, 256, 8),
    Cell("124M, 8192 tokens", 12, 768, 12, 8192, 2),
)


def job_of(cell: Cell, machine: str) -> Job:
    """The cell as the planner sees it."""
    shape = Shape(cell.layers, cell.width, cell.heads, 4 * cell.width, VOCABULARY, positions=cell.context)
    return Job(
        model=transformer(cell.name, shape, cell.context),
        machine=find_machine(machine, gpus=1),
        layout=Layout(),
        global_batch=cell.micro_batch * cell.micro_batches,
        micro_batch=cell.micro_batch,
        recompute="full" if cell.recompute else "none",
        zero=0,
        precision=cell.precision,
        compiled=cell.compiled,
    )


def work(cell: Cell, out: Path) -> None:
    """Train the cell."""
    import torch
    from gpt2 import GPT2, Tokens
    from gpt2 import Shape as GptShape
    from torch import nn

    import lockstep

    shape = GptShape(cell.layers, cell.width, cell.heads, cell.context, VOCABULARY)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return model(batch["x"], batch["y"], "sum"), batch["y"].numel()

    run = lockstep.init()
    engine = run.setup(
        lambda: GPT2(shape),
        loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        clip=1.0,
        precision=cell.precision,
        recompute=cell.recompute,
        compile="blocks" if cell.compiled else "off",
    )
    batch = cell.micro_batch * cell.micro_batches
    steps = run.loader(
        Tokens(shape, 4096, 0), batch, micro_batch=cell.micro_batch, steps=WARM_UP + BATCHES * STEPS, workers=2
    )
    seconds: list[float] = []
    begin = 0.0
    for number, samples in enumerate(steps):
        if number >= WARM_UP and (number - WARM_UP) % STEPS == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            if number > WARM_UP:
                seconds.append((now - begin) / STEPS)
            begin = now
        engine.step(samples)
    torch.cuda.synchronize()
    seconds.append((time.perf_counter() - begin) / STEPS)
    out.write_text(json.dumps(seconds))
    run.close()


def measure(cell: Cell) -> list[float]:
    """Seconds of a step, by batch of steps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seconds.json")
        command = [sys.executable, "-m", "lockstep.cli", "run", "--nproc", "1", "--device", "cuda", "--restarts", "0"]
        command += ["--run-dir", f"{folder}/run", __file__, "--worker", cell.name, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode or not out.is_file():
            raise RuntimeError(f"{cell.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        found: list[float] = json.loads(out.read_text())
        return found


def main() -> int:
    """Measure the cells, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="H200", help="the GPU, as the planner's catalogue calls it")
    parser.add_argument("--cells", help="only those whose name contains one of these, by comma")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(next(cell for cell in CELLS if cell.name == options.worker), options.out)
        return 0
    wanted = options.cells.split(",") if options.cells else [""]
    rows: list[dict[str, Any]] = []
    print(f"{'cell':24} {'measured ms':>12} {'spread':>7} {'predicted':>10} {'error':>7}")
    for cell in (cell for cell in CELLS if any(part in cell.name for part in wanted)):
        seconds = measure(cell)
        measured, predicted = median(seconds), estimate_time(job_of(cell, options.machine))
        error = predicted.total / measured - 1
        spread = max(seconds) / min(seconds) - 1
        print(
            f"{cell.name:24} {1e3 * measured:12.2f} {spread:7.1%} {1e3 * predicted.total:10.2f} {error:+7.1%}",
            flush=True,
        )
        rows.append({**asdict(cell), "seconds": seconds, "predicted": asdict(predicted), "error": error})
    if options.json:
        options.json.write_text(json.dumps({"machine": options.machine, "rows": rows}, indent=1))
    worst = max(abs(row["error"]) for row in rows)
    print(f"largest error {worst:.1%}; wanted {WANTED:.0%}")
    return 0 if worst <= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
