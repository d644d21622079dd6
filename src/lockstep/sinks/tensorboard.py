"""A run's events as TensorBoard reads them, in the run folder's `tb/`.

Written with the tensorboard package's own messages and record format: `torch.utils.tensorboard` would bring
torch (and TensorFlow, where that is installed) into a process that only copies numbers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.events import Event
from lockstep.sinks.numbers import Numbers
from lockstep.sinks.records import RecordWriter

FLUSH_SECONDS = 1.0


class TensorBoard:
    """Writes TensorBoard's files to `folder`; when it cannot, it says why once and lets the run go on."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._writer: Any = None
        self._numbers = Numbers()
        self._flushed = 0.0
        self._closed = False

    def handle(self, event: Event) -> None:
        """Write one event. Kinds with nothing to plot are passed over."""
        if self._closed:
            return
        try:
            if self._writer is None:
                self._writer = _open_writer(self._folder, event["attempt"], event["time"])
            message = _message(event, self._numbers.of(event))
            if message is not None:
                self._writer.write(message)
                # Every step would cost more than writing does.
                if event["kind"] != "step" or event["time"] - self._flushed >= FLUSH_SECONDS:
                    self._writer.flush()
                    self._flushed = event["time"]
        except Exception as error:
            # Closed first: what is said may come back here as an event.
            self._closed = True
            self._say(_why_not(error))

    def close(self) -> None:
        """Close the file. Later events are not written."""
        writer, self._writer, self._closed = self._writer, None, True
        if writer is not None:
            writer.close()


def _message(event: Event, numbers: dict[str, float]) -> bytes | None:
    """The event as a serialised TensorBoard message, or None when there is nothing to show of it."""
    from tensorboard.compat.proto import event_pb2, types_pb2  # type: ignore[import-untyped]

    message = event_pb2.Event(wall_time=event["time"], step=event.get("step", 0))
    if event["kind"] == "start":
        # Tells TensorBoard to forget what an earlier attempt plotted from this step on: it is done again.
        message.step = (event["resumed_from_step"] or 0) + 1
        message.session_log.status = event_pb2.SessionLog.START
    elif event["kind"] in ("sample", "settings"):
        value = message.summary.value.add(tag="Sample" if event["kind"] == "sample" else "Config")
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = types_pb2.DT_STRING
        # TensorBoard shows Markdown: indented as code, the text keeps its lines and its special characters.
        text = textwrap.indent(event.get("prompt", "") + event["text"], "    ")
        value.tensor.string_val.append(text.encode("utf-8", "replace"))
    else:
        for tag, number in numbers.items():
            message.summary.value.add(tag=tag, simple_value=number)
        if not message.summary.value:
            return None
    return bytes(message.SerializeToString())


def _open_writer(folder: Path, attempt: int, time: float) -> Any:
    from tensorboard.compat.proto import event_pb2

    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads the files of a folder in the order of their names, so the attempt comes first.
    writer = RecordWriter((folder / f"events.out.tfevents.{attempt:010d}.lockstep").open("ab"))
    writer.write(event_pb2.Event(wall_time=time, file_version="brain.Event:2").SerializeToString())
    return writer


def _why_not(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"nothing is written for TensorBoard ({error}): pip install tensorboard"
    return f"nothing more is written for TensorBoard ({type(error).__name__}: {error})"
