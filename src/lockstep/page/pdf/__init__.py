"""The page as a PDF, without a browser: the same panels, drawn on A4."""

from __future__ import annotations

from lockstep.page.panels import (
    NO_ADVICE,
    Advice,
    Fact,
    Headline,
    Heat,
    Lines,
    Mesh,
    Page,
    Panel,
    RunPage,
    Section,
    Shares,
    Stack,
    Table,
    Text,
    Timeline,
    Timetable,
)
from lockstep.page.pdf.charts import HEIGHT, draw_lines, draw_stack
from lockstep.page.pdf.drawings import draw_mesh, draw_shares, draw_timeline, draw_timetable
from lockstep.page.pdf.heat import draw_heat, heat_height
from lockstep.page.pdf.paper import INK, LEVELS, LINE, PALE, QUIET, STATES, Paper, moment_text
from lockstep.page.pdf.tables import draw_table, draw_text

ROOM_FOR_A_PANEL = 30.0
FACTS_IN_A_ROW = 4


def page_pdf(page: Page) -> bytes:
    """All of a page as a PDF: the comparison of several runs, then each run with its headline and advice first."""
    foot = f"{page.title} · made {moment_text(page.made)} · lockstep {page.version}"
    paper = Paper(page.title, foot, page.made)
    if page.comparison:
        paper.pen(18, INK, bold=True)
        paper.paragraph(page.title, 8)
        paper.ln(3)
        for section in page.comparison:
            _draw_section(paper, section, 0)
    for number, run in enumerate(page.runs):
        if number or page.comparison:
            paper.add_page()
        _draw_run(paper, run)
    return bytes(paper.output())


def _draw_run(paper: Paper, run: RunPage) -> None:
    paper.start_section(paper.clean(run.name) or "run", 0)
    _draw_headline(paper, run.headline)
    _draw_advice(paper, run.advice)
    if run.unreadable:
        _draw_unreadable(paper, run.unreadable)
    for section in run.sections:
        _draw_section(paper, section, 1)


def _draw_headline(paper: Paper, headline: Headline) -> None:
    paper.pen(7.5, "#ffffff", bold=True)
    state = headline.state
    width = paper.get_string_width(state) + 5
    top = paper.get_y()
    paper.set_fill_color(STATES[state])
    paper.rect(paper.left + paper.wide - width, top + 1, width, 5.6, style="F", round_corners=True, corner_radius=1.5)
    paper.word(paper.left + paper.wide - width / 2, top + 4.8, state, "middle")
    paper.pen(18, INK, bold=True)
    paper.paragraph(headline.title, 8, width=paper.wide - width - 4)
    paper.pen(9, QUIET)
    paper.paragraph(headline.subtitle, 4.6)
    paper.ln(2)
    paper.pen(11, INK)
    paper.paragraph(headline.verdict, 5.4)
    paper.ln(3)
    for first in range(0, len(headline.facts), FACTS_IN_A_ROW):
        _draw_facts(paper, headline.facts[first : first + FACTS_IN_A_ROW])
    paper.ln(2)


def _draw_facts(paper: Paper, facts: list[Fact]) -> None:
    """A row of numbers, each in a box of its own."""
    gap = 3.0
    width = (paper.wide - gap * (FACTS_IN_A_ROW - 1)) / FACTS_IN_A_ROW
    paper.pen(6.5, QUIET)
    notes = [paper.lines_of(fact.note, width - 5)[:4] if fact.note else [] for fact in facts]
    height = 12.5 + 2.9 * max(map(len, notes))
    paper.need(height + 3)
    top = paper.get_y()
    for number, (fact, note) in enumerate(zip(facts, notes, strict=True)):
        x = paper.left + number * (width + gap)
        paper.filled(x, top, width, height, PALE)
        paper.filled(x, top, 0.9, height, LEVELS[fact.level] if fact.level != "info" else LINE)
        paper.pen(7, QUIET)
        paper.word(x + 3, top + 4, fact.label, most=width - 4)
        size = 13.0
        paper.pen(size, INK, bold=True)
        while size > 7 and paper.get_string_width(paper.clean(fact.value)) > width - 4:
            size -= 0.5
            paper.pen(size, INK, bold=True)
        paper.word(x + 3, top + 9.8, fact.value, most=width - 4)
        paper.pen(6.5, QUIET)
        for line, text in enumerate(note):
            paper.word(x + 3, top + 13 + 2.9 * line, text, most=width - 4)
    paper.set_y(top + height + 3)


