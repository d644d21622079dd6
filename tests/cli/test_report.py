"""`lockstep report`, and the report that every run leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lockstep.page.report import leave_report, write_report
from tests.cli.commands import SMALL_LM, events, in_this_process, lockstep, run, start
from tests.patience import wait_for
from tests.runs import Made, write_run

SCRIPT = """
import sys
import torch
import lockstep

run = lockstep.init("single", run_dir="runs/mine")
data = [(torch.randn(4), torch.randn(1)) for _ in range(16)]


def loss(model, batch):
    x, y = batch
    return ((model(x) - y) ** 2).sum(), y.numel()


engine = run.setup(lambda: torch.nn.Linear(4, 1), loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
for number, batch in enumerate(run.loader(data, global_batch=4)):
    engine.step(batch)
    if "fail" in sys.argv and number == 2:
        raise RuntimeError("planted")
"""


def data_in(report: Path) -> Any:
    """The page's data, as its script reads it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', report.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prints a PDF of nothing: tests/browser prints with a real one."""
    program = tmp_path_factory.mktemp("programs") / "browser"
    program.write_text(
        '#!/bin/sh\nfor word; do case $word in --print-to-pdf=*) printf %%PDF-1.4 > "${word#*=}";; esac; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("LOCKSTEP_BROWSER", str(program))
    return program


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs/lm", Made(steps=60, name="lm"))


def test_the_report_of_a_run_is_one_file_in_its_folder(tmp_path: Path, made: Path) -> None:
    done = in_this_process(tmp_path, "report", "runs/lm")
    assert (done.returncode, done.stdout, done.stderr) == (0, "report: runs/lm/report.html\n", "")
    data = data_in(made / "report.html")
    assert data["live"] is False
    assert [one["headline"]["state"] for one in data["runs"]] == ["finished"]
    assert sorted(path.name for path in made.iterdir()) == ["events.jsonl", "report.html"]


def test_several_runs_are_compared_in_the_current_folder(tmp_path: Path, made: Path) -> None:
    write_run(tmp_path / "runs/other", Made(steps=60, ranks=8, name="other"))
    done = in_this_process(tmp_path, "report", "runs/lm", "runs/other")
    assert (done.returncode, done.stdout) == (0, "report: report.html\n")
    data = data_in(tmp_path / "report.html")
    assert [one["name"] for one in data["runs"]] == ["lm", "other"]
    assert data["comparison"]
    assert not (made / "report.html").exists()


def test_a_run_that_is_named_twice_is_not_compared_with_itself(tmp_path: Path, made: Path) -> None:
    done = in_this_process(tmp_path, "report", "runs/lm", "runs/lm/events.jsonl", str(made), "runs/lm/")
    assert done.returncode == 0
    data = data_in(made / "report.html")
    assert [one["name"] for one in data["runs"]] == ["lm"]
    assert not data["comparison"]


def test_the_log_of_a_run_means_the_run(tmp_path: Path, made: Path) -> None:
    done = in_this_process(tmp_path, "report", "runs/lm/events.jsonl")
    assert (done.returncode, done.stdout) == (0, "report: runs/lm/report.html\n")
    assert (made / "report.html").exists()


@pytest.mark.usefixtures("browser")
def test_a_pdf_comes_beside_the_page_or_alone(tmp_path: Path, made: Path) -> None:
    both = in_this_process(tmp_path, "report", "runs/lm", "--pdf")
    assert both.stdout == "report: runs/lm/report.html\nreport: runs/lm/report.pdf\n"
    assert (made / "report.pdf").read_bytes().startswith(b"%PDF-")
    alone = in_this_process(tmp_path, "report", "runs/lm", "-o", "for-the-boss.pdf", "--pdf")
    assert alone.stdout == "report: for-the-boss.pdf\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["for-the-boss.pdf", "runs"]


def test_json_is_the_pages_data_and_text_goes_to_stderr(tmp_path: Path, made: Path) -> None:
    done = in_this_process(tmp_path, "report", "runs/lm", "--json")
    assert done.stderr == "report: runs/lm/report.html\n"
    said = json.loads(done.stdout)
    assert said.pop("made") > 0
    stored = data_in(made / "report.html")
    assert {**stored, "made": 0} == {**said, "made": 0}


@pytest.mark.parametrize(
    ("ending", "state"), [("end", "finished"), ("failed", "failed"), ("stop", "stopped"), ("killed", "lost")]
)
def test_a_run_is_reported_however_it_ended(tmp_path: Path, ending: str, state: str) -> None:
    folder = write_run(tmp_path / "lm", Made(steps=40, ending=ending))
    os.utime(folder / "events.jsonl", (0, 0))
    write_report(folder)
    assert data_in(folder / "report.html")["runs"][0]["headline"]["state"] == state


@pytest.mark.usefixtures("browser")
def test_a_damaged_log_with_hostile_names_is_reported_and_nothing_can_execute(tmp_path: Path) -> None:
    attack = '</script><img src=x onerror=alert(1)>\u2028"'
    evil = {"time": 1760000100.0, "kind": "message", "attempt": 1, "text": attack, "level": "warning"}
    lines = [json.dumps(evil) + "\n", "not json\n", '{"kind": "unheard of", "time": 1, "attempt": 1}\n', '{"torn']
    folder = write_run(tmp_path / "<img src=x>", Made(steps=20, name=attack), lines)
    done = in_this_process(tmp_path, "report", "<img src=x>", "--pdf")
    assert done.returncode == 0
    html = (folder / "report.html").read_text()
    assert "<img" not in html
    assert html.count("</script>") == 2
    unreadable = data_in(folder / "report.html")["runs"][0]["unreadable"]
    assert any("not JSON" in one for one in unreadable)


def refused(folder: Path, *args: str) -> str:
    before = sorted(folder.rglob("*"))
    done = in_this_process(folder, "report", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lockstep: ")
    assert done.stderr.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
    return done.stderr.removeprefix("lockstep: ").strip()


@pytest.mark.usefixtures("made")
def test_an_unknown_run_is_refused_with_the_nearest(tmp_path: Path) -> None:
    assert refused(tmp_path, "runs/ln") == "there is no run runs/ln: did you mean runs/lm?"
    assert refused(tmp_path, "lm") == "there is no run lm: did you mean runs/lm?"
    assert refused(tmp_path, "runs/quite-another") == "there is no run runs/quite-another: there is runs/lm"
    write_run(tmp_path / "runs/vit", Made(steps=5))
    assert refused(tmp_path, "runs/quite-another") == "there is no run runs/quite-another: there are runs/lm, runs/vit"
    assert refused(tmp_path, "runs") == "runs is a folder of runs: name one of them: runs/lm, runs/vit"


@pytest.mark.usefixtures("made")
def test_what_is_no_run_or_has_not_begun_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    assert refused(tmp_path, "photos").startswith("photos is not a run folder: ")
    (tmp_path / "photos/events.json").touch()
    assert refused(tmp_path, "photos/events.json").startswith("photos/events.json is not a run folder: ")
    (tmp_path / "photos/config.toml").touch()
    assert refused(tmp_path, "photos").startswith("photos has not begun: ")


@pytest.mark.usefixtures("made")
def test_a_target_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    assert "--output report.txt is neither a page nor a PDF" in refused(tmp_path, "runs/lm", "-o", "report.txt")
    assert "--output runs is a folder" in refused(tmp_path, "runs/lm", "-o", "runs")
    assert "in a folder that is not there" in refused(tmp_path, "runs/lm", "-o", "nowhere/report.html")
    (tmp_path / "taken.pdf").mkdir()
    assert "--output taken.pdf is a folder" in refused(tmp_path, "runs/lm", "-o", "taken.html", "--pdf")


@pytest.mark.usefixtures("made")
def test_a_pdf_without_a_browser_is_refused_and_nothing_is_written(
    tmp_path: Path, browser: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser.write_text("#!/bin/sh\necho something is broken >&2\nexit 1\n")
    said = refused(tmp_path, "runs/lm", "-o", "x.pdf")
    assert said.startswith(f"{browser} has printed nothing (something is broken): ")
    browser.unlink()
    assert refused(tmp_path, "runs/lm", "--pdf").startswith(f"LOCKSTEP_BROWSER={browser} is no program: ")
    monkeypatch.delenv("LOCKSTEP_BROWSER")
    monkeypatch.setenv("PATH", str(tmp_path))
    for arguments in (["-o", "x.pdf"], ["--pdf"]):
        said = refused(tmp_path, "runs/lm", *arguments)
        assert said.startswith("a PDF is printed by Chromium or Chrome, and there is none on this machine: install it")


def test_a_disk_that_is_full_leaves_the_old_report(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (made / "report.html").write_text("old")

    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "report.html cannot be written (no space left on device)" in refused(tmp_path, "runs/lm")
    assert (made / "report.html").read_text() == "old"


def test_at_the_end_of_a_run_nothing_that_goes_wrong_is_more_than_a_line(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert leave_report(made) == ""

    for failure in (KeyError("x"), MemoryError(), RecursionError("deep\nstack")):
        monkeypatch.setattr("lockstep.page.make_page.page_of", mock.Mock(side_effect=failure))
        line = leave_report(made)
        assert line.startswith("no report: ")
        assert "\n" not in line
    monkeypatch.setattr("lockstep.page.report.MOST_BYTES", 10)
    assert "lockstep report" in leave_report(made)


@pytest.mark.slow
def test_a_launched_run_leaves_its_report_and_says_where(tmp_path: Path) -> None:
    done = lockstep(tmp_path, "train", *SMALL_LM, "--steps", "3", "--nproc", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert "\nreport     runs/lm/report.html\n" in done.stderr
    assert json.loads(done.stdout)["exit"] == 0
    assert data_in(tmp_path / "runs/lm/report.html")["runs"][0]["headline"]["state"] == "finished"


@pytest.mark.slow
def test_a_launched_run_that_fails_leaves_its_report_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace('"single", run_dir="runs/mine"', ""))
    done = lockstep(tmp_path, "run", "--nproc", "1", "--name", "mine", "--restarts", "0", "script.py", "fail")
    assert done.returncode == 1
    assert "planted" in done.stderr
    assert "report     runs/mine/report.html" in done.stdout
    assert data_in(tmp_path / "runs/mine/report.html")["runs"][0]["headline"]["state"] == "failed"


@pytest.mark.slow
def test_a_launched_run_that_is_interrupted_leaves_its_report_and_its_exit_code(tmp_path: Path) -> None:
    process = start(tmp_path, "train", *SMALL_LM, "--steps", "100000", "--nproc", "1")
    try:
        wait_for(lambda: len(events(tmp_path / "runs/lm", "step")) > 3, "steps")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert "report     runs/lm/report.html" in said
    assert data_in(tmp_path / "runs/lm/report.html")["runs"][0]["headline"]["state"] == "stopped"


@pytest.mark.parametrize(
    ("argument", "code", "state"),
    [pytest.param("", 0, "finished", marks=pytest.mark.slow), pytest.param("fail", 1, "failed")],
)
def test_a_script_without_a_launcher_leaves_its_report(tmp_path: Path, argument: str, code: int, state: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path, sys.executable, "script.py", argument)
    assert done.returncode == code, done.stderr
    assert "report: runs/mine/report.html" in done.stdout
    assert data_in(tmp_path / "runs/mine/report.html")["runs"][0]["headline"]["state"] == state
