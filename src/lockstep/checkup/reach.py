"""Whether nodes reach each other over the network, and write to one shared folder."""

from __future__ import annotations

import json
import os
import secrets
import socket
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.errors import UserError, reason
from lockstep.launch.meeting import Meeting
from lockstep.links.findings import GIGABYTE, MEGABYTE, Finding
from lockstep.runtime.host.network import address_towards, interface_of

SECONDS_OF_SKEW = 1.0
LEAST_DISK_FREE = 2 * GIGABYTE
LEAST_DISK_SPEED = 50 * MEGABYTE

SECONDS_FOR_A_CALL = 3.0
SECONDS_FOR_THE_OTHERS = 30.0
WRITTEN = 32 * MEGABYTE
SECONDS_OF_WRITING = 3.0


@dataclass(frozen=True)
class DoorKnock:
    """One node's knock at another one's door: which of its interfaces leads there, how long the answer took."""

    caller: int
    called: int
    address: str
    interface: str
    seconds: float | None
    skew: float
    trouble: str
    name: str
    """What the other one's name is taken for here; nothing where nobody knows it."""


@dataclass(frozen=True)
class Folder:
    """What a node saw of the folder that runs are written to."""

    path: str
    free: int
    bytes_per_second: float | None
    is_shared: bool
    """Whether it has the note there that the head left."""
    trouble: str


def call_all(meeting: Meeting, hosts: Sequence[str]) -> list[DoorKnock]:
    """Knock at every other node, while they knock here; all calls of all nodes, where they could tell of them."""
    if meeting.store is None:
        return []
    family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
    with socket.create_server((meeting.address, 0), family=family) as door:
        threading.Thread(target=_answer, args=(door,), daemon=True).start()
        doors = meeting.share("doors", list(door.getsockname()[:2]), SECONDS_FOR_THE_OTHERS)
        others = [other for other, address in enumerate(doors) if address and other != meeting.rank]
        made = [_call(meeting.rank, other, hosts[other], *doors[other]) for other in others]
        told = meeting.share("calls", [asdict(call) for call in made], SECONDS_FOR_THE_OTHERS)
        with suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)  # else its thread would sit there, and the port stay taken
        return [DoorKnock(**call) for calls_of in told for call in calls_of or []]


def _answer(door: socket.socket) -> None:
    """Tell everybody who comes what time it is here."""
    with suppress(OSError):  # the door is closed
        while True:
            caller, _ = door.accept()
            with suppress(OSError), caller:
                caller.sendall(json.dumps(time.time()).encode())


def _call(me: int, other: int, host: str, address: str, port: int) -> DoorKnock:
    interface, name = "", _address_of(host)
    began = time.time()
    try:
        interface = interface_of(address_towards(address, port))
        began = time.time()
        with socket.create_connection((address, port), timeout=SECONDS_FOR_A_CALL) as line:
            theirs = float(json.loads(line.recv(100)))
    except (OSError, ValueError, UserError) as error:
        why = (
            error.cause
            if isinstance(error, UserError)
            else reason(error)
            if isinstance(error, OSError)
            else "no answer"
        )
        return DoorKnock(me, other, address, interface, None, 0.0, why, name)
    took = time.time() - began
    return DoorKnock(me, other, address, interface, took, theirs - (began + took / 2), "", name)


