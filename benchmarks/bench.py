"""Does `lockstep bench` say what a loop by hand says, and does its curve predict sizes that it has not seen?

CPU ranks over gloo. Both live in the same processes and take turns, size after size, round after round: a point
of Lockstep, and the loop that one would write with torch.distributed: a few calls, a barrier, many calls, the clock,
and the slowest rank counts. A ratio is the median over the rounds of what two neighbouring turns say. The loop has two
turns in every round, and how far it is from itself says how much the machine allows to see.

In the same rounds the sizes halfway between the command's own (by factors of two) are measured by hand; what the curve
through the command's sizes, and its alpha and beta, predict for them is compared with that, medians with medians.

With --rate each rank is on a host of its own behind a slow cable (lab/cables.py): there a call takes what the cable
takes, and not what the machine's scheduler makes of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import FOLDER, Say, in_turn, machine_text, options_of, past_the_console, start_ranks

from lockstep.checkup.bench import SECONDS_A_POINT, sweep
from lockstep.cli.bench import parse_sizes
from lockstep.cli.options import parse_size
from lockstep.lab.cables import run_on_own_network
from lockstep.launch.probe import Seat, first_trouble
from lockstep.layout import Layout
from lockstep.links.collective_cost import Collective
from lockstep.links.fit import TimeCurve, fit_link
from lockstep.runtime.comm import Comm, gather_into, scatter_sums_into  # torch's own, under either name
from lockstep.runtime.rank_env import find_place

SIZES = "1kB:16MB"
CHOSEN: tuple[Collective, ...] = ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
LARGE = 64_000

AGREEMENT, PREDICTION = 0.10, 0.15
"""What is wanted: the largest differences, relative."""
CPU = torch.device("cpu")
HAND, AGAIN = "by hand", "by hand again"

Key = tuple[str, int]
"""A collective, and bytes."""


def by_hand(name: str, size: int) -> Callable[[], Any]:
    """A collective as one would write it, with nccl-tests' meaning of a size."""
    ranks = dist.get_world_size()
    whole = torch.ones(size // 4 // ranks * ranks)
    part = torch.ones(size // 4 // ranks)
    return {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: gather_into(whole, part),
        "reduce-scatter": lambda: scatter_sums_into(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }[name]


def timed_by_hand(name: str, size: int, seconds: float) -> float:
    """Seconds of a call, on the slowest rank."""
    call = by_hand(name, size)
    call()
    began = time.perf_counter()
    call()
    once = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    calls = max(2, min(2000, int(seconds / float(once))))
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def main() -> None:
    options = arguments()
    if options.rate:
        measure_over_cables(options)
    elif "RANK" in os.environ:
        measure_on_this_rank(options)
    else:
        raise SystemExit(start_ranks(options.ranks))


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.set_defaults(rounds=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rate", type=parse_size, help="bytes a second of each rank's cable, as in 20MB")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds = "4kB:64kB", 2
    return options


def measure_on_this_rank(options: argparse.Namespace) -> None:
    say = past_the_console(Path(os.environ[FOLDER]) / "console.log") if os.environ["RANK"] == "0" else lambda _: None
    say(f"{machine_text()}; torch {torch.__version__}, {options.ranks} ranks over gloo")
    layout = Layout(dp=options.ranks)
    comm = Comm(find_place(), layout, CPU, "gloo", datetime.timedelta(seconds=120))
    results = {"machine": machine_text(), "ranks": options.ranks, "torch": torch.__version__}
    results |= measure(comm, parse_sizes(options.sizes), options.rounds, say)
    if options.json and comm.rank == 0:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    comm.close()


def measure_over_cables(options: argparse.Namespace) -> None:
    """Each rank on a host of its own, whose cable is slower than the machine is noisy (root, or user namespaces)."""
    print(f"{machine_text()}; torch {torch.__version__}, {options.ranks} hosts with cables of {options.rate:,} bytes/s")

    def work(seat: Seat) -> dict[str, Any]:
        comm = seat.join(Layout(dp=options.ranks), CPU, "gloo", 120)
        return measure(comm, parse_sizes(options.sizes), options.rounds, seat.tell)

    hear = partial(print, flush=True)
    answers = run_on_own_network(work, options.ranks, options.rate, hear, seconds=3600)
    if (trouble := first_trouble(answers)) is not None:
        raise SystemExit(f"rank {trouble.rank} {trouble.trouble}\n{trouble.log}")
    if options.json:
        options.json.write_text(json.dumps({"rate": options.rate, **answers[0].value}, indent=1) + "\n")


def measure(comm: Comm, sizes: tuple[int, ...], rounds: int, say: Say) -> dict[str, Any]:
    """Both in turns; then how far they are apart, and how far predictions are from what was held out."""
    group = comm.group("dp")
    assert group is not None
    between = [size * 2 for size in sizes[:-1] if size * 2 < sizes[-1]]
    times: dict[str, dict[Key, list[float]]] = {who: defaultdict(list) for who in ("lockstep", HAND, AGAIN)}
    for number in range(rounds):
        for name in CHOSEN:
            for size in sorted([*sizes, *between]):
                for who in in_turn(list(times), number):
                    if who != "lockstep":
                        times[who][name, size].append(timed_by_hand(name, size, SECONDS_A_POINT))
                    elif size in sizes:
                        (row,) = sweep(comm, "dp", group, name, [size], CPU, SECONDS_A_POINT)
                        assert row.seconds is not None
                        times[who][name, size].append(row.seconds)
        say(f"  round {number + 1} of {rounds}")

    hand = times[HAND]
    ratios: dict[str, dict[Key, float]] = {
        who: {key: median(a / b for a, b in zip(own, hand[key], strict=True)) for key, own in times[who].items()}
        for who in ("lockstep", AGAIN)
    }
    misses: dict[str, dict[Key, float]] = {"curve": {}, "alpha and beta": {}}
    for name in CHOSEN:
        points = [(float(size), median(times["lockstep"][name, size])) for size in sizes]
        curve, link = TimeCurve.through(points), fit_link(points)
        for size in between:
            real = median(hand[name, size])
            misses["curve"][name, size] = curve.seconds(size) / real - 1
            misses["alpha and beta"][name, size] = link.seconds(size) / real - 1

    say("| ratio to the loop by hand | median | farthest | within 10 % |\n|---|---|---|---|")
    for who, of in ratios.items():
        for what, keys in split(of):
            far = max(keys, key=lambda key: abs(of[key] - 1))
            inside = sum(abs(of[key] - 1) <= AGREEMENT for key in keys)
            worst = f"{of[far]:.3f} ({far[0]}, {far[1]:,} bytes)"
            say(f"| {who}, {what} | {median(of[key] for key in keys):.3f} | {worst} | {inside} of {len(keys)} |")
    say("| predicted, of sizes held out | median miss | farthest | within 15 % |\n|---|---|---|---|")
    for by, found in misses.items():
        for what, keys in split(found):
            far = max(keys, key=lambda key: abs(found[key]))
            inside = sum(abs(found[key]) <= PREDICTION for key in keys)
            typical = median(abs(found[key]) for key in keys)
            say(
                f"| {by}, {what} | {typical:.1%} | {found[far]:+.1%} ({far[0]}, {far[1]:,} bytes) "
                f"| {inside} of {len(keys)} |"
            )
    return {
        "seconds": {who: named(one) for who, one in times.items()},
        "ratios": {who: named(one) for who, one in ratios.items()},
        "misses": {by: named(one) for by, one in misses.items()},
    }


def named(found: Mapping[Key, Any]) -> dict[str, Any]:
    return {f"{name} {size}": value for (name, size), value in found.items()}


def split(found: Mapping[Key, float]) -> list[tuple[str, list[Key]]]:
    """Large and small sizes, where there are any."""
    large = ("64 kB and more", [key for key in found if key[1] >= LARGE])
    small = ("less", [key for key in found if key[1] < LARGE])
    return [(what, keys) for what, keys in (large, small) if keys]


if __name__ == "__main__":
    main()
