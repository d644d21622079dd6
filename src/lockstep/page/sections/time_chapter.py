"""The chapter on where the time went: of a mean step, and of the whole run."""

from __future__ import annotations

import numpy as np

from lockstep.page.panels import Curve, Panel, Share, Shares, Stacked, Table
from lockstep.page.reading.run_data import Digest
from lockstep.page.reading.series import numbers, places
from lockstep.page.reading.summary import IN_KEPT_STEPS, PARTS_OF_TIME, Compared, Summary
from lockstep.text.units import bytes_text, duration_text, error_text, seconds_text, share_text

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
    "waited for checkpoints, spread over the steps. Idle: the rest of the time from report to report, without "
    "validation, samples and profiling."
)
SPENT = {
    "useful": "forward and backward of steps whose result was kept",
    "optimizer": "in the same steps: clipping and the update",
    "communication": "in the same steps: ranks stood still in collectives",
    "input": "in the same steps: waiting for samples",
    "between": "in the same steps: the script's own code",
    "validation": "also test, and samples of what the model writes",
    "checkpoints": "the training waited for them",
    "profiling": "writing traces, and what profiled steps took longer than others",
    "repeated": "done again after a restart, to be done again because they were not saved, taken back, or skipped",
    "starting": "processes, model, loading a checkpoint, and what the first step took longer than others",
    "stopped": "between attempts: in a queue, or until somebody started it again",
    "other": "no event accounts for it",
}
NEGLIGIBLE = 1e-3
"""Of a step: a part that is never more is not worth a colour."""


def time(digest: Digest, summary: Summary) -> list[Panel]:
    """The stack over steps, the whole run in one bar, and what was predicted."""
    panels: list[Panel] = []
    if digest.ranks.grid.of("steps"):
        at = places(digest.ranks.grid.at)
        parts = digest.ranks.stack()
        least = NEGLIGIBLE * np.sum(list(parts.values()), axis=0).max()
        curves = [Curve(name, at, numbers(parts[part], 6)) for part, name in STACK.items() if parts[part].max() > least]
        looks = digest.ranks.grid.looks_of_each
        note = STACK_NOTE + (f" Each column is the mean of {looks} reports." if looks > 1 else "")
        begin = float(digest.ranks.first_step)
        panels.append(
            Stacked("step_time", "Time of a step", "step", "seconds of a step", at, curves, note, begin=begin)
        )
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
        Share(PARTS_OF_TIME[field], round(getattr(spent, field), 3), field in IN_KEPT_STEPS, note)
        for field, note in SPENT.items()
        if getattr(spent, field) > 0
    ]
    attempts = f"{len(summary.attempts)} attempt{'' if len(summary.attempts) == 1 else 's'}"
    said = f"Goodput is the share in steps whose result was kept: {share_text(goodput)}." if goodput is not None else ""
    note = f"From the first event to the last: {duration_text(spent.whole)}, in {attempts}. {said}"
    return Shares("spent", "The whole run", "s", parts, note.strip())


def _row(name: str, compared: Compared | None, text: object) -> list[list[str]]:
    if compared is None:
        return []
    assert callable(text)
    error = "-" if compared.error is None else error_text(compared.error)
    return [[name, text(compared.predicted), "-" if compared.measured is None else text(compared.measured), error]]
