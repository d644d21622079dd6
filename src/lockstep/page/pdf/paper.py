"""The paper a PDF is printed on: A4, its fonts and colours, and how values are written.

Text may be anything: what cannot be printed becomes a box, and nothing a name holds can break the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from fpdf import FPDF
from fpdf.enums import XPos, YPos
from fpdf.fonts import TTFFont

from lockstep.text.charts import LIGHT, plain
from lockstep.text.units import bytes_text, count_text, percent, seconds_text

FONTS = Path(__file__).parents[1] / "fonts"
MARGIN = 16.0
BOTTOM = 18.0

INK, QUIET, LINE, PALE = "#1b1f24", "#5b6570", "#c9d0d8", "#f4f6f8"
LEVELS = {"good": "#00734f", "info": "#0067a5", "warning": "#b05a00", "error": "#a01c2c"}
STATES = {"running": "#0067a5", "finished": "#00734f", "stopped": "#7a5c00", "failed": "#a01c2c", "lost": "#a01c2c"}
STROKES = LIGHT
"""Of lines: Okabe and Ito's, dark enough for thin lines on white."""
FILLS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8a8f96", "#5b4fc4")
"""Of areas: Okabe and Ito's own, neighbours far apart."""
PARTS = {
    "compute": LIGHT[0],
    "optimizer": LIGHT[2],
    "exposed communication": LIGHT[1],
    "communication": LIGHT[1],
    "both at once": LIGHT[8],
    "input": LIGHT[3],
    "between steps": LIGHT[4],
    "idle": LIGHT[5],
    "validation": LIGHT[6],
    "checkpoint stall": LIGHT[7],
    "checkpoint stalls": LIGHT[7],
    "profiling": LIGHT[8],
    "repeated or skipped steps": "#cc79a7",
    "starting": "#e0a800",
    "stopped": "#56b4e9",
    "other": LIGHT[5],
}
"""Of what time goes to, by its name, as in parts.js of the page; what that tells apart by hatching is paler here."""
BOX = "\u25a1"


class Paper(FPDF):
    """A document with our fonts; `foot` stands at the bottom of every page."""

    def __init__(self, title: str, foot: str, made: float) -> None:
        super().__init__(format="A4", unit="mm")
        self.foot = foot
        self.add_font("sans", "", FONTS / "LiberationSans-Regular.ttf")
        self.add_font("sans", "B", FONTS / "LiberationSans-Bold.ttf")
        self.add_font("mono", "", FONTS / "LiberationMono-Regular.ttf")
        self._known = {name: set(font.cmap) for name, font in self.fonts.items() if isinstance(font, TTFFont)}
        self.set_margins(MARGIN, MARGIN, MARGIN)
        self.set_auto_page_break(True, BOTTOM)
        self.alias_nb_pages("{all}")
        self.set_title(_printable(title))
        self.set_creator("lockstep")
        self.set_lang("en")
        self.set_creation_date(datetime.fromtimestamp(made).astimezone())
        self.c_margin = 0
        self.pen(9)
        self.add_page()

    @property
    def left(self) -> float:
        """Where text begins."""
        return MARGIN

    @property
    def wide(self) -> float:
        """How wide text may be."""
        return float(self.epw)

    @property
    def room(self) -> float:
        """How much of this page is left."""
        return float(self.h - BOTTOM - self.get_y())

    def need(self, height: float) -> None:
        """Begin a new page where this one has no room for something."""
        if self.room < height:
            self.add_page()

    def footer(self) -> None:
        """What every page ends with."""
        self.set_y(-12)
        self.pen(7, QUIET)
        self.cell(self.wide - 14, 4, self.short(self.foot, self.wide - 20))
        self.cell(14, 4, f"{self.page_no()} / {{all}}")  # how wide that will be, nobody knows yet

    def pen(self, size: float, colour: str = INK, bold: bool = False, mono: bool = False) -> None:
        """How the next text looks."""
        self.set_font("mono" if mono else "sans", "B" if bold and not mono else "", size)
        self.set_text_color(colour)

    def stroke(self, colour: str, width: float = 0.2, dash: Sequence[float] = ()) -> None:
        """How the next line looks."""
        self.set_draw_color(colour)
        self.set_line_width(width)
        self.set_dash_pattern(*dash)

    def clean(self, text: str) -> str:
        """A text with a box for whatever the font in use does not have."""
        known = self._known[self.font_family + self.font_style]
        return "".join(char if char == "\n" or ord(char) in known else BOX for char in _printable(text))

    def short(self, text: str, width: float) -> str:
        """As much of a line as fits."""
        text = self.clean(" ".join(text[:1000].split()))
        if self.get_string_width(text) <= width:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.get_string_width(text[:middle] + "…") <= width else (low, middle - 1)
        return text[:low].rstrip() + "…"

    def word(self, x: float, y: float, text: str, align: str = "left", most: float = 1000.0) -> float:
        """One line of text with its base line at y; returns how wide it is."""
        text = self.short(text, most)
        width = float(self.get_string_width(text))
        self.text(x - {"left": 0.0, "right": width, "middle": width / 2}[align], y, text)
        return width

    def lines_of(self, text: str, width: float) -> list[str]:
        """A text, broken into lines."""
        text = self.clean(text)
        if "\n" not in text and self.get_string_width(text) <= width:
            return [text]
        lines = self.multi_cell(width, 4, text, align="L", dry_run=True, output="LINES")
        assert isinstance(lines, list)
        return lines

    def paragraph(self, text: str, height: float, x: float | None = None, width: float | None = None) -> None:
        """A text over as many lines and pages as it takes; goes on below it."""
        self.set_x(self.left if x is None else x)
        self.multi_cell(width or self.wide, height, self.clean(text), align="L", new_x=XPos.LMARGIN, new_y=YPos.NEXT)

    def filled(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A rectangle without an edge."""
        self.set_fill_color(colour)
        self.rect(x, y, width, height, style="F")


def value_text(value: float | None, unit: str) -> str:
    """A value with its unit, as people read it."""
    if value is None or not math.isfinite(value):
        return "-"
    match unit:
        case "s":
            return f"-{seconds_text(-value)}" if value < 0 else seconds_text(value) if value else "0 s"
        case "B":
            return bytes_text(value)
        case "B/s":
            return f"{bytes_text(value)}/s"
        case "share":
            return percent(value) if value >= 0 else plain(value)
        case "W" | "flop/s":
            count = count_text(value)
            return f"{count}{unit}" if count[-1].isalpha() else f"{count} {unit}"
        case "/s":
            return f"{count_text(value)}/s"
        case "items":
            return f"{value:,.0f}"
        case _:
            return plain(value)


def moment_text(when: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """A moment in local time; a time that no calendar has is a dash."""
    try:
        return datetime.fromtimestamp(when).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "-"


def _printable(text: str) -> str:
    """Without what has no shape: control characters, halves of surrogate pairs, marks that turn the direction."""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(char if char == "\n" or char.isprintable() else " " if char.isspace() else BOX for char in text)
