"""The event log: what a reader may rely on, also after a crash."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.record import log as log_of_a_run
from lockstep.record.events import ADDED, KINDS, validate
from lockstep.record.events_page import EXAMPLES as EXAMPLES_FILE
from lockstep.record.events_page import events_page
from lockstep.record.log import EventLog, LogReader
from tests.events import Event, follow_events, read_events

DOCS = Path(__file__).parents[2] / "docs" / "events.md"
EXAMPLES: dict[str, Event] = {
    event["kind"]: event for event in map(json.loads, re.findall(r"```json\n(.*)\n```", DOCS.read_text()))
}


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "lm" / "events.jsonl"


def write_statuses(path: Path, *texts: str, attempt: int = 1) -> None:
    log = EventLog(path, attempt)
    for text in texts:
        log.emit("status", text=text)
    log.close()


def texts(path: Path) -> list[str]:
    return [event["text"] for event in read_events(path)]


def test_importing_the_event_log_needs_neither_torch_nor_rich():
    code = "import sys, lockstep.record.log; sys.exit(not {'torch', 'rich', 'numpy'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# The schema and its page


def test_the_page_is_made_from_the_declarations():
    assert DOCS.read_text() == events_page(), "python -m lockstep.record.events_page > docs/events.md"
    assert len(EXAMPLES_FILE.read_text().splitlines()) == len(KINDS)


def test_the_page_shows_every_kind_and_each_example_is_valid():
    assert EXAMPLES.keys() == KINDS.keys()
    for event in EXAMPLES.values():
        validate(event)


def test_the_page_names_every_field_of_every_kind():
    sections = dict(re.findall(r"^\*\*(\w+)\*\*:(.*?)^```\n", DOCS.read_text(), flags=re.S | re.M))
    for kind, declared in KINDS.items():
        for field in declared.__annotations__.keys() - {"time", "kind", "attempt"}:
            assert field in sections[kind], f"{kind}.{field}"


def test_the_page_can_be_read_in_one_sitting():
    assert len(DOCS.read_text().splitlines()) <= 165


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("step", {"loss": None}, "'loss'"),
        ("step", {"loss": "2.1"}, "'loss'"),
        ("step", {"step": 1.0}, "'step'"),
        ("step", {"skipped": 0}, "'skipped'"),
        ("step", {"step": True}, "'step'"),
        ("step", {"los": 2.1}, "'los'"),
        ("start", {"versions": {"lockstep": "0.1.0", "python": "3.11.7"}}, "'versions.torch'"),
        ("start", {"item": "words"}, "'words'"),
        ("validation", {"metrics": {"accuracy": {"sum": 1, "count": 2}}}, "'metrics.accuracy.value'"),
        ("validation", {"metrics": [0.9]}, "'metrics'"),
        ("metric", {"values": {"note": "high"}}, "'values.note'"),
        ("message", {"level": "error"}, "'error'"),
        ("stop", {"reason": "bored"}, "'bored'"),
        ("config", {"micro_batch": [8]}, "'micro_batch'"),
        ("ranks", {"wait": None}, "'wait'"),
        ("ranks", {"input": [0.001, "long"]}, "'input.1'"),
        ("ranks", {"samples": [True, 784]}, "'samples.0'"),
        ("machine", {"hosts": [{**EXAMPLES["machine"]["hosts"][0], "gpus": [{"index": 0}]}]}, "'hosts.0.gpus.0.name'"),
        ("status", {"kind": []}, "'[]'"),
    ],
)
def test_a_wrong_field_is_refused_by_name(kind: str, change: Event, named: str):
    with pytest.raises(UserError, match=re.escape(named)):
        validate({**EXAMPLES[kind], **change})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_missing_field_is_named(kind: str):
    required: frozenset[str] = vars(KINDS[kind])["__required_keys__"]
    for field in required - {"kind"}:
        event = {name: value for name, value in EXAMPLES[kind].items() if name != field}
        with pytest.raises(UserError, match=repr(field)):
            validate(event)


def test_an_unknown_kind_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'checkpoint'"):
        validate({"time": 0.0, "kind": "checkpiont", "attempt": 1})


def test_what_breaks_the_schema_is_not_written(path: Path):
    log = EventLog(path, attempt=1)
    with pytest.raises(UserError, match="'text'"):
        log.emit("status")
    log.close()
    assert path.read_bytes() == b""


# Writing


def test_an_event_reaches_the_file_and_every_reader_alike(path: Path):
    readers = [Recorder(), Recorder()]
    log = EventLog(path, attempt=3, readers=readers)
    log.emit("status", text="two\nlines, ünï \ud800")
    log.emit("baseline", name="bigram", loss=2.42)
    written = list(read_events(path))
    assert [reader.events for reader in readers] == [written, written]
    assert [event["attempt"] for event in written] == [3, 3]
    assert written[0]["text"] == "two\nlines, ünï \ud800"
    log.close()
    log.close()
    assert [reader.closed for reader in readers] == [1, 1]


def test_a_reader_sees_an_event_only_once_it_is_in_the_file(path: Path):
    class Checks(Recorder):
        def handle(self, event: Event) -> None:
            assert list(read_events(path))[-1] == event
            super().handle(event)

    reader = Checks()
    log = EventLog(path, attempt=1, readers=[reader])
    log.emit("status", text="building the model")
    log.close()
    assert len(reader.events) == 1


def test_a_reader_may_emit_a_message_itself(path: Path):
    class Complains(Recorder):
        def handle(self, event: Event) -> None:
            if event["kind"] != "message":
                log.emit("message", text="no", level="warning")

    log = EventLog(path, attempt=1, readers=[Complains()])
    log.emit("status", text="go")
    log.close()
    assert texts(path) == ["go", "no"]


def test_all_readers_and_the_file_are_closed_when_closing_one_fails(path: Path):
    class Fails(Recorder):
        def close(self) -> None:
            raise RuntimeError("broken reader")

    before, after = Recorder(), Recorder()
    log = EventLog(path, attempt=1, readers=[before, Fails(), after])
    with pytest.raises(RuntimeError, match="broken reader"):
        log.close()
    assert (before.closed, after.closed) == (1, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.emit("status", text="late")


def test_numbers_that_json_has_not_are_legal_in_the_file_and_floats_to_readers(path: Path):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    log = EventLog(path, attempt=1)
    log.emit("metric", step=1, values={"a": math.nan, "b": math.inf, "c": -math.inf})
    log.emit("sample", step=1, prompt="NaN", text="Infinity")
    log.close()
    first, second = path.read_text().splitlines()
    in_file = json.loads(first, parse_constant=refuse)["values"]
    assert in_file == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    metric, sample = read_events(path)
    values = metric["values"]
    assert math.isnan(values.pop("a"))
    assert values == {"b": math.inf, "c": -math.inf}
    assert (sample["prompt"], sample["text"]) == ("NaN", "Infinity")
    assert json.loads(second) == sample


def test_events_from_several_threads_do_not_mix(path: Path):
    log = EventLog(path, attempt=1)

    def write(name: str) -> None:
        for number in range(200):
            log.emit("status", text=f"{name}{number}" * 50)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert len(texts(path)) == 800


# Crashes


def test_the_events_before_a_kill_are_all_there(path: Path):
    """The process is killed with no chance to clean up, right after its second event."""
    code = (
        "import os, signal, sys; from pathlib import Path; from lockstep.record.log import EventLog\n"
        "log = EventLog(Path(sys.argv[1]), 1)\n"
        "log.emit('status', text='one'); log.emit('status', text='two'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -signal.SIGKILL
    assert texts(path) == ["one", "two"]


def test_a_last_line_torn_anywhere_is_skipped_and_the_next_attempt_goes_on(path: Path):
    write_statuses(path, "one", "two")
    whole = path.read_bytes()
    length_of_second = len(whole.splitlines(keepends=True)[1])
    for lost in range(1, length_of_second):
        path.write_bytes(whole[:-lost])
        assert texts(path) == ["one"]
        write_statuses(path, "three", attempt=2)
        assert texts(path) == ["one", "three"]
    assert [event["attempt"] for event in read_events(path)] == [1, 2]


def test_a_torn_line_longer_than_any_buffer_is_cut_at_its_beginning(path: Path):
    write_statuses(path, "one")
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    write_statuses(path, "two")
    assert texts(path) == ["one", "two"]


def test_a_log_that_is_one_torn_line_begins_anew(path: Path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"time": 17')
    assert texts(path) == []
    write_statuses(path, "one")
    assert texts(path) == ["one"]


def test_a_full_disk_leaves_whole_lines_only(path: Path, monkeypatch: pytest.MonkeyPatch):
    log = EventLog(path, attempt=1)
    log.emit("status", text="one")
    with monkeypatch.context() as patch:
        write = os.write
        patch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:7]))
        with pytest.raises(OSError, match="free some disk space"):
            log.emit("status", text="two")
    log.emit("status", text="three")
    log.close()
    assert texts(path) == ["one", "three"]


DAMAGES = {
    "torn": b'{"time": 1, "ki',
    "zeros": b"\0\0\0",
    "list": b"[]",
    "no time": b'{"kind": "status"}',
    "empty": b"",
    "no text": b"\xff",
    "kind is a list": b'{"time": 1, "kind": [], "attempt": 1, "text": "two"}',
    "deep": b'{"time": 1, "kind": "status", "attempt": 1, "text": ' + 5000 * b"[" + 5000 * b"]" + b"}",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_in_the_middle_costs_nothing_but_itself(path: Path, damage: bytes):
    write_statuses(path, "one", "two", "three")
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage, lines[2], b""]))
    assert texts(path) == ["one", "three"]
    assert [event["text"] for event in follow_events(path, lambda: True)] == ["one", "three"]


def test_a_missing_log_is_said_in_one_sentence(path: Path):
    with pytest.raises(UserError, match="there is no event log at"):
        list(read_events(path))


def test_kinds_and_fields_of_a_later_version_can_be_read(path: Path):
    write_statuses(path, "one")
    with path.open("a") as file:
        file.write('{"time": 1.0, "kind": "weather", "attempt": 1, "sky": "NaN"}\n')
        file.write('{"time": 1.0, "kind": "status", "attempt": 1, "text": "two", "urgent": true}\n')
    assert [event["kind"] for event in read_events(path)] == ["status", "weather", "status"]


def test_a_reader_that_comes_back_gets_whole_events_only(path: Path):
    """What a later version has added is fine; a line that is damaged, or lacks a field, costs nothing but itself."""
    write_statuses(path, "one")
    status = '{"time": 1.0, "kind": "status", "attempt": 1'
    with path.open("a") as file:
        file.write('broken\n{"time": 1.0, "kind": "weather", "attempt": 1}\n')
        file.write(f'{status}}}\n{status}, "text": 2}}\n{status}, "text": "two", "urgent": true}}\n')
        file.write('{"time": 1.0, "kind": "message", "attempt": 1, "level": "error", "text": "three"}\n')
        file.write('{"time": "noon", "kind": "weather", "attempt": 1}\n')
    log = LogReader(path)
    found: list[tuple[int, Event]] = [(log.offset, event) for event in log.events()]
    assert [event and event.get("text", event["kind"]) for _, event in found] == [
        *("one", None, "weather", None, None, "two", "three", None),
    ]
    assert (log.lines, log.damaged) == (8, 4)
    assert list(LogReader(path, found[4][0]).events()) == [event for _, event in found[5:]]
    assert list(log.events()) == []
    write_statuses(path, "four")
    assert [event and event["kind"] for event in log.events()] == ["status"]


def test_a_log_that_is_replaced_is_read_from_its_beginning(path: Path):
    write_statuses(path, "one", "two")
    log = LogReader(path)
    assert len(list(log.read())) == 2
    path.unlink()
    write_statuses(path, "three", "four", "five")
    news = log.read()
    assert log.is_another
    assert len(list(news)) == log.lines == 3
    list(log.read())
    assert not log.is_another


def test_a_line_longer_than_any_event_costs_nothing_but_itself(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_of_a_run, "LONGEST_LINE", 50_000)
    monkeypatch.setattr(log_of_a_run, "CHUNK", 1000)
    write_statuses(path, "one")
    log = LogReader(path)
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    assert [type(told) for told in log.read()] == [dict, str]
    with path.open("ab") as file:
        file.write(b"x\n")
    write_statuses(path, "two")
    assert [told["text"] for told in log.read() if isinstance(told, dict)] == ["two"]
    assert (log.lines, log.damaged) == (3, 1)


def test_a_log_of_an_earlier_version_has_what_that_did_not_know(path: Path):
    path.parent.mkdir(parents=True)
    kinds = sorted({kind for kind, _ in ADDED})
    before = [{name: told for name, told in EXAMPLES[kind].items() if (kind, name) not in ADDED} for kind in kinds]
    path.write_text("".join(json.dumps(event) + "\n" for event in before))
    read = {event["kind"]: event for event in read_events(path)}
    assert list(read) == kinds
    for (kind, name), default in ADDED.items():
        assert read[kind][name] == default
        validate(read[kind])


def test_numbers_that_json_has_not_come_back_inside_of_lists(path: Path):
    log = EventLog(path, attempt=1)
    log.emit(**{**EXAMPLES["ranks"], "wait": [math.inf, 0.007]})
    log.close()
    [event] = read_events(path)
    assert event["wait"] == [math.inf, 0.007]


# Following


def test_following_gives_each_event_once_while_it_is_written(path: Path):
    """The follower starts before the file is there, and sees an attempt die in the middle of a line."""
    done = threading.Event()
    seen: list[str] = []
    new = threading.Condition()

    def follow() -> None:
        for event in follow_events(path, done.is_set):
            with new:
                seen.append(event["text"])
                new.notify_all()

    def wait_for(count: int) -> None:
        with new:
            new.wait_for(lambda: len(seen) >= count)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    write_statuses(path, "one", "two")
    wait_for(2)
    with path.open("ab") as file:
        file.write(b'{"time": 17, "kind": "sta')
    write_statuses(path, "three", attempt=2)
    wait_for(3)
    write_statuses(path, "four", attempt=3)
    done.set()
    follower.join()
    assert seen == ["one", "two", "three", "four"]


def test_following_a_log_that_never_came_ends(path: Path):
    assert list(follow_events(path, lambda: True)) == []
