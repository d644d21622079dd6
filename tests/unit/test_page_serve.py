"""The board over real sockets: two addresses, read-only, for this host's own names or below a secret."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.launch.follow_job import note
from lockstep.launch.queue import JobState
from lockstep.page.panels import Page, as_json
from lockstep.page.serve import Board, LivePage, follow, open_board
from lockstep.record.folder import RunFolder, existing_runs
from tests.browser.example import example_page, hostile_page


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@contextmanager
def serving(build: Callable[[], Page] = example_page, host: str = "127.0.0.1") -> Iterator[Board]:
    with open_board(build, host, 0) as board:
        thread = threading.Thread(target=board.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield board
        finally:
            board.shutdown()
            thread.join()


def ask(board: Board, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", board.port)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def send(board: Board, raw: bytes) -> bytes:
    """What comes back to bytes that no browser sends."""
    with socket.create_connection(("127.0.0.1", board.port)) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture(scope="module")
def board() -> Iterator[Board]:
    with serving() as board:
        yield board


def test_the_page_and_its_data_are_there(board: Board) -> None:
    page, data = ask(board, "/"), ask(board, "/data.json")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.body.startswith(b"<!doctype html>")
    assert b"data.json" in page.body
    assert (data.status, data.headers["content-type"]) == (200, "application/json")
    assert json.loads(data.body) == json.loads(json.dumps(as_json(example_page())))


@pytest.mark.parametrize("path", ["/", "/data.json", "/nothing"])
def test_every_answer_tells_the_browser_to_be_careful(board: Board, path: str) -> None:
    headers = ask(board, path).headers
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "python" not in headers["server"].lower()


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/data.json/../events.jsonl",
        "/events.jsonl",
        "/data.json/",
        "/./",
        "/%2e%2e/",
        "/data.json%00",
        "http://127.0.0.1/",
        "/favicon.ico",
    ],
)
def test_nothing_else_is_there(board: Board, path: str) -> None:
    answer = ask(board, path)
    assert (answer.status, answer.body) == (404, b"Not Found\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_it_only_reads(board: Board, method: str) -> None:
    answer = ask(board, "/data.json", method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def test_head_is_get_without_the_body(board: Board) -> None:
    got, asked = ask(board, "/data.json"), ask(board, "/data.json", "HEAD")
    assert (asked.status, asked.body) == (200, b"")
    assert asked.headers["content-length"] == got.headers["content-length"] == str(len(got.body))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8600", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
def test_a_name_that_is_not_this_hosts_own_gets_nothing(board: Board, host: str) -> None:
    answer = ask(board, "/data.json", Host=host)
    assert (answer.status, answer.body) == (403, b"Forbidden\n")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8600", "[::1]:9"])
def test_this_hosts_own_names_are_served_on_any_port_as_a_tunnel_needs(board: Board, host: str) -> None:
    assert ask(board, "/", Host=host).status == 200


@pytest.mark.parametrize("host", ["127.0.1.1", "::1", "this-machine"])
def test_the_address_that_it_says_to_open_answers(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a name of this machine is an address that only it can reach, as Debian sets it up."""
    look_up = socket.getaddrinfo

    def known(name: str, *rest: Any, **named: Any) -> Any:
        return look_up("127.0.1.1" if name == "this-machine" else name, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", known)
    with serving(host=host) as board, urllib.request.urlopen(board.url) as answer:
        assert answer.status == 200
        assert board.token == ""


def test_requests_without_a_host_or_with_two_get_nothing(board: Board) -> None:
    assert b" 403 " in send(board, b"GET / HTTP/1.1\r\n\r\n").splitlines()[0]
    assert b" 403 " in send(board, b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n").splitlines()[0]


@pytest.mark.parametrize(
    "raw", [b"\x00\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000]
)
def test_what_is_not_http_is_refused_and_the_board_lives_on(board: Board, raw: bytes) -> None:
    assert b"<" not in send(board, raw)
    assert ask(board, "/").status == 200


def test_data_that_did_not_change_is_not_sent_again(board: Board) -> None:
    tag = ask(board, "/data.json").headers["etag"]
    for asked in (tag, f"W/{tag}", f'"other", {tag}'):
        again = ask(board, "/data.json", If_None_Match=asked)
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    assert ask(board, "/data.json", If_None_Match='"other"').status == 200


@pytest.mark.parametrize("path", ["/", "/data.json"])
def test_who_takes_gzip_gets_it(board: Board, path: str) -> None:
    plain, zipped = ask(board, path), ask(board, path, Accept_Encoding="br, GZIP;q=0.5")
    assert "content-encoding" not in plain.headers
    assert zipped.headers["content-encoding"] == "gzip"
    assert len(zipped.body) < len(plain.body) / 2
    assert gzip.decompress(zipped.body) == plain.body
    assert "content-encoding" not in ask(board, path, Accept_Encoding="gzip;q=0, deflate").headers


def test_many_at_once_get_the_same_page_that_was_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.page.serve.SECONDS_BETWEEN_BUILDS", 600.0)
    built = []

    def build() -> Page:
        built.append(time.monotonic())
        time.sleep(0.2)
        return hostile_page()

    with serving(build) as board, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(board, "/data.json"), range(48)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert len(built) == 1


def test_a_page_is_built_again_after_a_second_and_later_where_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    built: list[float] = []

    def build() -> Page:
        clock[0] += 0.1 if len(built) < 2 else 3.0
        built.append(clock[0])
        return replace(example_page(steps=1), title=str(len(built)))

    monkeypatch.setattr("lockstep.page.serve.time.monotonic", lambda: clock[0])
    page = LivePage(build)

    def title_after(seconds: float) -> str:
        clock[0] += seconds
        return page.newest().page.title

    assert [title_after(0.0), title_after(0.9), title_after(0.2)] == ["1", "1", "2"]
    assert title_after(1.1) == "3"  # which takes 3 s
    assert [title_after(14.0), title_after(1.1)] == ["3", "4"]


def test_when_a_page_was_made_is_no_news() -> None:
    made = iter([1.0, 2.0, 3.0])
    page = LivePage(lambda: replace(example_page(steps=1), made=next(made)))
    first = page.newest()
    page._due = 0.0
    assert page.newest() is first


def test_a_page_that_cannot_be_made_is_one_sentence_and_the_next_may_do_better() -> None:
    fails = [True]

    def build() -> Page:
        if fails.pop() if fails else False:
            raise UserError("the log is gone", "bring it back")
        return example_page(steps=1)

    with serving(build) as board:
        first, second = ask(board, "/data.json"), ask(board, "/data.json")
    assert (first.status, first.body) == (500, b"the page cannot be made: the log is gone: bring it back\n")
    assert second.status == 200


def test_on_other_addresses_all_is_below_a_secret() -> None:
    with serving(host="0.0.0.0") as board:
        token = board.token
        assert len(token) >= 32
        assert board.url.endswith(f":{board.port}/{token}/")
        assert ask(board, f"/{token}/", Host="login1.cluster:8600").status == 200
        assert ask(board, f"/{token}/data.json").status == 200
        assert ask(board, f"/{token}/data.json", "POST").status == 405
        wrong = [token[:-1], token + "x", token[::-1], "", "é", token.swapcase()]
        for path in ("/", "/data.json", f"/{token}", f"/?{token}/", *(f"/{one}/" for one in wrong if one)):
            for method in ("GET", "POST"):
                answer = send(board, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert answer.startswith(b"HTTP/1.1 404 "), path
                assert answer.endswith(b"\r\n\r\nNot Found\n")
                assert token.encode() not in answer
    with serving(host="0.0.0.0") as other:
        assert other.token != token


def test_loopback_has_no_secret_and_goes_by_its_name() -> None:
    with open_board(example_page, "localhost", 0) as board:
        assert (board.is_loopback, board.token, board.url) == (True, "", f"http://localhost:{board.port}/")


def test_a_port_that_is_taken_is_refused_and_without_one_the_next_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port} .*in use.*: give another --port"):
            open_board(example_page, port=port)
        monkeypatch.setattr("lockstep.page.serve.USUAL_PORT", port)
        with open_board(example_page) as board:
            assert port < board.port < port + 100


@pytest.mark.parametrize("host", ["no-such-host.invalid", "999.1.1.1", "a b", "x" * 300, "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    with pytest.raises(UserError, match="--host"):
        open_board(example_page, host, 0)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    run = tmp_path / "soon"
    run.mkdir()
    build = follow([run])
    waiting = build()
    assert waiting.live
    assert "has not begun" in waiting.runs[0].headline.verdict
    (run / "events.jsonl").write_text('{"time": 1.0, "kind": "status", "attempt": 1, "text": "starting"}\n')
    assert "has not begun" not in build().runs[0].headline.verdict


def test_a_job_that_waits_in_a_queue_has_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "lm"
    folder.mkdir()
    note(RunFolder(folder, 1), JobState("17", "PENDING"))  # all that `lockstep submit` writes to the log
    page = follow(existing_runs([folder]))()
    assert page.live
    assert page.runs[0].headline.verdict == "Queued: no step is done yet."


def test_of_two_runs_one_may_still_be_waited_for(tmp_path: Path) -> None:
    for name in ("later", "now"):
        (tmp_path / name).mkdir()
    (tmp_path / "now/events.jsonl").write_text('{"time": 1.0, "kind": "status", "attempt": 1, "text": "starting"}\n')
    page = follow([tmp_path / "later", tmp_path / "now"])()
    assert [run.name for run in page.runs] == ["later", "now"]
    assert page.comparison == []
