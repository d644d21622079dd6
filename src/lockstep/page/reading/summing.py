"""A run in numbers: every field of `Summary`, from what was read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.page.reading.damage import LARGEST_COUNT
from lockstep.page.reading.run_data import Digest
from lockstep.page.reading.series import Array
from lockstep.page.reading.starts import Attempt
from lockstep.page.reading.steps import Columns
from lockstep.page.reading.summary import Summary, TimeSpent
from lockstep.record.run_state import GOES_ON, State, state_of

WARM_UP = 2
"""The first steps of an attempt, which compile and fill caches: left out of medians where there are others."""
PARTS = {"input": "input", "wait": "communication", "optimizer": "optimizer", "between": "between"}
"""What the ranks call it, and the summary."""


@dataclass(frozen=True)
class InSteps:
    """Seconds in the steps of an attempt; all but `unsaved` together are all of them."""

    warm_up: float
    """What the first one took longer than others."""
    slowed: float
    """What profiled ones took longer than others."""
    lasting: float
    """The rest, in steps whose result was kept."""
    repeated: float
    """The rest, in all others."""
    unsaved: float
    """Of these, in steps that were neither skipped nor taken back, but not saved before the attempt ended."""


@dataclass(frozen=True)
class Efficiency:
    """How much of what the devices can do was done."""

    flops_per_second: float | None
    peak_flops: float | None
    source: str
    mfu: float | None
    reason: str


@dataclass(frozen=True)
class Energy:
    """What a run used up, and what that leaves out."""

    kwh: float | None
    without_cpus: bool
    reason: str


def summarize(digest: Digest, name: str, now: float, changed: float) -> Summary:
    """The run as it stands `now`; `changed` is when the log was last written, for one without any event."""
    columns = digest.steps.columns()
    kept = columns.where(columns.kept)
    counted = kept.where(kept.skipped == 0)
    attempts = [digest.attempts[number] for number in sorted(digest.attempts)]
    began = [attempt for attempt in attempts if math.isfinite(attempt.begin)]
    started = next((one.started for one in reversed(attempts) if one.started), None)
    profiled = profiled_steps(columns, attempts)
    step_seconds, rate, is_profiled = typical(columns, profiled)
    state = state_of(began[-1] if began else None, digest.job_word, now, changed)
    lasting = lasting_steps(digest, columns, state)
    in_steps = {one.number: seconds_in_steps(columns, profiled, lasting, one) for one in began}
    told = [one.summary(now, in_steps[one.number].unsaved, is_last=one is began[-1]) for one in began]
    begin = digest.first_time if digest.events else changed or now
    end = max((one.end for one in began), default=begin)
    efficiency = _efficiency(digest, step_seconds)
    energy = _energy(began)
    finite_losses = math.isfinite(kept.loss[-1]) if len(kept) else False
    best = digest.best[-1] if digest.best else (None, None)
    ranks = digest.machines.with_processes(digest.ranks.summaries())
    on_cpus = started is None or started.device == "cpu"  # a process holds much besides its tensors
    return Summary(
        name=started.run if started and started.run else name,
        state=state,
        layout=started.layout if started else "",
        world_size=started.world_size if started else 0,
        nodes=started.nodes if started else 0,
        device=started.device if started else "",
        precision=started.precision if started else "",
        parameters=started.parameters if started else 0,
        item=started.item if started else "samples",
        steps=int(kept.step[-1]) if len(kept) else 0,
        total_steps=started.total_steps if started else None,
        begin=begin,
        end=end,
        attempts=told,
        spent=time_spent(began, in_steps, begin, end),
        loss=float(kept.loss[-1]) if finite_losses else None,
        best_step=best[0],
        best_loss=best[1],
        test_loss=digest.test[1] if digest.test and math.isfinite(digest.test[1]) else None,
        step_seconds=step_seconds,
        is_profiled=is_profiled,
        items_per_second=rate,
        items=int(_total(counted.items)),
        padding=int(_total(counted.padding)),
        trained=_total(counted.weight),
        flops_per_second=efficiency.flops_per_second,
        peak_flops=efficiency.peak_flops,
        peak_source=efficiency.source,
        mfu=efficiency.mfu,
        mfu_reason=efficiency.reason,
        device_hours=sum(one.devices * one.seconds for one in began) / 3600,
        kwh=energy.kwh,
        kwh_without_cpus=energy.without_cpus,
        kwh_reason=energy.reason,
        memory=int(digest.ranks.most_memory) or None,
        predicted_step=digest.predicted.step(step_seconds),
        predicted_memory=digest.predicted.memory(None if on_cpus else max((one.memory for one in ranks), default=0)),
        ranks=ranks,
        hosts=digest.machines.host_summaries(Counter(one.host for one in ranks)),
        gpus=digest.machines.gpu_summaries(),
        stragglers=list(digest.stragglers.values()),
        checkpoints=digest.checkpoints,
        checkpoint_stalls=digest.stalls,
        checkpoint_bytes=digest.largest,
        alarms=digest.alarm_count,
        skipped_steps=int((kept.skipped != 0).sum()),
        warnings=digest.warning_count,
        saved_step=digest.saved[-1].step if digest.saved else None,
        steps_per_epoch=started.steps_per_epoch if started else None,
        global_batch=started.global_batch if started else None,
        micro_batch=digest.micro_batch or (started.micro_batch if started else None),
        not_finite=digest.not_finite,
        diverged_step=int(counted.step[-1]) if len(counted) and not math.isfinite(counted.loss[-1]) else None,
    )


def _total(values: Array) -> float:
    """Of what anybody can have counted: a damaged log may have anything here."""
    return float(values[np.abs(values) <= LARGEST_COUNT].sum())


def profiled_steps(columns: Columns, attempts: Sequence[Attempt]) -> Array:
    """Which steps a profiler slowed down; on a GPU also the one before those it recorded, when it is switched on."""
    mask = np.zeros(len(columns), bool)
    for attempt in attempts:
        warm_up = 0 if attempt.started and attempt.started.device == "cpu" else 1
        for first, last in attempt.profiled:
            within = (columns.step >= first - warm_up) & (columns.step <= last)
            mask |= within & (columns.attempt == attempt.number)
    return mask


def typical(columns: Columns, profiled: Array) -> tuple[float | None, float | None, bool]:
    """Seconds, and items a second, of the median step of the last attempt that did any.

    Profiled ones count only where there are no others; the last value says whether it is so.
    """
    if not len(columns):
        return None, None, False
    last = _rows(columns, int(columns.attempt[-1]))
    is_profiled = bool(profiled[last].all())
    steps = columns.where(last).where(slice(None) if is_profiled else ~profiled[last])
    warm = steps.where(np.arange(len(steps)) >= min(WARM_UP, len(steps) - 1))
    seconds = float(np.median(warm.seconds))
    with np.errstate(all="ignore"):
        rates = warm.items / warm.seconds
    rates = rates[np.isfinite(rates)]
    return seconds, float(np.median(rates)) if len(rates) else None, is_profiled


def lasting_steps(digest: Digest, columns: Columns, state: State) -> Array:
    """Which steps changed the weights for good: where a run ended early, what it had not saved is to be done again."""
    lasting: Array = columns.kept & (columns.skipped == 0)
    if state not in ("finished", *GOES_ON) and len(columns):
        last = digest.attempts[int(columns.attempt[-1])]  # kept steps of others are saved: it went on from there
        lasting &= (columns.attempt != last.number) | (columns.step <= last.saved_step)
    return lasting


def seconds_in_steps(columns: Columns, profiled: Array, lasting: Array, attempt: Attempt) -> InSteps:
    """Where the time in the steps of an attempt went; every second is in one place."""
    own = _rows(columns, attempt.number)
    steps, profiled, lasting = columns.where(own), profiled[own], lasting[own]
    warm_up, slowed = _warm_up(steps.seconds), _slowed(steps.seconds, profiled)
    usual = steps.seconds - slowed
    usual[:1] -= warm_up
    unsaved = steps.kept & (steps.skipped == 0) & ~lasting & (steps.step > attempt.saved_step)
    return InSteps(
        warm_up=warm_up,
        slowed=float(slowed.sum()),
        lasting=float(usual[lasting].sum()),
        repeated=float(usual[~lasting].sum()),
        unsaved=float(usual[unsaved].sum()),
    )


def _rows(columns: Columns, attempt: int) -> slice:
    """The steps of an attempt lie together: what it tells after a later one has begun is left out."""
    begin, end = np.searchsorted(columns.attempt, [attempt, attempt + 1])
    return slice(int(begin), int(end))


def _warm_up(seconds: Array) -> float:
    """What the first step of an attempt took longer than its median one: to compile, to fill caches."""
    return max(0.0, float(seconds[0] - np.median(seconds[1:]))) if len(seconds) > 1 else 0.0


def _slowed(seconds: Array, profiled: Array) -> Array:
    """What each profiled step took longer than the median of the others; the first one is slow by itself."""
    slowed = np.zeros(len(seconds))
    if profiled.any() and not profiled.all():
        slowed[profiled] = np.maximum(seconds[profiled] - np.median(seconds[~profiled]), 0.0)
        slowed[0] = 0.0
    return slowed


def time_spent(attempts: Sequence[Attempt], in_steps: dict[int, InSteps], begin: float, end: float) -> TimeSpent:
    """Where the time went. What no event accounts for is `other`, so that all of it together is the whole time."""
    spent = dict.fromkeys(vars(TimeSpent()), 0.0)
    end_before = begin
    for attempt in attempts:
        steps = in_steps[attempt.number]
        spent["starting"] += attempt.starting + steps.warm_up
        spent["repeated"] += steps.repeated
        _share_out(spent, attempt, steps.lasting)
        spent["validation"] += attempt.validation
        spent["checkpoints"] += attempt.stalls
        spent["profiling"] += attempt.profiling + steps.slowed
        spent["stopped"] += max(0.0, attempt.begin - end_before)
        end_before = max(end_before, attempt.end)
    spent["other"] = max(0.0, end - begin - sum(spent.values()))
    return TimeSpent(**spent)


def _share_out(spent: dict[str, float], attempt: Attempt, in_steps: float) -> None:
    """The time in steps that count, by what the ranks say of a mean step: all of it useful where they say nothing."""
    left = in_steps
    for part, name in PARTS.items():
        share = attempt.parts.get(part, 0.0) / attempt.told_seconds if attempt.told_seconds > 0 else 0.0
        taken = min(left, in_steps * share)
        spent[name] += taken
        left -= taken
    spent["useful"] += left


def _efficiency(digest: Digest, step_seconds: float | None) -> Efficiency:
    """MFU: operations of the model over what all ranks' devices can do in the same time. Above 1 it is an error."""
    last = next((one for one in reversed(list(digest.attempts.values())) if one.started and one.first_step), None)
    per_sample, peak = digest.flops.get("per_sample"), digest.flops.get("peak")
    source, reason = str(digest.flops.get("source", "")), str(digest.flops.get("reason", ""))
    if not digest.flops:
        return Efficiency(None, None, "", None, "the run does not say how many operations a sample costs")
    if last is None or last.started is None or not step_seconds:
        return Efficiency(None, None, source, None, reason or "no step is done")
    rate = per_sample * last.started.global_batch / step_seconds if isinstance(per_sample, float) else None
    most = peak * last.started.world_size if isinstance(peak, float) and peak > 0 else None
    if rate is None or most is None:
        return Efficiency(rate, most, source, None, reason or "operations or peak are not known")
    mfu = rate / most
    if mfu > 1:
        fix = (
            "run lockstep bench again while nothing else runs"
            if "bench" in source
            else "it is that of another device or number format"
        )
        wrong = (
            f"an error: {100 * mfu:.0f} % of the peak cannot be, so that the peak is too low "
            f"({source or 'of no source'}): {fix}"
        )
        return Efficiency(rate, most, source, None, wrong)
    return Efficiency(rate, most, source, mfu, reason)


