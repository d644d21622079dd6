"""`--profile STEPS`: a trace of some steps on some ranks, recorded with torch.profiler.

All ranks know from the config which steps are profiled. Each rank that records writes its own trace and digests it
after the last of the steps, where all ranks meet; rank 0 writes the events. A profiler that fails costs the run nothing
but a message.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from lockstep.config.selection import StepRange, parse_ranks, parse_steps
from lockstep.engine import Engine
from lockstep.observe.trace_digest import STEP, digest_trace
from lockstep.observe.trace_memory import is_allocation
from lockstep.record.failure import short_host
from lockstep.runtime.process import set_default_environment
from lockstep.text.units import bytes_text

FOLDER = "profile"
SUFFIX = ".pt.trace.json.gz"
"""TensorBoard's profile plugin looks for files that end in this."""

NOTHING_SEEN = {
    "seconds": dict.fromkeys(("whole", "compute", "communication", "overlapped", "idle"), 0.0),
    **{what: [] for what in ("kernels", "gaps", "memory", "tensors")},
}
"""Of a trace: what a `profile` event tells, where it can only say which steps were slower."""

MOST_STEPS_WITH_STACKS = 5
"""Python's functions are most of a trace: of more steps it would be too large."""
MOST_BYTES = 200_000_000
"""How large a trace may be, before it is compressed, to be looked through while all ranks wait: if that took longer
than their timeout, it would end the run. It takes 0.12 s of CPU time a MB, and 0.04 s only to write it (measured with
58 MB and torch 2.13)."""

Held = dict[int, tuple[int, str, str]]
"""Tensors by the address of their memory: bytes, shape, what they are."""


class Profiler:
    """Which steps of a run are profiled, and what this rank records of them."""

    def __init__(self, steps: str | None, ranks: str, rank: int, world_size: int, device: torch.device) -> None:
        self.steps: StepRange | None = parse_steps(steps) if steps else None
        """What is still to be profiled."""
        asked = parse_ranks(ranks)
        chosen: Sequence[int] = range(world_size) if asked is None else asked
        self._missing = [one for one in chosen if one >= world_size]
        self._last_rank = world_size - 1
        self._rank = rank
        self._is_chosen = rank in chosen
        self._device = device
        # CUPTI is slow at first: it is switched on one step before.
        self._warm_up = 1 if device.type == "cuda" else 0
        self._first: int | None = None
        self._recording: TraceRecording | None = None
        self._failure: str | None = None

    def out_of_reach(self, steps_done: int, total_steps: int | None) -> Iterator[str]:
        """Before the first step of a start: one sentence for whatever cannot be profiled."""
        if (steps := self.steps) is None:
            return
        if self._missing:
            yield f"rank {self._missing[0]} cannot be profiled: the last rank of this run is {self._last_rank}"
        if steps_done >= steps.last:
            self.steps = None
            yield f"the run goes on after step {steps_done}, and {steps} came before: nothing is left to profile"
        elif total_steps is not None and steps.last > total_steps:
            reach = "cannot be profiled" if steps.first > total_steps else f"are profiled up to step {total_steps}"
            yield f"{steps} {reach}: the run has {total_steps} steps"

    def touches(self, step: int) -> bool:
        """Whether a step takes longer than others because of this, on some rank and so on all."""
        return self.steps is not None and self.steps.first - self._warm_up <= step <= self.steps.last

    def begin_step(self, step: int, engine: Engine) -> None:
        """Before the samples of a step are waited for, on every rank."""
        if self.steps is None or not self.touches(step):
            self.discard()  # what there may be: a rollback has gone back to before these steps
            return
        is_profiled = step >= self.steps.first
        if is_profiled and self._first is None:
            self._first = step
        if not self._is_chosen or self._failure is not None:
            return
        with self._noting_failure():
            if self._recording is None:
                few = self.steps.last - self.steps.first < MOST_STEPS_WITH_STACKS
                self._recording = TraceRecording(engine, self._device, with_stacks=few)
            if is_profiled:
                self._recording.begin_step(step)

    def end_step(self, step: int) -> None:
        """After a step, on every rank."""
        if self._recording is not None and self.steps is not None and step >= self.steps.first:
            with self._noting_failure():
                self._recording.end_step()

    def marked(self, name: str) -> AbstractContextManager[Any]:
        """A range of the trace that is recorded."""
        return record_function(name) if self._recording is not None else nullcontext()

    def is_complete(self, step: int) -> bool:
        """Whether `step` is the last one to be profiled."""
        return self.steps is not None and step >= self.steps.last and self._first is not None

    def has_recorded(self, step: int) -> bool:
        """Whether steps up to `step` were recorded that nobody has told of yet, on any rank."""
        # One that has begun may never be done: nobody knows that a stream has ended before its next sample is due.
        return self._first is not None and self._first <= step

    def finish(self, step: int, folder: Path) -> dict[str, Any] | None:
        """Write what was recorded up to `step`; returns the fields of a `profile` event.

        Where nothing could be recorded, or nobody has looked through it, `kernels` are none and the text says why.
        """
        first, self._first, self.steps = self._first, None, None
        recording, self._recording = self._recording, None
        if not self._is_chosen:
            return None
        told = {"rank": self._rank, "host": short_host(), "first_step": first, "last_step": step}
        if recording is not None and self._failure is None:
            with self._noting_failure():
                path = Path(FOLDER) / f"{short_host()}.{self._rank}.step-{first:08d}{SUFFIX}"
                return {**told, "path": str(path), **recording.write(folder / path, told)}
        why = self._failure or "nothing was recorded"
        text = f"rank {self._rank} could not be profiled ({why}); the training goes on"
        return {**told, "path": "", **NOTHING_SEEN, "text": text}

    def discard(self) -> None:
        """Leave no file of what was recorded so far."""
        self._first, recording, self._recording = None, self._recording, None
        if recording is not None:
            with suppress(Exception):
                recording.close()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, the training goes on
            self._failure = f"{type(error).__name__}: {error}"
            if self._recording is not None:
                recording, self._recording = self._recording, None
                with suppress(Exception):
                    recording.close()


