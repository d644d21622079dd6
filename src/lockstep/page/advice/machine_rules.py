"""What to change about the machine: GPUs, cores and memory. Every rule: (seconds won, advice), or None."""

from __future__ import annotations

from statistics import mean

from lockstep.page.advice.step_rules import busy_of, is_certain, layout_of, step_of
from lockstep.page.panels import Advice
from lockstep.page.reading.summary import GpuSummary, Summary, fullest_rank
from lockstep.text.units import bytes_text, how_many, percent

Found = tuple[float, Advice]

IDLE_GPU = 0.05
"""A GPU without a rank is nobody's where it is less busy than this and less of its memory is held: else it is
somebody else's."""
MOST_THREADS = 1.5
"""Threads and data workers for each core, from which on they are in each other's way."""
BUSY_HOST = 0.85
"""Threads that mostly sleep are in nobody's way: the cores have to be as busy as this."""
NEARLY_FULL = 0.95
HALF_EMPTY = 0.5
ENOUGH_BUSY = 0.7
LOW_MFU = 0.25
"""A GPU that is less busy, or a model that gets less out of it, has room for more at once."""
LEAST_IN_STEPS = 20.0
"""Seconds in steps, before anything is said that cannot be measured in advance."""
MOST_HOSTS_NAMED = 3


def unused_gpus(summary: Summary) -> Found | None:
    """GPUs of the nodes that nobody uses, and that are paid for all the same."""
    idle = [gpu for gpu in summary.gpus if _is_nobodys(gpu)]
    ours = [gpu for gpu in summary.gpus if gpu.ranks]
    if not idle:
        return None
    hosts = sorted({gpu.host for gpu in idle})
    named = [_indices(host, [gpu.index for gpu in idle if gpu.host == host]) for host in hosts]
    who = " and ".join(named[:MOST_HOSTS_NAMED])
    if len(hosts) > MOST_HOSTS_NAMED:
        who += f" and those of {len(hosts) - MOST_HOSTS_NAMED} more hosts"
    is_one = len(idle) == 1
    share = len(idle) / len([*idle, *ours])
    if summary.device == "cpu":
        seen = f"torch does not see {'it' if is_one else 'them'} (CUDA_VISIBLE_DEVICES, or a build for CPUs)"
        fix = f"leave --device cpu out; where nobody said it, {seen}"
        ranks, gpus = how_many(summary.world_size, "rank"), how_many(len(idle), "idle GPU")
        evidence = f"The run has {ranks} on CPUs, and none on the {gpus} of its node{'s' if summary.nodes > 1 else ''}."
    else:
        on_first = sum(gpu.host == hosts[0] for gpu in [*idle, *ours])
        fix = f"start a rank on {'it' if is_one else 'each'} (--nproc {on_first}), or ask for fewer GPUs"
        evidence = (
            f"{len(idle)} of the {len(idle) + len(ours)} GPUs {'has' if is_one else 'have'} no rank: {percent(share)} "
            f"of what the node{'s' if summary.nodes > 1 else ''} of this run cost{'s' if summary.nodes == 1 else ''}."
        )
    text = f"{who} ({idle[0].name}) {'is' if is_one else 'are'} used by nobody: {fix}."
    return share * (summary.spent.whole - summary.spent.stopped), Advice(text, evidence, "machine")


def too_many_threads(summary: Summary) -> Found | None:
    """More threads want to compute on a host than it has cores.

    What that costs shows in no number by itself: it counts as the share of the compute for which no core is there.
    """
    worst: tuple[float, str, str] | None = None
    for host in summary.hosts:
        ranks = [rank for rank in summary.ranks if rank.host == host.host]
        threads = [rank.threads for rank in ranks if rank.threads is not None]
        if not threads or host.cores < 1:
            continue
        busy = busy_of(host, ranks)
        if busy < BUSY_HOST:
            continue
        workers = sum(rank.workers or 0 for rank in ranks)
        crowd = (sum(threads) + workers) / host.cores
        if crowd >= MOST_THREADS and (worst is None or crowd > worst[0]):
            each = max(1, (host.cores - workers) // len(ranks))
            fix = f"OMP_NUM_THREADS={each}" + (" and fewer data.workers" if workers else "")
            text = f"The CPUs of {host.host} are oversubscribed, and its threads wait for a core: start with {fix}"
            if each * len(ranks) + workers > host.cores and not workers:
                text += ", or with fewer ranks"
            helped = f" and {workers} data worker{'s' * (workers > 1)}" if workers else ""
            evidence = (
                f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} with {_range(threads)} "
                f"thread{'s' * (max(threads) > 1)} each{helped} want "
                f"{sum(threads) + workers} cores; {host.host} has {host.cores}, {percent(busy)} busy."
            )
            worst = (crowd, text + ".", evidence)
    if worst is None or not step_of(summary):
        return None
    crowd, text, evidence = worst
    return (1 - 1 / crowd) * _compute_seconds(summary), Advice(text, evidence, "machine")


