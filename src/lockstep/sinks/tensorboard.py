"""A run's events as TensorBoard reads them, in the run folder's `tb/`.

Written with the tensorboard package's own messages and record format: `torch.utils.tensorboard` would bring
torch (and TensorFlow, where that is installed) into a process that only copies numbers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.record.events import Event
from lockstep.sinks.records import RecordWriter
from lockstep.sinks.scalars import Numbers

SECONDS_BETWEEN_WRITES = 1.0


class TensorBoard:
    """Writes TensorBoard's files to `folder`; when it cannot, it says why once and lets the run go on."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._writer: Any = None
        self._numbers = Numbers()
        self._plot = _Plot()
        self._waiting: list[bytes] = []
        self._wrote = 0.0
        self._closed = False

    def handle(self, event: Event) -> None:
        """Write one event. Kinds with nothing to plot are passed over."""
        if self._closed:
            return
        try:
            if self._writer is None:
                self._writer = _open_writer(self._folder, event["attempt"], event["time"])
            message = self._plot.of(event, self._numbers.of(event)) or _message(event)
            if message is not None:
                self._waiting.append(message)
                # By itself every step would cost several times as much.
                if event["kind"] != "step" or event["time"] - self._wrote >= SECONDS_BETWEEN_WRITES:
                    self._write()
                    self._wrote = event["time"]
        except Exception as error:
            # Closed first: what is said may come back here as an event.
            self._closed = True
            self._say(_why_not(error))

    def close(self) -> None:
        """Close the file. Later events are not written."""
        if self._writer is not None and not self._closed:
            try:
                self._write()
            except OSError as error:
                self._closed = True
                self._say(_why_not(error))
        writer, self._writer, self._closed = self._writer, None, True
        if writer is not None:
            writer.close()

    def _write(self) -> None:
        if self._waiting:
            self._writer.write(self._waiting)
            self._waiting = []


class _Plot:
    """A message with numbers, filled in anew as long as their names are the same: to make one takes longer."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._message: Any = None

    def of(self, event: Event, numbers: dict[str, float]) -> bytes | None:
        """The numbers of an event as a serialised message; None where there are none."""
        if not numbers:
            return None
        names = tuple(numbers)
        if names != self._names:
            self._names, self._message = names, _message_of(names)
        self._message.wall_time, self._message.step = event["time"], event.get("step", 0)
        for value, number in zip(self._message.summary.value, numbers.values(), strict=True):
            value.simple_value = number
        return bytes(self._message.SerializeToString())


def _message_of(names: tuple[str, ...]) -> Any:
    from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]

    message = event_pb2.Event()
    for name in names:
        message.summary.value.add(tag=name)
    return message


def _message(event: Event) -> bytes | None:
    """An event without numbers as a serialised message, or None when there is nothing to show of it."""
    from tensorboard.compat.proto import event_pb2, types_pb2

    message = event_pb2.Event(wall_time=event["time"], step=event.get("step", 0))
    if event["kind"] == "start":
        # Tells TensorBoard to forget what an earlier attempt plotted from this step on: it is done again.
        message.step = (event["resumed_from_step"] or 0) + 1
        message.session_log.status = event_pb2.SessionLog.START
    elif event["kind"] == "sample" or event["kind"] == "settings":
        tag, written = ("Sample", event["prompt"]) if event["kind"] == "sample" else ("Config", "")
        value = message.summary.value.add(tag=tag)
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = types_pb2.DT_STRING
        # TensorBoard shows Markdown: indented as code, the text keeps its lines and its special characters.
        text = textwrap.indent(written + event["text"], "    ")
        value.tensor.string_val.append(text.encode("utf-8", "replace"))
    else:
        return None
    return bytes(message.SerializeToString())


def _open_writer(folder: Path, attempt: int, time: float) -> Any:
    from tensorboard.compat.proto import event_pb2

    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads the files of a folder in the order of their names, so the attempt comes first.
    writer = RecordWriter((folder / f"events.out.tfevents.{attempt:010d}.lockstep").open("ab"))
    writer.write([event_pb2.Event(wall_time=time, file_version="brain.Event:2").SerializeToString()])
    return writer


def _why_not(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "nothing is written for TensorBoard, which is not installed: pip install lockstep-train[tensorboard]"
    return f"nothing more is written for TensorBoard ({type(error).__name__}: {error})"
