"""What a torch.profiler trace says: the longest kernels, communication that compute hides, idle times.

It reads the Chrome trace alone, a JSON object with `traceEvents`, so that any trace can be digested anywhere. Where a
trace has kernels of a GPU they are what counts, those of NCCL as communication. Elsewhere the operators of the CPU
threads count, and gloo's collectives are communication from the moment they are asked for until they are done.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.observe.intervals import Interval, common, length, outside, union
from lockstep.observe.kernel_names import short_kernel_name
from lockstep.observe.trace_memory import digest_memory

MOST_KERNELS = 15
MOST_GAPS = 10
LONGEST_NAME = 160
STEP = "ProfilerStep#"
"""What the range of a step is called, with its number: TensorBoard's plugin and other tools look for this name."""

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COMMUNICATION = ("gloo:", "c10d::", "_c10d_functional::", "record_param_comms", "nccl:", "mpi:", "ucc:")
POSTED = ("gloo:send", "gloo:recv")
"""Messages of a pipeline, from when they were asked for until somebody looked: that is no communication yet."""
AROUND_OTHERS = ("autograd::engine::evaluate_function", "RegisterPostBackwardFunction")
"""Operators that only call others and hooks, where a rank may wait (`fully_shard` has some): what they call counts."""


@dataclass(frozen=True)
class Span:
    """Something that took time: a kernel, an operator, a range. In seconds since the first profiled step began."""

    name: str
    """For people; different kernels may have the same."""
    begin: float
    end: float
    lane: Any
    """The thread or stream it ran on."""
    category: str
    whole_name: str
    """As the trace has it."""

    @property
    def interval(self) -> Interval:
        """When it ran."""
        return self.begin, self.end


@dataclass(frozen=True)
class Work:
    """What a device did: spans of compute, of communication, and the seconds of each kernel without what it calls."""

    compute: list[Span]
    communication: list[Span]
    own_seconds: Sequence[tuple[Span, float]]


