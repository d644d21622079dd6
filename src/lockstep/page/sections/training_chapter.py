"""The chapters on what the model learns and how fast: curves over steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lockstep.page.panels import Curve, Lines, Mark, Panel
from lockstep.page.reading.run_data import Digest
from lockstep.page.reading.series import Array, Series, curve_of, numbers, ratio_curve
from lockstep.page.reading.steps import Columns
from lockstep.page.reading.summary import Summary

MOST_MARKS = 20
"""Of one sort; more would hide the curve."""
MOST_ATTEMPT_CURVES = 12
WIDE = 100.0
"""From this ratio of highest to lowest on, a chart begins with a logarithmic axis."""


def training(digest: Digest, columns: Columns) -> list[Panel]:
    """Loss, learning rate, gradient norm, and what was scored."""
    mask = columns.kept
    kept = columns.where(mask)
    panels: list[Panel] = []
    restarts = _restarts(digest)
    if curves := [*_losses(digest, kept, columns.where(~mask))]:
        odd = _runs(kept.step, ~np.isfinite(kept.loss), "loss not finite", "error")
        skipped = _runs(kept.step, kept.skipped != 0, "skipped", "warning")
        alarms = [Mark(step, f"alarm: {what}", "warning") for step, what in list(digest.alarms)[-MOST_MARKS:]]
        log = _is_wide(kept.loss)
        note = _loss_note(kept)
        panels.append(Lines("loss", "Loss", "step", "loss", curves, note, [*restarts, *odd, *skipped, *alarms], log))
    if len(kept):
        rate = curve_of("learning rate", kept.step, kept.lr)
        panels.append(Lines("lr", "Learning rate", "step", "learning rate", [rate], "Of the first parameter group."))
        norm = curve_of("gradient norm", kept.step, kept.grad_norm)
        odd = _runs(kept.step, ~np.isfinite(kept.grad_norm), "gradient not finite", "error")
        log, note = _is_wide(kept.grad_norm), "Before clipping."
        panels.append(Lines("grad_norm", "Gradient norm", "step", "norm", [norm], note, [*restarts, *odd], log))
    for number, (name, series) in enumerate(digest.scores.items()):
        curves = [series.curve("validation", "points")]
        if digest.test and math.isfinite(digest.test[2].get(name, math.nan)):
            curves.append(Curve("test", [digest.test[0]], [digest.test[2][name]], style="points"))
        panels.append(Lines(f"score_{number}", f"Validation: {name}", "step", name, curves, marks=restarts))
    for number, (name, series) in enumerate(digest.metrics.items()):
        panels.append(Lines(f"metric_{number}", name, "step", name, [series.curve(name)], _odd(series), restarts))
    if digest.metrics_left_out and panels:
        names = sorted(digest.metrics_left_out)
        said = f"Left out, because there are so many: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}."
        panels[-1] = replace(panels[-1], note=f"{panels[-1].note} {said}".strip())
    return panels


def _losses(digest: Digest, kept: Columns, replaced: Columns) -> Iterator[Curve]:
    if len(kept):
        yield curve_of("training", kept.step, kept.loss)
    if len(replaced):
        order = np.argsort(replaced.step, kind="stable")
        yield curve_of("done again later", replaced.step[order], replaced.loss[order], "points", 200)
    validation = digest.validation.curve("validation", "points")
    if validation.x:
        yield validation
    if digest.test and math.isfinite(digest.test[1]):
        yield Curve("test", [digest.test[0]], [digest.test[1]], style="points")
    ends = [float(kept.step[0]), float(kept.step[-1])] if len(kept) else validation.x[:1] + validation.x[-1:]
    for name, loss in digest.baselines.items():
        if ends and math.isfinite(loss):
            yield Curve(f"{name} (baseline)", list(dict.fromkeys(ends)), [loss] * len(set(ends)), style="dashed")


def _loss_note(kept: Columns) -> str:
    odd = int((~np.isfinite(kept.loss)).sum())
    if not odd:
        return ""
    all_of_it = "None of them is drawn." if odd == len(kept) else "They are marked and not drawn."
    return f"{odd:,} of {len(kept):,} losses are not finite numbers. {all_of_it}"


def _odd(series: Series) -> str:
    return f"{series.not_finite:,} values are not finite, and not drawn." if series.not_finite else ""


def _restarts(digest: Digest) -> list[Mark]:
    marks = [
        Mark(attempt.first_step, f"attempt {attempt.number} {_begins(attempt.first_step)}", "warning")
        for attempt in sorted(digest.attempts.values(), key=lambda attempt: attempt.number)[1:]
        if attempt.first_step is not None
    ]
    return marks if len(marks) <= MOST_MARKS else marks[-MOST_MARKS:]


def _begins(step: int) -> str:
    return "begins anew" if step == 1 else f"goes on at step {step}"


def _profiles(digest: Digest) -> list[Mark]:
    """Steps that were recorded, and are slower for it."""
    ranges = sorted({steps for attempt in digest.attempts.values() for steps in attempt.profiled})
    return [Mark(first, f"profiled: {steps_text(first, last)}") for first, last in ranges[-MOST_MARKS:]]


def steps_text(first: int, last: int) -> str:
    """Steps in a row."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _runs(steps: Array, mask: Array, what: str, level: str) -> list[Mark]:
    """Marks for steps with something odd: one for each unbroken row of them, the first ones where they are many."""
    odd = np.flatnonzero(mask)
    if not len(odd):
        return []
    rows = np.split(odd, np.flatnonzero(np.diff(odd) > 1) + 1)
    marks = []
    for row in rows[:MOST_MARKS]:
        first, last = int(steps[row[0]]), int(steps[row[-1]])
        marks.append(Mark(first, f"{what}: {steps_text(first, last)}", level))  # type: ignore[arg-type]
    if len(rows) > MOST_MARKS:
        more = f", and {len(rows) - MOST_MARKS:,} more times up to step {int(steps[odd[-1]])}"
        marks[-1] = replace(marks[-1], text=marks[-1].text + more)
    return marks


