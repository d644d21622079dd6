"""What a torch.profiler trace says of memory: how much was held over time, the biggest tensors at the peak.

The profiler notes every block that is allocated and freed while it records. What was there before,
`TraceRecording` adds to the trace: weights, gradients and the optimizer's state, by name.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

MOST_POINTS = 500
MOST_TENSORS = 10
CPU = 0
"""The profiler's number for memory of the host; other numbers are kinds of GPUs."""

COMPILED = re.compile(r"^c[a-z0-9]{30,}$")
"""Files that torch.compile has written."""


def digest_memory(trace: Mapping[str, Any], zero: float) -> dict[str, Any]:
    """`memory` and `tensors` of a `profile` event; `zero` is the microsecond of the trace at which the steps began."""
    blocks = sorted(_blocks(trace["traceEvents"]), key=lambda block: block["ts"])
    held = trace.get("lockstep", {}).get("held", [])
    if not blocks:
        return {"memory": [], "tensors": []}
    taken = {block["args"]["Addr"] for block in blocks if block["args"]["Bytes"] > 0}
    # Memory of the host that was freed before is not in the trace, but nobody else gets what is still in use.
    held = [(size, shape, where) for address, size, shape, where in held if address not in taken]
    on_cpu = blocks[0]["args"]["Device Type"] == CPU
    now = (
        sum(size for size, *_ in held) if on_cpu else blocks[0]["args"]["Total Allocated"] - blocks[0]["args"]["Bytes"]
    )
    points = [(0.0, now)]
    for block in blocks:
        now = now + block["args"]["Bytes"] if on_cpu else block["args"]["Total Allocated"]
        points.append((max(0.0, (block["ts"] - zero) / 1e6), now))
    peak = max(range(len(points)), key=lambda number: points[number][1])
    alive: dict[int, Mapping[str, Any]] = {}
    for block in blocks[:peak]:
        if block["args"]["Bytes"] > 0:
            alive[block["args"]["Addr"]] = block
        else:
            alive.pop(block["args"]["Addr"], None)
    biggest = sorted(alive.values(), key=lambda block: -block["args"]["Bytes"])[:MOST_TENSORS]
    code = _Code(trace["traceEvents"])
    found = [(block["args"]["Bytes"], block["args"].get("Shape", ""), code.where(block)) for block in biggest]
    tensors = sorted([*held, *found], key=lambda tensor: -tensor[0])[:MOST_TENSORS]
    return {
        "memory": [[round(second, 6), size] for second, size in thinned(points)],
        "tensors": [list(tensor) for tensor in tensors],
    }


def is_allocation(event: Mapping[str, Any]) -> bool:
    """Whether an event of a trace tells of memory that was taken or given back."""
    return event.get("name") == "[memory]" and "Addr" in event.get("args", {})


def _blocks(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What happened to the memory of the device that computes: the GPU, where there is one."""
    blocks = [event for event in events if is_allocation(event)]
    devices = Counter((block["args"]["Device Type"], block["args"]["Device Id"]) for block in blocks)
    if not devices:
        return []
    device = max(devices, key=lambda device: (device[0] != CPU, devices[device]))
    return [block for block in blocks if (block["args"]["Device Type"], block["args"]["Device Id"]) == device]


def thinned(points: Sequence[tuple[float, int]], most: int = MOST_POINTS) -> Sequence[tuple[float, int]]:
    """At most so many of the points, with the first, the last, and the lowest and highest of every stretch between."""
    if len(points) <= most:
        return points
    stretches = (most - 2) // 2
    kept = {0, len(points) - 1}
    for number in range(stretches):
        begin, end = (len(points) * edge // stretches for edge in (number, number + 1))
        stretch = range(begin, end)
        kept |= {min(stretch, key=lambda at: points[at][1]), max(stretch, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


class _Code:
    """Finds the code that ran at a moment of a trace."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self._spans: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
        for event in events:
            if event.get("ph") == "X" and event.get("cat") in ("python_function", "cpu_op", "user_annotation"):
                self._spans[event["tid"]].append(event)
        self._to_forward = {
            event["id"]: event for event in events if event.get("cat") == "fwdbwd" and event["ph"] == "s"
        }
        self._from_backward = [event for event in events if event.get("cat") == "fwdbwd" and event["ph"] == "f"]

    def where(self, event: Mapping[str, Any]) -> str:
        """The user's function that an event happened in; in the backward pass, the one whose backward it is."""
        around = self._around(event["tid"], event["ts"])
        backward = [one for one in around if str(one["name"]).startswith("autograd::engine::evaluate_function")]
        if backward:
            begin, end = backward[-1]["ts"], event["ts"]
            links = [one for one in self._from_backward if one["tid"] == event["tid"] and begin <= one["ts"] <= end]
            forward = self._to_forward.get(links[-1]["id"]) if links else None
            name = str(backward[-1]["name"]).partition(": ")[2] or "backward"
            of = forward and self._function(self._around(forward["tid"], forward["ts"]))
            return f"backward of {of}" if of else name.removeprefix("torch::autograd::")
        operators = [str(one["name"]) for one in around if one["cat"] == "cpu_op"]
        phases = [str(one["name"]) for one in around if one["cat"] == "user_annotation"]
        return self._function(around) or next(iter(operators), next(reversed(phases), "unknown"))

    def _around(self, thread: Any, moment: float) -> list[Mapping[str, Any]]:
        """What ran on a thread at a moment, the outermost first."""
        found = [one for one in self._spans[thread] if one["ts"] <= moment <= one["ts"] + one["dur"]]
        return sorted(found, key=lambda one: (one["ts"], -one["dur"]))

    def _function(self, around: Sequence[Mapping[str, Any]]) -> str | None:
        names = [users_function(str(one["name"])) for one in around if one["cat"] == "python_function"]
        return next((name for name in reversed(names) if name), None)


def users_function(name: str) -> str | None:
    """A function of the user's, or of a recipe, as FILE:LINE (NAME); None for one of Python, torch or ours.

    The profiler writes `torch/nn/modules/linear.py(130): forward`, with the line that the function begins in.
    """
    found = re.fullmatch(r"(.+\.py)\((\d+)\): (.+)", name)
    if found is None:
        return None
    path = PurePath(found[1])
    package = path.parts[0].removesuffix(".py") if not path.is_absolute() else ""
    in_library = "site-packages" in path.parts or package in ("torch", *sys.stdlib_module_names)
    in_library |= "lockstep" in path.parts and "recipes" not in path.parts
    in_library |= any(part.startswith("python3") for part in path.parts) or COMPILED.match(path.stem) is not None
    return None if in_library else f"{'/'.join(path.parts[-2:])}:{found[2]} ({found[3]})"
