"""The console: what a person sees of a run, on a terminal and in a log file."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console as Terminal

from lockstep.record.events import validate
from lockstep.sinks.console import Console
from tests.events import Event
from tests.patience import wait_for

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def terminal(width: int = 100) -> Terminal:
    return Terminal(file=io.StringIO(), force_terminal=True, width=width, height=30, _environ={})


def pipe() -> Terminal:
    return Terminal(file=io.StringIO(), _environ={})


def output(screen: Terminal) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def lines(screen: Terminal) -> list[str]:
    """What was written, line by line as if nothing had been erased, without colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output(screen))
    return [line for line in re.split(r"[\r\n]+", plain) if line]


def wait_for_text(screen: Terminal, pattern: str, times: int = 1) -> None:
    """Wait until the live line has shown `times` different texts that match."""
    wait_for(lambda: len({text for line in lines(screen) for text in re.findall(pattern, line)}) >= times, pattern)


def event(kind: str, *, time: float = 0.0, attempt: int = 1, **fields: Any) -> Event:
    event = {"time": time, "kind": kind, "attempt": attempt, **fields}
    validate(event)
    return event


def start(**changes: Any) -> Event:
    fields: dict[str, Any] = {
        "run": "lm",
        "layout": "dp=2",
        "world_size": 2,
        "nodes": 1,
        "device": "cpu",
        "precision": "fp32",
        "formats": {"weights": "fp32"},
        "resumed_from_step": None,
        "total_steps": 300,
        "steps_per_epoch": 120,
        "global_batch": 32,
        "micro_batch": 8,
        "item": "tokens",
        "versions": {"lockstep": "0.1.0", "torch": "2.11.0", "python": "3.11.7"},
        "parameters": 812345,
        "host": "node1",
    }
    return event("start", **{**fields, **changes})


def step(number: int, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "step": number,
        "epoch": number / 120,
        "loss": 2.5,
        "grad_norm": 1.0,
        "lr": 3e-4,
        "weight": 2048.0,
        "items": 2048,
        "padding": 0,
        "seconds": 0.05,
        "skipped": False,
        "loss_scale": 1.0,
    }
    return event("step", **{**fields, **changes})


def validation(number: int, loss: float, best: bool = True, **metrics: tuple[float, float, float]) -> Event:
    named = {name: dict(zip(("sum", "count", "value"), numbers, strict=True)) for name, numbers in metrics.items()}
    return event(
        "validation",
        step=number,
        epoch=number / 120,
        loss=loss,
        metrics=named,
        samples=180,
        seconds=0.6,
        best=best,
    )


def final_score(number: int, loss: float, **metrics: tuple[float, float, float]) -> Event:
    named = {name: dict(zip(("sum", "count", "value"), numbers, strict=True)) for name, numbers in metrics.items()}
    return event("test", step=number, loss=loss, metrics=named, samples=10_000, seconds=0.6)


def checkpoint(number: int) -> Event:
    path = f"checkpoints/step-{number:08d}"
    return event("checkpoint", step=number, path=path, seconds=0.42, stall=0.42, bytes=9_812_345, best=False)


def end(number: int = 300, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "step": number,
        "loss": 1.8471,
        "best_loss": None,
        "best_step": None,
        "metrics": {},
        "seconds": 62.0,
    }
    return event("end", **{**fields, **changes})


def shown(*events: Event, on: Terminal | None = None) -> list[str]:
    screen = on or pipe()
    console = Console(screen)
    for one in events:
        console.handle(one)
    console.close()
    return lines(screen)


def test_importing_the_console_does_not_import_torch():
    code = "import sys, lockstep.sinks.console; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# The lasting lines


