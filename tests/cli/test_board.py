"""`lockstep board`, as a user starts it: it prints its address, follows a run and ends with Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import LOCKSTEP, clean_environment, in_this_process
from tests.patience import wait_for
from tests.runs import Made, run_events, write_run


@contextmanager
def board(folder: Path, *args: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A board that runs, its address and the lines it has printed until then."""
    with subprocess.Popen(
        [*LOCKSTEP, "board", *args],
        cwd=folder,
        env=clean_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = []
            while line := process.stdout.readline():
                lines.append(line)
                if line.startswith("Ctrl-C"):
                    break
            found = re.search(r"http://\S+", lines[0])
            assert found is not None, lines
            yield process, found[0], lines
        finally:
            process.kill()


def data_of(url: str) -> Any:
    with urllib.request.urlopen(f"{url}data.json") as answer:
        return json.load(answer)


def _is(url: str, state: str) -> bool:
    headline = data_of(url)["runs"][0]["headline"]
    return headline["state"] == state and "has not begun" not in headline["verdict"]


def test_it_follows_a_run_from_before_its_start_to_its_end_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    made = list(run_events(Made(steps=30, name="lm")))
    now = time.time()
    folder = tmp_path / "runs/lm"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('recipe = "lm"\n')
    with board(tmp_path, "runs/lm", "--port", "0") as (process, url, lines):
        assert lines[0] == f"runs/lm: {url}\n"
        assert "ssh" not in "".join(lines)
        waiting = data_of(url)
        assert waiting["live"] is True
        assert "has not begun" in waiting["runs"][0]["headline"]["verdict"]
        half, last = len(made) // 2, made[-1]["time"]
        for part, state in ((made[:half], "running"), (made[half:], "finished")):
            with (folder / "events.jsonl").open("a") as log:
                log.writelines(json.dumps({**event, "time": event["time"] - last + now}) + "\n" for event in part)
            wait_for(partial(_is, url, state), f"the board to say that the run is {state}")
        assert data_of(url)["live"] is False
        with urllib.request.urlopen(url) as answer:
            assert answer.read().startswith(b"<!doctype html>")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate()
        assert process.returncode == 130
        assert "Traceback" not in rest
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "events.jsonl"]


def test_other_addresses_have_a_secret_and_ssh_gets_a_hint(tmp_path: Path) -> None:
    write_run(tmp_path / "lm", Made(steps=5))
    with board(tmp_path, "lm", "--host", "0.0.0.0", "--port", "0", SSH_CONNECTION="1 2 3 4") as (_, url, lines):
        assert "ssh" not in "".join(lines)
        found = re.fullmatch(r"http://([^/:]+):(\d+)/([\w-]{32,})/", url)
        assert found is not None
        here = f"http://127.0.0.1:{found[2]}/"
        assert data_of(f"{here}{found[3]}/")["live"] is False
        with pytest.raises(urllib.error.HTTPError, match="404"):
            data_of(here)
    with board(tmp_path, "lm", "--port", "0", SSH_CONNECTION="1 2 3 4") as (_, url, lines):
        port = url.rstrip("/").rpartition(":")[2]
        assert f"ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}" in lines[1]


def test_bad_input_is_one_sentence_and_exit_2(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/lm", Made(steps=5))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for args, words in (
            (["runs/ln"], "did you mean runs/lm?"),
            (["runs/lm", "--host", "no-such-host.invalid"], "--host no-such-host.invalid is not an address"),
            (["runs/lm", "--port", port], f"cannot listen on 127.0.0.1:{port} (address already in use)"),
            (["runs/lm", "--port", "99999"], "65535"),
            ([], "RUN"),
        ):
            done = in_this_process(tmp_path, "board", *args)
            assert (done.returncode, done.stdout) == (2, "")
            assert words in done.stderr
            assert done.stderr.count("\n") == 1