class TraceRecording:
    """The profiler at work on one rank: made ready, then switched on with the first step that counts."""

    def __init__(self, engine: Engine, device: torch.device, *, with_stacks: bool) -> None:
        self._engine = engine
        self._device = device
        # Else kineto writes lines for its developers to stderr. 6 is the first level above all of them; it is read when
        # the profiler is first used.
        set_default_environment("KINETO_LOG_LEVEL", "6")
        if device.type == "cuda":
            # Read when the trace ends. Else CUPTI stays attached and every kernel is slower from then on
            # (pytorch issue 144455).
            set_default_environment("TEARDOWN_CUPTI", "1")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        # Python's stacks say where tensors come from, for a few percent of time. To get them torch looks at modules
        # and their gradients, which a pipeline's stages would take for a part of the forward.
        with_stacks = with_stacks and engine.pipeline is None
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=with_stacks)
        self._step = ExitStack()
        self._state: Literal["ready", "on", "off"] = "ready"
        self._held: Held = {}
        self._profile.prepare_trace()

    def begin_step(self, step: int) -> None:
        """A step that is recorded begins; the first one switches the profiler on."""
        if self._state == "ready":
            self._wait_for_device()
            self._held = held_tensors(self._engine)
            self._start()
        self._step.close()
        self._step.enter_context(record_function(f"{STEP}{step}"))

    def end_step(self) -> None:
        """A step that is recorded is done, as far as the host is concerned."""
        self._step.close()

    def close(self) -> None:
        """Switch the profiler off."""
        self._step.close()
        if self._state == "ready":  # torch takes back what it has made ready only with a trace
            self._start()
        if self._state == "on":
            self._state = "off"
            self._wait_for_device()
            self._profile.stop_trace()

    def _start(self) -> None:
        self._profile.start_trace()
        self._state = "on"

    def write(self, path: Path, told: dict[str, Any]) -> dict[str, Any]:
        """Switch the profiler off, write its trace to a file that is there whole or not at all, and digest it."""
        self.close()
        still = held_tensors(self._engine).keys()
        held = [[address, *tensor] for address, tensor in self._held.items() if address in still]
        told = {**told, "held": held}
        with tempfile.TemporaryDirectory() as scratch:
            plain = Path(scratch) / "trace.json"
            self._profile.export_chrome_trace(str(plain))
            if (size := plain.stat().st_size) > MOST_BYTES:
                with plain.open("rb") as file, _written_whole(path) as target:
                    _, brace, rest = file.read(1 << 20).partition(b"{")
                    target.write(brace + f'"lockstep": {json.dumps(told)},'.encode() + rest)
                    shutil.copyfileobj(file, target, 1 << 20)
                why = f"at {bytes_text(size)} it is too large to be looked through while the run waits"
                text = f"rank {told['rank']} has left a trace, but {why}: profile fewer steps"
                return {**NOTHING_SEEN, "text": text}
            with plain.open(encoding="utf-8") as file:
                trace = json.load(file)
        begun = f"{STEP}{told['last_step'] + 1}"  # and never done: no samples were left
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("name") != begun]
        trace["lockstep"] = told
        with suppress(Exception):  # then shapes are not known: these events are no public API (torch 2.11 and 2.13)
            inner: Any = self._profile.profiler
            _add_shapes(trace["traceEvents"], inner.kineto_results.experimental_event_tree())
        with _written_whole(path) as target:
            target.write(json.dumps(trace).encode())  # json.dump takes four times as long
        return digest_trace(trace)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def _written_whole(path: Path) -> Iterator[gzip.GzipFile]:
    """A compressed file that is there when all of it was written."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with gzip.open(partial, "wb", compresslevel=5) as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def held_tensors(engine: Engine) -> Held:
    """Weights, buffers, gradients and the optimizer's state of this rank, by the memory they are in."""
    names = {id(parameter): name for name, parameter in engine.stored}
    named: list[tuple[str, torch.Tensor | None]] = [(f"weight {name}", p) for name, p in engine.stored]
    named += [(f"buffer {name}", buffer) for name, buffer in engine.buffers]
    named += [(f"gradient of {name}", parameter.grad) for name, parameter in engine.stored]
    for parameter, state in engine.optimizer.state.items():
        name = names.get(id(parameter), "a parameter")
        named += [(f"{key} of {name}", value) for key, value in state.items() if isinstance(value, torch.Tensor)]
    places: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in named:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local is not None and local.device.type == engine.device.type:
            places[local.untyped_storage().data_ptr()].append((name, local))
    held: Held = {}
    for address, tensors in places.items():
        (name, first), others = tensors[0], len(tensors) - 1
        size = first.untyped_storage().nbytes()
        also = f" and {others} more" if others else ""
        held[address] = (size, shape_text(first.shape, first.dtype) if not others else "", f"{name}{also}")
    return {address: one for address, one in held.items() if address and one[0]}


