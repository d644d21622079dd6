"""`python -m lockstep.sinks.tracking wandb|mlflow RUN`: tell W&B or MLflow of a run while it goes on.

How far it came is in the run folder (`wandb/sent.json`), so that a run that goes on is told from there, and one that
was not told from its beginning is told all of it. What was told of a step is not told again when the step is done
again: neither W&B nor MLflow can take it back. What was not told of it yet, its validation say, is.
"""

from __future__ import annotations

import fcntl
import json
import select
import signal
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import time
from typing import Any, Literal, Protocol

from lockstep.record.events import Event, settled
from lockstep.record.folder import EVENTS
from lockstep.record.log import LogReader
from lockstep.record.run_state import RunState
from lockstep.sinks.scalars import Numbers

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_TRIES = 60.0
SECONDS_TO_SEND_THE_REST = 600.0
EVENTS_AT_ONCE = 1000


Ending = Literal["finished", "failed", "stopped"]
ENDINGS: Mapping[str, Ending] = {"finished": "finished", "failed": "failed"}
"""What a tracker calls a run in this state when its process ends; in all others it was stopped."""


@dataclass
class Sent:
    """How far a tracker was told of a run, and as which of its runs."""

    run: str = ""
    offset: int = 0
    step: int = 0
    """Where the run stands."""
    told: dict[str, int] = field(default_factory=dict)
    """The last step of which each number was told."""
    before: dict[str, int] = field(default_factory=dict)
    """The same when the run last began, or went back to do steps again."""


class Service(Protocol):
    """What W&B and MLflow have in common."""

    def describe(self, config: Mapping[str, Any]) -> None:
        """The settings of the run, by dotted names."""

    def log(self, numbers: Mapping[str, float], step: int, time: float) -> None:
        """Numbers of a step. Steps come in their order."""

    def flush(self) -> None:
        """Send what was logged."""

    def finish(self, how: Ending) -> None:
        """The run is over, or this attempt of it."""


def main() -> None:
    """Follow a run until standard input ends, which is when rank 0 closes it or dies."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    assert name in ("wandb", "mlflow"), name
    is_last_try = False
    with _alone(folder / name):
        while True:
            try:
                return follow(name, folder, lambda: _input_ended(SECONDS_BETWEEN_LOOKS))
            except Exception:
                if is_last_try:
                    raise
                traceback.print_exc()
            # The network may come back; what was sent is kept.
            is_last_try = _input_ended(SECONDS_BETWEEN_TRIES)


def _input_ended(seconds: float) -> bool:
    """Wait so long for the end of standard input. After it there is some time left, and no more."""
    ended = bool(select.select([sys.stdin], [], [], seconds)[0])
    if ended and not signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, SECONDS_TO_SEND_THE_REST)
    return ended


def follow(name: str, folder: Path, is_over: Callable[[], bool]) -> None:
    """Tell a service what is new in a run's log, until `is_over()` and all is told."""
    state = folder / name / "sent.json"
    kept = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
    sent = Sent(**{name: value for name, value in kept.items() if name in vars(Sent())})  # of any version
    service = _connect(name, folder, sent)
    log, numbers, run = LogReader(folder / EVENTS), Numbers(), RunState()
    while True:
        last_round = is_over()  # asked before reading, so that nothing written before the end is missed
        _tell(service, log, sent, numbers, run, state)
        if last_round:
            service.finish(ENDINGS.get(run.state(time()), "stopped"))
            return


def _connect(name: str, folder: Path, sent: Sent) -> Service:
    if name == "wandb":
        from lockstep.sinks.weights_and_biases import WeightsAndBiases

        return WeightsAndBiases(folder, sent)
    from lockstep.sinks.mlflow_store import MlflowStore

    return MlflowStore(folder, sent)


def _tell(service: Service, log: LogReader, sent: Sent, numbers: Numbers, run: RunState, state: Path) -> None:
    """Tell what is new; what was sent before is only read, because later numbers and the state need it."""
    news = 0
    for told in log.read():
        run.take(told)
        event = settled(told) if isinstance(told, dict) else None
        if log.offset <= sent.offset:
            if event is not None:
                numbers.of(event)
            continue
        if event is not None:
            _tell_one(service, event, sent, numbers)
        sent.offset = log.offset
        news += 1
        if news % EVENTS_AT_ONCE == 0:
            _keep(service, sent, state)
    if news % EVENTS_AT_ONCE:
        _keep(service, sent, state)


def _tell_one(service: Service, event: Event, sent: Sent, numbers: Numbers) -> None:
    if event["kind"] == "settings":
        with suppress(tomllib.TOMLDecodeError):
            service.describe(dict(_dotted(tomllib.loads(event["text"]))))
        return
    named = numbers.of(event)
    if event["kind"] == "start":
        wanted = ("layout", "world_size", "nodes", "device", "precision", "parameters", "global_batch", "host")
        service.describe({f"start.{name}": value for name, value in event.items() if name in wanted})
        sent.step, sent.before = event["resumed_from_step"] or 0, dict(sent.told)
    elif event["kind"] == "step":
        if event["step"] <= sent.step:
            sent.before = dict(sent.told)
        sent.step = event["step"]
    step = event.get("step")
    if isinstance(step, int) and (news := {name: n for name, n in named.items() if step > sent.before.get(name, -1)}):
        service.log(news, step, event["time"])
        sent.told |= dict.fromkeys(news, step)


def _keep(service: Service, sent: Sent, state: Path) -> None:
    service.flush()
    draft = state.with_suffix(".new")
    draft.write_text(json.dumps(asdict(sent)), encoding="utf-8")
    draft.replace(state)


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for the process of the attempt before, which may still send."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
