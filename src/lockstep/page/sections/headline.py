"""The top of a run's page: what ran where, how it went in one sentence, and the numbers that matter most.

A number that is not known stands there all the same, as a dash with the reason: a reader would look for it.
"""

from __future__ import annotations

import math
from datetime import datetime

from lockstep.page.panels import Fact, Headline, Level
from lockstep.page.reading.summary import Summary, fullest_rank, is_over_the_peak
from lockstep.text.units import (
    beside_prediction,
    bytes_text,
    count_text,
    device_time_text,
    duration_text,
    energy_text,
    how_many,
    loss_text,
    percent,
    seconds_text,
    share_text,
)

UNKNOWN = "\N{EN DASH}"
GOOD_GOODPUT = 0.9
POOR_GOODPUT = 0.5
LONG_RUN = 600.0
"""Seconds: a shorter run is mostly starting, which is no reason to warn."""
FAR_OFF = 0.25
"""A prediction that is wrong by more than this is worth a warning."""


def headline(summary: Summary, written: float | None = None) -> Headline:
    """What is said of a run before everything else; `written` is when, on a page that does not follow the run."""
    return Headline(summary.name, _subtitle(summary), summary.state, _verdict(summary, written), _facts(summary))


def devices_text(summary: Summary) -> str:
    """What a run had, in words: "4 GPUs (NVIDIA H200) of 1 node"."""
    if not summary.world_size:
        return "the log does not say where it ran"
    nodes = f"{summary.nodes} node{'s' if summary.nodes != 1 else ''}"
    if summary.device == "cpu":
        return f"{how_many(summary.world_size, 'CPU process', 'es')} of {nodes}"
    gpus = summary.world_size - sum(len(gpu.ranks) - 1 for gpu in summary.gpus if gpu.ranks)
    if 0 < gpus < summary.world_size:
        shared = f"{how_many(summary.world_size, 'rank')} that share {how_many(gpus, 'GPU')}"
        return f"{shared} ({summary.device}) of {nodes}"
    return f"{how_many(summary.world_size, 'GPU')} ({summary.device}) of {nodes}"


def _subtitle(summary: Summary) -> str:
    where = devices_text(summary)
    if not summary.world_size:
        return where
    return f"{where}, layout {summary.layout}, {count_text(summary.parameters)} parameters, {summary.precision}"


def _verdict(summary: Summary, written: float | None) -> str:
    """How it went, in one sentence."""
    attempts = len(summary.attempts)
    tries = f" in {attempts} attempts" if attempts > 1 else ""
    at = f"step {summary.steps}" if summary.steps else "the start"
    of = f"{at} of {summary.total_steps}" if summary.steps and summary.total_steps else at
    why = _why(summary)
    if summary.state == "finished":
        loss = f", with a loss of {loss_text(summary.loss)}" if summary.loss is not None else ""
        if summary.steps and not loss:
            loss = ", with a loss that is no finite number"
        took = duration_text(summary.spent.whole)
        return f"Finished {how_many(summary.steps, 'step')} in {took}{tries}{loss}."
    when = f" when this was written ({datetime.fromtimestamp(written):%H:%M, %d %b %Y})" if written else ""
    if summary.state == "queued":
        return f"Queued{when}: {f'it goes on from {of}' if summary.steps else 'no step is done yet'}."
    if summary.state == "restarting":
        return f"Restarting{when}, after {of}: {why}."
    if summary.state == "starting":
        again = f", attempt {attempts}" if attempts > 1 else ""
        return f"Starting{again}{when}: {f'{of} is done' if summary.steps else 'no step is done yet'}."
    if summary.state == "running":
        left = seconds_left(summary)
        return f"Running{when}: {of}" + (f", about {duration_text(max(1, round(left)))} left." if left else ".")
    if summary.state == "stopped":
        return f"Stopped at {of}{tries}{': ' + why if why else ''}{_and_then(summary)}"
    if summary.state == "failed":
        return f"Failed at {of}{tries}: {why or 'the log does not say why'}{_and_then(summary)}"
    last = duration_text(summary.end - summary.begin)
    return f"Lost at {of}{tries}: its last word came after {last} and nothing says how it ended{_and_then(summary)}"


