"""The board: the page of some runs over HTTP, kept up to date while they go on. It only ever reads.

Two addresses, `/` (the page) and `/data.json` (its data); everything else does not exist, and nothing of a request ever
names a file. On loopback, requests have to be for this host by one of its own names: a web site of somebody else whose
name leads here (DNS rebinding) gets nothing. On other addresses all of it is below a random token.
"""

from __future__ import annotations

import gzip
import hashlib
import ipaddress
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, reason
from lockstep.page.html import content_security_policy, page_html
from lockstep.page.make_page import page_of
from lockstep.page.panels import Headline, Page, RunPage, as_json
from lockstep.page.reading.reader import RunReader
from lockstep.record.folder import EVENTS

USUAL_PORT = 8600
PORTS_TO_TRY = 100
DATA = "data.json"
SECONDS_BETWEEN_BUILDS = 1.0
SHARE_OF_BUILDING = 0.2
"""Of one core, for a page that takes long to build: the run it shows may need it."""
SECONDS_OF_SILENCE = 30.0
"""A connection on which nothing comes for so long is closed."""

Build = Callable[[], Page]


@dataclass(frozen=True)
class WirePage:
    """A page as it goes over the wire; its tag stays the same while nothing happens."""

    page: Page
    data: bytes
    zipped: bytes
    tag: str

    @staticmethod
    def of(page: Page) -> WirePage:
        """A page with its data written out."""
        content = as_json(page)
        data = _as_bytes(content)
        # When it was made differs every time, and is no news.
        digest = hashlib.blake2b(_as_bytes({**content, "made": 0}), digest_size=12).hexdigest()
        return WirePage(page, data, gzip.compress(data, compresslevel=4), f'"{digest}"')


def follow(folders: Sequence[Path]) -> Build:
    """How to build the page of some runs again and again: each time, only what is new in their logs is read."""
    readers: dict[Path, RunReader] = {}

    def build() -> Page:
        for folder in folders:
            if folder not in readers and (folder / EVENTS).is_file():
                readers[folder] = RunReader(folder)
        for reader in readers.values():
            reader.read()
        page = page_of([readers[folder] for folder in folders if folder in readers], live=True)
        found = iter(page.runs)
        runs = [next(found) if folder in readers else _waiting(folder) for folder in folders]
        # One that has failed or was stopped can be started again, and goes on in the same log.
        live = any(run.headline.state != "finished" for run in runs)
        return replace(page, title=page.title or runs[0].name, runs=runs, live=live)

    return build


def _waiting(folder: Path) -> RunPage:
    verdict = "It has not begun: nothing has been written to its log yet, and this page waits for it."
    return RunPage(
        folder.resolve().name, Headline(folder.resolve().name, str(folder), "running", verdict, []), [], [], []
    )


class LivePage:
    """The newest page of some runs, built when somebody asks and at most once a second, however many ask."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._building = threading.Lock()
        self._shown: WirePage | None = None
        self._due = 0.0

    def newest(self) -> WirePage:
        """The page as of now, or of a moment ago."""
        with self._building:
            began = time.monotonic()
            if self._shown is None or began >= self._due:
                shown = WirePage.of(self._build())
                if self._shown is None or shown.tag != self._shown.tag:
                    self._shown = shown
                now = time.monotonic()
                self._due = now + max(SECONDS_BETWEEN_BUILDS, (now - began) / SHARE_OF_BUILDING)
            return self._shown


class Board(ThreadingHTTPServer):
    """Serves one page. `url` is what to open in a browser."""

    daemon_threads = True
    request_queue_size = 128  # with five, a few browsers at once wait for a second

    def __init__(self, build: Build, host: str, port: int) -> None:
        self.address_family, self.address, self.is_loopback = _look_up(host)
        self.own_names = {"localhost", "127.0.0.1", "[::1]", in_url(self.address), in_url(host)}
        self.page = LivePage(build)
        self.token = "" if self.is_loopback else secrets.token_urlsafe(24)
        super().__init__((self.address, port), _Handler)
        self.port = int(self.server_address[1])
        name = socket.gethostname() if ipaddress.ip_address(self.address).is_unspecified else in_url(host)
        self.url = f"http://{name}:{self.port}/{self.token}{'/' if self.token else ''}"

    def server_bind(self) -> None:
        """Bind without asking a name server who this host is, as http.server does, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, *_: Any) -> None:
        """A browser that hung up is nothing to tell of."""


