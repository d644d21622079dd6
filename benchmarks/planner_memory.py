"""Is the planner's memory what a run really takes? GPT-2 under several layouts, predicted and measured, rank by rank.

Every cell is a training of its own: `lockstep run` with the cell's layout, a few steps. On CPUs every allocation of
torch is counted, in all threads (allocations.c, which needs a C compiler); on GPUs it is torch's own
max_memory_allocated. The peak counts from the second step on, since the optimizer makes its state at the end of the
first. Several ranks may share one GPU (--share-gpu), each with memory of its own.

    python benchmarks/planner_memory.py [--device cuda --share-gpu] [--cells single,fsdp] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Some virtual machines name AMX among the CPU's features and kill the process that uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from lockstep.layout import Layout
from lockstep.links.collective_cost import Link
from lockstep.planner.cost.estimate import Memory
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.memory import estimate_memory
from lockstep.planner.machine.hardware import GpuKind, Machine
from lockstep.planner.model.parts import Shape
from lockstep.planner.model.transformer import transformer

STEPS = 3
WANTED = 0.05
"""The largest difference that is good enough, relative."""
MIB = float(1 << 20)


@dataclass(frozen=True)
class Cell:
    """A layout and how it is trained. `micro_batches` are those of one data rank in a step."""

    layout: str
    zero: Literal[0, 1, 2, 3] = 3
    recompute: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"
    micro_batches: int = 1

    @property
    def name(self) -> str:
        """For the table."""
        extra = [f"zero{self.zero}"] * ("fsdp" in self.layout) + ["recompute"] * self.recompute + [self.precision]
        return " ".join([self.layout, *extra, f"{self.micro_batches} mb"])


CELLS = [
    Cell("single"),
    Cell("single", precision="bf16"),
    Cell("single", recompute=True, micro_batches=2),
    Cell("dp=2", zero=0),
    Cell("fsdp=2"),
    Cell("fsdp=2", recompute=True, precision="bf16"),
    Cell("fsdp=2", zero=1, micro_batches=2),
    Cell("fsdp=2", zero=2, precision="bf16"),
    Cell("tp=2"),
    Cell("tp=2", precision="bf16"),
    Cell("cp=2"),
    Cell("cp=2,fsdp=2"),
    Cell("pp=2", micro_batches=4),
    Cell("pp=2,fsdp=2", micro_batches=4),
    Cell("pp=2", precision="bf16", micro_batches=4),
]


@dataclass(frozen=True)
class Size:
    """A GPT-2 and its micro-batch."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    micro_batch: int

    def shape(self) -> Shape:
        """As the planner takes it; the head has a matrix of its own."""
        return Shape(
            layers=self.layers,
            hidden=self.width,
            heads=self.heads,
            ffn=4 * self.width,
            vocab=self.vocabulary,
            tied=False,
            positions=self.context,
        )


SIZES = {
    "small": Size(layers=6, width=256, heads=8, context=256, vocabulary=2048, micro_batch=4),
    "wide": Size(layers=4, width=384, heads=6, context=128, vocabulary=4096, micro_batch=8),
    "large": Size(layers=12, width=1024, heads=16, context=1024, vocabulary=32768, micro_batch=4),
}


def job_of(cell: Cell, size: Size, device: str) -> Job:
    """The cell as the planner sees it."""
    layout = Layout.parse(cell.layout)
    gpu = GpuKind(
        device, {"fp32": 1.0, "bf16": 1.0}, 1.0, 100.0, 100.0, 1, 1.0, 1.0, "not asked", is_cpu=device == "cpu"
    )
    link = Link(1e-5, 1e-9)
    return Job(
        model=transformer("gpt2", size.shape(), size.context),
        machine=Machine(device, gpu, layout.world_size, 1, link, link),
        layout=layout,
        global_batch=size.micro_batch * cell.micro_batches * layout.data_size,
        micro_batch=size.micro_batch,
        recompute="full" if cell.recompute else "none",
        zero=cell.zero if layout.fsdp > 1 else 0,
        sequence_parallel=device == "cuda" and layout.tp > 1,
        precision=cell.precision,
    )


