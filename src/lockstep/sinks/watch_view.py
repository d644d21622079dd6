"""How `lockstep watch` shows a run: lines of text for a terminal of any width, with or without colours."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text

from lockstep.page.panels import Advice
from lockstep.record.events import GpuTold, HostTold
from lockstep.sinks.console import score_texts, start_text
from lockstep.sinks.watched import Watched
from lockstep.text.charts import ChartLine, terminal_chart
from lockstep.text.units import bytes_text, clock, count_text, percent, printable, seconds_text, steady

MOST_RANKS = 16
SLOWEST_SHOWN = 8
MOST_DEVICES = 8
MOST_WARNINGS = 3
CHART_HEIGHT = 10
HIGHEST_CHART = 16
SPARKS = "▁▂▃▄▅▆▇█"
LEAST_CHART = 4
AXIS_LINES = 2
COLOURS = {
    "finished": "bold green",
    "failed": "bold red",
    "lost": "bold red",
    "stopped": "bold yellow",
    "restarting": "bold yellow",
}


@dataclass(frozen=True)
class Screen:
    """What there is to draw on. Without `height` there is as much as it takes."""

    width: int
    height: int | None = None
    is_unicode: bool = True


@dataclass
class _Sections:
    """The lines of a view, before it is known how much of each there is room for."""

    head: list[Text] = field(default_factory=list)
    ranks: list[Text] = field(default_factory=list)
    machine: list[Text] = field(default_factory=list)
    tail: list[Text] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.head) + len(self.ranks) + len(self.machine) + len(self.tail)


def view(name: str, run: Watched, now: float, screen: Screen, advice: Sequence[Advice] = ()) -> list[Text]:
    """The run as lines, the most important first; on a low screen the rest gives way."""
    parts = _Sections(
        _head(name, run, now, screen), _ranks(run, screen), _machine(run, screen), _tail(run, now, advice, screen.width)
    )
    height = CHART_HEIGHT if screen.height is None else screen.height - parts.count - AXIS_LINES
    chart = _chart(run, screen, min(height, HIGHEST_CHART)) if height >= LEAST_CHART else _sparkline(run, screen)
    if screen.height is None:
        return [*parts.head, *chart, *parts.ranks, *parts.machine, *parts.tail]
    room = screen.height - len(parts.head) - len(chart)
    tail = parts.tail[: max(room, 0)]
    ranks = parts.ranks[: max(room - len(tail), 0)]
    machine = parts.machine[: max(room - len(tail) - len(ranks), 0)]
    lines = [*parts.head, *chart, *ranks, *machine, *tail][: screen.height]
    for line in lines:
        line.truncate(screen.width, overflow="ellipsis" if screen.is_unicode else "crop")
    return lines


def _head(name: str, run: Watched, now: float, screen: Screen) -> list[Text]:
    step, total = run.step, run.start["total_steps"] if run.start else None
    state = run.run.state(now)
    title = Text.assemble((printable(name), "bold"), "  ", (state, COLOURS.get(state, "bold cyan")))
    if step is not None:
        done = f"  step {step['step']}" + (f"/{total} ({percent(step['step'] / total)})" if total else "")
        title.append(done)
    if step is not None and total and state == "running" and step["step"] < total:
        title.append(f"  {clock(run.pace.seconds_for(total - step['step']))} left")
    if run.run.starts > 1:
        title.append(f"  attempt {run.run.starts}", "yellow")
    lines = [title]
    if step is not None and total:
        lines.append(_bar(screen.width - 1, {"█#": step["step"] / total, "░.": 1 - step["step"] / total}, screen))
    if silence := run.silence(now):
        lines.append(Text(silence, "bold red"))
    if run.why:
        lines.append(Text(printable(run.why), "red" if state == "failed" else "yellow"))
    elif run.last_time is None:
        lines.append(Text("no event yet"))
    if run.start is not None:
        lines.append(Text(printable(start_text(run.start)), "dim"))
    lines += _wrapped(_numbers(run), screen.width)
    if run.validation is not None:
        best = [f"best {steady(run.best[0])} at step {run.best[1]}"] if run.best else []
        lines += _wrapped([f"step {run.validation['step']}:", *score_texts(run.validation), *best], screen.width)
    if run.test is not None:
        lines += _wrapped(score_texts(run.test), screen.width)
    return lines


def _numbers(run: Watched) -> list[str]:
    step = run.step
    if step is None:
        return []
    texts = ["skipped" if step["skipped"] else f"loss {steady(step['loss'])}"]
    if run.pace.recent_seconds > 0:
        item = run.start["item"] if run.start else "items"
        texts.append(f"{count_text(run.pace.recent_items / run.pace.recent_seconds)} {item}/s")
        texts.append(f"{seconds_text(run.pace.recent_seconds / run.pace.recent_steps)} a step")
    texts += [f"lr {step['lr']:.3g}", f"grad norm {steady(step['grad_norm'])}", f"epoch {step['epoch']:.2f}"]
    return texts + [f"{printable(name)} {value:.4g}" for name, value in run.logged.items() if name != "loss"]


def _wrapped(texts: Sequence[str], width: int) -> list[Text]:
    """Texts beside each other, in as many lines as they need."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += f"  {text}"
        else:
            lines.append(text)
    return [Text(line) for line in lines]