def open_board(build: Build, host: str = "127.0.0.1", port: int | None = None) -> Board:
    """Listen on an address: on `port` (0: any that is free), or without one on the usual port or the next free one."""
    ports: Sequence[int] = [port] if port is not None else range(USUAL_PORT, USUAL_PORT + PORTS_TO_TRY)
    for number in ports:
        try:
            return Board(build, host, number)
        except OSError as error:
            failed = error
            if port is not None or isinstance(error, PermissionError):
                break
    where = f"{host}:{port}" if port is not None else f"{host}, ports {ports[0]} to {ports[-1]},"
    raise UserError(
        f"cannot listen on {where} ({reason(failed)})", "give another --port (0: any that is free) or --host"
    )


class _Handler(BaseHTTPRequestHandler):
    server: Board
    protocol_version = "HTTP/1.1"
    timeout = SECONDS_OF_SILENCE

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """What http.server itself objects to. A method that has no function here is none that we know."""
        self.close_connection = True
        if code == HTTPStatus.NOT_IMPLEMENTED and hasattr(self, "headers"):
            self._answer()
        else:
            self._say(HTTPStatus(code))

    def version_string(self) -> str:
        return "lockstep"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        board = self.server
        if board.is_loopback and not self._is_for_this_host():
            return self._refuse(HTTPStatus.FORBIDDEN)
        path = self.path.split("?", 1)[0]
        if board.token:
            below = f"/{board.token}/".encode()
            if not secrets.compare_digest(path.encode("utf-8", "replace")[: len(below)], below):
                return self._refuse(HTTPStatus.NOT_FOUND)
            path = path[len(below) - 1 :]
        if self.command not in ("GET", "HEAD"):
            return self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)
        if path not in ("/", f"/{DATA}"):
            return self._say(HTTPStatus.NOT_FOUND)
        try:
            shown = board.page.newest()
            if path == "/":
                return self._send_page(shown)
        except Exception as error:  # the log may have been deleted; the next request may do better
            return self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"the page cannot be made: {error}")
        return self._send_data(shown)

    def _is_for_this_host(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and re.sub(r":\d*$", "", hosts[0].strip().lower()) in self.server.own_names

    def _send_page(self, shown: WirePage) -> None:
        html = page_html(shown.page, data_url=DATA)
        body = html.encode("utf-8", "replace")
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": content_security_policy(live=True),
        }
        if self._takes_gzip():
            body = gzip.compress(body, compresslevel=4)
            headers["Content-Encoding"] = "gzip"
        self._send(HTTPStatus.OK, body, headers)

    def _send_data(self, shown: WirePage) -> None:
        headers = {"Content-Type": "application/json", "ETag": shown.tag}
        asked = re.split(r"\s*,\s*", self.headers.get("If-None-Match", ""))
        if shown.tag in [tag.removeprefix("W/") for tag in asked] or asked == ["*"]:
            return self._send(HTTPStatus.NOT_MODIFIED, b"", headers)
        if not self._takes_gzip():
            return self._send(HTTPStatus.OK, shown.data, headers)
        return self._send(HTTPStatus.OK, shown.zipped, {**headers, "Content-Encoding": "gzip"})

    def _takes_gzip(self) -> bool:
        for coding in self.headers.get("Accept-Encoding", "").lower().split(","):
            name, _, quality = coding.replace(" ", "").partition(";q=")
            if name == "gzip":
                return quality.strip("0.") != "" or quality == ""
        return False

    def _refuse(self, status: HTTPStatus) -> None:
        """Without reading what else the request holds."""
        self.close_connection = True
        self._say(status)

    def _say(self, status: HTTPStatus, text: str = "") -> None:
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        self._send(status, f"{text or status.phrase}\n".encode("utf-8", "replace"), headers)

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        usual = {
            "Content-Security-Policy": "default-src 'none'",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Vary": "Accept-Encoding",
        }
        self.send_response(status)
        for name, value in (usual | headers).items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD" and status != HTTPStatus.NOT_MODIFIED:
            self.wfile.write(body)


def _as_bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _look_up(host: str) -> tuple[socket.AddressFamily, str, bool]:
    """Family and address of a host that a user named, and whether only this machine can reach it."""
    try:
        family, *_, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise UserError(
            f"--host {host} is not an address of this machine", "use 127.0.0.1, 0.0.0.0 or its name"
        ) from None
    return family, str(address), ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


def in_url(host: str) -> str:
    """A name or address as it stands in a URL."""
    return f"[{host}]".lower() if ":" in host else host.lower()
