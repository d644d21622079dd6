"""A run as a person sees it: lasting lines for what happened, one live line for what is happening."""

from __future__ import annotations

import atexit
import math
import textwrap
from dataclasses import dataclass

from rich.console import Console as Terminal
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lockstep.record import events
from lockstep.text.units import beside_prediction, bytes_text, clock, count_text, printable, seconds_text, steady

BAR_WIDTH = 24
HEAD_FIELDS = ("time", "kind", "attempt")
SECONDS_BETWEEN_PLAIN_STEPS = 60.0


class Console:
    """Shows a run's events on `terminal`: a live bar for a person, plain lines in a pipe or a file."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._live: Live | None = None
        self._spinner = Spinner("dots" if terminal.encoding.startswith("utf") else "line")
        self._baseline: tuple[str, float] | None = None
        self._validation: events.ValidationEvent | None = None
        self._status = ""
        # What follows belongs to one attempt and begins anew with each start event.
        self._start: events.StartEvent | None = None
        self._step: events.StepEvent | None = None
        self._pace = Pace()
        self._logged: dict[str, float] = {}
        self._plain_due = 0.0

    def handle(self, event: events.Event) -> None:
        """Show one event. Kinds this version does not know are passed over."""
        match event["kind"]:
            case "start":
                self._start, self._step, self._pace, self._logged = event, None, Pace(), {}
                self._plain_due = 0.0
                self._line(start_text(event), "bold")
                self._show_live()
            case "status":
                self.show_status(event["text"])
            case "step":
                self._show_step(event)
            case "metric":
                # Replaced, never changed in place: the live display reads it from its own thread.
                self._logged = {**self._logged, **event["values"]}
            case "validation":
                self._pause(event["seconds"])
                self._validation = event
                parts = [f"step {event['step']}", *score_texts(event), *["best so far"] * event["best"]]
                self._line(" | ".join(parts), "green" if event["best"] else "")
            case "test":
                self._status = ""
                self._line(_test_text(event), "bold green")
            case "checkpoint":
                self._pause(event["stall"])
                size = f"{bytes_text(event['bytes'])} in {event['seconds']:.1f} s"
                best = " | best so far" if event["best"] else ""
                self._line(f"step {event['step']} | saved {event['path']} ({size}){best}", "dim")
            case "baseline":
                self._baseline = (event["name"], event["loss"])
                self._line(f"{event['name']} baseline: loss {steady(event['loss'])}")
            case "sample":
                self._line(f"step {event['step']} | sample:", "dim")
                self._line(textwrap.indent(event["prompt"] + event["text"], "  "))
            case "message":
                self.say(event["text"], event["level"])
            case "alarm":
                self.say(event["text"], "warning")
            case "config":
                chosen = [f"{name} = {value}" for name, value in event.items() if name not in HEAD_FIELDS]
                self._line(f"chosen: {', '.join(chosen)}")
            case "job":
                self._line(job_text(event), "dim")
            case "prediction_error":
                self._line(_prediction_text(event), "dim")
            case "stop":
                self.close()
                style = "bold red" if event["reason"] == "failed" else "bold yellow"
                self._line(f"{event['reason']} at step {event['step']}: {event['text']}", style)
            case "end":
                self.close()
                self._line(_end_text(event, self._validation, self._baseline), "bold")

    def say(self, text: str, level: str = "info") -> None:
        """A remark in a line of its own; one that matters is a warning."""
        is_warning = level == "warning"
        self._line(f"warning: {text}" if is_warning else text, "yellow" if is_warning else "")

    def print_line(self, text: str) -> None:
        """Print a line of the script's own output above the bar, as it is."""
        if self._live is None:
            # In one piece: the run's own lines come from another thread.
            self._terminal.file.write(self._encodable(text) + "\n")
            self._terminal.file.flush()
        else:
            # Colours stay, but escape codes that move the cursor would tear the bar.
            self._terminal.print(Text.from_ansi(self._encodable(text)), soft_wrap=True)

    def close(self) -> None:
        """Take the live bar away and give the cursor back. Later events are still shown."""
        atexit.unregister(self.close)
        live, self._live, self._status = self._live, None, ""
        if live is not None:
            live.stop()

    def _line(self, text: str, style: str = "") -> None:
        # A model's sample may well hold escape codes.
        shown = Text(self._encodable(printable(text)), style)
        # A terminal gets lines broken between words; a file gets them whole, for grep.
        self._terminal.print(shown, soft_wrap=not self._terminal.is_interactive)

    def _encodable(self, text: str) -> str:
        # What a worker or a model writes may not exist in the terminal's encoding: better a "?" than a crash.
        return text.encode(self._terminal.encoding, "replace").decode(self._terminal.encoding)

    def _show_live(self) -> None:
        if self._live is None and self._terminal.is_interactive:
            # Neither stream is redirected: with --json the result goes to stdout and this display to stderr.
            self._live = Live(
                console=self._terminal,
                get_renderable=self._render,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            # An exception nobody catches would otherwise leave the user's terminal without a cursor.
            atexit.register(self.close)
            self._live.start()

    def show_status(self, text: str) -> None:
        """What the run waits for, until something else happens."""
        news = text != self._status
        self._status = text
        self._show_live()
        if self._live is None and news and self._step is None:
            self._line(text)

    def _pause(self, seconds: float) -> None:
        self._status = ""
        self._pace.pause_seconds += seconds

    def _show_step(self, event: events.StepEvent) -> None:
        self._status = ""
        self._step = event
        self._pace.add(event)
        self._show_live()
        total = self._total_steps()
        if self._live is None and (event["time"] >= self._plain_due or event["step"] == total):
            self._plain_due = event["time"] + SECONDS_BETWEEN_PLAIN_STEPS
            self._line(" | ".join([_progress_text(event, total), *self._detail_texts(event)]))

    def _total_steps(self) -> int | None:
        return self._start["total_steps"] if self._start else None

    def _detail_texts(self, step: events.StepEvent) -> list[str]:
        """What there is to say about the latest step, the most wanted first."""
        texts = ["skipped" if step["skipped"] else f"loss {steady(step['loss'])}"]
        if self._pace.recent_seconds > 0:
            rate = self._pace.recent_items / self._pace.recent_seconds
            texts.append(f"{count_text(rate)} {self._start['item'] if self._start else 'items'}/s")
        total = self._total_steps()
        if total and total > step["step"]:
            texts.append(f"{clock(self._pace.seconds_for(total - step['step']))} left")
        texts.append(f"epoch {step['epoch']:.2f}")
        # The loss stands there already, and scripts like to log it.
        texts += [f"{name} {value:.4g}" for name, value in self._logged.items() if name != "loss"]
        return texts

    def _render(self) -> RenderableType:
        """The live line: a spinner with the status while there is no step yet, then the bar."""
        line = Table.grid(padding=(0, 1))
        step, total, status = self._step, self._total_steps(), self._status
        if step is None:
            text = Text(status or "waiting for the first step")
            text.truncate(max(self._terminal.width - 2, 1), overflow="crop")
            line.add_row(self._spinner, text)
            return line
        progress = _progress_text(step, total)
        room = self._terminal.width - len(progress) - 1
        bar_width = min(BAR_WIDTH, room // 5) if total else 0
        room -= bar_width + 1 if bar_width else 0
        texts = [status] if status else self._detail_texts(step)
        if self._validation is not None and not status:
            texts += score_texts(self._validation)
        while len(texts) > 1 and len(" | ".join(texts)) > room:
            texts.pop()
        text = Text(" | ".join(texts))
        text.truncate(max(room, 1), overflow="crop")
        bar = [ProgressBar(total, step["step"], width=bar_width)] if bar_width else []
        line.add_row(progress, *bar, text)
        return line


@dataclass
class Pace:
    """How fast the run goes: its latest steps, and apart from them the time for validation and saving."""

    steps: int = 0
    recent_steps: float = 0.0
    recent_items: float = 0.0
    recent_seconds: float = 0.0
    pause_seconds: float = 0.0

    def add(self, step: events.StepEvent) -> None:
        # Each step counts 5 % less than the one after it; the first, which warms up, only while it is alone.
        keep = 0.95 if self.steps > 1 else 0.0
        self.steps += 1
        self.recent_steps = keep * self.recent_steps + 1
        self.recent_items = keep * self.recent_items + step["items"]
        self.recent_seconds = keep * self.recent_seconds + step["seconds"]

    def seconds_for(self, steps: int) -> float:
        return steps * (self.recent_seconds / self.recent_steps + self.pause_seconds / self.steps)


def start_text(start: events.StartEvent) -> str:
    """What runs where, in a line."""
    count = start["world_size"]
    one, many = ("CPU process", "CPU processes") if start["device"] == "cpu" else ("GPU", "GPUs")
    nodes = f" of {start['nodes']} nodes" if start["nodes"] > 1 else ""
    precision = "" if start["precision"] == "fp32" else f", computed in {start['precision']}"
    steps = (
        "steps" if start["total_steps"] is None else f"{start['total_steps']} step{'s' * (start['total_steps'] != 1)}"
    )
    parts = [
        f"{start['run']} on {count} {one if count == 1 else many}{nodes}",
        f"layout {start['layout']}",
        f"{_parameters(start['parameters'])} parameters{precision}",
        f"{steps} of {start['global_batch']} sample{'s' * (start['global_batch'] != 1)}",
    ]
    if start["resumed_from_step"] is not None:
        parts.append(f"resumed from step {start['resumed_from_step']}")
    return ", ".join(parts)


def _end_text(
    end: events.EndEvent, validation: events.ValidationEvent | None, baseline: tuple[str, float] | None
) -> str:
    steps = f"{end['step']} step{'s' * (end['step'] != 1)}"
    done = f"done: {steps} in {clock(end['seconds'])}, training loss {steady(end['loss'])}"
    if validation is None:
        return done
    parts = [f"validation loss {steady(validation['loss'])}"]
    if baseline is not None:
        name, loss = baseline
        parts[0] += f", {name} baseline {steady(loss)}: {'' if validation['loss'] < loss else 'not '}below it"
    parts += _metric_texts(end["metrics"])
    if end["best_loss"] is not None and end["best_step"] != end["step"]:
        parts.append(f"best {steady(end['best_loss'])} at step {end['best_step']}")
    return done + "\n" + " | ".join(parts)


def _prediction_text(event: events.PredictionErrorEvent) -> str:
    """What was predicted and what came; tensors are counted on GPUs only."""
    memory, time = event["memory_bytes"], event["step_seconds"]
    told = [("a step took", time, seconds_text), ("the fullest rank held tensors of", memory, bytes_text)]
    parts = [
        f"{what} {text(measured)}, {beside_prediction(measured, compared['predicted'], text)}"
        for what, compared, text in told
        if (measured := compared["measured"]) is not None
    ]
    guessed = " (as if this were some laptop: lockstep bench measures it)" if event["machine"] == "laptop-cpu" else ""
    return f"{'; '.join(parts)}{guessed}"


def _progress_text(step: events.StepEvent, total: int | None) -> str:
    return f"step {step['step']:>{len(str(total))}}/{total}" if total else f"step {step['step']}"


def score_texts(event: events.ValidationEvent | events.TestEvent) -> list[str]:
    """The loss and the metrics of a validation or test event."""
    return [f"{event['kind']} loss {steady(event['loss'])}", *_metric_texts(event["metrics"])]


def _test_text(test: events.TestEvent) -> str:
    return " | ".join([*score_texts(test), f"by the weights of step {test['step']}"])


def _metric_texts(metrics: dict[str, events.MetricTold]) -> list[str]:
    texts = []
    for name, metric in metrics.items():
        hits, count = float(metric["sum"]), float(metric["count"])
        is_share = count and hits.is_integer() and count.is_integer() and 0 <= hits <= count
        if is_share and math.isclose(metric["value"], hits / count):
            texts.append(f"{name} {100 * metric['value']:.1f} % ({hits:.0f}/{count:.0f})")
        elif count:
            texts.append(f"{name} {steady(metric['value'])}")
    return texts


def _parameters(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.1f} B"
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count}"


def job_text(event: events.JobTold) -> str:
    """A job of Slurm in a line."""
    why = f" ({event['reason']})" if event["reason"] else ""
    where = f" on {event['nodes']}" if event["nodes"] else ""
    again = f", requeued {event['restart']} time{'s' * (event['restart'] > 1)}" if event["restart"] else ""
    return f"job {event['id']}: {event['state'].lower().replace('_', ' ')}{why}{where}{again}"
