"""What a step costs with Lockstep, Fabric, Lightning Trainer and Accelerate, next to a DDP loop written by hand.

Two CPU ranks over gloo, fp32. All contenders live in the same two processes and take turns of a few steps in rotating
order, so that whatever else the machine does hits all of them. First their loss curves are compared, on samples in
order; a difference fails the benchmark. Then they are timed on shuffled samples. What counts is the ratio to the raw
loop of the same round. A time is that of the slower rank.

Processor time is reported beside it: what the two processes made the cores do, waiting left out. It hardly depends on
what else the machine does, so on a busy one it is the figure to look at.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, Problem, choose, quiet_peers
from gpt2 import GPT2, Shape, Size, Tokens
from measuring import (
    FOLDER,
    OwnGarbageSetting,
    Say,
    in_turn,
    largest_difference,
    machine_text,
    options_of,
    past_the_console,
    ratio_cells,
    start_ranks,
    summary,
    turn,
    versions,
)

import lockstep
from lockstep.run import Run

RANKS = 2
SEED = 0
LARGEST_DIFFERENCE = 1e-5
WARMUP_TURNS = 2


SIZES = {
    "small": Size(Shape(layers=2, width=64, heads=2, context=64, vocabulary=256), batch=4, block=20),
    "medium": Size(Shape(layers=4, width=128, heads=4, context=128, vocabulary=256), batch=4, block=5),
}


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:
        measure_on_this_rank(options)
    else:
        raise SystemExit(start_ranks(RANKS))


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SIZES)} (default all)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="raw is always one (default all)")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    return options


def measure_on_this_rank(options: argparse.Namespace) -> None:
    say = past_the_console(Path(os.environ[FOLDER]) / "console.log") if os.environ["RANK"] == "0" else lambda _: None
    quiet_peers()
    say(f"{machine_text()}; {', '.join(f'{name} {number}' for name, number in versions().items())}")
    run = lockstep.init(f"dp={RANKS}", run_dir=Path(os.environ[FOLDER]) / "run", device="cpu", seed=SEED)
    names = choose(options.contenders)
    garbage = OwnGarbageSetting()
    results: dict[str, Any] = {"machine": machine_text(), "ranks": RANKS, "versions": versions(), "sizes": {}}
    wrong = []
    for size_name in options.sizes.split(","):
        result = results["sizes"][size_name] = measure(size_name, names, options, run, garbage, say)
        wrong += [
            f"the loss curve of {name} at size {size_name} differs by {difference:.1e}"
            for name, difference in result["largest_difference"].items()
            if not difference < LARGEST_DIFFERENCE
        ]
        if options.json and run.is_main:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    run.close()
    for line in wrong:
        say(line)
    raise SystemExit(bool(wrong))


def measure(
    size_name: str,
    names: Sequence[str],
    options: argparse.Namespace,
    run: Run,
    garbage: OwnGarbageSetting,
    say: Say,
) -> dict[str, Any]:
    """Compare the loss curves at one size, then time the contenders in turns."""
    size = SIZES[size_name]
    block = 3 if options.quick else size.block
    torch.manual_seed(SEED)
    weights = GPT2(size.shape)
    steps = block * (WARMUP_TURNS + options.rounds)

    def problem(shuffle: bool) -> Problem:
        return Problem(
            build_model=lambda: copy.deepcopy(weights),
            dataset=Tokens(size.shape, steps * size.batch * RANKS, SEED),
            batch=size.batch,
            steps=steps,
            block=block,
            device=torch.device("cpu"),
            shuffle=shuffle,
        )

    parameters = sum(parameter.numel() for parameter in weights.parameters())
    say(f"\n{size_name}: {parameters:,} parameters, {size.batch} x {size.shape.context} tokens a rank")
    curves = {}
    for name in names:
        loop = CONTENDERS[name](problem(shuffle=False), run)
        with garbage.of(name):
            losses = turn(loop, 2 * block).losses
        loop.close()
        curves[name] = run.reduce(torch.tensor(losses, dtype=torch.float64), "mean").tolist()
        difference = largest_difference(curves[name], curves["raw"])
        say(f"  {name}: loss {curves[name][0]:.6f} to {curves[name][-1]:.6f}, at most {difference:.1e} away from raw")

    loops = {name: CONTENDERS[name](problem(shuffle=True), run) for name in names}
    for _ in range(WARMUP_TURNS):
        for name in names:
            with garbage.of(name):
                turn(loops[name], block)
    times: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in in_turn(names, number):
            with garbage.of(name):
                done = turn(loops[name], block)
            times[name].append(run.reduce(done.seconds, "max") / block * 1e3)
            processor[name].append(run.reduce(done.processor_seconds, "mean") / block * 1e3)
        say(f"  round {number + 1}: " + ", ".join(f"{name} {times[name][-1]:.2f}" for name in names) + " ms")
    for loop in loops.values():
        loop.close()

    summaries = {name: summary(times[name], times["raw"]) for name in names}
    processor_summaries = {name: summary(processor[name], processor["raw"]) for name in names}
    for what, shown in (("wall clock", summaries), ("processor", processor_summaries)):
        say(f"| {what} | ms/step | us more than raw | ratio to raw | middle half | all rounds |")
        say("|---|---|---|---|---|---|")
        for name, one in shown.items():
            say(f"| {name} | {one['median_ms']:.2f} | {one['extra_us']:.0f} | {ratio_cells(one)} |")
    return {
        **asdict(size),
        "parameters": parameters,
        "block": block,
        "losses": curves,
        "largest_difference": {name: largest_difference(curves[name], curves["raw"]) for name in names},
        "contenders": summaries,
        "processor": processor_summaries,
    }


if __name__ == "__main__":
    main()
