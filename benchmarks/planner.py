"""How far the planner is from what others measured: step times, memory, what did not fit, and which layout was best.

    python benchmarks/planner.py --cases benchmarks/published/cases.csv
    python benchmarks/planner.py --cases FILE.csv --json
    python benchmarks/planner.py --refit            # what the constants of benchmarks/stacks.py would be, by stack

`shipped` uses the constants of the library. `held out` leaves out all rows of one model, fits the four constants of its
stack to the others, and scores the rows that were left out; so no row is judged by constants that have seen its model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from lockstep.errors import UserError
from lockstep.planner.cost.checks import verdict
from lockstep.planner.cost.memory import estimate_memory
from lockstep.planner.cost.stack import Speeds
from lockstep.planner.cost.step_time import estimate_time
from lockstep.text import charts, svg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published_cases import Case, read_cases
from benchmarks.stacks import find_stack

CASES = Path(__file__).with_name("published") / "cases.csv"
FITTED = ("matmul", "traffic", "attention", "contention")
NEUTRAL = {"matmul": 0.9, "traffic": 1.0, "attention": 1.0, "contention": 0.2}
"""Where a fit begins, for all stacks alike."""
PRIOR = 0.3
"""How strongly a constant stays where it begins, relative to one row that is off by as much."""
ROBUST = 0.1
"""Rows that are farther off than this count less: some published runs were sick (benchmarks/published/README.md)."""
CONTEXT = 1.5 * 2**30
"""What nvidia-smi shows beside torch's memory (benchmarks/published/README.md)."""
FEWEST = 3
"""Layouts of a cell, at least, for a best one to mean something."""


@dataclass(frozen=True)
class Score:
    """Errors of one family, as shares of what was measured."""

    family: str
    what: str
    rows: int
    mean: float
    median: float
    worst: float
    bias: float


def score(family: str, what: str, ratios: Sequence[float]) -> Score:
    """Of predictions divided by measurements."""
    errors = [abs(ratio - 1) for ratio in ratios]
    return Score(family, what, len(errors), fmean(errors), median(errors), max(errors), fmean(ratios) - 1)


def time_ratio(case: Case, speeds: Speeds | None = None) -> float:
    """Predicted by measured seconds of a step."""
    assert case.job is not None
    assert case.seconds is not None
    job = case.job if speeds is None else replace(case.job, stack=replace(case.job.stack, speeds=speeds))
    return estimate_time(job).total / case.seconds


def fit(cases: Sequence[Case], begin: Speeds) -> Speeds:
    """The constants that bring predictions nearest to what was measured, on a logarithmic scale."""
    start = np.log([getattr(begin, name) for name in FITTED])

    def constants(x: np.ndarray) -> Speeds:
        return replace(begin, **{name: float(value) for name, value in zip(FITTED, np.exp(x), strict=True)})

    def residuals(x: np.ndarray) -> np.ndarray:
        speeds = constants(x)
        missed = np.array([math.log(time_ratio(case, speeds)) for case in cases])
        # Grows with the square root far out, so that a sick run does not pull.
        weighed = np.sign(missed) * ROBUST * np.sqrt(2 * (np.sqrt(1 + (missed / ROBUST) ** 2) - 1))
        return np.concatenate([weighed, PRIOR * (x - start)])

    x, damping = start.copy(), 1e-3
    now = residuals(x)
    for _ in range(25):
        step = 1e-3
        slopes = np.stack([(residuals(x + step * unit) - now) / step for unit in np.eye(len(x))], axis=1)
        normal = slopes.T @ slopes
        move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), slopes.T @ now)
        then = residuals(x + move)
        if then @ then < now @ now:
            done = float(np.abs(move).max()) < 1e-3
            x, now, damping = x + move, then, damping / 3
            if done:
                break
        else:
            damping *= 10
            if damping > 1e6:
                break
    return constants(x)


