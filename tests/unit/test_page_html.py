"""The page as a file: nothing breaks out of its data, and the browser is told to run nothing but what is in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

from lockstep.page import html
from lockstep.page.html import content_security_policy, data_text, page_html
from lockstep.page.panels import as_json
from lockstep.text import charts
from tests.browser import example

FRONT = Path(html.__file__).parent / "front"


def inside(text: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)
    assert found is not None
    return found.group(1)


def test_the_data_come_back_as_they_were() -> None:
    page = example.hostile_page()
    assert json.loads(data_text(page)) == as_json(page)


def test_no_string_breaks_out_of_the_data() -> None:
    text = data_text(example.hostile_page())
    assert not set(text) & set("<>&\u2028\u2029")
    assert page_html(example.hostile_page()).count("<script") == 2


def test_what_is_written_without_script_is_escaped() -> None:
    plain = page_html(example.hostile_page()).partition('<script type="application/json"')[0]
    assert "<img" not in plain
    assert "&lt;/script&gt;&lt;img" in plain


def test_the_policy_names_the_hashes_of_the_script_and_the_style() -> None:
    text = page_html(example.sparse_page())
    policy = content_security_policy(live=False)
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(inside(text, tag).encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_only_a_live_page_may_ask_and_only_its_own_server() -> None:
    assert "connect-src" not in content_security_policy(live=False)
    assert "connect-src 'self'" in content_security_policy(live=True)
    live = page_html(replace(example.sparse_page(), live=True), data_url='data?token="><b>')
    assert "connect-src &#x27;self&#x27;" in live
    assert 'data-url="data?token=&quot;&gt;&lt;b&gt;"' in live


def test_it_can_be_written_whatever_a_string_holds() -> None:
    page = replace(example.sparse_page(), title="half a pair: \ud800")
    assert "half a pair" in page_html(page).encode("utf-8").decode("utf-8")


def test_the_page_has_the_colours_of_the_charts() -> None:
    theme = (FRONT / "src/theme.js").read_text(encoding="utf-8")
    for name, colours in (("LIGHT", charts.LIGHT), ("DARK", charts.DARK)):
        listed = theme.partition(f"{name} = [")[2].partition("]")[0]
        assert tuple(re.findall(r"#[0-9a-f]{6}", listed)) == colours


def test_the_licence_of_what_is_bundled_is_kept() -> None:
    assets = Path(html.__file__).parent / "assets"
    for name in ("page.js", "page.css", "LICENSES.txt"):
        text = (assets / name).read_text(encoding="utf-8")
        assert "Copyright (c) 2022 Leon Sorokin" in text
        assert "THE SOFTWARE IS PROVIDED" in text


def test_no_source_makes_html_of_text() -> None:
    for source in FRONT.glob("src/**/*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", source.read_text("utf-8")
        ), source
