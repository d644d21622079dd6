"""Whatever is in a log, the page of its run is made, and says what could not be read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.page.make_page import build_page
from lockstep.page.panels import RunPage, as_json
from lockstep.page.reading.reader import RunReader
from lockstep.page.reading.summary import Summary
from lockstep.record import log as reading
from tests.runs import BEGIN, Made, run_events, write_run

LATER = BEGIN + 1e5
DOCS = Path(__file__).parents[2] / "docs" / "events.md"
EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*)\n```", DOCS.read_text())]
JUNK: list[Any] = [
    None,
    True,
    -1,
    10**400,
    "NaN",
    "-Infinity",
    1e308,
    "</script><script>alert(1)</script>\ud800\u0000",
    [],
    [None],
    [[1, 2]],
    {},
    {"a": {"value": {}}},
    "x" * 100_000,
]

pytestmark = pytest.mark.usefixtures("plain_sentences")


def page_of(folder: Path, now: float = LATER) -> RunPage:
    reader = RunReader(folder)
    reader.read()
    page = reader.page(now)
    json.dumps(as_json(page), allow_nan=False).encode()  # it can be written
    return page


def step_lines(page: RunPage) -> int:
    section = next(section for section in page.sections if section.id == "training")
    return len(next(panel for panel in section.panels if panel.id == "loss").curves[0].x)  # type: ignore[union-attr]


def test_a_sound_log_has_nothing_unreadable(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", Made(fails_after=(60,))))
    assert page.unreadable == []
    assert step_lines(page) == 200


def test_a_run_that_is_not_there_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no run folder .*name the folder of a run"):
        RunReader(tmp_path / "none")
    with pytest.raises(UserError, match=r"has no events\.jsonl: name the folder of a run that has started"):
        RunReader(tmp_path)


def test_an_empty_log_is_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    page = page_of(tmp_path)
    assert page.name == tmp_path.name
    assert page.unreadable == ["the log has no event that can be used"]


def test_a_torn_last_line_is_waited_for_and_told_once_the_run_is_over(tmp_path: Path) -> None:
    lines = [json.dumps(event) + "\n" for event in run_events(Made(steps=10, ending="killed"))]
    log = tmp_path / "events.jsonl"
    log.write_text("".join(lines[:-1]) + lines[-1][:20])
    reader = RunReader(tmp_path)
    assert reader.read()
    assert reader.page(BEGIN + 20).unreadable == []
    assert "the last line is torn: it has 20 bytes" in reader.page(LATER).unreadable[0]
    with log.open("a") as file:
        file.write(lines[-1][20:])
    assert reader.read()
    assert not reader.read()
    assert reader.page(LATER).unreadable == []


def test_a_log_is_followed_line_by_line_to_the_same_page(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", Made(steps=60, fails_after=(30,), save_every=20))
    data = (whole / "events.jsonl").read_bytes()
    (tmp_path / "grows").mkdir()
    log = tmp_path / "grows" / "events.jsonl"
    log.touch()
    reader = RunReader(tmp_path / "grows")
    with log.open("ab", buffering=0) as file:
        for begin in range(0, len(data), 7001):
            file.write(data[begin : begin + 7001])
            reader.read()
    assert as_json(reader.page(LATER)) == as_json(page_of(whole))


def test_a_log_that_is_replaced_or_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Made(steps=50))
    reader = RunReader(folder)
    reader.read()
    other = write_run(tmp_path / "other", Made(steps=80, name="other"))
    shutil.copyfile(other / "events.jsonl", folder / "events.jsonl")  # the same file, with other contents
    assert reader.read()
    assert (reader.summary(LATER).name, reader.summary(LATER).steps) == ("other", 80)
    log = folder / "events.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:20]))
    assert reader.read()
    assert reader.summary(LATER).steps < 80
    log.unlink()
    assert not reader.read()
    write_run(folder, Made(steps=30))
    assert reader.read()
    assert reader.summary(LATER).steps == 30


def test_lines_that_are_no_events_are_counted_with_the_first_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Made(steps=10))
    count = len((folder / "events.jsonl").read_text().splitlines())
    more = [
        "garbage\n",
        '{"half": \n',
        "[1, 2]\n",
        "3\n",
        '{"time": 1, "attempt": 1}\n',
        '{"kind": "step", "attempt": 1}\n',
        '{"kind": "status", "time": 1e300, "attempt": 1, "text": ""}\n',
        '{"kind": "status", "time": 1760000000.0, "attempt": "one", "text": ""}\n',
        "\n",
        "[" * 100_000 + "\n",
        "\x00\x01\n",
    ]
    page = page_of(write_run(tmp_path / "run", Made(steps=10), more))
    assert page.unreadable == [
        f"4 lines are not JSON (the first in line {count + 1})",
        f"2 lines are JSON, but no object (the first in line {count + 3})",
        f"1 line is without a kind (line {count + 5})",
        f"2 lines are without a time that can be (the first in line {count + 6})",
        f"1 line is without the number of an attempt (line {count + 8})",
    ]
    assert step_lines(page) == 10


def test_events_of_another_version_are_named(tmp_path: Path) -> None:
    event = {"time": BEGIN, "attempt": 1}
    more = [json.dumps({**event, "kind": kind}) + "\n" for kind in ("new", "newer", "new", "x" * 500)]
    page = page_of(write_run(tmp_path / "run", Made(steps=10), more))
    assert "4 events are of a kind that this version does not know" in page.unreadable[0]
    assert "'new', 'newer', 'xxx" in page.unreadable[0]
    assert len(page.unreadable[0]) < 250


def test_a_bad_field_costs_one_event(tmp_path: Path) -> None:
    events = list(run_events(Made(steps=10)))
    steps = [event for event in events if event["kind"] == "step"]
    steps[3]["loss"] = "low"
    del steps[5]["seconds"]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = page_of(tmp_path)
    assert step_lines(page) == 8
    assert [re.sub(r"line \d+", "line N", told) for told in page.unreadable] == [
        "1 step event cannot be used (line N): its field 'loss' is not a number",
        "1 step event cannot be used (line N): its field 'seconds' is not a number",
    ]


def test_steps_of_a_log_without_padding_are_read(tmp_path: Path) -> None:
    events = list(run_events(Made(steps=10)))
    for event in events:
        for name in ("padding", "optimizer", "between"):
            event.pop(name, None)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = page_of(tmp_path)
    assert page.unreadable == []
    assert step_lines(page) == 10


def test_two_attempts_that_write_at_once_are_told_apart(tmp_path: Path) -> None:
    events = list(run_events(Made(fails_after=(60,), save_every=50)))
    first = [event for event in events if event["attempt"] == 1]
    second = [event for event in events if event["attempt"] == 2]
    late = [event for event in first if event.get("step", 0) > 50]
    early, many = first[: -len(late)], 20 + len(late)
    mixed = [*early, *second[:20], *(event for pair in zip(late, second[20:many], strict=True) for event in pair)]
    mixed += second[many:]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in mixed))
    page = page_of(tmp_path)
    left_out = sum(event["kind"] in ("step", "ranks", "machine", "validation", "checkpoint") for event in late)
    assert f"attempt 1 still wrote after attempt 2 had done its first step: {left_out} events" in page.unreadable[0]
    reader = RunReader(tmp_path)
    reader.read()
    assert reader.summary(LATER).steps == 200
    losses = next(panel for section in page.sections for panel in section.panels if panel.id == "loss")
    assert losses.curves[0].x == list(range(1, 201))  # type: ignore[union-attr]


def test_ranks_that_say_nothing_are_named(tmp_path: Path) -> None:
    events = list(run_events(Made(steps=10, ranks=4)))
    for event in events:
        if event["kind"] == "ranks":
            event["compute"] = event["compute"][:2]
            event["wait"][1] = None
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page = page_of(tmp_path)
    assert re.search(r"2 ranks events of 4 ranks tell nothing, or not all, of ranks 2, 3 \(the", page.unreadable[0])
    heat = next(panel for section in page.sections for panel in section.panels if panel.id == "rank_heat")
    assert heat.layers[0].values[2] == [None, None]  # type: ignore[union-attr]


def test_a_line_longer_than_memory_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK", 1000)
    monkeypatch.setattr(reading, "LONGEST_LINE", 50_000)
    lines = [json.dumps(event) + "\n" for event in run_events(Made(steps=10))]
    (tmp_path / "events.jsonl").write_text("".join([*lines[:12], "x" * 200_000 + "\n", *lines[12:]]))
    page = page_of(tmp_path)
    assert page.unreadable == ["1 line is longer than any event (line 13)"]
    assert step_lines(page) == 10


def test_a_clock_that_goes_back_is_told(tmp_path: Path) -> None:
    events = list(run_events(Made(steps=100, validate_every=None, save_every=None)))
    for event in events[60:]:
        event["time"] -= 3600
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert "the clock went back by more than 1 s" in page_of(tmp_path).unreadable[0]


@pytest.mark.parametrize("kind", [event["kind"] for event in EXAMPLES])
def test_no_field_of_any_kind_can_break_the_page(tmp_path: Path, kind: str) -> None:
    example = next(event for event in EXAMPLES if event["kind"] == kind)
    lines = []
    for name, value in example.items():
        for junk in JUNK:
            lines.append(json.dumps({**example, name: junk}) + "\n")
            if isinstance(value, dict):
                lines += [json.dumps({**example, name: {**value, inner: junk}}) + "\n" for inner in value]
            if isinstance(value, list):
                lines += [json.dumps({**example, name: [junk]}) + "\n"]
                lines += [
                    json.dumps({**example, name: [{**value[0], inner: junk}]}) + "\n"
                    for inner in (value[0] if value and isinstance(value[0], dict) else ())
                ]
        lines.append(json.dumps({other: value for other, value in example.items() if other != name}) + "\n")
    page = page_of(write_run(tmp_path / "run", Made(steps=3), lines))
    assert page.unreadable or kind in ("status", "config")
    assert not any("not understood" in told for told in page.unreadable)
    assert len(json.dumps(as_json(page))) < 600_000


def test_several_runs_come_with_their_comparison(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, Made(steps=5, name=name)) for name in ("one", "two")]
    page = build_page(folders)
    assert [run.name for run in page.runs] == ["one", "two"]
    assert [section.id for section in page.comparison] == ["one", "two"]
    assert page.title == "one and two"
    assert build_page(folders[:1], live=True).live
    assert build_page(folders[:1]).comparison == []


def test_a_run_of_a_comparison_is_summed_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed = []

    def summary(reader: RunReader, now: float) -> Summary:
        summed.append(reader)
        return summarized(reader, now)

    summarized = RunReader.summary
    monkeypatch.setattr(RunReader, "summary", summary)
    build_page([write_run(tmp_path / name, Made(steps=5, name=name)) for name in ("one", "two")])
    assert len(summed) == len(set(summed)) == 2