def digest_trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    """`seconds`, `kernels`, `gaps`, `memory`, `tensors` and `text` of a `profile` event (docs/events.md)."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    spans, whole, zero = _spans(events)
    work = _on_device(spans) if any(span.category == "kernel" for span in spans) else _on_cpu(spans)
    compute = _within(union(span.interval for span in work.compute), whole)
    communication = _within(union(span.interval for span in work.communication), whole)
    busy = union([*compute, *communication])
    seconds = {
        "whole": whole[1] - whole[0],
        "compute": length(compute),
        "communication": length(communication),
        "overlapped": length(common(compute, communication)),
        "idle": length(outside(busy, whole)),
    }
    gaps = _gaps(busy, [*work.compute, *work.communication], whole)
    rank = trace.get("lockstep", {}).get("rank", trace.get("distributedInfo", {}).get("rank", 0))
    return {
        "seconds": {part: round(took, 9) for part, took in seconds.items()},
        "kernels": _longest(work.own_seconds),
        "gaps": gaps,
        **digest_memory(trace, zero),
        "text": _sentence(rank, seconds, gaps),
    }


def _spans(events: Sequence[Mapping[str, Any]]) -> tuple[list[Span], Interval, float]:
    """All spans, the time that the steps took, and the microsecond of the trace at which they began.

    A GPU may still compute when the host is done with the last step: that is part of it.
    """
    steps = [
        event
        for event in events
        if str(event.get("name")).startswith(STEP) and event.get("cat") != "gpu_user_annotation"
    ]
    around = steps or [event for event in events if event.get("cat") in (*ON_DEVICE, "cpu_op")]
    if not around:
        raise ValueError("the trace has neither steps nor operators nor kernels")
    zero = min(event["ts"] for event in around)
    last = max(event["ts"] + event["dur"] for event in around)
    last = max([last, *(event["ts"] + event["dur"] for event in events if event.get("cat") in ON_DEVICE)])
    spans = [
        Span(
            _name_of(event),
            (event["ts"] - zero) / 1e6,
            (event["ts"] + event["dur"] - zero) / 1e6,
            (event.get("pid"), event.get("tid")),
            str(event.get("cat", "")),
            str(event["name"]),
        )
        for event in events
    ]
    return spans, (0.0, (last - zero) / 1e6), zero


def _name_of(event: Mapping[str, Any]) -> str:
    name = str(event["name"])
    return short_kernel_name(name) if event.get("cat") == "kernel" else name


def _on_device(spans: Sequence[Span]) -> Work:
    """What the streams of a GPU did. Copies count as compute: they keep kernels of their stream waiting."""
    on_device = [span for span in spans if span.category in ON_DEVICE]
    communication = [span for span in on_device if "nccl" in span.whole_name.lower()]
    compute = [span for span in on_device if "nccl" not in span.whole_name.lower()]
    if not communication:  # ranks that share a GPU talk over gloo, on the host
        communication = [
            span for span in spans if _is_communication(span) and span.category in ("cpu_op", "user_annotation")
        ]
    return Work(compute, communication, [(span, span.end - span.begin) for span in on_device])


def _on_cpu(spans: Sequence[Span]) -> Work:
    """What the threads of a CPU did: operators that nobody called but Python, and those that communicate."""
    lanes: dict[Any, list[Span]] = defaultdict(list)
    for span in spans:
        if span.category == "cpu_op" or (span.category == "user_annotation" and _is_communication(span)):
            lanes[span.lane].append(span)
    compute: list[Span] = []
    communication: list[Span] = []
    own_seconds: list[tuple[Span, float]] = []
    for lane in lanes.values():
        tops, talks, own = _one_thread(sorted(lane, key=lambda span: (span.begin, -span.end)))
        talking = union(span.interval for span in talks)
        for top in tops:
            parts = outside(_within(talking, top.interval), top.interval)
            compute += [replace(top, begin=begin, end=end) for begin, end in parts]
        communication += talks
        own_seconds += own
    return Work(compute, communication, own_seconds)


def _one_thread(spans: Sequence[Span]) -> tuple[list[Span], list[Span], list[tuple[Span, float]]]:
    """The outermost operators that compute, those that communicate, and the seconds of each without what it calls."""
    tops, talks = [], []
    own = [span.end - span.begin for span in spans]
    callers: list[int] = []
    for number, span in enumerate(spans):
        while callers and spans[callers[-1]].end <= span.begin:
            callers.pop()
        if callers:
            own[callers[-1]] -= span.end - span.begin
        around = [spans[caller] for caller in callers if not spans[caller].name.startswith(AROUND_OTHERS)]
        if _is_communication(span):
            talks.append(span)
        elif not around and not span.name.startswith(AROUND_OTHERS):
            tops.append(span)
        callers.append(number)
    named = [
        (span, max(0.0, seconds))
        for span, seconds in zip(spans, own, strict=True)
        if not span.name.startswith(AROUND_OTHERS)
    ]
    return tops, talks, named


def _is_communication(span: Span) -> bool:
    return span.name.startswith(COMMUNICATION) and not span.name.startswith(POSTED)


def _within(intervals: Sequence[Interval], whole: Interval) -> list[Interval]:
    return common(intervals, [whole])


def _longest(own_seconds: Iterable[tuple[Span, float]]) -> list[list[Any]]:
    """By the names for people; where several kernels have the same, it says how many."""
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    kernels: dict[str, set[str]] = defaultdict(set)
    for span, took in own_seconds:
        calls[span.name] += 1
        seconds[span.name] += took
        kernels[span.name].add(span.whole_name)
    longest = sorted(seconds, key=lambda name: (-seconds[name], name))[:MOST_KERNELS]
    told = {name: f" ({len(kernels[name])} kernels)" if len(kernels[name]) > 1 else "" for name in longest}
    return [[name[:LONGEST_NAME] + told[name], calls[name], round(seconds[name], 9)] for name in longest]


def _gaps(busy: Sequence[Interval], spans: Sequence[Span], whole: Interval) -> list[list[Any]]:
    """The longest times with nothing: when they began, how long they were, what ended before and began after."""
    by_end = sorted(spans, key=lambda span: span.end)
    by_begin = sorted(spans, key=lambda span: span.begin)
    ends, begins = [span.end for span in by_end], [span.begin for span in by_begin]
    gaps = []
    for begin, end in sorted(outside(busy, whole), key=lambda gap: (gap[0] - gap[1], gap))[:MOST_GAPS]:
        before, after = bisect_right(ends, begin) - 1, bisect_left(begins, end)
        names = (
            by_end[before].name if before >= 0 else "the start",
            by_begin[after].name if after < len(by_begin) and end < whole[1] else "the end",
        )
        gaps.append([round(begin, 9), round(end - begin, 9), *(name[:LONGEST_NAME] for name in names)])
    return gaps


def _sentence(rank: int, seconds: Mapping[str, float], gaps: Sequence[Sequence[Any]]) -> str:
    whole, communication = seconds["whole"], seconds["communication"]
    parts = [f"rank {rank} computed {_percent(seconds['compute'], whole)} of the time"]
    if communication > 0:
        hidden = _percent(seconds["overlapped"], communication)
        parts.append(f"communicated {_percent(communication, whole)}, {hidden} of that hidden behind compute")
    idle = f"and was idle {_percent(seconds['idle'], whole)}"
    if gaps:
        _, took, before, after = gaps[0]
        next_to = f"before {after}" if after != "the end" else f"after {before}"
        idle += f": the longest gap, {1000 * took:.3g} ms, was {next_to}"
    return ", ".join([*parts, idle])


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else "0 %"
