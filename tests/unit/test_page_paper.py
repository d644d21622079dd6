"""Printing the page, as far as no browser is needed: which one is taken, and what is said where it does not print."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.page import paper
from lockstep.page.paper import find_browser, print_pdf

PRINTS = 'for word; do case $word in --print-to-pdf=*) printf %%PDF-1.4 > "${word#*=}";; esac; done'


def browser_that(folder: Path, does: str, name: str = "chromium") -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with programs, as far as anybody looks."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("LOCKSTEP_BROWSER", raising=False)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_the_first_browser_there_is_prints_unless_one_is_named(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chrome = browser_that(programs, "", "google-chrome")
    assert find_browser() == str(chrome)
    chromium = browser_that(programs, "")
    assert find_browser() == str(chromium)
    mine = browser_that(programs, "", "mine")
    monkeypatch.setenv("LOCKSTEP_BROWSER", str(mine))
    assert find_browser() == str(mine)


@pytest.mark.usefixtures("programs")
def test_without_a_browser_one_sentence_says_what_to_do(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"there is none on this machine: install it .* or write -o NAME.html"):
        print_pdf("<p>", target)
    monkeypatch.setenv("LOCKSTEP_BROWSER", "/nowhere/chrome")
    with pytest.raises(UserError, match="LOCKSTEP_BROWSER=/nowhere/chrome is no program"):
        print_pdf("<p>", target)
    assert list(target.iterdir()) == []


def test_what_the_browser_wrote_is_the_pdf_and_nothing_is_left(programs: Path, target: Path) -> None:
    browser_that(programs, PRINTS)
    assert print_pdf("<p>\ud800", target) == b"%PDF-1.4"
    assert list(target.iterdir()) == []


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo no usable sandbox >&2; exit 1", r"has printed nothing \(no usable sandbox\)"),
        ("exit 3", r"has printed nothing \(exit code 3\)"),
        ("while :; do :; done", r"has printed nothing \(it took longer than 1 s\)"),
    ],
)
def test_a_browser_that_does_not_print_is_named_with_its_last_words(
    programs: Path, target: Path, monkeypatch: pytest.MonkeyPatch, does: str, said: str
) -> None:
    monkeypatch.setattr(paper, "LONGEST", 1.0)
    browser = browser_that(programs, does)
    with pytest.raises(UserError, match=said) as raised:
        print_pdf("<p>", target)
    assert str(browser) in str(raised.value)
    assert "LOCKSTEP_BROWSER" in str(raised.value)
    assert list(target.iterdir()) == []


def test_a_program_that_cannot_be_started_is_no_disk_that_is_full(programs: Path, target: Path) -> None:
    browser_that(programs, "").write_bytes(b"\x00\x00\x00\x00")
    with pytest.raises(UserError, match="has printed nothing"):
        print_pdf("<p>", target)
