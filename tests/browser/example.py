"""Pages with every kind of panel: one as a real run would fill it, one of bad strings, one that is nearly empty, one of
several runs, and a large one."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

from lockstep.page.panels import (
    Advice,
    AttemptBar,
    Chapter,
    Curve,
    Fact,
    Headline,
    Heat,
    HeatLayer,
    Lines,
    Mark,
    Mesh,
    MeshAxis,
    Moment,
    Number,
    Page,
    Panel,
    RunPage,
    Share,
    Shares,
    Stacked,
    Table,
    Text,
    Timeline,
    Timetable,
)

START = 1760000000.0
STEPS = 3000
SECONDS_PER_STEP = 0.42
HOSTILE = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u2028\'"&<b>'


def example_run(name: str = "lm-wikitext", steps: int = STEPS, seed: int = 0) -> RunPage:
    """A run of eight ranks on two hosts that was restarted once."""
    draw = random.Random(seed)
    at = [float(step) for step in range(1, steps + 1, max(1, steps // 600))]
    facts = [
        Fact("Goodput", "87.4 %", "time in steps whose result was kept", "good"),
        Fact("Speed", "41.2 k tokens/s", "at the median step of 398 ms"),
        Fact("MFU", "31.8 %", "of 8 x 989 Tflop/s: data sheet, dense bf16"),
        Fact("Validation loss", "2.913", "best of 30, at step 2,900", "good"),
        Fact("Cost", "2.81 GPU-hours", "8 ranks x 21 min, and 1.6 kWh without the CPUs"),
        Fact("Memory", "61.3 GB", "on the fullest rank, of 150 GB"),
        Fact("Foretold step", "374 ms", "6 % below what was measured"),
        Fact("Slowest rank", "rank 5 (node2)", "its input takes 84 ms of a step, that of the others 11 ms", "warning"),
    ]
    headline = Headline(
        title=name,
        subtitle="dp=2,tp=2,pp=2 on 8 GPUs of 2 nodes (NVIDIA H200, bf16), 124 M parameters, Slurm job 4711",
        state="finished",
        verdict="It finished all 3,000 steps in 21 min with one restart; one rank held the others up.",
        facts=facts,
    )
    advice = [
        Advice(
            "Give rank 5 on node2 faster input: raise data.workers from 2 to 6, or move its data to a local disk.",
            "Its input takes 84 ms of a step and that of the others 11 ms; they wait 73 ms of 398 ms for it.",
            "ranks",
        ),
        Advice(
            "Save checkpoints in the background, or half as often.",
            "30 checkpoints held the training up for 48 s, 4 % of the time.",
            "time",
        ),
        Advice(
            "GPU 3 of node1 is used by nobody: start one more rank there.", "It was busy 0 % of the time.", "nothing"
        ),
    ]
    return RunPage(name, headline, advice, [], _sections(draw, at, steps))


def _sections(draw: random.Random, at: list[float], steps: int) -> list[Chapter]:
    return [
        Chapter("learning", "Learning", _learning(draw, at, steps)),
        Chapter("time", "Where the time went", _time(draw, at)),
        Chapter("ranks", "Ranks", [_heat(draw, at), mesh({"pp": 2, "dp": 2, "tp": 2}, 4, slow=[5]), timetable()]),
        Chapter("machine", "Machines", _machines(draw, steps), "What the nodes did, also with GPUs that nobody uses."),
        Chapter("events", "What happened", [_timeline(steps)]),
        Chapter(
            "config", "Configuration", [_checkpoints(), Text("config", "Resolved config", CONFIG, language="toml")]
        ),
    ]


CONFIG = """# every value, also those nobody set
recipe = "lm"
layout = "pp=2,dp=2,tp=2"
precision = "bf16"

[data]
name = "wikitext2"
workers = 2