def seconds_left(summary: Summary) -> float | None:
    """Until the last step, at the pace of this attempt, with validation and saving as often as so far."""
    if summary.total_steps is None or summary.step_seconds is None:
        return None
    spent = summary.spent
    beside = (spent.validation + spent.checkpoints) / spent.steps if spent.steps > 0 else 0.0
    return max(0, summary.total_steps - summary.steps) * summary.step_seconds * (1 + beside)


def _why(summary: Summary) -> str:
    return summary.attempts[-1].why.strip().rstrip(".") if summary.attempts else ""


def _and_then(summary: Summary) -> str:
    """What the same command would do, where the run's own last sentence has not said it."""
    if "same command" in _why(summary):
        return "."
    if summary.saved_step is None:
        return "; nothing was saved, so that the same command begins anew."
    return f"; the same command goes on from the checkpoint of step {summary.saved_step}."


def _facts(summary: Summary) -> list[Fact]:
    return [
        _goodput(summary),
        _wall_time(summary),
        _hours(summary),
        _energy(summary),
        _mfu(summary),
        _step_time(summary),
        _throughput(summary),
        _items(summary),
        *_losses(summary),
        _memory(summary),
        _predicted_memory(summary),
    ]


def _goodput(summary: Summary) -> Fact:
    means = "the share of the time in steps whose result was kept, and not in anything else, such as starting or saving"
    share = summary.spent.goodput
    if share is None:
        return Fact("Goodput", UNKNOWN, "no time has passed yet")
    level: Level = "good" if share >= GOOD_GOODPUT else "info"
    if share < POOR_GOODPUT and summary.spent.whole >= LONG_RUN:
        level = "warning"
    return _share("Goodput", share, means, level)


def _wall_time(summary: Summary) -> Fact:
    spent = summary.spent
    note = "from the first event to the last"
    if spent.stopped:
        note += f", of which {duration_text(spent.stopped)} between attempts, when nothing ran"
    return Fact("Wall time", duration_text(spent.whole), note)


def _hours(summary: Summary) -> Fact:
    is_cpu = summary.device == "cpu"
    each = "process" if is_cpu else "GPU"
    note = f"every {each} for as long as its attempts took, whether it computed or not"
    idle = sum(not gpu.ranks for gpu in summary.gpus)
    if idle and not is_cpu:
        note += f"; {how_many(idle, 'GPU')} of the nodes that no rank uses {'is' if idle == 1 else 'are'} not in it"
    return Fact("Cost", device_time_text(summary.device_hours, summary.device), note)


def _energy(summary: Summary) -> Fact:
    if summary.kwh is None:
        return Fact("Energy", UNKNOWN, summary.kwh_reason or "nobody measured it")
    whose = "GPUs alone" if summary.kwh_without_cpus else "CPUs and GPUs"
    note = f"{whose}, as they count it themselves; without the rest of the nodes and their cooling"
    return Fact("Energy", energy_text(summary.kwh), "; ".join(filter(None, (note, summary.kwh_reason))))


def _mfu(summary: Summary) -> Fact:
    means = "model FLOPs per second over the stated peak; recomputation not counted"
    rate, peak, mfu = summary.flops_per_second, summary.peak_flops, summary.mfu
    if rate is not None and peak:
        means += f": {_flops(rate)} of {_flops(peak)}" + (f" ({summary.peak_source})" if summary.peak_source else "")
    if mfu is None:
        level: Level = "error" if is_over_the_peak(summary) else "info"
        return Fact("MFU", UNKNOWN, summary.mfu_reason or "the model's FLOPs were not counted", level)
    return Fact("MFU", share_text(mfu), "; ".join(filter(None, (means, summary.mfu_reason))))


def _share(label: str, share: float, note: str, level: Level) -> Fact:
    """A share of a whole: one over 100 % is an error, and says so."""
    if share > 1:
        return Fact(label, share_text(share), f"more than all of it: a number is wrong ({note})", "error")
    return Fact(label, share_text(share), note, level)


def _throughput(summary: Summary) -> Fact:
    if summary.items_per_second is None:
        return Fact("Throughput", UNKNOWN, "no step is done")
    note = f"{summary.item} of a step over its seconds, at the median step, on all ranks together"
    return Fact("Throughput", f"{count_text(summary.items_per_second)} {summary.item}/s", note)


