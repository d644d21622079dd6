"""What a step costs on one GPU with Lockstep, Fabric, Lightning Trainer and Accelerate, next to a loop by hand.

GPT-2, bf16 autocast, fused AdamW, clipping at 1.0, the whole model compiled. The contenders live in one process and
take turns of a few steps in rotating order; their gradients are dropped between turns, so that they fit side by side.
The first turn compiles, the second warms up. Then come the timed rounds, and at last one turn under the profiler, which
tells what attention kernel really ran: a benchmark that believes its settings compares something else.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# This cache is keyed by the graph before the attention back end is chosen: one contender would be handed the kernels of
# another. The cache behind it knows the back end and stays on. Read when torch is imported.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
# For --device cpu: some virtual machines name AMX among the CPU's features and kill the process that uses it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import gpt2
import torch
from contenders import CONTENDERS, Losses, Problem, choose, quiet_peers
from gpt2 import GPT2, Shape, Size, Tokens, flops_per_token
from measuring import (
    OwnGarbageSetting,
    Say,
    in_turn,
    largest_difference,
    machine_text,
    past_the_console,
    ratio_cells,
    summary,
    versions,
)
from torch.profiler import ProfilerActivity, profile

import lockstep
from lockstep.run import Run

SEED = 0
PEAK_FLOPS = 989e12
"""bf16 without sparsity, of an H100 or H200 SXM."""
GIB = 1 << 30
LARGEST_DIFFERENCE = 1e-2
"""Of two loss curves in bf16, which carries 8 bits."""
ATTENTION = {"cuda": re.compile("^(?!triton_).*(flash|fmha|sdpa|attention)"), "cpu": re.compile("^aten::_scaled_dot")}
"""Names of attention kernels. What the compiler fuses around them has names with "attention" in them too."""


SIZES = {
    "tiny": Size(Shape(layers=2, width=64, heads=2, context=64, vocabulary=512), batch=4, block=3),
    "124m": Size(Shape(layers=12, width=768, heads=12, context=1024, vocabulary=50304), batch=32, block=10),
    "350m": Size(Shape(layers=24, width=1024, heads=16, context=1024, vocabulary=50304), batch=16, block=10),
    "1.5b": Size(Shape(layers=48, width=1600, heads=25, context=1024, vocabulary=50304), batch=8, block=5),
}


def main() -> None:
    options = arguments()
    quiet_peers()
    with tempfile.TemporaryDirectory() as folder:
        say = past_the_console(Path(folder) / "console.log")
        run = lockstep.init("single", run_dir=Path(folder) / "run", device=options.device, seed=SEED)
        try:
            failures = Benchmark(options, run, say).measure()
        except Exception:
            failures = [traceback.format_exc()]
        run.leave()
    for failure in failures:
        say(failure)
    raise SystemExit(bool(failures))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--batch", type=int, help="samples a step (default 32 for 124m, 16 for 350m, 8 for 1.5b)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="raw is always one (default all)")
    parser.add_argument("--rounds", type=int, default=6, help="timed turns of each contender (default 6)")
    parser.add_argument("--seconds", type=float, default=500, help="begin no round after so long (default 500)")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="write all figures to this file, as they come")
    return parser.parse_args()


class Benchmark:
    """One size on one device: what was measured so far."""

    def __init__(self, options: argparse.Namespace, run: Run, say: Say) -> None:
        self.began = time.perf_counter()
        self.print = say
        self.options = options
        self.run = run
        self.size = SIZES[options.size]
        self.device = run.device
        torch.manual_seed(SEED)
        with self.device:  # a GPU draws the weights of a large model in no time
            self.weights = GPT2(self.size.shape)
        self.weights.to("cpu")
        self.models: dict[str, GPT2] = {}
        self.garbage = OwnGarbageSetting()
        batch = options.batch or self.size.batch
        steps = self.size.block * (options.rounds + 3)
        self.problem = Problem(
            build_model=lambda: self.weights,
            dataset=Tokens(self.size.shape, steps * batch, SEED),
            batch=batch,
            steps=steps,
            block=self.size.block,
            device=self.device,
            precision="bf16",
            compiled=not options.eager,
            fused=True,
            shuffle=False,
            workers=2 if self.device.type == "cuda" else 0,
        )
        self.results: dict[str, Any] = {
            "machine": machine_text(),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "versions": versions(),
            "size": options.size,
            "compiled": not options.eager,
            **asdict(self.size),
            "batch": batch,
            "contenders": {},
        }

    def build_model(self, name: str) -> GPT2:
        """The model with the common weights, of a class that no other contender has.

        What torch.compile made of a forward belongs to its code, not to the model: with one class for all, a later
        contender would get the kernels, or pay for the guards, of an earlier one.
        """
        spec = importlib.util.spec_from_file_location(f"gpt2_of_{name}", gpt2.__file__)
        assert spec is not None
        assert spec.loader is not None
        own = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(own)
        with torch.device("meta"):
            model: GPT2 = own.GPT2(self.size.shape)
        model.to_empty(device="cpu")
        model.head.weight = model.tokens.weight
        model.load_state_dict(self.weights.state_dict())
        self.models[name] = model
        return model

    def measure(self) -> list[str]:
        """Everything, in order; returns what went wrong."""
        failures = []
        self.say(f"{self.results['device']}, {self.results['machine']}")
        self.say(", ".join(f"{name} {number}" for name, number in versions().items()))
        mode = "eager" if self.options.eager else "compiled"
        self.say(f"{self.options.size}, batch {self.problem.batch}, {mode}, {self.problem.block} steps a turn")
        loops: dict[str, Losses] = {}
        for name in choose(self.options.contenders):
            try:
                loops[name] = self.first_turn(name)
            except Exception as error:
                if name == "raw":
                    raise
                failures.append(f"{name} failed: {type(error).__name__}: {error}")
                self.say(traceback.format_exc())
                self.models.pop(name, None)
                gc.collect()
        for name, loop in loops.items():
            self.second_turn(name, loop)
        self.timed_rounds(loops)
        self.table()
        for name, loop in loops.items():
            self.profiled_turn(name, loop)
        failures += [
            f"the loss curve of {name} differs by {one['largest_difference']:.1e}"
            for name, one in self.results["contenders"].items()
            if not one["largest_difference"] < LARGEST_DIFFERENCE
        ]
        for loop in loops.values():
            loop.close()
        return failures

    def first_turn(self, name: str) -> Losses:
        """Build and compile one contender."""
        before = self.allocated()
        loop = CONTENDERS[name](replace(self.problem, build_model=lambda: self.build_model(name)), self.run)
        seconds, losses, _ = self.turn(name, loop)
        self.results["contenders"][name] = {
            "losses": losses,
            "first_turn_seconds": seconds,
            "resident_gib": (self.allocated() - before) / GIB,
            "times": [],
            "peak_gib": 0.0,
        }
        self.say(f"{name}: first turn {seconds:.1f} s")
        return loop

    def second_turn(self, name: str, loop: Losses) -> None:
        """Warm one contender up, now that all are there, and compare the loss curves so far."""
        one = self.results["contenders"][name]
        one["losses"] += self.turn(name, loop)[1]
        losses, reference = one["losses"], self.results["contenders"]["raw"]["losses"]
        one["largest_difference"] = largest_difference(losses, reference)
        self.say(
            f"{name}: loss {losses[0]:.5f} to {losses[-1]:.5f} in {len(losses)} steps, "
            f"at most {one['largest_difference']:.1e} away from raw"
        )

    def timed_rounds(self, loops: dict[str, Losses]) -> None:
        for number in range(self.options.rounds):
            if number and time.perf_counter() - self.began > self.options.seconds:
                self.say(f"out of time after {number} rounds")
                break
            for name in in_turn(list(loops), number):
                one = self.results["contenders"][name]
                seconds, _, above = self.turn(name, loops[name])
                one["times"].append(seconds / self.problem.block * 1e3)
                one["peak_gib"] = max(one["peak_gib"], one["resident_gib"] + above / GIB)
                self.say(f"round {number + 1}: {name} {one['times'][-1]:.2f} ms")

    def turn(self, name: str, loop: Losses) -> tuple[float, list[float], int]:
        """Let one contender do its steps: seconds, losses, and the bytes it needed beyond what stays between turns."""
        idle = self.allocated()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with self.garbage.of(name):
            began = time.perf_counter()
            losses = [next(loop) for _ in range(self.problem.block)]
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        numbers = [float(loss) for loss in losses]
        for model in self.models.values():
            model.zero_grad(set_to_none=True)
        return seconds, numbers, peak - idle

    def profiled_turn(self, name: str, loop: Losses) -> None:
        """Which attention kernels ran. Kernels of the CPU are seen only in the thread that profiles: not Trainer's."""
        on_gpu = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
            self.turn(name, loop)
        found = {
            short_name(event.key) for event in recorded.key_averages() if ATTENTION[self.device.type].search(event.key)
        }
        self.results["contenders"][name]["attention"] = sorted(found)
        self.say(f"{name}: attention by {', '.join(sorted(found)) or 'nothing seen'}")

    def table(self) -> None:
        contenders = self.results["contenders"]
        flops = flops_per_token(self.weights, self.size.shape)
        tokens = self.problem.batch * self.size.shape.context
        self.print("| contender | ms/step | tokens/s | MFU | GiB | ratio to raw | middle half | all rounds |")
        self.print("|---|---|---|---|---|---|---|---|")
        for name, one in contenders.items():
            one |= summary(one["times"], contenders["raw"]["times"])
            one["tokens_per_second"] = tokens / one["median_ms"] * 1e3
            one["mfu"] = one["tokens_per_second"] * flops / PEAK_FLOPS
            self.print(
                f"| {name} | {one['median_ms']:.2f} | {one['tokens_per_second']:,.0f} | {one['mfu']:.1%} "
                f"| {one['peak_gib']:.1f} | {ratio_cells(one)} |"
            )
        self.write()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def say(self, text: str) -> None:
        self.print(f"[{time.perf_counter() - self.began:5.0f} s] {text}")
        self.write()

    def write(self) -> None:
        if self.options.json:
            self.options.json.write_text(json.dumps(self.results, indent=1) + "\n")


def short_name(kernel: str) -> str:
    """A kernel's name without its template arguments."""
    return re.split("[<(]", kernel.removeprefix("void "))[0][:80]


if __name__ == "__main__":
    main()
