"""The chapters of a run's page, in order. A panel without data is left out, and so is a chapter without panels."""

from __future__ import annotations

from lockstep.page.panels import Chapter
from lockstep.page.reading.run_data import Digest
from lockstep.page.reading.summary import Summary
from lockstep.page.sections.log_chapter import checkpoints, events, profile, settings
from lockstep.page.sections.machine_chapter import machine
from lockstep.page.sections.rank_chapter import ranks
from lockstep.page.sections.time_chapter import time
from lockstep.page.sections.training_chapter import speed, training


def sections_of(digest: Digest, summary: Summary) -> list[Chapter]:
    """All of them."""
    columns = digest.steps.columns()
    chapters = [
        Chapter("training", "Training", training(digest, columns)),
        Chapter("speed", "Speed", speed(digest, columns, summary)),
        Chapter("time", "Where the time went", time(digest, summary)),
        Chapter("ranks", "Ranks", ranks(digest, summary)),
        Chapter("machine", "Machine", machine(digest)),
        Chapter("checkpoints", "Checkpoints", checkpoints(digest, summary)),
        Chapter("profile", "Profile", profile(digest)),
        Chapter("events", "What happened", events(digest, summary)),
        Chapter("settings", "Settings", settings(digest)),
    ]
    return [chapter for chapter in chapters if chapter.panels]