def _items(summary: Summary) -> Fact:
    real = summary.items - summary.padding
    padding = f"{count_text(summary.padding)} more were padding" if summary.padding else "none were padding"
    trained = f"{count_text(summary.trained)} were trained on: the weight of the losses"
    return Fact(summary.item.capitalize(), f"{count_text(real)} real", f"{padding}; {trained}")


def _losses(summary: Summary) -> list[Fact]:
    last = Fact("Loss", UNKNOWN, "no step is done")
    if summary.steps:
        note = f"training loss of step {summary.steps}"
        last = Fact("Loss", "not finite", note, "error")
        if summary.loss is not None and math.isfinite(summary.loss):
            last = Fact("Loss", loss_text(summary.loss), note)
    best = Fact("Best validation", UNKNOWN, "nothing was validated")
    if summary.best_loss is not None:
        at = f"loss after step {summary.best_step}" if summary.best_step is not None else "loss"
        best = Fact("Best validation", loss_text(summary.best_loss), at)
    found = [last, best]
    if summary.test_loss is not None:
        found.append(Fact("Test", loss_text(summary.test_loss), "loss over the test data, with the best weights"))
    return found


def _memory(summary: Summary) -> Fact:
    if summary.memory is None:
        return Fact("Memory", UNKNOWN, "no rank has told")
    where = "host memory of its process" if summary.device == "cpu" else "GPU memory"
    note = f"{where}, of the rank that held most"
    fullest = fullest_rank(summary)
    if fullest is None or summary.device == "cpu":
        return Fact("Memory", bytes_text(summary.memory), note)
    rank, total = fullest
    if rank.memory > total:
        return Fact("Memory", bytes_text(rank.memory), f"more than the {bytes_text(total)} there are", "error")
    of = f"{percent(rank.memory / total)} of {bytes_text(total)}"
    if rank.memory < summary.memory:  # an earlier attempt held more, maybe on larger GPUs, or a rank on a larger one
        return Fact("Memory", bytes_text(summary.memory), f"{note}; the fullest GPU of the last attempt: {of}")
    return Fact("Memory", bytes_text(summary.memory), f"{note}: {of}")


def _step_time(summary: Summary) -> Fact:
    compared, median, measured = summary.predicted_step, _which_steps(summary), summary.step_seconds
    if measured is None:
        return Fact("Step time", UNKNOWN, "no step is done")
    if compared is None:
        return Fact("Step time", seconds_text(measured), f"{median}; nothing was predicted")
    error = compared.predicted / measured - 1 if measured > 0 else math.nan
    note = f"{median}; {beside_prediction(measured, compared.predicted, seconds_text)}"
    return Fact("Step time", seconds_text(measured), note, _level(error))


def _which_steps(summary: Summary) -> str:
    """What the median is of."""
    last = next((attempt for attempt in reversed(summary.attempts) if attempt.last_step is not None), None)
    if last is not None and last.first_step == last.last_step:
        return "the only step of the last attempt, with its warm-up"
    if summary.is_profiled:
        return "the median of the last attempt, all of whose steps a profiler slowed down"
    left_out = "warm-up and profiled steps" if summary.spent.profiling else "warm-up"
    return f"the median of the last attempt, {left_out} left out"


def _predicted_memory(summary: Summary) -> Fact:
    compared = summary.predicted_memory
    if compared is None:
        return Fact("Predicted memory", UNKNOWN, "nothing was predicted")
    note = "of tensors, on the fullest rank"
    if compared.measured is None or compared.error is None:
        why = ": on CPUs nobody counts tensors apart" if summary.device == "cpu" else ""
        return Fact("Predicted memory", bytes_text(compared.predicted), f"{note}; not measured{why}")
    note += f"; measured {bytes_text(compared.measured)}, "
    note += beside_prediction(compared.measured, compared.predicted, lambda _: "amount")
    return Fact("Predicted memory", bytes_text(compared.predicted), note, _level(compared.error))


def _level(error: float) -> Level:
    return "warning" if abs(error) > FAR_OFF else "info"


def _flops(rate: float) -> str:
    return f"{count_text(rate)}FLOP/s"
