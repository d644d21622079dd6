"""What to change over a whole run: restarts, checkpoints, starting. Every rule: (seconds won, advice), or None."""

from __future__ import annotations

import math
import re

from lockstep.page.panels import Advice
from lockstep.page.reading.summary import AttemptSummary, Summary
from lockstep.planner.search.scale import daly
from lockstep.text.units import count_text, duration_text, percent, seconds_text

Found = tuple[float, Advice]

LOOP = 3
"""So many attempts in a row that fail alike, and win no step after the first, are a loop wherever they end."""
MOST_REPEATED = 0.05
"""The share of the time in which the run was not stopped that may be work done again."""
MOST_STALLS = 0.05
"""The share of the time in training that may be spent waiting for checkpoints."""
FEW_STALLS = 0.01
"""What waiting for checkpoints should come down to."""
LEAST_CHECKPOINTS = 3
"""Fewer say nothing about how often to save: every run saves at its end."""
MOST_STARTING = 0.1
LONG_START = 60.0
LONG_RUN = 600.0
"""Seconds. In a run that is shorter most of the time is starting, and nobody minds."""
MOST_STOPPED = 0.2
MOST_VALIDATION = 0.2
LONG_VALIDATION = 60.0
MOST_LOST_STEPS = 0.02
LEAST_LOST_STEPS = 3
MOST_PADDING = 0.15
FEWEST_STEPS_BETWEEN_SAVES = 10
"""Where saving costs nothing that can be measured, it is still not advised after every step."""


def restart_loop(summary: Summary) -> Found | None:
    """The same failure again and again, and no step is won in between.

    Where the run ended so, nothing else matters before it: what it wins is without limit.
    """
    loop = _loop(summary.attempts)
    if not loop:
        return None
    first, last = loop[0].number, loop[-1].number
    numbers = f"{first} and {last}" if len(loop) == 2 else f"{first} to {last}"
    because = loop[-1].why.strip().split("\n")[0].rstrip(".") or "the log does not say which"
    text = (
        f"Attempts {numbers} failed alike and none got further than the first of them, so that restarting does not "
        f"help: repair the cause before the next start ({because})."
    )
    lost = sum(attempt.end - attempt.begin for attempt in loop[1:])
    reached = max((attempt.last_step for attempt in loop if attempt.last_step is not None), default=0)
    where = f"step {reached}" if reached else "the start"
    evidence = (
        f"{len(loop)} attempts of {len(summary.attempts)}: none got beyond {where}, and all after the first, "
        f"{duration_text(lost)}, were for nothing."
    )
    ended_so = loop[-1] is summary.attempts[-1] and summary.state in ("failed", "lost")
    return math.inf if ended_so else lost, Advice(text, evidence, "events")


def repeated_work(summary: Summary) -> Found | None:
    """Steps that were done twice because the last checkpoint was old when a rank failed, or Slurm killed the job."""
    spent = summary.spent
    running = spent.whole - spent.stopped
    failed = [attempt for attempt in summary.attempts if attempt.state in ("failed", "lost")]
    killed = [attempt for attempt in summary.attempts if attempt.state == "stopped" and attempt.unsaved > 0]
    failures, end = len(failed + killed), "interruption" if killed else "failure"
    repeated = sum(attempt.unsaved for attempt in failed + killed)
    if not failures or repeated <= MOST_REPEATED * running or _loop(summary.attempts):
        return None
    evidence = (
        f"{duration_text(repeated)} of {duration_text(running)} ({percent(repeated / running)}) were steps "
        f"done again, or to be done again, after {failures} {end}{'s' if failures > 1 else ''}, with "
        f"{summary.checkpoints or 'no'} checkpoint{'s' if summary.checkpoints != 1 else ''}."
    )
    if not summary.checkpoints:
        text = f"Work is repeated after every {end}, because nothing was saved: set save_every, or call run.save()."
        return repeated, Advice(text, evidence, "checkpoints")
    stall = summary.checkpoint_stalls / summary.checkpoints
    least = FEWEST_STEPS_BETWEEN_SAVES * (summary.step_seconds or 0.0)
    interval = max(least, daly(stall, running / failures))
    if spent.steps + spent.repeated < 1.5 * interval * summary.checkpoints:
        return None  # it saves about as often as that already
    text = f"Work is repeated after {end}s: save more often, {_every(interval, summary)}."
    evidence += (
        f" A save stalls for {seconds_text(stall)} and {end}s come every {duration_text(running / failures)}: "
        f"the best interval is {duration_text(interval)} (Daly)."
    )
    return repeated, Advice(text, evidence, "checkpoints")


def checkpoint_stalls(summary: Summary) -> Found | None:
    """The training stands still while it saves."""
    spent = summary.spent
    training = spent.whole - spent.stopped - spent.starting
    if summary.checkpoints < LEAST_CHECKPOINTS or spent.checkpoints <= MOST_STALLS * training:
        return None
    stall = spent.checkpoints / summary.checkpoints
    text = (
        "The training stands still while it saves: save in the background (run.save() without wait=True), or less "
        f"often, {_every(stall / FEW_STALLS, summary)}."
    )
    evidence = (
        f"{summary.checkpoints} checkpoints stalled it for {seconds_text(stall)} each, "
        f"{duration_text(spent.checkpoints)} in all: {percent(spent.checkpoints / training)} of the time in training."
    )
    return spent.checkpoints, Advice(text, evidence, "checkpoints")


