"""The page as one file: its style, its script and its data are inside, and nothing is ever asked for outside.

page_html(page)                              -> a report that opens from any disk
page_html(page, data_url="data.json")        -> the board: the script asks there for the newest data

The browser is told to run and load nothing but what is known here by its hash, and to make no HTML of any text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files

from lockstep.page.panels import NO_ADVICE, Chapter, Page, RunPage, Table, as_json

ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E%3Crect width='32' height='32' "
    "rx='7' fill='%230067a5'/%3E%3Cpath d='M7 24V8M7 24h6m3 0V8m0 16h9' stroke='white' stroke-width='3.5' "
    "fill='none'/%3E%3C/svg%3E"
)
PLAIN_ROWS = 100
"""So many rows of a table are there without the script."""


def page_html(page: Page, *, data_url: str | None = None) -> str:
    """All of the page. With `data_url`, relative to it, the script asks there for `as_json(page)` while `page.live`."""
    style, script = _asset("page.css"), _asset("page.js")
    url = f' data-url="{escape(data_url)}"' if data_url is not None else ""
    policy = _policy(is_live=data_url is not None)
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f'<meta name="generator" content="Lockstep {escape(page.version)}">',
        f"<title>{escape(page.title)}</title>",
        f'<link rel="icon" href="{escape(ICON)}">',
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        *_plain(page),
        f'<script type="application/json" id="data"{url}>{data_text(page)}</script>',
        f"<script>{script}</script>",
        "</body>",
        "</html>",
        "",
    ]
    return _writable("\n".join(lines))


def content_security_policy(*, live: bool) -> str:
    """The header of the same name for an answer that holds the page; `live` where it was made with a `data_url`."""
    return f"{_policy(is_live=live)}; frame-ancestors 'none'"


def data_text(page: Page) -> str:
    """The page's data as JSON in which nothing can end a script, begin a tag or break a line."""
    text = json.dumps(as_json(page), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return _writable(text)


def _writable(text: str) -> str:
    """Without lone halves of a surrogate pair, which JSON can hold and UTF-8 cannot: they become escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _policy(is_live: bool) -> str:
    rules = [
        "default-src 'none'",
        f"script-src {_hash(_asset('page.js'))}",
        f"style-src {_hash(_asset('page.css'))}",
        "img-src data:",
        *(["connect-src 'self'"] if is_live else []),
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return "; ".join(rules)


@cache
def _asset(name: str) -> str:
    return files("lockstep.page").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


# What is there without the script, which takes its place: for readers of text, and where scripts are forbidden.


def _plain(page: Page) -> Iterable[str]:
    yield '<main id="plain">'
    yield (
        '<noscript><p class="no-script">The charts of this page need JavaScript, which is switched off; '
        "what can be said without it is below.</p></noscript>"
    )
    yield f"<h1>{escape(page.title)}</h1>"
    for section in page.comparison:
        yield from _section(section)
    for run in page.runs:
        yield from _run(run)
    yield "</main>"


def _run(run: RunPage) -> Iterable[str]:
    head = run.headline
    yield f"<h2>{escape(head.title)}: {escape(head.state)}</h2>"
    yield _paragraph(head.subtitle, "subtitle") + _paragraph(head.verdict, "verdict")
    yield '<dl class="facts">'
    for fact in head.facts:
        note = f'<dd class="fact-note">{escape(fact.note)}</dd>' if fact.note else ""
        yield (
            f'<div class="fact level-{escape(fact.level)}"><dt>{escape(fact.label)}</dt>'
            f'<dd class="fact-value">{escape(fact.value)}</dd>{note}</div>'
        )
    yield "</dl>"
    if run.unreadable:
        yield "<h3>Not all of the log could be read</h3>"
        yield _list("ul", run.unreadable)
    yield "<h3>What to change</h3>"
    if run.advice:
        yield _list("ol", [f"{advice.text} {advice.evidence}" for advice in run.advice])
    else:
        yield _paragraph(NO_ADVICE)
    for section in run.sections:
        yield from _section(section)


def _section(section: Chapter) -> Iterable[str]:
    tables = [panel for panel in section.panels if isinstance(panel, Table) and panel.rows]
    if not tables:
        return
    yield f"<h3>{escape(section.title)}</h3>{_paragraph(section.note)}"
    for table in tables:
        yield from _table(table)


def _table(table: Table) -> Iterable[str]:
    yield f"<table><caption>{escape(table.title)}</caption>"
    yield f"<thead><tr>{_cells('th', table.columns, table.right)}</tr></thead><tbody>"
    for row in table.rows[:PLAIN_ROWS]:
        yield f"<tr>{_cells('td', row, table.right)}</tr>"
    yield "</tbody></table>"
    left = len(table.rows) - PLAIN_ROWS
    yield _paragraph(f"And {left} more rows." if left > 0 else "") + _paragraph(table.note, "note")


def _cells(tag: str, texts: list[str], right: list[bool]) -> str:
    sides = right + [False] * (len(texts) - len(right))
    return "".join(
        f"<{tag}{' class=right' if is_right else ''}>{escape(text)}</{tag}>"
        for text, is_right in zip(texts, sides, strict=False)
    )


def _list(tag: str, texts: list[str]) -> str:
    return f"<{tag}>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</{tag}>"


def _paragraph(text: str, name: str = "") -> str:
    kind = f' class="{name}"' if name else ""
    return f"<p{kind}>{escape(text)}</p>" if text else ""