def _energy(attempts: Sequence[Attempt]) -> Energy:
    """What the hosts used up in all attempts, and whom that leaves out."""
    joules: list[float] = []
    unknown: dict[str, None] = {}
    with_cpus: dict[str, None] = {}
    without_cpus: dict[str, None] = {}
    for attempt in attempts:
        on_cpus = attempt.started is not None and attempt.started.device == "cpu"
        for host, used in attempt.joules.items():
            measured = host in attempt.measured_cpus
            # GPUs that stand beside a training on CPUs are no part of it.
            if used is None or (on_cpus and not measured):
                unknown[host] = None
            else:
                joules.append(used)
                (with_cpus if measured else without_cpus)[host] = None
    if not joules:
        reason = "nobody measures the power of these hosts" if unknown else "no event tells what the hosts used up"
        return Energy(None, False, reason)
    left_out = []
    if unknown:
        left_out.append(f"{_some(unknown)}, whose power nobody measures")
    if with_cpus and without_cpus:
        left_out.append(f"the CPUs of {_some(without_cpus)}, whose power nobody measures")
    silent = [str(one.number) for one in attempts if not one.joules and one.first_step is not None]
    if silent:
        left_out.append(f"attempt{'s' * (len(silent) > 1)} {', '.join(silent[:8])}, which told nothing of it")
    reason = f"without {' and '.join(left_out)}" if left_out else ""
    return Energy(sum(joules) / 3.6e6, not with_cpus, reason)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return f"{', '.join(every[:4])}{', ...' if len(every) > 4 else ''}"
