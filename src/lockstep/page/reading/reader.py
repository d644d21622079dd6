"""Reads the `events.jsonl` of a run, whatever is in it, and again where it has grown."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.errors import UserError
from lockstep.page.panels import RunPage
from lockstep.page.reading.run_data import Digest
from lockstep.page.reading.summary import Summary
from lockstep.record.folder import EVENTS
from lockstep.record.log import parsed

CHUNK = 1 << 22
LONGEST_LINE = 1 << 26
"""Bytes: what is longer was not written by a run."""
HEAD = 256


class RunReader:
    """Follows the log of one run. Nothing in the file makes it raise; what it could not read is part of the page."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS
        self._name = folder.resolve().name
        if not folder.is_dir():
            raise UserError(f"there is no run folder {folder}", "name the folder of a run, such as runs/lm")
        if not self._path.is_file():
            raise UserError(
                f"{folder} has no {EVENTS}", "name the folder of a run that has started (lockstep jobs lists yours)"
            )
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._digest = Digest()
        self._offset = self._lines = self._torn = 0
        self._passing_over = False
        self._changed = 0.0
        self._file: tuple[int, int] | None = None
        self._head = b""

    def read(self) -> bool:
        """Take in what is new in the log; True where something was, also where it is another file now."""
        try:
            # Opened anew for each look: network file systems show what other hosts wrote only from open to open.
            with self._path.open("rb") as file:
                state = os.fstat(file.fileno())
                head = file.read(HEAD)
                same = self._file in (None, (state.st_dev, state.st_ino)) and head.startswith(self._head)
                replaced = not same or state.st_size < self._offset
                if replaced:
                    self._begin_anew()
                self._file, self._changed = (state.st_dev, state.st_ino), state.st_mtime
                self._head = head[: self._offset]
                file.seek(self._offset)
                before = self._lines
                rest = b""
                while chunk := file.read(CHUNK):
                    rest = self._take(rest + chunk)
                self._torn = len(rest)
                self._head = head[: self._offset]
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UserError(f"cannot read {self._path}", error.strerror or str(error)) from None
        return replaced or self._lines > before

    def _take(self, data: bytes) -> bytes:
        """Every whole line of this; returns what comes after the last one."""
        end = data.rfind(b"\n") + 1
        if end == 0:
            if len(data) > LONGEST_LINE:
                self._offset += len(data)
                if not self._passing_over:
                    self._passing_over = True
                    self._lines += 1
                    self._digest.damage.line("longer than any event", self._lines)
                return b""
            return data
        self._offset += end
        take = self._digest.take
        lines = data[:end].split(b"\n")
        lines.pop()
        if self._passing_over:  # this is how it ends
            self._passing_over = False
            del lines[0]
        number = self._lines
        for line in lines:
            number += 1
            try:
                event = parsed(line)
            except (ValueError, RecursionError):
                if line.strip():
                    self._digest.damage.line("not JSON", number)
                continue
            take(event, number)
        self._lines = number
        return data[end:]

    def summary(self, now: float) -> Summary:
        """The run in numbers, as it stands at this time."""
        from lockstep.page.reading.summing import summarize

        return summarize(self._digest, self._name, now, self._changed)

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
        if self._torn and summary.state != "running":
            told.append(f"the last line is torn: it has {self._torn:,} bytes and no end, as a crash leaves it")
        whole, sum_of_parts = summary.end - summary.begin, summary.spent.whole
        if sum_of_parts > 1.01 * whole + 1:
            told.append(
                f"the times add up to {sum_of_parts:.0f} s, but from the first event to the last it is {whole:.0f} s: "
                "two attempts ran at once, or a clock jumped, and shares of the whole time are not to be trusted"
            )
        if not self._digest.events:
            told.insert(0, "the log has no event that can be used")
        return told
