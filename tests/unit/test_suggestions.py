"""Commands that are suggested can be pasted into a shell, whatever the files in them are called."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console as Terminal

from lockstep.cli.train import _next_commands
from lockstep.page.report import leave_report
from lockstep.record.folder import RunFolder


def test_what_to_try_next_means_the_files_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    run, config = Path("a b") / "<x>", "my runs/$x.toml"
    (run / "tb").mkdir(parents=True)
    _next_commands(RunFolder(run, 1), config, [], ("fsdp=2", "less memory"), Terminal(file=said, width=500))
    lines = [shlex.split(line.split("   ")[0]) for line in said.getvalue().splitlines() if line.startswith("  ")]
    assert lines[0][1:4] == ["train", config, "--layout"]
    assert lines[2][1:3] == ["board", str(run)]
    assert lines[3][1:3] == ["--logdir", str(run / "tb")]
    assert lines[4][1:4] == ["ckpt", "ls", str(run)]
    assert ">" not in said.getvalue().replace(f"'{run}'", "").replace(f"'{run / 'tb'}'", "")


def test_a_report_that_could_not_be_made_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "a b"
    run.mkdir()
    (run / "events.jsonl").write_text("{}")
    monkeypatch.setattr("lockstep.page.report.MOST_BYTES", 1)
    assert f"lockstep report {shlex.quote(str(run))} reads it" in leave_report(run)