def shape_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """A tensor's shape and number format for people, such as 512x512 float32."""
    return f"{'x'.join(map(str, shape)) or 'scalar'} {str(dtype).removeprefix('torch.')}"


def _add_shapes(events: list[dict[str, Any]], roots: Sequence[Any]) -> None:
    """Give every block of memory in a trace the shape of the largest tensor that an operator has seen in it."""
    # In the order of time: blocks come and go at one address.
    happened: list[tuple[int, Any]] = []
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = event.extra_fields
        if event.name == "[memory]" or hasattr(fields, "inputs"):
            happened.append((event.start_time_ns, fields))
    happened.sort(key=lambda one: one[0])
    shapes: dict[int, list[list[Any]]] = defaultdict(list)  # for every address, of one block after the other
    for _, fields in happened:
        if hasattr(fields, "alloc_size"):
            if fields.alloc_size > 0:
                shapes[fields.ptr].append([0, ""])
            continue
        for tensor in _tensors_in(fields.inputs):
            if blocks := shapes.get(tensor.storage_data_ptr):
                size = int(torch.Size(tensor.sizes).numel()) * tensor.dtype.itemsize
                if size > blocks[-1][0]:
                    blocks[-1][:] = [size, shape_text(tensor.sizes, tensor.dtype)]
    seen: dict[int, int] = defaultdict(int)
    for event in sorted(filter(is_allocation, events), key=lambda event: event["ts"]):
        address = event["args"]["Addr"]
        if event["args"]["Bytes"] > 0:
            known = shapes[address]
            if seen[address] < len(known):
                event["args"]["Shape"] = known[seen[address]][1]
            seen[address] += 1


def _tensors_in(inputs: Sequence[Any]) -> Iterator[Any]:
    for one in inputs:
        if isinstance(one, list):
            yield from _tensors_in(one)
        elif hasattr(one, "storage_data_ptr") and one.storage_data_ptr:
            yield one
