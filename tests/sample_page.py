"""A page with every kind of panel on it, made up by arithmetic: for whatever draws pages."""

from __future__ import annotations

import math

from lockstep.page import panels as p

BEGIN = 1_760_000_000.0
HOSTILE = "</script><img src=x onerror=alert(1)> \x00\x1b[31m \ud800 \u202e日本 عربي 😀 {all} \\( %PDF"


def sample_page(steps: int = 400, ranks: int = 8, name: str = "lm", live: bool = False) -> p.Page:
    """A page of one run."""
    return p.Page(f"Run {name}", BEGIN + 4000, "0.1.0", [sample_run(steps, ranks, name)], live=live)


def sample_run(steps: int = 400, ranks: int = 8, name: str = "lm") -> p.RunPage:
    """A run whose curves are those of textbooks."""
    return p.RunPage(
        name,
        sample_headline(name),
        [
            p.Advice(
                "Give rank 2 more data workers: its input takes 0.31 s of a step.",
                "The others wait 0.2 s for it in every step, which is 29 % of the run.",
                "ranks",
            ),
            p.Advice("Save every 500 steps instead of every 50.", "Checkpoints held the training up for 12 % of it."),
        ],
        ["line 17 of events.jsonl is not an event, and was passed over"],
        [
            p.Section("training", "Training", _training(steps)),
            p.Section("time", "Where the time went", _time(steps), "Per step, and over the whole run."),
            p.Section("ranks", "Ranks", _ranks(steps, ranks)),
            p.Section("what", "What happened", [_timeline(), _table()]),
            p.Section("config", "Config", [p.Text("config", "config.toml", 'recipe = "lm"\nlayout = "dp=8"\n' * 20)]),
        ],
    )


def sample_headline(name: str) -> p.Headline:
    """With more facts than fit one row."""
    facts = [
        p.Fact("Goodput", "93.1 %", "of the time in steps whose result was kept", "good"),
        p.Fact("Cost", "8.2 GPU-hours", "8 GPUs for 61.5 minutes"),
        p.Fact("Energy", "3.1 kWh", "of the GPUs alone"),
        p.Fact("MFU", "41 %", "model flops of a step over its seconds and the peak of 989 Tflop/s", "warning"),
        p.Fact("Throughput", "182 k tokens/s"),
        p.Fact("Step", "0.312 s", "predicted 0.290 s (-7 %)"),
    ]
    subtitle = "8 GPUs of 1 node, layout dp=8, bf16, 124.4 M parameters"
    verdict = "It finished all 400 steps in 1 h 2 min, over 2 attempts; the loss fell from 10.8 to 3.21."
    return p.Headline(f"{name}", subtitle, "finished", verdict, facts)


def _training(steps: int) -> list[p.Panel]:
    x = [float(step) for step in range(1, steps + 1)]
    loss: list[p.Number] = [3 + 7 / math.sqrt(step) + 0.1 * math.sin(step) for step in x]
    if steps > 200:
        loss[150] = None
    low = [None if value is None else value - 0.2 for value in loss]
    high = [None if value is None else value + 0.3 for value in loss]
    every = x[:: max(1, steps // 10)]
    validation = p.Curve("validation", every, [3.1 + 7 / math.sqrt(step) for step in every], style="points")
    marks = [p.Mark(steps / 2, "attempt 2 begins"), p.Mark(150.0, "not finite", "error")]
    rate = p.Curve("learning rate", x, [3e-4 * min(1.0, step / 50) * (1 - step / steps / 2) for step in x])
    return [
        p.Lines(
            "loss",
            "Loss",
            "step",
            "mean over what counts",
            [p.Curve("training", x, loss, low, high), validation],
            "The band holds every value.",
            marks,
            log=True,
        ),
        p.Lines("lr", "Learning rate", "step", "factor", [rate]),
    ]


def _time(steps: int) -> list[p.Panel]:
    at = [float(step) for step in range(1, steps + 1, 4)]
    parts = [
        p.Curve(name, at, [share * (1 + 0.2 * math.sin(n * x / 20)) for x in at])
        for n, (name, share) in enumerate([("compute", 0.2), ("communication", 0.05), ("input", 0.03), ("other", 0.01)])
    ]
    shares = [
        p.Share("useful", 3000, good=True, note="steps whose result was kept"),
        p.Share("communication", 400, good=True),
        p.Share("checkpoints", 250),
        p.Share("starting", 90),
        p.Share("stopped", 260, note="until somebody started it again"),
    ]
    lanes = [
        [("F", place, m, 0.1 * (m + place), 0.1 * (m + place + 1)) for m in range(3)]
        + [("B", place, m, 0.1 * (8 - place + m), 0.1 * (9 - place + m)) for m in range(2)]
        for place in range(4)
    ]
    return [
        p.Stack("steps", "Parts of a step", "step", "seconds", at, parts),
        p.Shares("spent", "All of the run", "s", shares, "From its first event to its last."),
        p.Timetable("pipeline", "One step of the pipeline", 1.1, lanes, [0.45, 0.45, 0.45, 0.45]),
    ]


def _ranks(steps: int, ranks: int) -> list[p.Panel]:
    at = [BEGIN + 10.0 * n for n in range(max(1, steps // 4))]
    rows = [f"rank {rank}" for rank in range(ranks)]
    values: list[list[p.Number]] = [
        [
            None if (n + rank) % 37 == 0 else 0.1 + 0.2 * (rank == 2) + 0.02 * math.sin(n / 7 + rank)
            for n in range(len(at))
        ]
        for rank in range(ranks)
    ]
    memory = [
        p.Curve(f"rank {rank}", at, [8e9 + 1e8 * rank + 1e6 * n for n in range(len(at))]) for rank in range(ranks)
    ]
    axes = [p.MeshAxis("dp", 2, "gradients, once a step"), p.MeshAxis("tp", ranks // 2, "activations, in every block")]
    hosts = ["node1"] * (ranks // 2) + ["node2"] * (ranks - ranks // 2)
    return [
        p.Heat("heat", "Time of the ranks", "time", at, rows, [p.Layer("compute", "s", values)]),
        p.Lines("memory", "Memory", "time", "bytes held", memory, unit="B", most=1.6e10),
        p.Mesh("mesh", "Who talks to whom", axes if ranks > 1 else [], hosts, slow=[2] if ranks > 2 else []),
    ]


def _timeline() -> p.Timeline:
    spans = [
        p.Span(1, BEGIN, BEGIN + 1500, "failed", "rank 3 on node1 was killed (SIGKILL)"),
        p.Span(2, BEGIN + 1760, BEGIN + 4000, "finished"),
    ]
    moments = [
        p.Moment(BEGIN + 400, 1, 50, "info", "checkpoint", "saved checkpoints/step-00000050 (1.5 GB in 3.1 s)"),
        p.Moment(BEGIN + 900, 1, 90, "warning", "straggler", "rank 2 (node1) is slow: " + "its input takes long; " * 9),
        p.Moment(BEGIN + 1500, 1, 120, "error", "failure", "rank 3 on node1 was killed (SIGKILL)"),
        p.Moment(BEGIN + 4000, 2, 400, "good", "end", "all steps are done"),
    ]
    return p.Timeline("timeline", "Attempts", spans, moments)


def _table() -> p.Table:
    rows = [[str(step), "1.5 GB", f"{step / 100:.1f} s", "whole " * (step // 50)] for step in range(50, 401, 50)]
    return p.Table(
        "checkpoints", "Checkpoints", ["step", "size", "seconds", "verdict"], rows, [True, True, True, False]
    )