def _address_of(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return ""


def look_at_folder(meeting: Meeting, run_dir: Path) -> list[Folder]:
    """What every node sees of the folder; the head leaves a note there for a moment, and each writes a file."""
    place = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
    word = secrets.token_hex(8)
    note = place / f".lockstep-doctor-{word}"
    trouble = ""
    if meeting.rank == 0:
        try:
            note.write_text(word, encoding="ascii")
        except OSError as error:
            trouble = f"cannot be written ({reason(error)})"
    try:
        left = meeting.share("note", str(note) if meeting.rank == 0 and not trouble else "", SECONDS_FOR_THE_OTHERS)[0]
        is_shared = bool(trouble) or not left or _can_see(place / Path(left).name, Path(left).name.rpartition("-")[2])
        speed = None
        if not trouble:
            speed, trouble = _writing_speed(place)
        stats = os.statvfs(place)
        own = Folder(str(place), stats.f_bavail * stats.f_frsize, speed, is_shared, trouble)
        told = meeting.share("folder", asdict(own), SECONDS_FOR_THE_OTHERS)
    finally:
        if meeting.rank == 0:
            note.unlink(missing_ok=True)
    return [Folder(**folder) if folder else own for folder in told]


def _can_see(note: Path, word: str) -> bool:
    """Network file systems show a new file after a moment."""
    for _ in range(20):
        with suppress(OSError):
            if note.read_text(encoding="ascii") == word:
                return True
        time.sleep(0.1)
    return False


def _writing_speed(folder: Path) -> tuple[float | None, str]:
    """Bytes per second that reach the disk, and why not where they do not."""
    file = folder / f".lockstep-doctor-{secrets.token_hex(8)}"
    block = os.urandom(MEGABYTE)
    written, began = 0, time.monotonic()
    try:
        with file.open("wb", buffering=0) as target:
            while written < WRITTEN and time.monotonic() - began < SECONDS_OF_WRITING:
                written += target.write(block)
            os.fsync(target.fileno())
    except OSError as error:
        return None, f"cannot be written ({reason(error)})"
    finally:
        with suppress(OSError):
            file.unlink()
    return written / (time.monotonic() - began), ""


def calls(hosts: Sequence[str], made: Sequence[DoorKnock]) -> Iterator[Finding]:
    """Whether every node reaches every other, by which interface, and whether their clocks agree."""
    failed = [call for call in made if call.trouble]
    for call in failed:
        yield Finding(
            "network",
            "broken",
            hosts[call.caller],
            f"{hosts[call.caller]} does not reach {hosts[call.called]} at {call.address}"
            f"{f' through {call.interface}' if call.interface else ''} ({call.trouble})",
            f"see cable, route and firewall between {hosts[call.caller]} and {hosts[call.called]}",
        )
    for caller, host in enumerate(hosts):
        reached = [call for call in made if call.caller == caller and not call.trouble]
        if reached:
            ways = ", ".join(
                f"{hosts[call.called]} by {call.interface} in {1000 * (call.seconds or 0):.1f} ms"
                for call in reached[:4]
            )
            more = f" and {len(reached) - 4} more" if len(reached) > 4 else ""
            yield Finding("network", "ok", host, f"reaches {ways}{more}")
    nameless: dict[int, list[str]] = defaultdict(list)
    for call in made:
        if not call.name:
            nameless[call.caller].append(hosts[call.called])
    for caller, unknown in nameless.items():
        yield Finding(
            "names",
            "note",
            hosts[caller],
            f"{hosts[caller]} does not know the name {', '.join(unknown[:4])}",
            "nothing for Lockstep, which uses addresses; other programs need it in /etc/hosts or the DNS",
        )
    skews: dict[int, list[float]] = defaultdict(list)
    for call in made:
        if not call.trouble:
            skews[call.called].append(call.skew)
            skews[call.caller].append(-call.skew)
    off = {node: statistics.median(found) for node, found in sorted(skews.items(), reverse=True)}
    worst = max(off, key=lambda node: abs(off[node]), default=None)
    if worst is not None and abs(off[worst]) > SECONDS_OF_SKEW:
        which = "ahead of" if off[worst] > 0 else "behind"
        others = f"that of {hosts[0]}" if len(hosts) == 2 else "the others"
        yield Finding(
            "clocks",
            "slow",
            hosts[worst],
            f"the clock of {hosts[worst]} is {abs(off[worst]):.1f} s {which} {others}",
            "start its time service (chronyc makestep): events and who failed first would be in the wrong order",
        )
    elif off:
        yield Finding("clocks", "ok", "all nodes", f"agree within {max(0.001, *map(abs, off.values())):.3f} s")


def folders(hosts: Sequence[str], seen: Sequence[Folder]) -> Iterator[Finding]:
    """Whether runs can be written, fast enough, and to one place."""
    for host, folder in zip(hosts, seen, strict=True):
        if folder.trouble:
            yield Finding("run folder", "broken", host, f"{folder.path} {folder.trouble}", "give another --run-dir")
        elif not folder.is_shared:
            yield Finding(
                "run folder",
                "broken",
                host,
                f"{host} does not see in {folder.path} what {hosts[0]} wrote there",
                "use a folder that all nodes share: --run-dir",
            )
        elif folder.free < LEAST_DISK_FREE:
            fix = "free some, or give a --run-dir with more room: a checkpoint takes 12 bytes a parameter"
            yield Finding("run folder", "broken", host, f"{folder.free / GIGABYTE:.1f} GB free in {folder.path}", fix)
        elif folder.bytes_per_second is not None and folder.bytes_per_second < LEAST_DISK_SPEED:
            yield Finding(
                "run folder",
                "slow",
                host,
                f"{folder.path} takes {folder.bytes_per_second / MEGABYTE:.0f} MB/s: a checkpoint of 10 GB would take "
                f"{10 * GIGABYTE / folder.bytes_per_second / 60:.0f} minutes",
                "use a faster file system: --run-dir",
            )
        else:
            speed = f", written at {folder.bytes_per_second / MEGABYTE:,.0f} MB/s" if folder.bytes_per_second else ""
            shared = ", the same on all nodes" if len(hosts) > 1 else ""
            yield Finding(
                "run folder", "ok", host, f"{folder.free / GIGABYTE:,.0f} GB free in {folder.path}{speed}{shared}"
            )