def _is_wide(values: Array) -> bool:
    good = values[np.isfinite(values)]
    return bool(len(good) and good.min() > 0 and good.max() > WIDE * good.min())


def speed(digest: Digest, columns: Columns, summary: Summary) -> list[Panel]:
    """How fast it went: items a second of every attempt, seconds of a step, and MFU."""
    if not len(columns):
        return []
    present = list(dict.fromkeys(columns.attempt.tolist()))
    shown = present[-MOST_ATTEMPT_CURVES:]
    most = max(60, 800 // len(shown))
    rates = []
    for number in shown:
        own = columns.where(columns.attempt == number)
        rates.append(ratio_curve(f"attempt {number}", own.step, own.items, own.seconds, most=most))
    left = len(present) - len(shown)
    note = f"{summary.item.capitalize()} of a step over its seconds, without validation and saving."
    note += f" Left out: the first {left} of {len(present)} attempts." if left else ""
    item = f"{summary.item}/s"
    kept = columns.where(columns.kept)
    seconds = curve_of("step", kept.step, kept.seconds)
    marks = [*_restarts(digest), *_profiles(digest)]
    panels: list[Panel] = [
        Lines("rate", item.capitalize(), "step", item, rates, note, unit="/s"),
        Lines(
            "step_seconds",
            "Seconds of a step",
            "step",
            "seconds",
            [seconds],
            "Without validation and saving; the first step of an attempt warms up.",
            marks,
            _is_wide(kept.seconds),
            unit="s",
        ),
    ]
    if summary.mfu is not None:
        panels.append(_mfu(digest, kept, summary))
    return panels


def _mfu(digest: Digest, kept: Columns, summary: Summary) -> Panel:
    """Over the steps of attempts on the device whose peak is known."""
    per_sample, peak = digest.flops["per_sample"], digest.flops["peak"]
    assert isinstance(per_sample, float)
    assert isinstance(peak, float)
    work = np.full(len(kept), np.nan)
    for number, attempt in digest.attempts.items():
        if attempt.started and attempt.started.device == summary.device:
            share = per_sample * attempt.started.global_batch / (peak * attempt.started.world_size)
            work[kept.attempt == number] = share
    curve = ratio_curve("MFU", kept.step, work, kept.seconds)
    y = np.array([math.nan if value is None else value for value in curve.y])
    over = int((y > 1).sum())
    y[y > 1] = np.nan
    note = (
        "Model FLOPs utilisation: operations of the model, each counted once, over what all devices can do in the "
        f"same time at the precision of matrix products ({summary.peak_source})."
    )
    note += f" {over} points above 100 % cannot be and are left out: the host's clock ran ahead." if over else ""
    return Lines("mfu", "MFU", "step", "share of the peak", [Curve("MFU", curve.x, numbers(y))], note, unit="share")
