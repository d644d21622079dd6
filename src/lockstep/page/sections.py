"""The chapters of a run's page, in order. A panel without data is left out, and so is a chapter without panels."""

from __future__ import annotations

from lockstep.page.digest import Digest
from lockstep.page.panels import Section
from lockstep.page.section_log import checkpoints, events, profile, settings
from lockstep.page.section_machine import machine
from lockstep.page.section_ranks import ranks
from lockstep.page.section_time import time
from lockstep.page.section_training import speed, training
from lockstep.page.summary import Summary


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