def by(cases: Iterable[Case], key: Callable[[Case], str]) -> dict[str, list[Case]]:
    """Cases in groups."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[key(case)].append(case)
    return groups


def stack(case: Case) -> str:
    """Whose software; versions that differ in what they keep are equally fast."""
    assert case.job is not None
    return case.job.stack.name.removesuffix("-2025")


def held_out(timed: Sequence[Case]) -> dict[str, float]:
    """By row: the ratio with constants that were fitted without its model; not where a stack has one model only."""
    ratios = {}
    for name, cases in by(timed, stack).items():
        models = by(cases, lambda case: case.model)
        for model, left_out in models.items():
            if others := [case for case in cases if case.model != model]:
                speeds = fit(others, replace(find_stack(name).speeds, **NEUTRAL))
                ratios |= {case.id: time_ratio(case, speeds) for case in left_out}
    return ratios


def memory_ratio(case: Case) -> float:
    """Predicted by measured bytes, of what the source calls memory."""
    assert case.job is not None
    assert case.memory_gib is not None
    memories = estimate_memory(case.job)
    measured = case.memory_gib * 2**30
    if "nvidia-smi" in case.memory_metric:
        return (max(memory.total for memory in memories) + CONTEXT) / measured
    if "analytic" in case.memory_metric or "read off" in case.memory_metric:
        return max(memory.allocated for memory in memories) / measured
    if case.family.startswith("nanotron"):  # its table is written by the first rank
        return memories[0].total / measured
    return max(memory.total for memory in memories) / measured


def said_to_fit(case: Case) -> bool:
    """What `lockstep plan` would say."""
    assert case.job is not None
    gpu = case.job.machine.gpu
    return all(verdict(memory, gpu) == "fits" for memory in estimate_memory(case.job))


def cell(case: Case) -> str:
    """Rows that differ only in how the work is cut."""
    job = case.job
    assert job is not None
    return f"{case.family}: {case.model} on {job.layout.world_size} GPUs, {job.global_batch} samples, {job.precision}"


def best_of_cells(timed: Sequence[Case]) -> list[dict[str, Any]]:
    """For every cell, how fast the layout that the planner ranks first was, relative to the fastest."""
    found = []
    for name, cases in by(timed, cell).items():
        layouts = {str(case.job.layout) for case in cases if case.job}
        if len(layouts) < FEWEST:
            continue
        # What is too full to be said to fit is not ranked, as long as there is something else.
        ranked = [case for case in cases if said_to_fit(case)] or cases
        chosen = min(ranked, key=lambda case: estimate_time(case.job).total if case.job else math.inf)
        fastest = min(cases, key=lambda case: case.seconds or math.inf)
        assert chosen.seconds is not None
        assert fastest.seconds is not None
        assert chosen.job is not None
        assert fastest.job is not None
        reached = fastest.seconds / chosen.seconds
        found.append(
            {
                "cell": name,
                "rows": len(cases),
                "chosen": f"{chosen.job.layout} micro-batch {chosen.job.micro_batch}",
                "fastest": f"{fastest.job.layout} micro-batch {fastest.job.micro_batch}",
                "reached": reached,
            }
        )
    return found


def scatter(points: dict[str, list[tuple[float, float]]]) -> str:
    """Measured to predicted seconds of a step, by family, with the band of ten per cent either way."""
    width, height, left, top, bottom, right = 760, 560, 74, 52, 58, 590
    values = [value for family in points.values() for point in family for value in point]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x_at(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (right - left)

    def y_at(value: float) -> float:
        return height - bottom - (math.log10(value) - low) / (high - low) * (height - top - bottom)

    body = [svg.text(left, 28, "Seconds of a step: published and predicted", 16, "ink strong")]
    for power in range(low, high + 1):
        at = 10.0**power
        body.append(f'<path d="M{left} {y_at(at):g}H{right}M{x_at(at):g} {top}V{height - bottom}" class="grid"/>')
        body.append(svg.text(left - 8, y_at(at) + 4, f"{at:g}", 12, "quiet end"))
        body.append(svg.text(x_at(at), height - bottom + 18, f"{at:g}", 12, "quiet mid"))
    start, end = 10.0**low, 10.0**high
    for factor, dash in ((1.0, ""), (1.1, "4 4"), (1 / 1.1, "4 4")):
        ends = f"M{x_at(start):.1f} {y_at(start * factor):.1f}L{x_at(end):.1f} {y_at(end * factor):.1f}"
        body.append(f'<path d="{ends}" class="ideal" stroke-dasharray="{dash}"/>')
    for index, (family, pairs) in enumerate(sorted(points.items())):
        again, colour = divmod(index, len(charts.LIGHT))
        marker = charts.MARKERS[(index + again) % len(charts.MARKERS)]
        marks = "".join(
            f'<path transform="translate({x_at(measured):.1f} {y_at(predicted):.1f}) scale(0.75)" d="{marker}"/>'
            for measured, predicted in pairs
        )
        body.append(f'<g class="s{colour}" opacity="0.75">{marks}</g>')
        body.append(
            f'<path class="s{colour}" transform="translate({right + 22} {top + 14 + 22 * index})" d="{marker}"/>'
        )
        body.append(svg.text(right + 34, top + 18 + 22 * index, f"{family} ({len(pairs)})", 12))
    body.append(svg.text((left + right) / 2, height - 14, "measured, s", 13, "quiet mid"))
    body.append(
        f'<g transform="translate(20 {(top + height - bottom) / 2:g}) rotate(-90)">'
        f"{svg.text(0, 0, 'predicted, s (dashed: 10 % off)', 13, 'quiet mid')}</g>"
    )
    colours = {f"s{i}": pair for i, pair in enumerate(zip(charts.LIGHT, charts.DARK, strict=True))}
    count = sum(map(len, points.values()))
    described = f"{count} published steps of {len(points)} families; the diagonal is a perfect prediction."
    drawn = svg.picture(width, height, "Published and predicted step times", described, body, colours)
    lines = ".grid { stroke: #8a94a0; stroke-opacity: 0.25; fill: none; } .ideal { stroke: #8a94a0; fill: none; }"
    return drawn.replace("</style>", f"{lines}\n</style>", 1)


def refitted(timed: Sequence[Case]) -> dict[str, Speeds]:
    """Constants for every stack, from all its rows."""
    return {name: fit(cases, replace(find_stack(name).speeds, **NEUTRAL)) for name, cases in by(timed, stack).items()}


def results(cases: Sequence[Case]) -> dict[str, Any]:
    """Everything that can be said of a table."""
    ran = [case for case in cases if case.status.lower() == "ok" and case.job]
    timed = [case for case in ran if case.seconds]
    apart = held_out(timed)
    scores = []
    for family, rows in sorted(by(timed, lambda case: case.family).items()):
        scores.append(score(family, "time, shipped", [time_ratio(case) for case in rows]))
        if unseen := [apart[case.id] for case in rows if case.id in apart]:
            scores.append(score(family, "time, held out", unseen))
    for family, rows in sorted(by(ran, lambda case: case.family).items()):
        if weighed := [memory_ratio(case) for case in rows if case.memory_gib]:
            scores.append(score(family, "memory", weighed))
    full = [case for case in cases if case.out_of_memory and case.job]
    return {
        "rows": len(cases),
        "scores": [asdict(found) for found in scores],
        "cells": best_of_cells(timed),
        "out_of_memory": [{"id": case.id, "said to fit": case.job is not None and said_to_fit(case)} for case in full],
        "not_jobs": [{"id": case.id, "why": case.reason} for case in cases if not case.job],
        "predictions": [
            {
                "id": case.id,
                "family": case.family,
                "measured_s": case.seconds,
                "predicted_s": estimate_time(case.job).total if case.job else None,
                "held_out_s": apart[case.id] * (case.seconds or 0.0) if case.id in apart else None,
                "said_to_fit": said_to_fit(case),
            }
            for case in timed
        ],
    }


def show(found: dict[str, Any]) -> str:
    """Tables for people."""
    lines = ["| family | what | rows | mean error | median | worst | bias |", "|---|---|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {row['family']} | {row['what']} | {row['rows']} | {row['mean']:.1%} | {row['median']:.1%} | "
        f"{row['worst']:.0%} | {row['bias']:+.1%} |"
        for row in found["scores"]
    ]
    cells = found["cells"]
    if cells:
        good = sum(row["reached"] >= 0.95 for row in cells)
        lines += [
            "",
            f"The layout ranked first reaches 95 % of the best published one in {good} of {len(cells)} cells:",
        ]
        for row in sorted(cells, key=lambda row: row["reached"]):
            lines.append(f"  {row['reached']:.0%}  {row['cell']}: {row['chosen']}, fastest {row['fastest']}")
    full = found["out_of_memory"]
    wrong = [row["id"] for row in full if row["said to fit"]]
    lines += ["", f"Published as out of memory: {len(full)}, of which said to fit: {len(wrong)} {' '.join(wrong)}"]
    reasons: dict[str, int] = defaultdict(int)
    for row in found["not_jobs"]:
        reasons[row["why"]] += 1
    if reasons:
        lines += ["", f"Rows that do not say enough to be a job: {sum(reasons.values())}"]
        lines += [f"  {count:3}  {why}" for why, count in sorted(reasons.items(), key=lambda pair: -pair[1])]
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=CASES, help="a table with the columns of the published cases")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument(
        "--refit", action="store_true", help="print what the constants of benchmarks/stacks.py would be"
    )
    parser.add_argument("--plot", type=Path, help="draw measured against predicted times as an SVG")
    options = parser.parse_args()
    try:
        cases = read_cases(options.cases)
    except UserError as error:
        print(f"planner.py: {error}", file=sys.stderr)
        return 2
    if options.refit:
        timed = [case for case in cases if case.status.lower() == "ok" and case.job and case.seconds]
        for name, speeds in refitted(timed).items():
            values = ", ".join(f"{constant} {getattr(speeds, constant):.3g}" for constant in FITTED)
            ratios = [time_ratio(case, speeds) for case in timed if stack(case) == name]
            missed = score(name, "", ratios)
            print(f"{name}: {values}  ({missed.rows} rows, mean {missed.mean:.1%}, median {missed.median:.1%})")
        return 0
    found = results(cases)
    if options.plot:
        points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row in found["predictions"]:
            if row["held_out_s"]:
                points[row["family"]].append((row["measured_s"], row["held_out_s"]))
        options.plot.write_text(scatter(points), encoding="utf-8")
    print(json.dumps(found, indent=1) if options.json else show(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