def long_start(summary: Summary) -> Found | None:
    """Much of the time passes before first steps."""
    spent = summary.spent
    running = spent.whole - spent.stopped
    if running < LONG_RUN or spent.starting < max(LONG_START, MOST_STARTING * running):
        return None
    count = len(summary.attempts)
    fix = "put environment, data and checkpoints on a disk near the nodes"
    if count > 1:
        fix += ", and let each of the attempts run longer"
    text = f"Much of the time passes before the first step of an attempt: {fix}."
    evidence = (
        f"{count} attempt{'s' if count > 1 else ''} took {duration_text(spent.starting)} to start, "
        f"{percent(spent.starting / running)} of {duration_text(running)}."
    )
    return spent.starting, Advice(text, evidence, "time")


def stood_still(summary: Summary) -> Found | None:
    """Between attempts nothing ran for long."""
    spent = summary.spent
    if spent.stopped < max(LONG_RUN, MOST_STOPPED * spent.whole):
        return None
    in_slurm = any(attempt.job for attempt in summary.attempts)
    fix = "ask for more time in one job, so that it queues less often" if in_slurm else "start it with --restarts"
    text = f"The run stood still between its attempts: {fix}."
    evidence = (
        f"Nothing ran for {duration_text(spent.stopped)} of {duration_text(spent.whole)} "
        f"({percent(spent.stopped / spent.whole)}), between {len(summary.attempts)} attempts."
    )
    return spent.stopped, Advice(text, evidence, "events")


def much_validation(summary: Summary) -> Found | None:
    """Validation takes a large part."""
    spent = summary.spent
    training = spent.whole - spent.stopped - spent.starting
    if spent.validation < max(LONG_VALIDATION, MOST_VALIDATION * training):
        return None
    text = "Validation takes a large part of the time: validate less often (validate_every), or on fewer samples."
    evidence = (
        f"{duration_text(spent.validation)} of {duration_text(training)} in training, "
        f"{percent(spent.validation / training)}."
    )
    return spent.validation, Advice(text, evidence, "time")


def lost_steps(summary: Summary) -> Found | None:
    """Loss or gradients are not finite: steps are skipped, or all that follows is lost."""
    skipped = summary.skipped_steps
    if summary.not_finite and summary.state == "failed":
        text = (
            f"The run stopped at a {summary.not_finite.split()[0]} that is not finite, and would again: look at the "
            "samples that the alarm names, or use a smaller optimizer.lr."
        )
        return math.inf, Advice(text, f"The {summary.not_finite} is no finite number.", "events")
    if summary.diverged_step is not None:
        text = (
            "The loss is not finite, so that nothing is learnt any more: go on from an earlier checkpoint with a "
            "smaller optimizer.lr, or clip gradients."
        )
        evidence = f"The loss of step {summary.diverged_step} is no finite number."
        return summary.spent.steps + summary.spent.repeated, Advice(text, evidence, "training")
    if skipped < max(LEAST_LOST_STEPS, MOST_LOST_STEPS * summary.steps) or summary.step_seconds is None:
        return None
    if summary.precision == "fp16":
        fix = 'use precision = "bf16", which does not overflow, or begin with a smaller numerics.loss_scale'
    else:
        fix = "use a smaller optimizer.lr or a longer schedule.warmup_steps, and look at the samples the alarms name"
    text = f"Many steps are skipped because their numbers are not finite: {fix}."
    evidence = (
        f"{skipped} of {summary.steps} steps ({percent(skipped / summary.steps)}) left the weights as they were, with "
        f"{summary.alarms} alarm{'s' if summary.alarms != 1 else ''}."
    )
    return skipped * summary.step_seconds, Advice(text, evidence, "events")


def much_padding(summary: Summary) -> Found | None:
    """Rows are filled up with what nobody learns from."""
    share = summary.padding / summary.items if summary.items else 0.0
    if share < MOST_PADDING:
        return None
    text = "Much of what is computed only fills rows up: pack several texts into a row, or batch texts of like length."
    evidence = (
        f"{count_text(summary.padding)} of {count_text(summary.items)} {summary.item} are padding, {percent(share)}."
    )
    return share * summary.spent.useful, Advice(text, evidence, "training")


def _loop(attempts: list[AttemptSummary]) -> list[AttemptSummary]:
    """The longest row of attempts that failed with one sentence, numbers aside, and won no step after the first.

    Two are a loop where they ended at the same step, or the second did none: else it may be an accident.
    """
    reached, longest, row = 0, list[AttemptSummary](), list[AttemptSummary]()
    for attempt in attempts:
        won = (attempt.last_step or 0) > reached
        reached = max(reached, attempt.last_step or 0)
        if attempt.state != "failed":
            row = []
        elif row and not won and _cause(row[-1]) == _cause(attempt):
            row = [*row, attempt]
        else:
            row = [attempt]
        is_loop = len(row) >= LOOP or (len(row) == 2 and attempt.last_step in (None, row[0].last_step))
        if is_loop and len(row) > len(longest):
            longest = row
    return longest


def _cause(attempt: AttemptSummary) -> str:
    return re.sub(r"\d+", "#", attempt.why)


def _every(seconds: float, summary: Summary) -> str:
    """How often to save, as the config says it."""
    if seconds >= 60 or not summary.step_seconds:
        count, unit = max(1, round(seconds / 60)), "minute"
    else:
        count, unit = max(1, math.ceil(seconds / summary.step_seconds)), "step"
    return f'as with save_every = "{count} {unit}{"s" if count > 1 else ""}"'
