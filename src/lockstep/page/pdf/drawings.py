"""What is drawn without a y axis: one bar in parts, the attempts of a run, its mesh, a pipeline's timetable."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.page.panels import Mesh, Moment, Shares, Timeline, Timetable
from lockstep.page.pdf.charts import draw_x_axis
from lockstep.page.pdf.paper import (
    FILLS,
    INK,
    LEVELS,
    LINE,
    PALE,
    PARTS,
    QUIET,
    STATES,
    STROKES,
    Paper,
    moment_text,
    value_text,
)
from lockstep.text.charts import Axis
from lockstep.text.units import percent

# Those of the page, so that neighbours are far apart; of more lost parts than it has colours, two more.
USEFUL = tuple(STROKES[number] for number in (2, 0, 5, 6, 8))
LOST = (*(STROKES[number] for number in (1, 3, 4, 7)), "#e0a800", "#b8bec6")
MOST_ATTEMPTS = 20
MOST_MOMENTS = 40
MOST_RANKS = 512
WORK = {
    "F": ("forward", "#56b4e9"),
    "B": ("backward", "#e69f00"),
    "I": ("backward for inputs", "#e69f00"),
    "W": ("backward for weights", "#009e73"),
}


def draw_shares(paper: Paper, panel: Shares) -> None:
    """One bar in parts, and below it what they are."""
    parts = [part for part in panel.parts if math.isfinite(part.amount) and part.amount > 0]
    whole = sum(part.amount for part in parts)
    if whole <= 0:
        paper.pen(8, QUIET)
        paper.paragraph("nothing yet", 4)
        return
    paper.need(14 + 4.6 * len(parts))
    counts = {True: 0, False: 0}
    colours = []
    for part in parts:
        several = USEFUL if part.good else LOST
        colours.append(PARTS.get(part.name, several[counts[part.good] % len(several)]))
        counts[part.good] += 1
    x, y = paper.left, paper.get_y() + 1
    for part, colour in zip(parts, colours, strict=True):
        width = paper.wide * part.amount / whole
        paper.filled(x, y, width, 8, colour)
        paper.stroke("#ffffff", 0.3)
        paper.line(x, y, x, y + 8)
        x += width
    paper.set_y(y + 10.5)
    for part, colour in zip(parts, colours, strict=True):
        y = paper.get_y()
        paper.filled(paper.left, y, 3.2, 3.2, colour)
        paper.pen(8, INK)
        paper.word(paper.left + 5, y + 2.7, part.name, most=48)
        paper.word(paper.left + 76, y + 2.7, value_text(part.amount, panel.unit), "right")
        paper.word(paper.left + 90, y + 2.7, percent(part.amount / whole), "right")
        paper.pen(7, QUIET)
        note = part.note or ("" if part.good else "lost")
        paper.word(paper.left + 94, y + 2.7, note, most=paper.wide - 94)
        paper.set_y(y + 4.6)


def draw_timeline(paper: Paper, panel: Timeline) -> None:
    """The attempts as bars over time, and what happened."""
    spans = panel.spans[-MOST_ATTEMPTS:]
    if spans:
        _draw_attempts(paper, panel, len(panel.spans) - len(spans))
    if panel.moments:
        _list_moments(paper, panel.moments)


def _draw_attempts(paper: Paper, panel: Timeline, left_out: int) -> None:
    spans = panel.spans[left_out:]
    low, high = min(span.begin for span in spans), max(span.end for span in spans)
    axis = Axis(low, high if high > low else low + 1.0, False)
    tall, label = 6.0, 22.0
    paper.need(tall * len(spans) + 14)
    top, left, width = paper.get_y() + 1, paper.left + label, paper.wide - label - 5
    rows = {span.attempt: top + tall * number for number, span in enumerate(spans)}
    for span in spans:
        y = rows[span.attempt]
        begin, end = (left + width * axis.share(moment) for moment in (span.begin, span.end))
        paper.pen(7, INK)
        paper.word(paper.left, y + 3.6, f"attempt {span.attempt}", most=label - 2)
        paper.filled(left, y + 0.8, width, tall - 1.6, PALE)
        paper.filled(begin, y + 0.8, max(0.6, end - begin), tall - 1.6, STATES[span.state])
        text = f"{span.state}{': ' if span.text else ''}{span.text}"
        paper.pen(6.5, "#ffffff")
        fits = paper.get_string_width(paper.clean(span.state)) + 3 < end - begin
        if fits:
            paper.word(begin + 1.5, y + 3.7, text, most=end - begin - 3)
        elif left + width - end > 25:
            paper.pen(6.5, QUIET)
            paper.word(end + 1.5, y + 3.7, text, most=left + width - end - 2)
    for moment in panel.moments:
        if moment.attempt in rows and low <= moment.time <= high:
            x, y = left + width * axis.share(moment.time), rows[moment.attempt]
            is_news = moment.level in ("warning", "error")
            paper.stroke(LEVELS[moment.level] if is_news else QUIET, 0.3 if is_news else 0.15)
            paper.line(x, y + 0.2 if is_news else y + tall - 0.8, x, y + tall)
    draw_x_axis(paper, "time", axis, lambda moment: left + width * axis.share(moment), top + tall * len(spans))
    paper.set_y(top + tall * len(spans) + 8)
    if left_out:
        paper.pen(7.5, QUIET)
        paper.paragraph(f"{left_out} attempts before these are on the page", 4)


def _list_moments(paper: Paper, moments: Sequence[Moment]) -> None:
    """Most of them in words: those that are no good news first, where there are too many, and in their order."""
    order = sorted(range(len(moments)), key=lambda n: (moments[n].level in ("info", "good"), -n))
    shown = [moments[number] for number in sorted(order[:MOST_MOMENTS])]
    for moment in shown:
        paper.pen(7.5, INK)
        lines = paper.lines_of(moment.text, paper.wide - 62)[:3]
        paper.need(3.7 * len(lines) + 1)
        y = paper.get_y() + 2.8
        paper.pen(7, QUIET)
        paper.word(paper.left, y, moment_text(moment.time, "%d %b %H:%M:%S"))
        paper.word(paper.left + 24, y, "" if moment.step is None else f"step {moment.step:,}", most=20)
        paper.pen(7, LEVELS[moment.level], bold=True)
        paper.word(paper.left + 43, y, moment.what, most=18)
        paper.pen(7.5, INK)
        for number, line in enumerate(lines):
            paper.word(paper.left + 62, y + 3.7 * number, line)
        paper.set_y(paper.get_y() + 3.7 * max(1, len(lines)) + 0.4)
    if len(shown) < len(moments):
        paper.pen(7.5, QUIET)
        paper.paragraph(f"{len(moments) - len(shown)} more are on the page", 4)


def draw_mesh(paper: Paper, panel: Mesh) -> None:
    """Every rank in its place, coloured by its host, and who talks to whom over each axis."""
    for axis in panel.axes:
        paper.need(5)
        paper.pen(8, INK, bold=True)
        name = f"{axis.name} = {axis.size}"
        paper.word(paper.left, paper.get_y() + 3, name, most=30)
        paper.pen(8, INK)
        paper.paragraph(axis.talk, 4, paper.left + 22, paper.wide - 22)
    count = math.prod(axis.size for axis in panel.axes)
    if count > MOST_RANKS:
        paper.pen(8, QUIET)
        paper.paragraph(f"{count:,} ranks are too many to draw", 4)
        return
    across = panel.axes[-1].size if panel.axes else 1
    hosts = list(dict.fromkeys(panel.hosts))
    size = max(3.4, min(11.0, paper.wide / across - 1))
    per_line = max(1, int((paper.wide + 1) // (size + 1)))
    tall = min(size, 7.0)
    inner = panel.axes[-2].size if len(panel.axes) > 1 else 1
    paper.ln(2)
    for first in range(0, count, across):
        if first and first // across % inner == 0:
            paper.ln(2)  # a step of one of the outer axes
        for begin in range(first, first + across, per_line):
            paper.need(tall + 2)
            y = paper.get_y()
            for place, rank in enumerate(range(begin, min(begin + per_line, first + across))):
                _draw_rank(paper, panel, hosts, rank, (paper.left + place * (size + 1), y, size, tall))
            paper.set_y(y + tall + 1)
    if len(hosts) > 1:
        paper.pen(7, QUIET)
        names = ", ".join(hosts[:12]) + (f" and {len(hosts) - 12} more" if len(hosts) > 12 else "")
        paper.paragraph(f"one colour for each host: {names}", 3.6)
    if panel.slow:
        paper.pen(7, LEVELS["error"])
        slow = ", ".join(map(str, panel.slow[:16]))
        paper.paragraph(f"framed: rank {slow} holds the others up", 3.6)


def _draw_rank(paper: Paper, panel: Mesh, hosts: list[str], rank: int, box: tuple[float, float, float, float]) -> None:
    x, y, width, height = box
    host = panel.hosts[rank] if rank < len(panel.hosts) else ""
    paper.set_fill_color(FILLS[hosts.index(host) % len(FILLS)] if host else LINE)
    with paper.local_context(fill_opacity=0.3):
        paper.rect(x, y, width, height, style="F")
    if rank in panel.slow:
        paper.stroke(LEVELS["error"], 0.6)
        paper.rect(x, y, width, height)
    if width >= 5:
        paper.pen(6.5, INK)
        paper.word(x + width / 2, y + height / 2 + 0.9, str(rank), "middle")


def draw_timetable(paper: Paper, panel: Timetable) -> None:
    """What each place of a pipeline did when, over one step."""
    if not panel.lanes or not panel.seconds > 0:
        return
    label, tall = 18.0, max(3.0, min(7.0, 90 / len(panel.lanes)))
    paper.need(tall * len(panel.lanes) + 16)
    left, width = paper.left + label, paper.wide - label - 14
    x, y = left, paper.get_y() + 3
    used = {what for lane in panel.lanes for what, *_ in lane}
    for what, (name, colour) in WORK.items():
        if what in used and not (what == "I" and "B" in used):
            paper.filled(x, y - 2.3, 4, 2.6, colour)
            paper.pen(7, INK)
            x += 5.5 + paper.word(x + 5.5, y, name) + 5
    paper.pen(7, QUIET)
    paper.word(paper.left + paper.wide, y, "busy", "right")
    top = y + 2
    for place, lane in enumerate(panel.lanes):
        y = top + tall * place
        paper.pen(7, INK)
        paper.word(paper.left, y + tall / 2 + 0.9, f"place {place}")
        paper.filled(left, y + 0.3, width, tall - 0.6, PALE)
        for what, _, micro_batch, begin, end in lane:
            start, stop = (left + width * min(1.0, max(0.0, at / panel.seconds)) for at in (begin, end))
            paper.filled(start, y + 0.3, max(0.15, stop - start - 0.12), tall - 0.6, WORK.get(what, ("", LINE))[1])
            paper.pen(5.5, INK)
            if stop - start > paper.get_string_width(str(micro_batch)) + 0.6 and tall > 3.4:
                paper.word((start + stop) / 2, y + tall / 2 + 0.7, str(micro_batch), "middle")
        if place < len(panel.busy):
            paper.pen(7, INK)
            paper.word(paper.left + paper.wide, y + tall / 2 + 0.9, percent(panel.busy[place]), "right")
    bottom = top + tall * len(panel.lanes)
    paper.pen(6.5, QUIET)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        align = "left" if share == 0 else "right" if share == 1 else "middle"
        paper.word(left + width * share, bottom + 3.2, value_text(share * panel.seconds, "s"), align)
    paper.set_y(bottom + 6)