def _draw_advice(paper: Paper, several: list[Advice]) -> None:
    _heading(paper, "What to change", 1)
    if not several:
        paper.pen(9.5, INK)
        paper.paragraph(NO_ADVICE, 4.8)
    for number, advice in enumerate(several, start=1):
        paper.pen(9.5, INK, bold=True)
        height = 4.8 * len(paper.lines_of(advice.text, paper.wide - 12))
        paper.pen(8.5, QUIET)
        height += 4.2 * len(paper.lines_of(advice.evidence, paper.wide - 12)) + 5
        paper.need(height)
        top = paper.get_y()
        paper.filled(paper.left, top, paper.wide, height, "#fdf6e9")
        paper.filled(paper.left, top, 0.9, height, LEVELS["warning"])
        paper.pen(13, LEVELS["warning"], bold=True)
        paper.word(paper.left + 4, top + 6.2, str(number))
        paper.set_y(top + 2.2)
        paper.pen(9.5, INK, bold=True)
        paper.paragraph(advice.text, 4.8, paper.left + 10, paper.wide - 12)
        paper.pen(8.5, QUIET)
        paper.paragraph(advice.evidence, 4.2, paper.left + 10, paper.wide - 12)
        paper.set_y(top + height + 2)
    paper.ln(2)


def _draw_unreadable(paper: Paper, sentences: list[str]) -> None:
    _heading(paper, "What could not be read", 1)
    paper.pen(8.5, LEVELS["error"])
    for sentence in sentences[:20]:
        paper.paragraph(sentence, 4.2)
    paper.ln(2)


def _draw_section(paper: Paper, section: Section, level: int) -> None:
    room = _room_for(section.panels[0]) if section.panels else ROOM_FOR_A_PANEL
    _heading(paper, section.title, level, room + (10 if section.note else 0))
    if section.note:
        paper.pen(8.5, QUIET)
        paper.paragraph(section.note, 4.2)
        paper.ln(1)
    for panel in section.panels:
        draw_panel(paper, panel)


def _heading(paper: Paper, title: str, level: int, room: float = ROOM_FOR_A_PANEL) -> None:
    """A heading, on the page of what comes after it."""
    paper.need(room + 14)
    paper.start_section(paper.clean(title) or "section", level)
    paper.ln(2)
    paper.pen(13, INK, bold=True)
    paper.paragraph(title, 6)
    paper.stroke(LINE, 0.2)
    paper.line(paper.left, paper.get_y() + 0.8, paper.left + paper.wide, paper.get_y() + 0.8)
    paper.ln(3)


def _room_for(panel: Panel) -> float:
    """How much of a page a panel takes that is not broken over two, with its title."""
    match panel:
        case Lines() | Stack():
            return HEIGHT + 20
        case Heat():
            return heat_height(panel) + 22
        case Shares():
            return 22 + 4.6 * len(panel.parts)
        case Timeline():
            return min(140.0, 24 + 6.0 * len(panel.spans))
        case Timetable():
            return min(140.0, 26 + 7.0 * len(panel.lanes))
        case _:
            return ROOM_FOR_A_PANEL


def draw_panel(paper: Paper, panel: Panel) -> None:
    """A panel with its title before it, and its note after it."""
    paper.need(_room_for(panel))
    paper.pen(9.5, INK, bold=True)
    y = paper.get_y() + 3.6
    width = paper.word(paper.left, y, panel.title, most=paper.wide * 0.7)
    if isinstance(panel, Lines | Stack):
        paper.pen(7.5, QUIET)
        says_more = panel.y.lower() != panel.title.lower()
        texts = [*[panel.y] * says_more, *["logarithmic"] * (isinstance(panel, Lines) and panel.log)]
        paper.word(paper.left + width + 3, y, ", ".join(texts), most=paper.wide - width - 3)
    paper.set_y(y + 1.8)
    match panel:
        case Lines():
            draw_lines(paper, panel)
        case Stack():
            draw_stack(paper, panel)
        case Shares():
            draw_shares(paper, panel)
        case Heat():
            draw_heat(paper, panel)
        case Timeline():
            draw_timeline(paper, panel)
        case Mesh():
            draw_mesh(paper, panel)
        case Timetable():
            draw_timetable(paper, panel)
        case Table():
            draw_table(paper, panel)
        case Text():
            draw_text(paper, panel)
    if panel.note:
        paper.pen(7.5, QUIET)
        paper.paragraph(panel.note, 3.8)
    paper.ln(4)