def test_the_start_says_what_runs_where():
    assert shown(start()) == ["lm on 2 CPU processes, layout dp=2, 0.8 M parameters, 300 steps of 32 samples"]
    [line] = shown(
        start(
            world_size=16,
            nodes=2,
            device="cuda",
            precision="bf16",
            layout="dp=2,fsdp=8",
            parameters=7_000_000_000,
            total_steps=None,
            resumed_from_step=120,
        )
    )
    assert line == (
        "lm on 16 GPUs of 2 nodes, layout dp=2,fsdp=8, 7.0 B parameters, computed in bf16, steps of 32 samples, "
        "resumed from step 120"
    )
    assert shown(start(world_size=1, layout="single"))[0].startswith("lm on 1 CPU process, layout single,")


def test_a_validation_shows_its_metrics_with_their_counts():
    assert shown(validation(100, 2.134, accuracy=(164, 180, 164 / 180), perplexity=(8.5, 180, 8.449))) == [
        "step 100 | validation loss 2.134 | accuracy 91.1 % (164/180) | perplexity 8.449 | best so far"
    ]


def test_a_metric_that_counted_nothing_is_not_shown():
    assert shown(validation(100, 2.134, best=False, accuracy=(0, 0, float("nan")))) == [
        "step 100 | validation loss 2.134"
    ]


def test_what_happened_is_said_in_one_line_each():
    assert shown(
        checkpoint(100),
        event("baseline", name="bigram", loss=2.42),
        event("config", micro_batch=8),
        event("message", text="a remark", level="info"),
        event("message", text="the loss jumped", level="warning"),
        event("sample", step=100, prompt="To be", text=" or not\nto be"),
        event("stop", reason="interrupted", step=120, text="the same command goes on"),
    ) == [
        "step 100 | saved checkpoints/step-00000100 (9.81 MB in 0.4 s)",
        "bigram baseline: loss 2.420",
        "chosen: micro_batch = 8",
        "a remark",
        "warning: the loss jumped",
        "step 100 | sample:",
        "  To be or not",
        "  to be",
        "interrupted at step 120: the same command goes on",
    ]


def test_a_warning_is_yellow_and_a_failure_red_on_a_terminal():
    screen = terminal()
    shown(
        event("message", text="careful", level="warning"),
        event("stop", reason="failed", step=3, text="rank 1 was killed"),
        on=screen,
    )
    assert "\x1b[33mwarning: careful" in output(screen)
    assert "\x1b[1;31mfailed at step 3: rank 1 was killed" in output(screen)


@pytest.mark.parametrize(("loss", "verdict"), [(1.91, "below it"), (2.5, "not below it")])
def test_the_end_compares_with_the_baseline(loss: float, verdict: str):
    metrics = {"accuracy": {"sum": 171, "count": 180, "value": 0.95}}
    *_, first, second = shown(
        event("baseline", name="bigram", loss=2.42),
        validation(300, loss),
        end(best_loss=1.9, best_step=200, metrics=metrics),
    )
    assert first == "done: 300 steps in 1:02, training loss 1.847"
    assert second == (
        f"validation loss {loss:.3f}, bigram baseline 2.420: {verdict} | accuracy 95.0 % (171/180) "
        "| best 1.900 at step 200"
    )


def test_the_test_is_shown_once_when_it_is_done():
    score = final_score(200, 0.0812, accuracy=(9761, 10_000, 0.9761), perplexity=(812.0, 10_000, 1.0846))
    line = "test loss 0.08120 | accuracy 97.6 % (9761/10000) | perplexity 1.085 | by the weights of step 200"
    assert shown(score) == [line]
    assert shown(validation(300, 2.0), score, end(best_loss=1.9, best_step=200)).count(line) == 1


def test_the_end_without_validation_is_one_line():
    assert shown(end()) == ["done: 300 steps in 1:02, training loss 1.847"]


@pytest.mark.parametrize("screen", [terminal(), pipe()], ids=["terminal", "pipe"])
def test_an_event_of_a_later_version_is_passed_over(screen: Terminal):
    assert shown({"time": 0.0, "kind": "weather", "attempt": 1, "sky": "clear"}, on=screen) == []


