"""The chapter on where the time went: of a mean step, and of the whole run."""

from __future__ import annotations

import numpy as np

from lockstep.amounts import bytes_text, percent, seconds_text
from lockstep.page.digest import Digest
from lockstep.page.panels import Curve, Panel, Share, Shares, Stack, Table
from lockstep.page.series import numbers, places
from lockstep.page.summary import Compared, Summary

STACK = {
    "compute": "compute",
    "optimizer": "optimizer",
    "wait": "exposed communication",
    "input": "input",
    "between": "between steps",
    "stall": "checkpoint stall",
    "idle": "idle",
}
STACK_NOTE = (
    "A mean step, mean over ranks. Compute: forward and backward. Optimizer: clipping and the update. Exposed "
    "communication: standing still in collectives, for others or for their numbers; what runs beside the compute is "
    "not in it. Input: waiting for samples. Between steps: the script's own code. Checkpoint stall: what the training "
    "waited for checkpoints, spread over the steps. Idle: what is in none of these, nor in validation."
)
SPENT = {
    "useful": ("computing", "forward and backward of steps whose result was kept"),
    "optimizer": ("optimizer", "in the same steps"),
    "communication": ("exposed communication", "in the same steps: ranks stood still in collectives"),
    "input": ("input", "in the same steps: waiting for samples"),
    "between": ("between steps", "the script's own code"),
    "validation": ("validation", "and test"),
    "checkpoints": ("checkpoint stalls", "the training waited for them"),
    "repeated": ("repeated steps", "done again after a restart, taken back, or skipped"),
    "starting": ("starting", "processes, model, checkpoint, and what the first step takes longer than others"),
    "stopped": ("stopped", "between attempts: in a queue, or until somebody started it again"),
    "other": ("other", "no event accounts for it"),
}
NEGLIGIBLE = 1e-3
"""Of a step: a part that is never more is not worth a colour."""
GOODPUT = ("useful", "optimizer", "communication", "input", "between")


def time(digest: Digest, summary: Summary) -> list[Panel]:
    """The stack over steps, the whole run in one bar, and what was predicted."""
    panels: list[Panel] = []
    if digest.ranks.grid.of("steps"):
        at = places(digest.ranks.grid.at)
        parts = digest.ranks.stack()
        least = NEGLIGIBLE * np.sum(list(parts.values()), axis=0).max()
        curves = [Curve(name, at, numbers(parts[part], 4)) for part, name in STACK.items() if parts[part].max() > least]
        looks = digest.ranks.grid.looks_of_each
        note = STACK_NOTE + (f" Each column is the mean of {looks} reports." if looks > 1 else "")
        begin = float(digest.ranks.first_step)
        panels.append(Stack("step_time", "Time of a step", "step", "seconds of a step", at, curves, note, begin=begin))
    if summary.spent.whole > 0:
        panels.append(_whole(summary))
    if rows := [
        *_row("step", summary.predicted_step, seconds_text),
        *_row("memory", summary.predicted_memory, bytes_text),
    ]:
        columns = ["", "predicted", "measured", "predicted / measured - 1"]
        right = [False, True, True, True]
        note = digest.predicted.note
        panels.append(Table("predicted", "Predicted and measured", columns, rows, right, note))
    return panels


def _whole(summary: Summary) -> Panel:
    spent, goodput = summary.spent, summary.spent.goodput
    parts = [
        Share(name, round(getattr(spent, field), 3), field in GOODPUT, note)
        for field, (name, note) in SPENT.items()
        if getattr(spent, field) > 0
    ]
    attempts = f"{len(summary.attempts)} attempt{'' if len(summary.attempts) == 1 else 's'}"
    said = f"Goodput is the share in steps whose result was kept: {percent(goodput)}." if goodput is not None else ""
    note = f"From the first event to the last: {seconds_text(spent.whole)}, in {attempts}. {said}"
    return Shares("spent", "The whole run", "s", parts, note.strip())


def _row(name: str, compared: Compared | None, text: object) -> list[list[str]]:
    if compared is None:
        return []
    assert callable(text)
    error = "-" if compared.error is None else f"{100 * compared.error:+.1f} %"
    return [[name, text(compared.predicted), "-" if compared.measured is None else text(compared.measured), error]]