def _chart(run: Watched, screen: Screen, height: int) -> list[Text]:
    spans = run.losses.spans()
    if len(spans) < 2 or not screen.is_unicode:
        return []
    points = [(step, loss) for step, low, high in spans for loss in dict.fromkeys((high, low))]
    first, last = points[0][0], points[-1][0]

    def step_text(step: float) -> str:  # the axis has a little room at its ends
        return f"step {min(max(step, first), last):.0f}"

    drawn = terminal_chart([ChartLine("loss", points)], screen.width - 1, height, x_format=step_text, from_zero=False)
    return [Text(line, "cyan") for line in drawn.splitlines()]


def _sparkline(run: Watched, screen: Screen) -> list[Text]:
    """The loss in one line, where there is no room for a chart; each mark is the highest of its steps."""
    points, width = run.losses.spans(), screen.width - len("loss  ")
    if len(points) < 2 or not screen.is_unicode or width < 1:
        return []
    first, last = points[0][0], points[-1][0]
    columns: dict[int, float] = {}
    for step, _, high in points:
        column = round((step - first) / (last - first) * (width - 1))
        columns[column] = max(high, columns.get(column, high))
    low, span = min(columns.values()), max(columns.values()) - min(columns.values()) or 1.0
    heights = {column: round((high - low) / span * (len(SPARKS) - 1)) for column, high in columns.items()}
    line = "".join(SPARKS[heights[column]] if column in heights else " " for column in range(width))
    return [Text(f"loss {line}", "cyan")]


def _ranks(run: Watched, screen: Screen) -> list[Text]:
    """Where the time of each rank's steps goes; of many ranks, those that work longest."""
    event = run.ranks
    if event is None or not event["seconds"] > 0:
        return []
    times = list(zip(event["compute"], event["input"], event["wait"], strict=False))  # a rank may lack in one of them
    count = len(times)
    if count == 0:
        return []
    shown = list(range(count))
    which = f"{count} ranks" if count > 1 else "1 rank"
    if count > MOST_RANKS:
        shown = sorted(shown, key=lambda rank: -sum(times[rank][:2]))[:SLOWEST_SHOWN]
        which = f"the {SLOWEST_SHOWN} slowest of {count} ranks"
    marks = [glyph if screen.is_unicode else letter for glyph, letter in ("█#", "▒i", "░.")]
    legend = f"{marks[0]} compute {marks[1]} input {marks[2]} wait"
    lines = [Text(f"{which}, {seconds_text(event['seconds'])} a step   {legend}", "bold")]
    hosts = [printable(host) for host in event["hosts"]]
    several = len(set(hosts)) > 1
    names = [f"rank {rank}" + (f" {hosts[rank]}" if several and rank < len(hosts) else "") for rank in shown]
    room = min(max(map(len, names)), 24)
    for name, rank in zip(names, shown, strict=True):
        seconds = zip(("█#", "▒i", "░."), times[rank], strict=True)
        shares = {glyphs: max(0.0, part) / event["seconds"] for glyphs, part in seconds}
        told = "".join(f"{percent(share):>6}" for share in shares.values())
        bar = _bar(max(screen.width - room - len(told) - 2, 4), shares, screen)
        lines.append(Text.assemble(f"{name[:room]:{room}} ", bar, told))
    return lines