def full_precision(summary: Summary) -> Found | None:
    """Matrix products in fp32 leave the fast units of a GPU idle.

    bf16 has a peak many times as high; that the compute gets twice as fast is a careful guess, and only ranks this.
    """
    compute = _compute_seconds(summary)
    if not _trains_on_gpus(summary) or summary.precision != "fp32" or not _is_compute_bound(summary):
        return None
    text = 'The GPUs compute matrix products in fp32: use precision = "bf16", for which they have faster units.'
    evidence = f"{percent(compute / summary.spent.steps)} of the time in steps is compute"
    if summary.flops_per_second is not None:
        evidence += f", at {summary.flops_per_second / summary.world_size / 1e12:.3g} TFLOP/s a GPU"
    return 0.5 * compute, Advice(text, evidence + ".", "machine")


def small_micro_batch(summary: Summary) -> Found | None:
    """The GPUs have little to do at once, and room for more.

    What more at once wins nobody knows in advance: it counts as the share in which the GPUs are idle, or in which they
    fall short of `LOW_MFU`.
    """
    used = [gpu for gpu in summary.gpus if gpu.ranks]
    filled = [gpu.memory / gpu.memory_total for gpu in used if gpu.memory is not None and gpu.memory_total]
    if not _trains_on_gpus(summary) or not filled or max(filled) > HALF_EMPTY or not _is_compute_bound(summary):
        return None
    is_one = len(used) == 1
    gpus = "The GPU" if is_one else "The GPUs"
    shares = [gpu.busy for gpu in used if gpu.busy is not None]
    if shares and mean(shares) < ENOUGH_BUSY:
        unused, how = 1 - mean(shares), f"{gpus} {'is' if is_one else 'are'} {percent(mean(shares))} busy"
    elif summary.mfu is not None and summary.mfu < LOW_MFU:
        unused, how = 1 - summary.mfu / LOW_MFU, f"The model gets {percent(summary.mfu)} of the peak (MFU)"
    else:
        return None
    layout = layout_of(summary)
    fix = f'a larger micro_batch, or compile = "blocks", keeps {"it" if is_one else "them"} busier'
    if summary.micro_batch is not None and summary.global_batch is not None and layout is not None:
        share = summary.global_batch // layout.data_size
        times = min(share // summary.micro_batch, int(0.8 / max(0.01, *filled)))
        if share <= summary.micro_batch:
            fewer = "" if is_one else " or fewer GPUs"
            fix = f'compile = "blocks"{" or" if is_one else ","} a larger global_batch{fewer} would change that'
        elif times > 1:
            fix = f"raise micro_batch from {summary.micro_batch} to {times * summary.micro_batch}"
    text = f"{gpus} {'has' if is_one else 'have'} little to do at once, and much free memory: {fix}."
    whose = "its memory" if is_one else "the memory of the fullest"
    evidence = f"{how}, and {percent(max(filled))} of {whose} is held."
    return unused * _compute_seconds(summary), Advice(text, evidence, "machine")


def nearly_full(summary: Summary) -> Found | None:
    """One longer batch, and a GPU runs out of memory: that would cost a restart, and the work since the last save."""
    fullest = fullest_rank(summary)
    if fullest is None:
        return None
    rank, total = fullest
    share = rank.memory / total
    if share < NEARLY_FULL:
        return None
    text = (
        f"The GPU of rank {rank.rank} ({rank.host}) is nearly full, and one longer batch may be too much: use a "
        "smaller micro_batch, recompute = true, or more shards (fsdp)."
    )
    evidence = f"Its tensors held {bytes_text(rank.memory)} of {bytes_text(total)}, {percent(share)}."
    spent = summary.spent
    one_failure = spent.starting / max(1, len(summary.attempts)) + spent.steps / (summary.checkpoints + 1)
    return one_failure, Advice(text, evidence, "machine")


def _is_nobodys(gpu: GpuSummary) -> bool:
    if gpu.ranks or (gpu.busy is None and gpu.memory is None):
        return False
    held = gpu.memory / gpu.memory_total if gpu.memory is not None and gpu.memory_total else 0.0
    return (gpu.busy or 0.0) < IDLE_GPU and held < IDLE_GPU


def _indices(host: str, indices: list[int]) -> str:
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, sorted(indices)))} of {host}"


def _range(counts: list[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


def _trains_on_gpus(summary: Summary) -> bool:
    return summary.device != "cpu" and is_certain(summary) and summary.spent.steps >= LEAST_IN_STEPS


def _is_compute_bound(summary: Summary) -> bool:
    """Whether most of a step is compute: else something else has to change first."""
    return bool(summary.ranks) and _compute_seconds(summary) >= 0.8 * summary.spent.steps


def _compute_seconds(summary: Summary) -> float:
    """Of the time in steps, what the ranks computed on average."""
    step = step_of(summary)
    if not step:
        return 0.0
    return mean(rank.compute for rank in summary.ranks) / step * summary.spent.steps
