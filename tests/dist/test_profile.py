"""Profiles of real steps: the traces can be opened, every chosen rank tells, and the training does not notice."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lockstep.observe.trace_digest import digest_trace
from tests.events import Event, read_events
from tests.marks import others_slow
from tests.parity.problems import RaggedTexts, Stream, TinyGPT, adamw, join, text_loss, unfinished
from tests.ranks import Job, RankPool

STEPS = 7


def train(job: Job, layout: str, meeting: str, until: int = STEPS, compiled: bool = False, **options: Any) -> Any:
    """Train to the end, or leave after `until` steps: the loss of every step, and what the run tells."""
    losses = []
    with unfinished(join(job, layout, meeting=meeting, run_dir=job.folder / meeting.rstrip("+"), **options)) as run:
        compile_: Any = "blocks" if compiled else "off"
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw, compile=compile_)
        for batch in run.loader(RaggedTexts(), 8, micro_batch=2, steps=STEPS, workers=0):
            losses.append(engine.step(batch).loss)
            if engine.steps_done == until < STEPS:
                run.save(wait=True)
                break
        else:
            run.close()
    return losses, list(read_events(run.folder.events))


def with_and_without(job: Job, layout: str, compiled: bool) -> Any:
    losses, _ = train(job, layout, "plain", compiled=compiled)
    same, events = train(job, layout, "profiled", compiled=compiled, profile="4-5", profile_ranks="all")
    files = sorted((job.folder / "profiled" / "profile").iterdir()) if job.rank == 0 else []
    return losses, same, events, {path.name: look_at(path) for path in files}


def look_at(path: Path) -> tuple[set[str], dict[str, Any]]:
    """The names of what took time in a trace, and what the file alone says."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    return {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}, digest_trace(trace)


