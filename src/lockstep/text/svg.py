"""What all pictures have in common: one file with nothing outside of it, for light and dark pages.

Colours are told apart by people who do not see red and green alike (Okabe and Ito's), and nothing is said by colour
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape, quoteattr

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

LIGHT = {
    "page": "#ffffff",
    "ink": "#1b1f24",
    "quiet": "#5b6570",
    "line": "#c9d0d8",
    "empty": "#f4f6f8",
    "cell": "#dde4eb",
    "new": "#fbd9a0",
    "newline": "#d17a00",
    "done": "#bfe5d8",
    "doneline": "#00795a",
    "arrow": "#0060a0",
}
DARK = {
    "page": "#14181d",
    "ink": "#f0f3f6",
    "quiet": "#a3adb8",
    "line": "#3d4650",
    "empty": "#1b2027",
    "cell": "#2a323b",
    "new": "#6b4713",
    "newline": "#f0a63a",
    "done": "#124a3b",
    "doneline": "#3fc79c",
    "arrow": "#62b5ee",
}


def picture(
    width: float, height: float, title: str, description: str, body: list[str], more: Mapping[str, tuple[str, str]] = {}
) -> str:
    """A whole SVG file. `more` has classes of its own: the colour on light pages, and the one on dark ones."""
    colours = {name: (LIGHT[name], DARK[name]) for name in LIGHT} | dict(more)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-labelledby="title description" font-family="{FONT}">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            "<style>",
            *_rules({name: pair[0] for name, pair in colours.items()}),
            ".mid { text-anchor: middle; } .end { text-anchor: end; } .strong { font-weight: 600; }",
            "@media (prefers-color-scheme: dark) {",
            *_rules({name: pair[1] for name, pair in colours.items()}),
            "}",
            "</style>",
            f'<rect class="page" width="{width:g}" height="{height:g}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, content: str, size: float = 13, classes: str = "ink") -> str:
    """A line of text; `classes` may say mid, end, strong and a colour."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" class="{classes}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, classes: str, radius: float = 3) -> str:
    """A filled rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class={quoteattr(classes)}/>'
    )


def group(content: list[str], title: str = "", **data: object) -> str:
    """Things that belong together, with `data-...` attributes that programs can read and a title to point at."""
    named = "".join(f" data-{key.replace('_', '-')}={quoteattr(str(value))}" for key, value in data.items())
    tip = f"<title>{escape(title)}</title>" if title else ""
    return f"<g{named}>{tip}{''.join(content)}</g>"


def wrapped(content: str, columns: int) -> list[str]:
    """A paragraph in lines."""
    lines: list[str] = []
    for word in content.split():
        if lines and len(lines[-1]) + 1 + len(word) <= columns:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def number(value: float) -> str:
    """A number as people write it: without the zeros that say nothing."""
    return f"{value:.6g}".replace("-0", "0") if value == 0 else f"{value:.6g}"


def _rules(colours: Mapping[str, str]) -> list[str]:
    rules = [f".{name} {{ fill: {colour}; }}" for name, colour in colours.items()]
    rules += [f".{name}-edge {{ stroke: {colour}; fill: none; }}" for name, colour in colours.items()]
    return rules
