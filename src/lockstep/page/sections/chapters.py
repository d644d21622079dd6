"""The chapters of a run's page, in order. A panel without data is left out, and so is a chapter without panels."""

from __future__ import annotations

from lockstep.page.panels import Section
from lockstep.page.reading.run_data import Digest
from lockstep.page.reading.summary import Summary
from lockstep.page.sections.log_chapter import checkpoints, events, profile, settings
from lockstep.page.sections.machine_chapter import machine
from lockstep.page.sections.rank_chapter import ranks
from lockstep.page.sections.time_chapter import time
from lockstep.page.sections.training_chapter import speed, training


def sections_of(digest: Digest, summary: Summary) -> list[Section]:
    """All of them."""
    columns = digest.steps.columns()
    chapters = [
        Section("training", "Training", training(digest, columns)),
        Section("speed", "Speed", speed(digest, columns, summary)),
        Section("time", "Where the time went", time(digest, summary)),
        Section("ranks", "Ranks", ranks(digest, summary)),
        Section("machine", "Machine", machine(digest)),
        Section("checkpoints", "Checkpoints", checkpoints(digest, summary)),
        Section("profile", "Profile", profile(digest)),
        Section("events", "What happened", events(digest, summary)),
        Section("settings", "Settings", settings(digest)),
    ]
    return [chapter for chapter in chapters if chapter.panels]