def of_kind(kind: str, events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def texts(events: list[Event]) -> list[str]:
    return [event["text"] for event in of_kind("message", events)]


@pytest.mark.parametrize(
    ("layout", "compiled"),
    others_slow(
        [("dp=2", False), ("fsdp=2", False), ("pp=2", False), ("tp=2", False), ("dp=2", True)],
        [("dp=2", False), ("fsdp=2", False), ("pp=2", False)],
    ),
)
def test_every_rank_leaves_a_trace_and_a_digest_and_the_losses_are_the_same(
    ranks: RankPool, layout: str, compiled: bool
) -> None:
    losses, same, events, traces = ranks.run(with_and_without, 2, layout, compiled, timeout=200)[0]
    assert len(losses) == STEPS
    assert same == losses

    profiles = of_kind("profile", events)
    assert [event["rank"] for event in profiles] == [0, 1]
    assert sorted(traces) == sorted(event["path"].removeprefix("profile/") for event in profiles), "and no other file"
    for event in profiles:
        assert (event["first_step"], event["last_step"]) == (4, 5)
        assert event["path"] == f"profile/{event['host']}.{event['rank']}.step-00000004.pt.trace.json.gz"
        names, again = traces[event["path"].removeprefix("profile/")]
        assert {"ProfilerStep#4", "ProfilerStep#5"} <= names
        assert not {"ProfilerStep#3", "ProfilerStep#6"} & names
        assert names >= {"data", "optimizer", "summing gradients"}
        assert names >= ({"pipeline"} if "pp" in layout else {"forward", "backward"})
        check_numbers(event)
        # Of the longest kernels it need not be one: a busy machine may hold a rank up in any of them.
        assert any("mm" in name for name in names)
        assert again == {field: event[field] for field in again}, "the file alone says the same"
    took = sum(event["seconds"] for event in of_kind("step", events) if event["step"] in (4, 5))
    # The run's time of a step has what it takes to switch the profiler on, too.
    assert 0.1 * took < profiles[0]["seconds"]["whole"] < 1.05 * took, "those two steps and nothing else"
    told = [event for event in texts(events) if event.startswith("rank ")]
    assert len(told) == 2
    assert all("computed" in text and "pt.trace.json.gz" in text for text in told)
    counted = sum(event["steps"] for event in of_kind("ranks", events))
    assert counted == STEPS - 1 - 2, "neither the first step nor profiled ones"


def check_numbers(event: Event) -> None:
    seconds = event["seconds"]
    parts = seconds["compute"] + seconds["communication"] - seconds["overlapped"] + seconds["idle"]
    assert parts == pytest.approx(seconds["whole"], rel=1e-6)
    assert seconds["compute"] > 0
    assert seconds["communication"] > 0
    assert 0 <= seconds["overlapped"] <= min(seconds["compute"], seconds["communication"])
    assert all(calls >= 1 and took >= 0 for _, calls, took in event["kernels"])
    assert 10 < len(event["memory"]) <= 500
    peak = max(size for _, size in event["memory"])
    sizes = [size for size, *_ in event["tensors"]]
    assert len(sizes) == 10
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= peak
    assert any(shape.endswith("float32") for _, shape, _ in event["tensors"])
    assert all(where for *_, where in event["tensors"])


def in_parts(job: Job) -> Any:
    """A run that is left in the middle of its profile, goes on with it, and then comes back for one it has passed."""
    _, first = train(job, "single", "run", until=4, profile="4-6")
    left = (job.folder / "run" / "profile").exists()
    _, second = train(job, "single", "run+", until=6, profile="4-6")
    _, third = train(job, "single", "run++", profile="5", profile_ranks="0,3")
    return first, left, second[len(first) :], third[len(second) :]


def test_a_run_that_goes_on_profiles_what_is_left(ranks: RankPool) -> None:
    first, left, second, third = ranks.run(in_parts, 1)[0]
    assert of_kind("profile", first) == []
    assert not left, "no half of a trace"
    (event,) = of_kind("profile", second)
    assert (event["first_step"], event["last_step"]) == (5, 6)
    assert event["path"].endswith(".0.step-00000005.pt.trace.json.gz")
    assert of_kind("profile", third) == []
    assert any("step 5" in text and "nothing is left to profile" in text for text in texts(third))
    assert any("rank 3 cannot be profiled: the last rank of this run is 0" in text for text in texts(third))


def a_stream(job: Job, steps: str = "4-9") -> Any:
    with join(job, "single", run_dir=job.folder / steps, profile=steps) as run:
        engine = run.setup(TinyGPT, text_loss, optimizer=adamw)
        for batch in run.loader(Stream(), 8, micro_batch=4, workers=0):
            engine.step(batch)
    traces = [look_at(run.folder.path / event["path"]) for event in of_kind("profile", read_events(run.folder.events))]
    return list(read_events(run.folder.events)), traces


def test_a_run_that_ends_before_tells_of_the_steps_it_did(ranks: RankPool) -> None:
    events, ((names, _),) = ranks.run(a_stream, 1)[0]
    steps = len(of_kind("step", events))
    assert 4 <= steps < 9
    (event,) = of_kind("profile", events)
    assert (event["first_step"], event["last_step"]) == (4, steps)
    assert f"ProfilerStep#{steps}" in names
    assert f"ProfilerStep#{steps + 1}" not in names, "its samples never came"


def never_done(job: Job) -> Any:
    """The first step after the last one is to be profiled, of data with a length and of a stream."""
    _, known = train(job, "single", "known", profile=f"{STEPS + 1}")
    stream, _ = a_stream(job, "1-2")
    ended, _ = a_stream(job, str(len(of_kind("step", stream)) + 1))
    return known, ended


def test_a_step_that_was_never_done_is_no_profile(ranks: RankPool) -> None:
    for events in ranks.run(never_done, 1)[0]:
        after = len(of_kind("step", events)) + 1
        assert of_kind("profile", events) == []
        assert f"the run has ended before step {after} could be profiled" in texts(events)


def large(job: Job) -> Any:
    with mock.patch("lockstep.observe.profiling.MOST_BYTES", 1000):
        _, events = train(job, "single", "large", profile="3-4")
    (path,) = (job.folder / "large" / "profile").iterdir()
    return events, look_at(path)


def test_a_large_trace_is_written_and_not_looked_through(ranks: RankPool) -> None:
    events, (names, digest) = ranks.run(large, 1)[0]
    (profile,) = of_kind("profile", events)
    assert (profile["first_step"], profile["last_step"], profile["kernels"]) == (3, 4, []), "which steps were slower"
    assert len(of_kind("step", events)) == STEPS
    (told,) = [text for text in texts(events) if text.startswith("rank 0 has left a trace, but at ")]
    assert "too large to be looked through while the run waits: profile fewer steps; the trace is " in told
    assert told.endswith(profile["path"])
    assert {"ProfilerStep#3", "ProfilerStep#4"} <= names
    assert digest["seconds"]["compute"] > 0, "the file can be looked through elsewhere"
    assert any("weight" in where for *_, where in digest["tensors"])


def failing(job: Job) -> Any:
    broken = mock.patch("lockstep.observe.profiling.os.replace", side_effect=OSError("no room"))
    plain, _ = train(job, "dp=2", "plain")
    with broken if job.rank == 1 else nullcontext():
        losses, events = train(job, "dp=2", "profiled", profile="2-3", profile_ranks="all")
    return plain, losses, events, sorted(path.name for path in (job.folder / "profiled" / "profile").iterdir())


def test_a_profiler_that_fails_is_a_message_and_the_run_goes_on(ranks: RankPool) -> None:
    plain, losses, events, files = ranks.run(failing, 2)[0]
    assert losses == plain
    assert all(map(math.isfinite, losses))
    assert [(event["rank"], bool(event["kernels"])) for event in of_kind("profile", events)] == [(0, True), (1, False)]
    assert any("rank 1 could not be profiled (OSError: no room)" in text for text in texts(events))
    assert len(files) == 1, "nothing of a file that could not be written"
    assert ".0.step-00000002." in files[0]