def _bar(width: int, shares: dict[str, float], screen: Screen) -> Text:
    """Shares of a whole as a bar; each has its mark, and after it the one for terminals without Unicode."""
    drawn, until = "", 0.0
    for glyphs, share in shares.items():
        until += share
        end = round(min(1.0, max(0.0, until)) * width)  # also of a share that is not finite
        drawn += glyphs[0 if screen.is_unicode else 1] * (end - len(drawn))
    return Text(f"{drawn:{width}}")


def _machine(run: Watched, screen: Screen) -> list[Text]:
    """What the hosts and every GPU of them do; of many, all together and the least busy."""
    if run.machine is None:
        return []
    hosts = run.machine["hosts"]
    gpus = [(gpu, f"GPU {gpu['index']} of {host['host']}") for host in hosts for gpu in host["gpus"]]
    lines = [_gpu_line(name if len(hosts) > 1 else f"GPU {gpu['index']}", gpu, screen) for gpu, name in gpus]
    if len(gpus) > MOST_DEVICES:
        lines = _together("GPUs", {name: gpu["busy"] for gpu, name in gpus})
    if len(hosts) > MOST_DEVICES:
        return lines + _together("hosts' CPUs", {host["host"]: host["cpu"] for host in hosts})
    return lines + [_host_line(host) for host in hosts]


def _together(what: str, busy: dict[str, float | None]) -> list[Text]:
    known = {name: share for name, share in busy.items() if share is not None}
    if not known:
        return []
    least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    mean = sum(known.values()) / len(known)
    text = f"{len(busy)} {what} {percent(mean)} busy"
    if known[least] < known[most]:
        text += f": from {percent(known[least])} ({least}) to {percent(known[most])} ({most})"
    return [Text(printable(text))]


def _gpu_line(name: str, gpu: GpuTold, screen: Screen) -> Text:
    parts = [printable(name)]
    if gpu["busy"] is not None:
        bar = _bar(10, {"█#": gpu["busy"], "░.": 1 - gpu["busy"]}, screen)
        parts.append(f"{bar} {percent(gpu['busy']):>5}")
    if gpu["memory"] is not None:
        of = f" of {bytes_text(gpu['memory_total'])}" if gpu["memory_total"] else ""
        parts.append(f"{bytes_text(gpu['memory'])}{of}")
    if gpu["watts"] is not None:
        parts.append(f"{gpu['watts']:.0f} W")
    if not gpu["ranks"]:
        parts.append("no rank uses it")
    return Text("  ".join(parts), "" if gpu["ranks"] else "yellow")


def _host_line(host: HostTold) -> Text:
    parts = [f"CPUs of {printable(host['host'])}"]
    if host["cpu"] is not None:
        parts.append(f"{percent(host['cpu'])} busy")
    if host["memory"] is not None:
        of = f" of {bytes_text(host['memory_total'])}" if host["memory_total"] else ""
        parts.append(f"{bytes_text(host['memory'])}{of}")
    # Not beside the share, which is of all cores of the host.
    parts.append(f"the run may use {host['cores']} core{'s' * (host['cores'] != 1)}")
    return Text("  ".join(parts))


def _tail(run: Watched, now: float, advice: Sequence[Advice], width: int) -> list[Text]:
    lines = []
    if run.checkpoint is not None:
        saved = run.checkpoint
        size = f"{bytes_text(saved['bytes'])} in {seconds_text(saved['seconds'])}"
        lines.append(Text(f"last checkpoint: step {saved['step']}, {size}, {clock(max(0.0, now - saved['time']))} ago"))
    told = [text for text in run.warnings if text != run.why]
    texts = [printable(text).replace("\n", " ") for text in told[-MOST_WARNINGS:]]
    lines += [Text(f"warning: {text}", "yellow") for text in texts]
    for one in advice:
        wrapped = textwrap.wrap(f"to change: {one.text} ({one.evidence})", max(width, 20), subsequent_indent="  ")
        lines += [Text(line, "green") for line in wrapped]
    if damage := run.damage():
        lines.append(Text(damage, "yellow"))
    return lines
