"""The chapters that tell what happened: checkpoints, profiles, the timeline, and the settings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lockstep.page.panels import AttemptBar, Lines, Panel, Share, Shares, Table, Text, Timeline
from lockstep.page.reading.profiles import Profile
from lockstep.page.reading.run_data import Digest
from lockstep.page.reading.series import curve_of
from lockstep.page.reading.summary import Summary
from lockstep.page.sections.training_chapter import steps_text
from lockstep.text.units import bytes_text, duration_text, percent, seconds_text

MOST_TABLE_ROWS = 50
MOST_SPANS = 200


def checkpoints(digest: Digest, summary: Summary) -> list[Panel]:
    """How long they took, what the training waited, and the last of them."""
    if not digest.saved:
        return []
    curves = [digest.saving.curve("until it is on disk"), digest.stalling.curve("the training waited")]
    many = f"{summary.checkpoints:,} checkpoint{'' if summary.checkpoints == 1 else 's'}"
    note = f"{many}; the training waited {duration_text(summary.checkpoint_stalls)} in all."
    shown = list(digest.saved)[-MOST_TABLE_ROWS:]
    rows = [
        [
            str(saved.step),
            str(saved.attempt),
            saved.path,
            bytes_text(saved.size),
            seconds_text(saved.seconds),
            seconds_text(saved.stall),
            "best" if saved.best else "",
        ]
        for saved in shown
    ]
    left = summary.checkpoints - len(shown)
    said = f"The last {len(shown)}; {left:,} before them are left out." if left else ""
    columns = ["step", "attempt", "path", "size", "until on disk", "stall", ""]
    right = [True, True, False, True, True, True, False]
    return [
        Lines("checkpoint_seconds", "Seconds of checkpoints", "step", "seconds", curves, note, unit="s"),
        Table("checkpoint_table", "Checkpoints", columns, rows, right, said),
    ]


def profile(digest: Digest) -> list[Panel]:
    """What `--profile` has recorded, rank by rank."""
    return [panel for number, recorded in enumerate(digest.profiles) for panel in _profile(recorded, number)]


def _profile(recorded: Profile, number: int) -> list[Panel]:
    id, who = f"profile{number}", f"rank {recorded.rank}, {steps_text(recorded.first_step, recorded.last_step)}"
    trace = f"The trace for Perfetto and TensorBoard is {recorded.path}." if recorded.path else ""
    note = f"{_sentence(recorded.text)} {trace}".strip()
    if not recorded.seconds["whole"]:
        return [Text(id, f"No digest: {who}", note)]
    overlap, seconds = recorded.seconds["overlapped"], recorded.seconds
    parts = [
        Share("compute", max(0.0, seconds["compute"] - overlap), True, "without communication beside it"),
        Share("both at once", overlap, True, "communication hidden behind compute"),
        Share("communication", max(0.0, seconds["communication"] - overlap), note="exposed"),
        Share("idle", seconds["idle"], note="neither"),
    ]
    panels: list[Panel] = [Shares(id, f"Device time: {who}", "s", parts, note)]
    whole = seconds["whole"]
    if recorded.kernels:
        rows = [
            [name, str(calls), seconds_text(spent), percent(spent / whole) if whole else ""]
            for name, calls, spent in recorded.kernels
        ]
        what = "operator" if recorded.on_cpu else "kernel"
        columns, right = [what, "calls", "time", "of all"], [False, True, True, True]
        said = (
            f"By their own time: without what they call. Of {what}s that ran at once, such as two collectives, the "
            "times are added up here; the bar counts each moment once."
        )
        panels.append(Table(f"{id}_kernels", f"Longest {what}s: {who}", columns, rows, right, said))
    if recorded.gaps:
        rows = [[seconds_text(begin), seconds_text(gap), before, after] for begin, gap, before, after in recorded.gaps]
        columns, right = ["at", "how long", "after", "before"], [True, True, False, False]
        panels.append(Table(f"{id}_gaps", f"Longest gaps: {who}", columns, rows, right))
    if recorded.memory:
        x, y = np.array(recorded.memory, float).T
        curve = curve_of("memory", np.round(1e6 * x), y, most=400)
        curve = replace(curve, x=[round(microseconds / 1e6, 6) for microseconds in curve.x])
        note = "Over seconds since the recording began."
        panels.append(Lines(f"{id}_memory", f"Memory: {who}", "seconds", "bytes", [curve], note, unit="B"))
    if recorded.tensors:
        rows = [[bytes_text(size), shape, where] for size, shape, where in recorded.tensors]
        columns, right = ["size", "shape", "where"], [True, False, False]
        panels.append(Table(f"{id}_tensors", f"Biggest tensors at the peak: {who}", columns, rows, right))
    return panels


def _sentence(text: str) -> str:
    """Words of an event as a sentence."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def events(digest: Digest, summary: Summary) -> list[Panel]:
    """The attempts, and what happened in them."""
    moments, left_out = digest.moments.chosen()
    spans = [
        AttemptBar(
            attempt.number,
            round(attempt.begin, 3),
            round(attempt.end, 3),
            attempt.state,
            _span_text(attempt.job, attempt.why),
        )
        for attempt in summary.attempts
    ]
    if len(spans) > MOST_SPANS:
        half = MOST_SPANS // 2
        left_out = f"{len(spans) - 2 * half:,} attempts in the middle are left out. {left_out}".strip()
        spans = [*spans[:half], *spans[-half:]]
    if not moments and not spans:
        return []
    return [Timeline("timeline", "Timeline", spans, moments, left_out)]


def _span_text(job: str, why: str) -> str:
    return ", ".join(part for part in (f"job {job}" if job else "", why) if part)


def settings(digest: Digest) -> list[Panel]:
    """The config, the formats of numbers, versions, and what the model writes."""
    panels: list[Panel] = []
    if digest.settings:
        chosen = ", ".join(f"{name} = {value}" for name, value in list(digest.chosen.items())[:20])
        note = f"Chosen while running: {chosen}." if chosen else ""
        panels.append(Text("config", "Config", digest.settings, note, "toml"))
    started = [attempt.started for attempt in digest.attempts.values() if attempt.started]
    if started:
        last = started[-1]
        formats = [[name, value] for name, value in last.formats.items()]
        versions = [[name, value] for name, value in last.versions.items()]
        pair = [False, False]
        panels.append(Table("formats", "Number formats", ["what", "format"], formats, pair))
        panels.append(Table("versions", "Versions", ["what", "version"], versions, pair))
    if digest.samples:
        told = "\n\n".join(f"step {step}: {prompt}|{said}" for step, prompt, said in digest.samples)
        panels.append(Text("samples", "What the model writes", told, "The prompt ends at the first |."))
    return panels
