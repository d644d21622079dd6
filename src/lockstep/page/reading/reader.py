"""Reads the `events.jsonl` of a run, whatever is in it, and again where it has grown."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import UserError
from lockstep.page.panels import RunPage
from lockstep.page.reading.run_data import Digest
from lockstep.page.reading.summary import Summary
from lockstep.record.folder import EVENTS
from lockstep.record.log import LogReader
from lockstep.record.run_state import GOES_ON


class RunReader:
    """Follows the log of one run. Nothing in the file makes it raise; what it could not read is part of the page."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"there is no run folder {folder}", "name the folder of a run, such as runs/lm")
        if not (folder / EVENTS).is_file():
            raise UserError(
                f"{folder} has no {EVENTS}", "name the folder of a run that has started (lockstep jobs lists yours)"
            )
        self._name = folder.resolve().name
        self._log, self._digest = LogReader(folder / EVENTS), Digest()

    def read(self) -> bool:
        """Take in what is new in the log; True where something was, also where it is another file now."""
        log, before = self._log, self._log.lines
        try:
            news = log.read()
        except OSError as error:
            raise UserError(f"cannot read {log.path}", error.strerror or str(error)) from None
        if log.is_another:
            self._digest = Digest()
        digest = self._digest
        for event in news:
            digest.take(event, log.lines)
        return log.is_another or log.lines > before

    def summary(self, now: float) -> Summary:
        """The run in numbers, as it stands at this time."""
        from lockstep.page.reading.summing import summarize

        return summarize(self._digest, self._name, now, self._log.changed)

    def page(self, now: float, *, live: bool = False, summary: Summary | None = None) -> RunPage:
        """The run as the page shows it; one that is not `live` says when it was written.

        Of a run of many steps a summary takes its time: who has that of `now` already hands it over.
        """
        # Not at the top: these make sentences of what is read here.
        from lockstep.page.advice.choose import advise
        from lockstep.page.sections.chapters import sections_of
        from lockstep.page.sections.headline import headline

        summary = summary or self.summary(now)
        return RunPage(
            name=summary.name,
            headline=headline(summary, None if live else now),
            advice=advise(summary),
            unreadable=self._unreadable(summary),
            sections=sections_of(self._digest, summary),
        )

    def _unreadable(self, summary: Summary) -> list[str]:
        told = self._digest.damage.sentences()
        if self._log.torn and summary.state not in GOES_ON:
            told.append(f"the last line is torn: it has {self._log.torn:,} bytes and no end, as a crash leaves it")
        whole, sum_of_parts = summary.end - summary.begin, summary.spent.whole
        if sum_of_parts > 1.01 * whole + 1:
            told.append(
                f"the times add up to {sum_of_parts:.0f} s, but from the first event to the last it is {whole:.0f} s: "
                "two attempts ran at once, or a clock jumped, and shares of the whole time are not to be trusted"
            )
        if not self._digest.events:
            told.insert(0, "the log has no event that can be used")
        return told