def test_a_loss_that_is_not_a_number_is_shown_as_such():
    assert "loss nan |" in shown(step(1, loss=float("nan")))[0]


# In a pipe, a log file, CI


def test_a_pipe_gets_no_escape_codes_and_no_broken_lines():
    screen = pipe()
    long = "word " * 60
    shown(start(), event("message", text=long, level="info"), step(1), validation(1, 2.0), end(), on=screen)
    assert "\x1b" not in output(screen)
    assert "\r" not in output(screen)
    assert long in lines(screen)


def test_a_pipe_gets_the_first_and_the_last_step_of_a_quick_run():
    steps = [line for line in shown(start(), *(step(number) for number in range(1, 301))) if "loss" in line]
    assert [int(line[5:8]) for line in steps] == [1, 300]
    assert steps[0] == "step   1/300 | loss 2.500 | 41 k tokens/s | 0:15 left | epoch 0.01"


def test_a_pipe_gets_a_step_a_minute_of_a_slow_run():
    slow = [step(number, time=1000 + 4.0 * number, seconds=4.0) for number in range(1, 41)]
    assert [int(line[5:11]) for line in shown(start(total_steps=100_000), *slow)[1:]] == [1, 16, 31]
    assert [int(line[5:7]) for line in shown(start(total_steps=None), *slow)[1:]] == [1, 16, 31]
    assert [int(line[5:7]) for line in shown(start(total_steps=40), *slow)[1:]] == [1, 16, 31, 40]


def test_a_pipe_gets_the_first_step_of_every_attempt():
    again = start(resumed_from_step=3)
    steps = [line for line in shown(start(), step(1), step(2), again, step(4), step(5)) if "loss" in line]
    assert [int(line[5:8]) for line in steps] == [1, 4]


def test_a_pipe_says_each_status_of_the_start_once():
    waiting = event("status", text="waiting for 2 processes")
    saving = event("status", text="saving")
    assert shown(waiting, waiting, event("status", text="building the model"), step(1), saving)[:2] == [
        "waiting for 2 processes",
        "building the model",
    ]
    assert "saving" not in shown(step(1), saving)


def test_what_a_script_prints_reaches_a_pipe_unchanged():
    screen = pipe()
    text = "a\tb [bold]no markup[/bold] {'x': 1} :smile: \x1b[31mred\x1b[0m " + "long " * 60
    Console(screen).print_line(text)
    assert output(screen) == text + "\n"


def test_text_that_the_encoding_lacks_does_not_end_the_run():
    raw = io.BytesIO()
    screen = Terminal(file=io.TextIOWrapper(raw, encoding="ascii"), force_terminal=True, width=80, _environ={})
    console = Console(screen)
    console.handle(event("status", text="building the model"))
    console.print_line("half a surrogate \udcff and 世界")
    console.handle(start(run="größe"))
    console.handle(step(1))
    console.handle(event("sample", step=1, prompt="世", text="\ud800"))
    console.close()
    assert "half a surrogate ? and ??" in raw.getvalue().decode("ascii")
    assert "gr??e on 2 CPU processes" in raw.getvalue().decode("ascii")


# On a terminal


def test_the_status_spins_until_the_first_step():
    screen = terminal()
    console = Console(screen)
    console.handle(event("status", text="building the model"))
    wait_for_text(screen, r"\S building the model", times=3)
    console.close()


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_the_bar_is_one_line_that_fits(width: int):
    screen = terminal(width)
    logged = event("metric", step=80, values={"loss": 2.5, "temperature": 0.7})
    bar = shown(step(79), logged, step(80), on=screen)[-1]
    with_total = terminal(width)
    bar_with_total = shown(start(), step(79), logged, step(80), on=with_total)[-1]
    for line in (bar, bar_with_total):
        assert line.startswith("step")
        assert len(line) <= width
    if width >= 80:
        details = r"loss 2.500 \| 41 k tokens/s \| 0:11 left \| epoch 0.67( \| temperature 0.7)? *"
        assert re.fullmatch("step  80/300 [━╸╺]+ " + details, bar_with_total)
        assert ("temperature" in bar_with_total) == (width == 120)