def compile_counter(folder: Path) -> Path:
    """The library that counts allocations on CPUs."""
    library = folder / "allocations.so"
    source = Path(__file__).with_name("allocations.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def measure(cell: Cell, options: argparse.Namespace, folder: Path, counter: Path | None) -> list[float]:
    """The peak of every rank, in bytes."""
    layout = Layout.parse(cell.layout)
    command = [sys.executable, "-m", "lockstep.cli", "run", "--layout", cell.layout, "--device", options.device]
    command += ["--nproc", str(layout.world_size), "--run-dir", str(folder / "run"), "--restarts", "0"]
    command += ["--share-gpu"] * (options.share_gpu and layout.world_size > 1)
    command += [__file__, "--worker", str(CELLS.index(cell)), "--device", options.device, "--size", options.size]
    command += ["--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"LD_PRELOAD": str(counter)} if counter else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    found = [folder / f"{rank}.json" for rank in range(layout.world_size)]
    if done.returncode or not all(file.is_file() for file in found):
        raise RuntimeError(f"failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return [json.loads(file.read_text()) for file in found]


def work(cell: Cell, size: Size, device: str, out: Path) -> None:
    """One rank of a cell."""
    import torch
    from gpt2 import GPT2
    from gpt2 import Shape as GptShape
    from torch import nn

    import lockstep

    shape = GptShape(size.layers, size.width, size.heads, size.context, size.vocabulary)

    class Gpt(GPT2):
        def forward(self, x: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
            """The loss of the recipes, whose logits are in 32 bits: autocast alone keeps less on a GPU."""
            hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
            for block in self.blocks:
                hidden = block(hidden)
            logits = self.head(self.norm(hidden)).float()
            return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction=reduction)

    def build() -> nn.Module:
        model = Gpt(shape)
        model.head = nn.Linear(size.width, size.vocabulary, bias=False)
        return model

    class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index)
            window = torch.randint(size.vocabulary, (size.context + 1,), generator=generator)
            return {"x": window[:-1], "y": window[1:]}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return model(batch["x"], batch["y"], "sum"), batch["y"].numel()

    counter = ctypes.CDLL(os.environ["LD_PRELOAD"]) if device == "cpu" else None
    if counter:
        counter.peak_bytes.restype = ctypes.c_size_t
    level = f"zero{cell.zero}" if cell.zero else "zero3"
    run = lockstep.init()
    engine = run.setup(
        build,
        loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        clip=1.0,
        precision=cell.precision,
        recompute=cell.recompute,
        shard={"level": level},
    )
    global_batch = size.micro_batch * cell.micro_batches * run.layout.data_size
    steps = run.loader(Tokens(), global_batch, micro_batch=size.micro_batch, steps=STEPS, workers=0)
    for number, batch in enumerate(steps):
        if number == 1:
            counter.forget_peak() if counter else torch.cuda.reset_peak_memory_stats()
        engine.step(batch)
    peak = counter.peak_bytes() if counter else torch.cuda.max_memory_allocated()
    (out / f"{run.rank}.json").write_text(json.dumps(peak))
    run.close()


def predicted_for(job: Job, rank: int) -> Memory:
    """The estimate of a rank's pipeline stage."""
    memories = estimate_memory(job)
    return memories[-1] if job.layout.coordinate(rank)["pp"] else memories[0]


def main() -> int:
    """Measure the cells, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=SIZES, help="the model (default: small on CPUs, large on GPUs)")
    parser.add_argument("--share-gpu", action="store_true", help="ranks share one GPU")
    parser.add_argument("--cells", help="only those whose name contains one of these, by comma")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = options.size or {"cpu": "small", "cuda": "large"}[options.device]
    if options.worker is not None:
        work(CELLS[options.worker], SIZES[options.size], options.device, options.out)
        return 0
    chosen = [
        cell for cell in CELLS if not options.cells or any(part in cell.name for part in options.cells.split(","))
    ]
    rows: list[dict[str, Any]] = []
    print(f"{'cell':34} {'rank':>4} {'measured':>10} {'predicted':>10} {'error':>7}   MiB by term")
    for cell in chosen:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            counter = compile_counter(Path(folder)) if options.device == "cpu" else None
            try:
                peaks = measure(cell, options, Path(folder), counter)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{cell.name:34} {error}")
                rows.append({"cell": cell.name, "failed": str(error)})
                continue
        for rank, peak in enumerate(peaks):
            memory = predicted_for(job_of(cell, SIZES[options.size], options.device), rank)
            error = memory.allocated / peak - 1
            terms = {
                name: round(getattr(memory, name) / MIB, 1)
                for name in (
                    "parameters",
                    "gradients",
                    "optimizer",
                    "activations",
                    "logits",
                    "communication",
                    "shared",
                )
            }
            print(
                f"{cell.name:34} {rank:4} {peak / MIB:10.1f} {memory.allocated / MIB:10.1f} {error:+7.1%}   "
                + " ".join(f"{name[:5]} {value:g}" for name, value in terms.items() if value),
                flush=True,
            )
            seconds = time.perf_counter() - begin
            rows.append(
                {
                    "cell": cell.name,
                    "rank": rank,
                    "measured": peak,
                    "predicted": memory.allocated,
                    "error": error,
                    "seconds": seconds,
                    "terms": terms,
                }
            )
    errors = [abs(row["error"]) for row in rows if "error" in row]
    if errors:
        print(f"largest error {max(errors):.1%}, mean {sum(errors) / len(errors):.1%}; wanted {WANTED:.0%}")
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "size": options.size, "rows": rows}, indent=1))
    return (
        0 if errors and len(errors) == sum("rank" in row for row in rows) == len(rows) and max(errors) <= WANTED else 1
    )


if __name__ == "__main__":
    sys.exit(main())