[optimizer]
name = "adamw"
lr = 0.0003
betas = [0.9, 0.95]
"""


def _learning(draw: random.Random, at: list[float], steps: int) -> list[Panel]:
    loss: list[Number] = [2.9 + 7.9 * math.exp(-x / (steps / 6)) + draw.gauss(0, 0.05) for x in at]
    broken = min(len(at) - 1, len(at) // 3)
    low, high = ([None if y is None else y + side * abs(draw.gauss(0.35, 0.08)) for y in loss] for side in (-1, 1))
    for curve in (loss, low, high):
        curve[broken] = None
    checks = at[20::20]
    rate: list[Number] = [3e-4 * min(1, x / 200) * (0.55 + 0.45 * math.cos(math.pi * x / steps)) for x in at]
    norm: list[Number] = [0.4 + 3 * math.exp(-x / 150) + abs(draw.gauss(0, 0.12)) for x in at]
    validation: list[Number] = [2.95 + 7.2 * math.exp(-x / (steps / 6)) for x in checks]
    marks = [
        Mark(at[broken], "the loss was not finite: the step was skipped", "error"),
        Mark(at[len(at) // 2], "attempt 2 went on here", "warning"),
    ]
    return [
        Lines(
            "loss",
            "Loss",
            "step",
            "loss per token",
            [
                Curve("train", at, loss, low, high),
                Curve("validation", checks, validation, style="points"),
                Curve("bigram", [at[0], at[-1]], [5.1, 5.1], style="dashed"),
            ],
            "The band holds the lowest and the highest of the steps that each point stands for.",
            marks,
        ),
        Lines("rate", "Learning rate", "step", "", [Curve("lr", at, rate)]),
        Lines("norm", "Gradient norm", "step", "before clipping", [Curve("norm", at, norm)], log=True),
        Lines(
            "speed",
            "Tokens per second",
            "step",
            "tokens a second, all ranks",
            [
                Curve("attempt 1", at[: len(at) // 2], [40300 + draw.gauss(0, 600) for _ in at[: len(at) // 2]]),
                Curve("attempt 2", at[len(at) // 2 :], [41200 + draw.gauss(0, 500) for _ in at[len(at) // 2 :]]),
            ],
            unit="/s",
        ),
    ]


def _time(draw: random.Random, at: list[float]) -> list[Panel]:
    means = {
        "compute": 0.26,
        "communication": 0.062,
        "input": 0.04,
        "optimizer": 0.021,
        "checkpoint": 0.012,
        "idle": 0.01,
    }
    parts = [Curve(name, at, [mean * (1 + abs(draw.gauss(0, 0.08))) for _ in at]) for name, mean in means.items()]
    amounts = {
        "useful steps": 812.0, "communication": 153.0, "input": 108.0, "starting": 61.0, "checkpoints": 48.0,
        "repeated steps": 31.0, "stopped": 26.0, "validation": 22.0, "other": 4.0,
    }  # fmt: skip
    notes = {"repeated steps": "done again after the restart", "starting": "processes, model, checkpoint, compiling"}
    shares = [Share(name, amount, name == "useful steps", notes.get(name, "")) for name, amount in amounts.items()]
    return [
        Shares("spent", "The whole run", "s", shares, "From the first event to the last."),
        Stacked("step", "A step, mean over the ranks", "step", "seconds of a step", at, parts),
    ]


def _heat(draw: random.Random, at: list[float]) -> Heat:
    rows = [f"rank {rank} (node{1 + rank // 4})" for rank in range(8)]

    def values(mean: float, slow: float) -> list[list[Number]]:
        table: list[list[Number]] = [
            [(slow if rank == 5 else mean) * (1 + draw.gauss(0, 0.06)) for _ in at] for rank in range(8)
        ]
        for rank in range(8):
            table[rank][len(at) // 2] = None
        return table

    layers = [
        HeatLayer("input", "s", values(0.011, 0.084)),
        HeatLayer("compute", "s", values(0.26, 0.262)),
        HeatLayer("waiting", "s", values(0.073, 0.004)),
        HeatLayer("busy", "share", values(0.82, 0.93)),
    ]
    return Heat("heat", "Each rank over time", "step", at, rows, layers, "Mean seconds of a step.")


def mesh(axes: dict[str, int], per_host: int, slow: list[int] | None = None) -> Mesh:
    """A mesh of the given axes, outermost first."""
    talk = {
        "pp": "activations and their gradients to the next stage",
        "dp": "sums of gradients, once a step",
        "fsdp": "parameters gathered, gradients scattered",
        "tp": "sums of activations, in every block",
    }
    hosts = [f"node{1 + rank // per_host}" for rank in range(math.prod(axes.values()))]
    described = [MeshAxis(name, size, talk[name]) for name, size in axes.items()]
    return Mesh("mesh", "The mesh", described, hosts, slow or [])


def timetable(places: int = 4, micro_batches: int = 8) -> Timetable:
    """One-forward-one-backward as it would be with equal stages."""
    forward, backward = 0.011, 0.021
    done: dict[tuple[str, int, int], float] = {}
    lanes: list[list[tuple[str, int, int, float, float]]] = [[] for _ in range(places)]
    orders: list[list[tuple[str, int]]] = []
    for place in range(places):
        warm = min(micro_batches, places - place)
        order = [("F", number) for number in range(warm)]
        for number in range(micro_batches):
            order.append(("B", number))
            if warm + number < micro_batches:
                order.append(("F", warm + number))
        orders.append(order)
    clocks = [0.0] * places
    while any(orders):
        for place, order in enumerate(orders):
            if not order:
                continue
            what, number = order[0]
            before = ("F", place - 1, number) if what == "F" else ("B", place + 1, number)
            is_first = (what == "F" and place == 0) or (what == "B" and place == places - 1)
            if not is_first and before not in done:
                continue
            begin = max(clocks[place], 0.0 if is_first else done[before])
            end = begin + (forward if what == "F" else backward)
            lanes[place].append((what, place, number, begin, end))
            clocks[place] = done[what, place, number] = end
            order.pop(0)
    seconds = max(clocks)
    busy = [sum(end - begin for *_, begin, end in lane) / seconds for lane in lanes]
    return Timetable("timetable", "One step of the pipeline", seconds, lanes, busy, "Step 40, as it really happened.")


def _machines(draw: random.Random, steps: int) -> list[Panel]:
    times = [START + second for second in range(0, int(steps * SECONDS_PER_STEP), 5)]

    def curve(name: str, mean: float, spread: float, most: float = math.inf) -> Curve:
        return Curve(name, times, [min(most, max(0.0, draw.gauss(mean, spread))) for _ in times])

    gpus = [
        curve(f"node{1 + gpu // 4} GPU {gpu % 4}", 0.0 if gpu == 3 else 0.88, 0.04 * (gpu != 3), 1) for gpu in range(8)
    ]
    memory = [curve(f"rank {rank}", 52e9 + 1.2e9 * rank, 2e8) for rank in range(8)]
    power = [curve("node1", 2210, 60), curve("node2", 2450, 60)]
    network = [curve("node1", 2.1e9, 2e8), curve("node2", 2.2e9, 2e8)]
    return [
        Lines("gpu", "GPU busy", "time", "share of the time", gpus, unit="share", most=1.0),
        Lines("memory", "Memory", "time", "held by each rank", memory, unit="B"),
        Lines("power", "Power", "time", "of all GPUs of a node", power, unit="W"),
        Lines("network", "Network", "time", "sent by each node", network, unit="B/s"),
    ]


def _timeline(steps: int) -> Timeline:
    end = START + steps * SECONDS_PER_STEP
    middle = START + (end - START) * 0.5
    spans = [
        AttemptBar(1, START, middle, "failed", "rank 1 on node2 was killed by SIGKILL"),
        AttemptBar(2, middle + 26, end, "finished"),
    ]
    moments = [
        Moment(START + 100 * number * SECONDS_PER_STEP, 1 if number < 15 else 2, 100 * number, "info", "checkpoint",
               f"checkpoint of step {100 * number} is on disk: 1.5 GB in 1.6 s")
        for number in range(1, 30)
    ]  # fmt: skip
    moments += [
        Moment(START + 420, 1, 1000, "error", "alarm", "the loss is not finite at step 1000: the step is skipped"),
        Moment(START + 500, 1, 1190, "warning", "straggler", "rank 5 (node2) is slow: its input takes 84 ms of a step"),
        Moment(middle, 1, 1500, "error", "failure", "rank 1 on node2 was killed by SIGKILL"),
        Moment(middle + 61, 2, 1500, "good", "recovered", "the run goes on from step 1500, 61 s after the failure"),
        Moment(end, 2, steps, "good", "end", f"all {steps} steps are done"),
    ]
    return Timeline("timeline", "Attempts", spans, sorted(moments, key=lambda moment: moment.time))


def _checkpoints() -> Table:
    rows = [[f"{step:,}", f"checkpoints/step-{step:08}", "1.5 GB", "1.6 s", "0.2 s"] for step in range(500, 3001, 500)]
    return Table("checkpoints", "Checkpoints", ["step", "path", "size", "took", "training waited"], rows,
                 [True, False, True, True, True])  # fmt: skip


@cache
def example_page(live: bool = False, steps: int = STEPS) -> Page:
    """One run with everything."""
    return Page("lm-wikitext", START + 4000, "0.1", [example_run(steps=steps)], live=live)


@cache
def comparison_page(steps: int = STEPS) -> Page:
    """Three runs side by side."""
    runs = [example_run(f"lm {ranks} GPUs", steps, seed=ranks) for ranks in (1, 4, 8)]
    speed = Lines(
        "scaling",
        "Speed-up",
        "ranks",
        "times the speed of one",
        [Curve("measured", [1.0, 4.0, 8.0], [1.0, 3.7, 6.9]), Curve("ideal", [1.0, 8.0], [1.0, 8.0], style="dashed")],
    )
    rows = [["1", "412 s", "1.00", "100 %"], ["4", "111 s", "3.70", "93 %"], ["8", "60 s", "6.90", "86 %"]]
    table = Table("table", "Scaling", ["GPUs", "time", "speed-up", "efficiency"], rows, [True] * 4)
    return Page("Three runs of lm", START + 4000, "0.1", runs, [Chapter("scaling", "Scaling", [table, speed])])


@cache
def hostile_page() -> Page:
    """Everything that is text is an attack."""
    page = example_page()
    run = page.runs[0]
    headline = Headline(HOSTILE, HOSTILE, "failed", HOSTILE, [Fact(HOSTILE, HOSTILE, HOSTILE, "error")])
    panels: list[Panel] = [
        Text("t", HOSTILE, HOSTILE, HOSTILE, "toml"),
        Table("a", HOSTILE, [HOSTILE], [[HOSTILE]], [False], HOSTILE),
        Mesh(HOSTILE, HOSTILE, [MeshAxis(HOSTILE, 2, HOSTILE)], [HOSTILE, "javascript:alert(1)"], [0], HOSTILE),
        Lines("l", HOSTILE, "step", HOSTILE, [Curve(HOSTILE, [1.0], [1.0])], HOSTILE, [Mark(1.0, HOSTILE)]),
        Heat("h", HOSTILE, "step", [1.0], [HOSTILE], [HeatLayer(HOSTILE, "", [[1.0]])]),
        Shares("s", HOSTILE, "s", [Share(HOSTILE, 1.0, True, HOSTILE)]),
        Stacked("k", HOSTILE, "step", HOSTILE, [1.0], [Curve(HOSTILE, [1.0], [1.0])]),
        Timeline(
            "m", HOSTILE, [AttemptBar(1, 0, 1, "failed", HOSTILE)], [Moment(0, 1, None, "error", HOSTILE, HOSTILE)]
        ),
        Timetable("g", HOSTILE, 1.0, [[(HOSTILE, 0, 0, 0.0, 1.0)]], [1.0], HOSTILE),
    ]
    advice = [Advice(HOSTILE, HOSTILE, HOSTILE)]
    bad = replace(run, name=HOSTILE, headline=headline, advice=advice, unreadable=[HOSTILE, "half a pair: \ud800"])
    return replace(page, title=HOSTILE, runs=[replace(bad, sections=[Chapter(HOSTILE, HOSTILE, panels, HOSTILE)])])


@cache
def sparse_page() -> Page:
    """One step, no validation, values that are not numbers, empty panels and an empty section."""
    nan = math.nan
    parts = [Curve("compute", [1.0], [0.2]), Curve("input", [1.0], [nan])]
    panels: list[Panel] = [
        Lines("one", "One step", "step", "loss", [Curve("train", [1.0], [10.8])]),
        Lines("none", "No curve", "step", "loss", []),
        Lines("nan", "Nothing finite", "step", "loss", [Curve("train", [1.0, 2.0, 3.0], [nan, nan, nan])]),
        Lines("zero", "All zero", "step", "", [Curve("lr", [1.0, 2.0], [0.0, 0.0])], log=True),
        Lines("holes", "Holes", "step", "loss", [Curve("train", [1.0, 2.0, 3.0, 4.0, 5.0], [3.0, nan, 2.5, nan, 2.0])]),
        Stacked("parts", "One step of parts", "step", "", [1.0], parts),
        Shares("shares", "Nothing spent", "s", []),
        Heat("heat", "No value", "step", [1.0], ["rank 0"], [HeatLayer("compute", "s", [[nan]])]),
        Timeline("timeline", "No attempt", [], []),
        Mesh("mesh", "One rank", [], ["laptop"]),
        Timetable("timetable", "No pipeline", 0.0, [], []),
        Table("table", "No row", ["a"], [], [False]),
        Text("text", "No text", ""),
    ]  # fmt: skip
    headline = Headline("first", "single on a laptop", "lost", "No event says that it ended.", [])
    unreadable = ["Line 12 of events.jsonl ends in the middle: the run was writing it."]
    sections = [Chapter("panels", "Panels", panels), Chapter("empty", "Empty", [])]
    return Page("first", START, "0.1", [RunPage("first", headline, [], unreadable, sections)])


def large_page(megabytes: float = 5.0) -> Page:
    """About so much data: many curves of many points."""
    points = 1000
    curves = int(megabytes * 1e6 / (points * 4 * 9.5))
    xs = [float(step * 997) for step in range(points)]
    draw = random.Random(1)

    def values(offset: float) -> list[Number]:
        return [round(offset + draw.random(), 6) for _ in xs]

    panels: list[Panel] = [
        Lines(f"chart{number}", f"Chart {number}", "step", "loss", [
            Curve(f"curve {at}", xs, values(0.5), values(0), values(1)) for at in range(4)
        ])
        for number in range(curves // 4)
    ]  # fmt: skip
    run = example_run()
    return Page("large", START, "0.1", [replace(run, sections=[*run.sections, Chapter("many", "Many", panels)])])