def test_the_bar_says_what_it_waits_for():
    screen = terminal()
    console = Console(screen)
    for one in (start(), step(80), event("status", text="saving step 80")):
        console.handle(one)
    wait_for_text(screen, r"step  80/300 .* saving step 80")
    console.handle(checkpoint(80))
    console.close()
    assert "loss 2.500" in lines(screen)[-1]


def test_the_bar_keeps_the_last_validation_and_its_metrics_in_sight():
    bar = shown(start(), step(100), validation(100, 2.0, accuracy=(164, 180, 164 / 180)), on=terminal(160))[-1]
    assert "loss 2.500" in bar
    assert "validation loss 2.000 | accuracy 91.1 % (164/180)" in bar


def test_throughput_leaves_out_the_first_step_and_the_pauses_but_the_time_left_has_them():
    events = [step(1, seconds=60.0), *(step(number) for number in range(2, 101))]
    pauses = [
        validation(100, 2.0),
        event("checkpoint", step=100, path="c", seconds=120.0, stall=99.4, bytes=1, best=False),
    ]
    bar = shown(start(), *events, *pauses, on=terminal(120))[-1]
    assert "41 k tokens/s" in bar
    assert "3:30 left" in bar  # 200 steps of 0.05 s, and 100 s of pauses in 100 steps


def test_what_a_script_prints_stands_above_the_bar_unchanged():
    screen = terminal()
    console = Console(screen)
    console.handle(start())
    console.handle(step(1))
    console.print_line("[bold]no markup[/bold] {'x': 1, 'y': None} :smile: http://example.org")
    console.print_line("\x1b[31mred\x1b[0m stays, \x1b[2J\x1b[Hmoving does not")
    assert "[bold]no markup[/bold] {'x': 1, 'y': None} :smile: http://example.org\n" in output(screen)
    assert "\x1b[31mred\x1b[0m stays, moving does not\n" in output(screen)
    console.close()


def test_a_sample_cannot_send_escape_codes():
    screen = terminal()
    shown(event("sample", step=1, prompt="a", text="\x1b[2Jb"), on=screen)
    assert "\x1b[2J" not in output(screen)


@pytest.mark.parametrize("last", [end(), event("stop", reason="interrupted", step=1, text="Ctrl-C")])
def test_the_end_takes_the_bar_away_and_gives_the_cursor_back(last: Event):
    screen = terminal()
    console = Console(screen)
    for one in (start(), step(1), last):
        console.handle(one)
    before, after = output(screen).rsplit(SHOW_CURSOR, 1)
    assert HIDE_CURSOR in before
    assert HIDE_CURSOR not in after
    assert after.startswith("\r\x1b[1A\x1b[2K")  # up to the bar, and erase it
    console.close()
    assert output(screen).endswith(after)


def test_a_restart_after_a_stop_shows_the_bar_again():
    stop = event("stop", reason="failed", step=1, text="rank 1 was killed")
    screen = terminal()
    shown(start(), step(1), stop, start(resumed_from_step=1), step(2), on=screen)
    assert output(screen).count(HIDE_CURSOR) == output(screen).count(SHOW_CURSOR) == 2


def test_the_cursor_comes_back_when_nobody_catches_the_exception():
    code = (
        "from rich.console import Console as Terminal\n"
        "from lockstep.sinks.console import Console\n"
        "console = Console(Terminal(force_terminal=True, _environ={}))\n"
        "console.handle({'kind': 'status', 'text': 'building'})\n"
        "raise RuntimeError('nobody catches this')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "nobody catches this" in result.stderr
    assert HIDE_CURSOR in result.stdout
    assert result.stdout.rindex(SHOW_CURSOR) > result.stdout.rindex(HIDE_CURSOR)
